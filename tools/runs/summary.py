# SPDX-License-Identifier: Apache-2.0
"""The tables that a comparison ends with: a line for each group of runs that differ in their seed only, with the
median and the spread of its finished runs."""

from itertools import groupby
from statistics import median

from common import count
from experiments import CONTENDERS
from metrics import metrics_in

COLUMNS = [  # head, name of the result, unit, digits
    ("speed-up", "speed-up over one device", 1, 2),
    ("samples/s", "samples/s", 1, 0),
    ("step ms", "step, median", 1e3, 1),
    ("epoch s", "time per epoch", 1, 2),
    ("accuracy", "val. accuracy", 1, 3),
    ("loss", "training loss", 1, 3),
    ("MB/step", "bytes moved in a step", 1e-6, 2),
    ("link MB/step", "busiest link, per step", 1e-6, 2),
    ("memory MiB", "memory", 1 / 2**20, 0),
    ("waiting %", "waiting", 100, 0),
    ("bubble %", "bubble", 100, 0),
    ("formula %", "bubble by the formula", 100, 0),
    ("delay", "mean delay", 1, 2),
    ("max delay", "largest delay", 1, 0),
]


def values_of(group, name):
    return [value for run in group if (value := run["results"].get(name)) is not None]


def cell(values, unit, digits):
    """ "12.3 ±0.4": the median, and half of what lies between the smallest and the largest."""
    if not values:
        return ""
    spread = f" ±{(max(values) - min(values)) / 2 * unit:.{digits}f}" if len(values) > 1 else ""
    return f"{median(values) * unit:.{digits}f}{spread}"


def alike(case, other):
    """Both have the same model and batch."""
    return all(case["varied"].get(key) == other["varied"].get(key) for key in ("model", "batch_size"))


def rates_on_one_device(runs, case):
    """Samples/s of `single` with the same model and batch; without it, of the run's own contender on one device."""
    alone = [run for run in runs if run["case"]["devices"] == 1 and alike(run["case"], case)]
    of_single = [run for run in alone if run["case"]["contender"] == "single"]
    own = [run for run in alone if all(run["case"][key] == case[key] for key in ("contender", "varied"))]
    return [run["results"]["samples/s"] for run in of_single or own]


def add_speed_ups(runs):
    """To the results of finished runs, whose case is what comparison.json says of them."""
    runs = [run for run in runs if run["results"].get("samples/s") is not None]
    for run in runs:
        if alone := rates_on_one_device(runs, run["case"]):
            run["results"]["speed-up over one device"] = run["results"]["samples/s"] / median(alone)


def table(heads, rows):
    """A column that is empty in every row is left out."""
    used = [column for column in range(len(heads)) if any(row[column] for row in rows)]

    def line(cells):
        return f"| {' | '.join(cells[column] for column in used)} |\n"

    return line(heads) + f"|{'|'.join([' --- '] * len(used))}|\n" + "".join(map(line, rows))


def all_results(groups):
    rows = []
    for group in groups:
        cells = [cell(values_of(group, name), unit, digits) for _, name, unit, digits in COLUMNS]
        rows.append([group[0]["case"]["group"], str(len(group)), *cells])
    return table(["", "runs", *(head for head, *_ in COLUMNS)], rows)


def formulas(settings, groups):
    rings = [first["results"]["bytes moved in a step"] for first, *_ in groups if first["case"]["strategy"] == "ddp"]
    gradient, megabits = next(filter(None, rings), None), settings["megabits_per_second"]
    if not megabits or not gradient:
        return ""
    rows = []
    for group in groups:
        case = group[0]["case"]
        contender = CONTENDERS[case["contender"]]
        if contender.busiest:
            megabytes = gradient * contender.busiest(case["devices"], contender.servers) / 1e6
            measured = cell(values_of(group, "busiest link, per step"), 1e-6, 2)
            step, limit = cell(values_of(group, "step, median"), 1e3, 1), f"{megabytes / megabits * 8e3:.1f}"
            rows.append([case["group"], measured, f"{megabytes:.2f}", contender.formula, step, limit])
    heads = ["", "busiest link, MB/step", "formula MB", "formula", "step ms", "limit ms"]
    return f"""
N workers, a host each, links of {megabits:.0f} Mb/s; K = {gradient / 1e6:.2f} MB of gradient. limit: the formula's \
bytes at the link's rate, both directions at once.

{table(heads, rows)}"""


