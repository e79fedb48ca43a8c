#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lockstep report: makes one HTML file about one or several runs, or about a comparison.

The page gets {"runs": [{"name", "partial": what is missing, what Metrics.drawn() returns, "results": what
Metrics.results() returns, "trace": what read_trace() returns, "case": what comparison.json says of it}],
"comparison": comparison.json without its runs, "benchmarks": files of lockstep bench step, "warnings": of runs that
can't be compared}.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from common import DataError, Error, UsageError, count, human_bytes, number, parse, read, require_format, run, write
from metrics import Metrics
from summary import add_speed_ups
from traces import is_trace, read_trace

HERE = Path(__file__).resolve().parent
COMPARISON_FORMAT = 1
COMPARED = {"contender", "devices", "varied"}  # what is said of each run


# ---- One run


def read_run(name, metrics=None, trace=None, case=None):
    found = {"name": name, "partial": [], "results": {}}
    if metrics:
        events = Metrics(metrics)
        events.require_events()
        found |= events.drawn() | {"partial": list(events.missing()), "events": events}
        found["results"] = events.results(case or {})
    if trace:
        found["trace"] = read_trace(trace)
        found["partial"] += found["trace"]["partial"]
        if waits := [rank["ms"].get("waiting", 0) / 1e3 for rank in found["trace"]["ranks"] if rank["steps"]]:
            found["results"]["waiting in a step"] = mean(waits)
    return found


def read_folder(folder, name, case=None):
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    if not metrics.exists():
        raise UsageError(
            f"{folder} has neither metrics.jsonl nor comparison.json",
            next="name the metrics file, or a folder that `lockstep compare` has written",
        )
    return read_run(name, metrics, trace if trace.exists() else None, case)


def read_word(word):
    """[NAME=]METRICS[,TRACE]. A file or folder that is called like that is one."""
    name, path, trace = "", word, None
    if not Path(path).exists() and "=" in path:
        name, path = path.split("=", 1)
    if not Path(path).exists() and "," in path:
        path, trace = path.rsplit(",", 1)
    path, trace = Path(path), trace and Path(trace)
    named = path.parent if path.name == "metrics.jsonl" and path.parent.name else path
    name = name or (named.stem if named.suffix == ".jsonl" else named.name)
    if path.is_dir():
        found = read_folder(path, name)
    elif not trace and path.exists() and is_trace(path):
        found = read_run(name, trace=path)
    else:
        found = read_run(name, path, trace)
    if found.get("run", {}).get("event") == "stop":  # an end, but not the one that was meant
        found["partial"].append("stopped by a signal")
    return found


# ---- Comparisons and benchmarks


def read_comparison(file):
    found = parse(read(file))
    found = found if isinstance(found, dict) else {}
    require_format(found.get("lockstep_comparison"), COMPARISON_FORMAT, file)
    runs = found.pop("runs", None)
    known = number(found.get("lockstep_comparison")) is not None and isinstance(runs, list)
    if not known or not all(isinstance(about, dict) and COMPARED <= about.keys() for about in runs):
        raise DataError(
            f"{file} does not describe a comparison",
            likely="it is cut off, an older lockstep's, or another kind of file",
            next="run `lockstep compare` again with the same folder: it goes on where it was",
        )
    runs = sorted(runs, key=lambda about: about.get("number", 0))  # as in the tables, not as made
    runs = [read_case(file.parent, about) for about in runs]
    add_speed_ups([run for run in runs if run["case"].get("state") == "finished"])
    return found, runs


def read_case(folder, about):
    """One of the runs; what there is of it."""
    state, name = about.get("state", "unknown"), about.get("name", "")
    try:
        found = read_folder(folder / about.get("folder", ""), name, about)
    except (Error, OSError) as error:
        why = str(getattr(error, "what", error)) if state == "finished" else "there is nothing of it"
        found = {"name": name, "partial": [why], "results": {}}
    if state != "finished":
        found["partial"].append(": ".join(filter(None, ["state", state, about.get("why")])))
    return found | {"case": about}


def read_benchmark(path):
    """A file of `lockstep bench step --json`; None if it is something else."""
    if not path.is_file() or path.suffix != ".json" or is_trace(path):
        return None
    found = parse(read(path))
    try:
        steps = [number(model["lockstep"]["step"]) for model in found["models"].values()]
    except (AttributeError, KeyError, TypeError):
        return None
    return found if steps and None not in steps else None


# ---- All


def read_all(words):
    found = {"runs": [], "comparison": None, "benchmarks": [], "warnings": []}
    for word in words:
        path = Path(word)
        description = path if path.name == "comparison.json" else path / "comparison.json"
        if benchmark := read_benchmark(path):
            found["benchmarks"].append(benchmark)
        elif not description.exists():
            found["runs"].append(read_word(word))
        elif found["comparison"]:
            raise UsageError(f"{word} is a second comparison", next="make a page of each")
        else:
            found["comparison"], runs = read_comparison(description)
            found["runs"] += runs
    number_equal_names(found["runs"])
    found["warnings"] = [
        f"The runs differ in {key} ({', '.join(sorted(values))}): their losses and times say nothing about each other."
        for key in ("model", "data")
        if len(values := subjects(found["runs"], key)) > 1
    ]
    return found


def number_equal_names(runs):
    names = set()
    for each in runs:
        name, i = each["name"], 2
        while each["name"] in names:
            each["name"], i = f"{name} ({i})", i + 1
        names.add(each["name"])


def subjects(runs, key):
    """Says what the runs were of: by the last event, or by the settings of a run that did not come so far. None where a
    comparison tries several."""
    if all(key in each.get("case", {}).get("varied", {}) for each in runs):
        return set()
    values = {each.get("run", {}).get(key) or each.get("start", {}).get("settings", {}).get(key) for each in runs}
    return values - {None, "", "auto"}


def page(found):
    """The data comes last: no mark is looked for in it. A <script> ends at the first "</script", wherever it stands."""
    data = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")
    text = read(HERE / "page.html")
    for file in ("page.css", "page.js", "chart.min.js"):
        text = text.replace(f"/*{file}*/", read(HERE / file), 1)
    return text.replace("/*data*/", data, 1)


def main():
    parser = argparse.ArgumentParser(
        "lockstep report",
        allow_abbrev=False,
        description="Makes a page of curves and tables about runs, for any browser, without network",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="[NAME=]METRICS[,TRACE]: files of lockstep train --metrics and --trace FILE.json; a trace alone; a folder "
        "with metrics.jsonl; the folder of a comparison; the file of lockstep bench step --json",
    )
    parser.add_argument("--output", default="report.html", metavar="FILE", help="the file to write [%(default)s]")
    parser.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write curves for TensorBoard in place of the page, a folder of them per run; needs PyPI's tensorboard",
    )
    options = parser.parse_args()
    if not options.output.endswith((".html", ".htm")):
        raise UsageError(
            f"--output {options.output} does not end in .html",
            likely="the name of a metrics file in its place",
            next="give --output FILE.html",
        )
    found = read_all(options.runs)
    for each in found["runs"]:
        for text in each["partial"]:
            print(f"{each['name']}: {text}", file=sys.stderr)
    events = {each["name"]: each.pop("events") for each in found["runs"] if "events" in each}
    if options.tensorboard:
        from curves import write_curves

        write_curves(options.tensorboard, events)
        return
    text = page(found)
    write(options.output, text)
    partial = sum(bool(each["partial"]) for each in found["runs"])
    print(
        f"{options.output}: {count(len(found['runs']), 'run')}",
        *[count(len(found["benchmarks"]), "benchmark")] * bool(found["benchmarks"]),
        *[f"{partial} partial"] * bool(partial),
        human_bytes(len(text)),
        sep=", ",
    )


if __name__ == "__main__":
    run(main)
