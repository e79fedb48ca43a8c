#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lockstep compare: trains one model with several strategies, several times, and shows them side by side."""

import argparse
import fcntl
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from common import COMMAND, UsageError, human_seconds, numbers, parse, read, run, write
from experiments import CONTENDERS, EXPERIMENTS, planned, require_named
from summary import summary
from training import Training, address_for_others, can_shape_links

FORMAT = 1  # of comparison.json
USAGE = 2  # exit code of lockstep train
# Options of lockstep train that compare gives itself
TAKEN = "strategy ranks seed metrics epochs max-steps config quiet trace threads batch-size model data".split()
TAKEN += ["checkpoint-dir", "resume"]


def machine():
    """2 cores, AMD EPYC, AVX-512, Linux 6.1.0"""
    about = read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", about, re.MULTILINE)
    flags = set(about.split())
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    system = os.uname()
    kernel, model = system.release.split("-")[0], model[1] if model else system.machine
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {vectors}, Linux {kernel}"


class Folder:
    """A comparison goes on from it, and `lockstep report` reads it. No other process continues the same comparison
    meanwhile.

    comparison.json          settings, machine, command, and each run with its state; written anew after every run
    tables.md                what is shown at the end
    runs/NAME/               metrics.jsonl, output.txt and, with --trace, trace.json
    """

    def __init__(self, path, about, runs):
        self.path, self.about, self.runs = Path(path), about, runs
        self.entries = {run.name: self.missing(run) for run in runs}
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process works on {self.path}",
                likely="a `lockstep compare` that still runs",
                next="wait for it, or give another --output",
            ) from None
        if (self.path / "comparison.json").exists():
            self.go_on()
        elif any(self.path.iterdir()):
            raise UsageError(
                f"{self.path} holds other files, and no comparison", next="give an --output that is empty, or not there"
            )
        self.save()

    def missing(self, run):
        return {
            **{key: getattr(run, key) for key in ("name", "number", "group", "devices", "seed")},
            "folder": f"runs/{run.name}",
            "contender": run.case,
            "strategy": run.contender.strategy,
            "varied": {option.replace("-", "_"): value for option, value in sorted(run.varied.items())},
            "arguments": run.arguments(self.about["settings"]),
            "state": "missing",
            "seconds": 0.0,
        }

    def go_on(self):
        file = self.path / "comparison.json"
        before = parse(read(file))
        known = isinstance(before, dict) and before.get("lockstep_comparison") == FORMAT
        if not known or not {"settings", "machine", "runs"} <= before.keys():
            raise UsageError(
                f"{file} is not a comparison that this lockstep can continue",
                likely="it is damaged, or of another version of lockstep",
                next="give another --output",
            )
        for key in ("settings", "machine"):
            there, here = before[key], self.about[key]
            for name in {**here, **there}:
                if there.get(name) != here.get(name):
                    raise UsageError(
                        f"{self.path} holds another comparison: {name} is {json.dumps(there.get(name))} there and "
                        f"{json.dumps(here.get(name))} here",
                        next="give the settings of that comparison to continue it, or another --output",
                    )
        self.about["command"] = before.get("command", "")
        for entry in before["runs"]:
            ours = self.entries.get(entry.get("name"), {})
            known = ours and ours.keys() <= entry.keys()  # an older lockstep's may lack some
            if known and entry["state"] == "finished" and entry["arguments"] == ours["arguments"]:
                self.entries[entry["name"]] = entry

    def save(self):
        about = self.about | {"runs": [self.entries[run.name] for run in self.runs]}
        write(self.path / "comparison.json", json.dumps(about, indent=2) + "\n")

    def state(self, run):
        return self.entries[run.name]["state"]

    def count(self, state):
        return sum(self.state(run) == state for run in self.runs)

    def of(self, run):
        return self.path / "runs" / run.name

    def begin(self, run):
        shutil.rmtree(self.of(run), ignore_errors=True)
        self.of(run).mkdir(parents=True)
        return self.of(run)

    def end(self, run, outcome):
        self.entries[run.name] = self.missing(run) | outcome
        self.save()


# ---- The command line