def seconds_to_loss(settings, runs, group):
    """Of each run that gets there: to --target-loss, or to what `ddp` ends with for the same seed and options."""
    seconds, same = [], ("seed", "devices", "varied")
    for run in group:
        case = run["case"]
        ends = [
            other["results"]["training loss"]
            for other in runs
            if other["case"]["contender"] == "ddp" and all(other["case"][key] == case[key] for key in same)
        ]
        target = settings["target_loss"] or next(iter(ends), None)
        if target is not None:
            seconds.append(run["metrics"].seconds_to(target))
    reached = [each for each in seconds if each is not None]
    if not seconds:
        return ""
    if not reached:
        return "never"
    return cell(reached, 1, 1) + (f" ({len(reached)} of {len(seconds)})" if len(reached) < len(seconds) else "")


def slow_links(settings, runs, groups):
    """The least: a step computes, or its bytes go over the link, whichever takes longer."""
    megabits = settings["megabits_per_second"]
    rows = []
    for group in groups:
        case = group[0]["case"]
        like = [run for run in runs if run["case"]["devices"] == case["devices"] and alike(run["case"], case)]
        computing = min(values_of(like, "computing, per step"), default=None)
        step, link = values_of(group, "step, mean"), values_of(group, "busiest link, per step")
        row = [case["group"], cell(step, 1e3, 1), cell(link, 1e-6, 3), "", ""]
        if megabits and link and computing:
            least = max(computing, median(link) * 8e-6 / megabits)
            row[3:] = [f"{least * 1e3:.1f}", f"{100 * least / median(step):.0f}"]
        rows.append([*row, cell(values_of(group, "training loss"), 1, 3), seconds_to_loss(settings, runs, group)])
    links = f"links of {megabits:.0f} Mb/s" if megabits else "the loopback device"
    target = settings["target_loss"] or "ddp's at its end"
    return f"""
Hosts of {count(settings["ranks_per_host"], "rank")}, {links}. least: the longer of computing, as in the row of this \
size that computes least, and the bytes at the link's rate. s to loss: training time until the loss is {target}.

{table(["", "mean step ms", "link MB/step", "least ms", "reached %", "loss", "s to loss"], rows)}"""


def summary(settings, machine, folder, cases):
    """cases: what comparison.json says of the runs, in the order of the lines."""
    finished = [case for case in cases if case["state"] == "finished"]
    runs = [{"case": case, "metrics": metrics_in(folder / case["folder"])} for case in finished]
    for run in runs:
        run["results"] = run["metrics"].results(run["case"])
    add_speed_ups(runs)
    groups = [list(group) for _, group in groupby(runs, key=lambda run: run["case"]["group"])]
    text = ""
    if groups:
        model = "" if "model" in runs[0]["case"]["varied"] else f"{settings['model']}, "
        text = f"""{settings["experiment"]}: {model}{count(settings["threads"], "thread")} per device; {machine}
The number in a name is that of devices. Medians over the seeds, ± half of the range.

{all_results(groups)}"""
        text += slow_links(settings, runs, groups) if settings["ranks_per_host"] > 1 else formulas(settings, groups)
    failures = [
        f"- failed: {case['name']}: {case.get('why', '')}; {folder / case['folder']}/output.txt says more\n"
        for case in cases
        if case["state"] == "failed"
    ]
    return text + "\n" * bool(failures) + "".join(failures)
