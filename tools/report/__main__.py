# SPDX-License-Identifier: Apache-2.0
"""lockstep report: one HTML file about one or several runs, or about a comparison."""
import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from files import Error, has_number, parse, read, require_known_format, text_of
from metrics import read_metrics
from spans import is_trace, read_trace

HERE = Path(__file__).resolve().parent
COMPARISON_FORMAT = 1

# ---- One run


def read_run(name, metrics, trace):
    """{"name": …, "partial": [text, …], what read_metrics() returns, "trace": what read_trace() returns}"""
    run = {"name": name, "partial": []}
    if metrics:
        found = read_metrics(metrics)
        run["partial"] += found.pop("partial")
        run |= found
    if trace:
        run["trace"] = read_trace(trace)
        run["partial"] += run["trace"]["partial"]
    return run


def files_of_folder(folder):
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    if metrics.exists():
        return metrics, trace if trace.exists() else None
    raise Error("UsageError", f"{folder} has neither metrics.jsonl nor comparison.json",
                next="name the metrics file, or a folder that `lockstep compare` has written")


def default_name(path):
    path = Path(path)
    if path.name == "metrics.jsonl" and path.parent.name:
        path = path.parent
    return path.stem if path.suffix == ".jsonl" else path.name


def read_named_run(word):
    """[NAME=]METRICS[,TRACE]. A file or folder that is called like that is one."""
    name, metrics, trace = "", word, ""
    if not Path(word).exists() and "=" in word:
        name, metrics = word.split("=", 1)
    if not Path(metrics).exists() and "," in metrics:
        metrics, trace = metrics.rsplit(",", 1)
    name = name or default_name(metrics)
    if Path(metrics).is_dir():
        return read_run(name, *files_of_folder(Path(metrics)))
    if not trace and Path(metrics).exists() and is_trace(metrics):
        metrics, trace = "", metrics
    return read_run(name, metrics, trace)


# ---- A comparison


def read_comparison(file):
    comparison = parse(read(file))
    if not has_number(comparison, "lockstep_comparison") or not isinstance(comparison.get("runs"), list):
        raise Error("DataError", f"{file} does not describe a comparison", likely="it is cut off, or another kind of file",
                    next="run `lockstep compare` again with the same folder: it goes on where it was")
    require_known_format(comparison, "lockstep_comparison", COMPARISON_FORMAT, file)
    return comparison


def read_case(folder, about):
    """One run of a comparison, as far as it can be read."""
    name, state, why = (text_of(about, key) for key in ("name", "state", "why"))
    try:
        run = read_run(name, *files_of_folder(folder / text_of(about, "folder")))
    except Error as error:
        run = {"name": name, "partial": [error.what if state == "finished" else "there is nothing of it"]}
    if state != "finished":
        run["partial"].append(f"state: {state or 'unknown'}" + (f": {why}" if why else ""))
    return run | {"case": about}


# ---- All


def read_benchmark(word):
    """The content of a file of `lockstep bench step --json`, or nothing."""
    if not word.endswith(".json") or not Path(word).is_file() or is_trace(word):
        return None
    benchmark = parse(read(word))
    models = benchmark.get("models") if isinstance(benchmark, dict) else None
    measured = isinstance(models, dict) and models and all(
        isinstance(model, dict) and has_number(model.get("lockstep"), "step") for model in models.values())
    return benchmark if measured else None


def add_runs(word, found):
    if benchmark := read_benchmark(word):
        found["benchmarks"].append(benchmark)
        return
    folder = Path(word).absolute().parent if Path(word).name == "comparison.json" else Path(word)
    description = folder / "comparison.json"
    if not description.exists():
        run = read_named_run(word)
        if text_of(run.get("run"), "event") == "stop":  # an end, but not the one that was meant
            run["partial"].append("stopped by a signal")
        found["runs"].append(run)
        return
    if found["comparison"] is not None:
        raise Error("UsageError", f"{word} is a second comparison", next="make a page of each")
    comparison = read_comparison(description)
    runs = sorted(comparison.pop("runs"), key=lambda about: about["number"] if has_number(about, "number") else 0)
    found["runs"] += [read_case(folder, about) for about in runs]
    found["comparison"] = comparison