def command_line():
    """Reads the options; `train` has what follows --."""
    names = "\n".join(f"  {name:16}{experiment.description}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        "lockstep compare",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.split(":", 1)[1].strip(),
        epilog=f"""  experiment      what it compares\n{names}

Strategies: {", ".join(CONTENDERS)}.
What follows -- is given to lockstep train in every run, such as -- --lr 0.1.
A comparison that was stopped goes on with the same command.""",
    )
    add = parser.add_argument
    add("experiment", nargs="?", default="strategies", metavar="EXPERIMENT", help="see below")
    add("--strategies", type=lambda text: text.split(","), default=[], metavar="NAME,…", help="only these, see below")
    add("--devices", type=numbers(int, 1, 1000), default=[], metavar="N,…", help="numbers of devices, such as 1,2,4")
    add("--seeds", type=numbers(int, 0, 10**9), default=[1, 2, 3], metavar="N,…", help="one repeat for each [1,2,3]")
    vary = "an option of lockstep train, in place of the experiment's values or beside what it varies"
    add("--vary", action="append", default=[], metavar="OPTION=VALUE,…", help=vary)
    add("--model", help="as lockstep train")
    add("--data", help="as lockstep train")
    add("--batch-size", type=numbers(int, 1, 10**8, one=True), help="global batch")
    add("--threads", type=numbers(int, 1, 1000, one=True), default=1, help="threads of each device [%(default)s]")
    budget = parser.add_mutually_exclusive_group().add_argument
    budget("--epochs", type=numbers(int, 1, 10**6, one=True), help="budget of each run: epochs")
    budget("--steps", type=numbers(int, 1, 10**9, one=True), help="or batches")
    links = "between hosts: shaped: as root, each host in a network of its own; loopback; auto: shaped where it may"
    add("--links", choices=("auto", "shaped", "loopback"), default="auto", help=links)
    rate = "of shaped links, Mb/s in each direction [%(default)s]"
    add("--rate", type=numbers(float, 0.1, 1e6, one=True), default=100.0, help=rate)
    target = "slow-links: show the time to this loss, in place of that of ddp at its end"
    add("--target-loss", type=numbers(float, 0, 1e9, one=True), default=0, help=target)
    deadline = "seconds after which a run is killed and counts as failed [%(default)s]"
    add("--deadline", type=numbers(float, 0.1, 1e7, one=True), default=3600.0, help=deadline)
    add("--output", help="folder; compare-EXPERIMENT by default")
    add("--trace", action="store_true", help="write a timeline of each run into its folder")
    add("--list", action="store_true", help="only show which runs there would be")
    words = sys.argv[1:]
    ours = words[: words.index("--")] if "--" in words else words
    options = parser.parse_args(ours)
    options.train = words[len(ours) + 1 :]
    return options


def read_vary(texts):
    vary = {}
    for text in texts:
        option, _, values = text.partition("=")
        option, values = option.replace("_", "-").lstrip("-"), values.split(",")
        if not option or not all(values):
            raise UsageError(f"--vary {text}", next="give OPTION=VALUE,VALUE... such as lr=0.05,0.1")
        if option in vary:
            raise UsageError(f"--vary {option} twice", next="give all its values at once")
        vary[option] = values
    return vary


def require_sense(options, experiment):
    for name in options.strategies:
        require_named(CONTENDERS, name, "strategy")
        if CONTENDERS[name].servers and not experiment.over_hosts:
            raise UsageError(
                "strategies with servers as hosts of their own",
                next="lockstep compare server-vs-ring; elsewhere kvstore-dist_sync",
            )
    for word in options.train:
        option = word.removeprefix("--").split("=")[0]
        if word.startswith("--") and option in TAKEN:
            raise UsageError(
                f"--{option} after --",
                likely="lockstep compare chooses it for every run",
                next="lockstep compare --help lists its own options; --vary tries several values",
            )
    for _, varied in experiment.cases:
        for option in varied:
            if getattr(options, option.replace("-", "_"), None) is not None:
                raise UsageError(
                    f"--{option}, which {options.experiment} varies", next=f"give --vary {option}=VALUE,VALUE..."
                )


