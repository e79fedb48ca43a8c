# SPDX-License-Identifier: Apache-2.0
"""Reads what `lockstep train --metrics FILE` writes."""
import math

from files import Error, has_number, parse, read, require_known_format, text_of

FORMAT = 1  # kMetricsFormat of lockstep/train/run_facts.h
POINTS = 500
COLUMNS = {"train_loss": "train_loss", "val_loss": "val_loss", "val_accuracy": "val_accuracy", "samples_per_second": "samples_per_second",
           "epoch_seconds": "seconds"}


def number_of(event, key):
    return event[key] if has_number(event, key) else math.nan


class Events:
    def __init__(self, content, file):
        self.start, self.run, self.steps, self.epochs = {}, {}, [], []
        self.bad, self.cut_off = 0, False
        *lines, last = content.split("\n")
        good = 0
        for line in lines + [last] * bool(last):
            if self.add(parse(line), file):
                good += 1
            elif line is last:
                self.cut_off = True
            else:
                self.bad += 1
        if good == 0:
            raise Error("DataError", f"{file} is empty" if not content else f"{file} has no event of lockstep in it",
                        likely="another kind of file, or cut off in its first line" if content else "the run died before its first step",
                        next="give what `lockstep train --metrics FILE` has written")

    def add(self, event, file):
        kind = text_of(event, "event")
        if kind == "step":
            return self.add_step(event)
        if kind == "start":
            require_known_format(event, "format", FORMAT, file)
            if has_number(event, "step"):
                self.go_back_to(event["step"])
            self.start = event
        elif kind == "epoch":
            self.epochs.append((self.steps[-1]["step"] if self.steps else 0, event))
        elif kind in ("run", "stop"):
            self.run = event
        return kind != ""

    def add_step(self, event):
        if not all(has_number(event, key) for key in ("step", "seconds", "samples")):
            return False
        if self.steps and self.steps[-1]["step"] >= event["step"]:
            self.go_back_to(event["step"])
        self.steps.append(event)
        return True

    def go_back_to(self, step):
        """What an earlier attempt wrote from `step` on is void, its end too."""
        self.steps = [other for other in self.steps if other["step"] < step]
        self.epochs = [epoch for epoch in self.epochs if epoch[0] < step]
        self.run = {}

    def missing(self):
        steps = self.steps[-1]["step"] + 1 if self.steps else 0
        if self.cut_off:
            yield "the last line is cut off"
        if self.bad:
            yield f"{self.bad} {'line is' if self.bad == 1 else 'lines are'} damaged and left out"
        if not self.run:
            yield f"no end: the run died after {steps} steps, or is still going on"
        if not self.start:
            yield "no command, machine and settings: an older lockstep has written it"


def points_of(steps):
    """At most POINTS, each the mean of some steps, with a band that tells what the mean hides."""
    points = {key: [] for key in ("step", "samples", "seconds", "loss", "low", "high", "rate")}
    each = -(-len(steps) // POINTS) or 1
    samples = seconds = 0
    for at in range(0, len(steps), each):
        part = steps[at:at + each]
        losses = [number_of(step, "loss") for step in part]
        known = [loss for loss in losses if not math.isnan(loss)]
        count, time = sum(step["samples"] for step in part), sum(step["seconds"] for step in part)
        samples, seconds = samples + count, seconds + time
        values = (part[-1]["step"], samples, seconds, sum(losses) / len(part), min(known, default=math.nan), max(known, default=math.nan),
                  count / time if time > 0 else math.nan)
        for key, value in zip(points, values):
            points[key].append(value)
    return points


def epochs_of(events):
    points = {key: [] for key in ("step", "samples", "seconds", *COLUMNS)}
    for last_step, event in events.epochs:
        before = [step for step in events.steps if step["step"] <= last_step]
        points["step"].append(last_step)
        for key in ("samples", "seconds"):
            points[key].append(sum(step[key] for step in before))
        for column, key in COLUMNS.items():
            points[column].append(number_of(event, key))
    return points


def speed_of(steps):
    """After the first few, which connect, order buckets and grow memory, as in the tables of `lockstep compare`."""
    steps = steps[min(3, len(steps) - 1):] if steps else []
    if not steps:
        return {}
    times = sorted(step["seconds"] * 1e3 for step in steps)
    seconds = sum(step["seconds"] for step in steps)
    return {"p50_ms": (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2, "p95_ms": times[len(times) * 95 // 100],
            "samples_per_second": sum(step["samples"] for step in steps) / seconds if seconds > 0 else math.nan}


def read_metrics(file):
    """{"start": …, "run": …,    the events, {} if there are none; "run" may be the "stop" of a run that a signal ended
    "steps": {"step": […], …},   what points_of() returns, by where each point ends since the start of the run
    "speed": …, "epochs": …,
    "partial": [text, …]}        what is missing, and why

    A step replaces what the file has of it and of later ones: a resumed run goes back."""
    events = Events(read(file), file)
    return {"start": events.start, "run": events.run, "steps": points_of(events.steps), "speed": speed_of(events.steps),
            "epochs": epochs_of(events), "partial": list(events.missing())}