def subject(run, key):
    """The run's model or data: by its last event, or by its settings if it did not come so far."""
    values = text_of(run.get("run"), key), text_of((run.get("start") or {}).get("settings"), key)
    return next((value for value in values if value not in ("", "auto")), "")


def warnings_of(runs):
    for key in ("model", "data"):
        if all(key in run.get("case", {}).get("varied", {}) for run in runs):
            continue
        values = sorted({subject(run, key) for run in runs} - {""})
        if len(values) > 1:
            yield f"The runs differ in {key} ({', '.join(values)}): their losses and times say nothing about each other."


def number_equal_names(runs):
    names = set()
    for run in runs:
        name, i = run["name"], 1
        while run["name"] in names:
            i += 1
            run["name"] = f"{name} ({i})"
        names.add(run["name"])


def read_runs(words):
    """{"runs": [what read_run() returns, in a comparison with "case": its words about it], "comparison": comparison.json without its
    runs, or null, "benchmarks": […], "warnings": [text, …]}. A run of a comparison that can't be read has "partial" alone."""
    found = {"runs": [], "comparison": None, "benchmarks": [], "warnings": []}
    for word in words:
        add_runs(word, found)
    number_equal_names(found["runs"])
    found["warnings"] += warnings_of(found["runs"])
    return found


# ---- The page


def finite(value):
    """JSON has no infinities and no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


def page_of(data):
    """One file that fetches nothing. Text of the data is never markup or script: it has no "<"."""
    page = read(HERE / "page.html")
    for mark, part in ("css", "page.css"), ("page", "page.js"), ("chart", "chart.min.js"):
        page = page.replace(f"/*{mark}*/", read(HERE / part), 1)
    text = json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("/*data*/", text, 1)  # last: nothing is looked for in it


def write(file, text):
    """The whole file or nothing."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=Path(file).absolute().parent, prefix=f"{Path(file).name}.tmp-", delete=False) as new:
            try:
                new.write(text)
                new.flush()
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(new.fileno(), 0o666 & ~mask)
                os.replace(new.name, file)
            except OSError:
                os.unlink(new.name)
                raise
    except OSError as error:
        raise Error("SystemError", f"can't write {file}: {error.strerror}", here=str(file)) from None


def count(number, what):
    return f"{number} {what}" + ("" if number == 1 else "s")


def main():
    parser = argparse.ArgumentParser(prog="lockstep report", allow_abbrev=False,
                                     description="Makes a page of curves and tables about runs, for any browser, without network")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=(
        "[NAME=]METRICS[,TRACE]: files of lockstep train --metrics and --trace FILE.json; a trace alone; a folder with metrics.jsonl; the "
        "folder of a comparison; the file of lockstep bench step --json"))
    parser.add_argument("--output", default="report.html", help="the file to write (%(default)s)")
    arguments = parser.parse_args()
    output = arguments.output
    if not output.endswith((".html", ".htm")):
        raise Error("UsageError", f"--output {output} does not end in .html", likely="the name of a metrics file in its place",
                    next="give --output FILE.html")
    data = read_runs(arguments.runs)
    page = page_of(data)
    write(output, page)
    for run in data["runs"]:
        for text in run["partial"]:
            print(f"{run['name']}: {text}", file=sys.stderr)
    partial = sum(bool(run["partial"]) for run in data["runs"])
    parts = [count(len(data["runs"]), "run")]
    parts += [count(len(data["benchmarks"]), "benchmark")] if data["benchmarks"] else []
    parts += [f"{partial} partial"] if partial else []
    print(f"{output}: {', '.join(parts)}, {len(page.encode()) / 1024:.1f} KiB")


try:
    main()
except Error as error:
    print(error, file=sys.stderr)
    sys.exit(2 if error.kind == "UsageError" else 1)