def settings_of(options):
    """Says what a comparison is asked for; it is only continued with the same."""
    require_named(EXPERIMENTS, options.experiment, "experiment")
    experiment = EXPERIMENTS[options.experiment]
    require_sense(options, experiment)
    most = max(2, len(os.sched_getaffinity(0)))
    given = vars(options)
    budget = {key: given[key] for key in ("epochs", "steps") if given[key]} or experiment.budget
    counts = range(1 if experiment.all_counts else most, most + 1)
    links = chosen_links(options) if experiment.over_hosts else "none"
    version = subprocess.run([COMMAND, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
    return {
        "version": version,
        **{key: given[key] for key in ("experiment", "threads", "strategies", "seeds", "trace")},
        "train": options.train or list(experiment.train),
        "target_loss": options.target_loss,
        **{key: given[key] or getattr(experiment, key) for key in ("model", "data", "batch_size")},
        "batch_per_device": 0 if options.batch_size else experiment.batch_per_device,
        **{key: budget.get(key, 0) for key in ("epochs", "steps")},
        "devices": list(options.devices or experiment.devices or counts),
        "vary": read_vary(options.vary),
        "links": links,
        "ranks_per_host": experiment.ranks_per_host,
        "megabits_per_second": options.rate if links == "shaped" else 0,
    }


def chosen_links(options):
    why = "--links loopback" if options.links == "loopback" else can_shape_links(options.rate)
    if not why:
        return "shaped"
    if options.links == "shaped":
        raise UsageError(f"--links shaped, but {why}", next="run it as root, or leave --links out")
    if not address_for_others():
        raise UsageError(
            f"hosts with links can't be made here, nor hosts on the loopback device: {why}",
            likely="this machine has no network address, by which ranks of several hosts find each other",
            next="run it as root, with iproute2",
        )
    say(f"lockstep compare: the ranks are hosts on the loopback device, whose speed is not that of a network: {why}")
    return "loopback"


# ---- The work


class Stopped(BaseException):
    pass


def stop(number, _):
    raise Stopped(number)


def say(text, end="\n"):
    print(text, end=end, file=sys.stderr, flush=True)


def train_all(folder, settings, deadline):
    for number, each in enumerate(folder.runs, 1):
        if folder.state(each) == "finished":
            continue
        say(f"[{number}/{len(folder.runs)}] {each.name}", end="")
        outcome = Training(each, settings, folder.begin(each), deadline).watch()
        folder.end(each, outcome)
        say(f"  {human_seconds(outcome['seconds'])}" + (f"  failed: {outcome['why']}" if "why" in outcome else ""))
        if outcome["exit_code"] == USAGE and not folder.count("finished"):  # all the others would fail, too
            raise UsageError(
                f"lockstep train refuses the first run, {each.name}",
                here=f"lockstep train {' '.join(each.arguments(settings))}",
                likely=read(folder.of(each) / "output.txt").strip(),
                next="correct the options",
            )


def main():
    options = command_line()
    settings = settings_of(options)
    runs = planned(settings)
    if options.list:
        for each in runs:
            print(f"{each.name}\n    lockstep train {' '.join(each.arguments(settings))}")
        print(f"{len(runs)} runs")
        return 0
    output = options.output or f"compare-{options.experiment}"
    about = {
        "lockstep_comparison": FORMAT,
        "experiment": options.experiment,
        "across": EXPERIMENTS[options.experiment].across,
        "settings": settings,
        "machine": {"description": machine(), "cores": len(os.sched_getaffinity(0))},
        "command": shlex.join(["lockstep", "compare", *sys.argv[1:]]),
    }
    folder = Folder(output, about, random.Random(1).sample(runs, len(runs)))
    if done := folder.count("finished"):
        say(f"lockstep compare: {done} of {len(runs)} runs are in {output} already")
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        train_all(folder, settings, options.deadline)
    except Stopped as stopped:
        done = f"{folder.count('finished')} of {len(runs)} runs"
        say(f"\nlockstep compare: stopped after {done}; the same command goes on from {output}")
        return 128 + stopped.args[0]
    tables = summary(settings, about["machine"]["description"], folder.path, [folder.entries[run.name] for run in runs])
    write(folder.path / "tables.md", tables)
    print(tables, end="")
    return 1 if folder.count("failed") else 0


if __name__ == "__main__":
    run(main)
