# SPDX-License-Identifier: Apache-2.0
"""Reads what `lockstep train --metrics FILE` writes: a JSON object a line, one for each start, step, epoch and end."""

import os
from statistics import median

from common import DataError, count, number, parse, quotient, read, require_format

FORMAT = 1  # kMetricsFormat of lockstep/train/reports/metrics.h
MOST_POINTS = 500
WARM_UP = 3  # steps that connect, order buckets and grow memory
EPOCH = ("train_loss", "val_loss", "val_accuracy", "samples_per_second", "seconds")  # numbers of its event


def chunks(items, most):
    """`items` in at most so many parts of equal length."""
    each = -(-len(items) // most)
    return [items[at : at + each] for at in range(0, len(items), each or 1)]


def table(columns, rows):
    return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def summed(steps, key):
    return sum(step[key] for step in steps)


class Metrics:
    """The events of a file. A step voids what the file has of it and of later ones: a resumed run goes back. Lines
    that are cut off or are no events are left out and counted."""

    def __init__(self, path):
        self.path = path
        self.start, self.end, self.steps, self.epochs = {}, {}, [], []  # an epoch: (its last step, event)
        *lines, rest = read(path).split("\n")
        self.bad = sum(not self.add(parse(line)) for line in lines)
        self.cut_off = bool(rest) and not self.add(parse(rest))
        self.good = len(lines) - self.bad

    def add(self, event):
        """False: it is none."""
        kind = event.get("event") if isinstance(event, dict) else None
        if kind == "step":
            if None in (number(event.get(key)) for key in ("step", "seconds", "samples")):
                return False
            if self.steps and self.steps[-1]["step"] >= event["step"]:
                self.go_back_to(event["step"])
            self.steps.append(event)
        elif kind == "start":
            require_format(event.get("format"), FORMAT, self.path)
            self.go_back_to(event.get("step", 0))
            self.start = event
        elif kind == "epoch":
            self.epochs.append((self.steps[-1]["step"] if self.steps else 0, event))
        elif kind in ("run", "stop"):
            self.end = event
        return isinstance(kind, str)

    def go_back_to(self, step):
        self.steps = [each for each in self.steps if each["step"] < step]
        self.epochs = [(last, event) for last, event in self.epochs if last < step]
        self.end = {}

    def require_events(self):
        if self.good or self.steps:
            return
        what, likely = "has no event of lockstep in it", "another kind of file, or cut off in its first line"
        if not self.bad and not self.cut_off:
            what, likely = "is empty", "the run died before its first step"
        next = "give what `lockstep train --metrics FILE` has written"
        raise DataError(f"{self.path} {what}", likely=likely, next=next)

    def missing(self):
        if self.cut_off:
            yield "the last line is cut off"
        if self.bad:
            yield f"{count(self.bad, 'line')} {'is' if self.bad == 1 else 'are'} damaged and left out"
        if not self.end:
            steps = self.steps[-1]["step"] + 1 if self.steps else 0
            yield f"no end: the run died after {steps} steps, or is still going on"
        if not self.start:
            yield "no command, machine and settings: an older lockstep has written it"

    def timed(self):
        """Steps after the warm-up, at least one."""
        return self.steps[min(WARM_UP, len(self.steps) - 1) :] if self.steps else []

    # ---- Points to draw. Where a point ends counts from the start of the run

    def step_points(self):
        """Each point is the mean of some steps; `low` and `high` tell what the mean hides."""
        samples, seconds, rows = 0, 0, []
        for steps in chunks(self.steps, MOST_POINTS):
            losses = [step.get("loss") for step in steps]
            finite = [loss for loss in losses if number(loss) is not None]
            now, time = summed(steps, "samples"), summed(steps, "seconds")
            samples, seconds = samples + now, seconds + time
            loss = sum(finite) / len(steps) if finite == losses else None
            band = min(finite, default=None), max(finite, default=None)
            rate = number(steps[-1].get("learning_rate"))
            rows.append((steps[-1]["step"], samples, seconds, loss, *band, quotient(now, time), rate))
        return table(("step", "samples", "seconds", "loss", "low", "high", "rate", "learning_rate"), rows)

    def epoch_points(self):
        rows = []
        for last, event in self.epochs:
            before = [step for step in self.steps if step["step"] <= last]
            values = (number(event.get(name)) for name in EPOCH)
            rows.append((last, summed(before, "samples"), summed(before, "seconds"), *values))
        return table(("step", "samples", "seconds", *EPOCH[:-1], "epoch_seconds"), rows)

    def drawn(self):
        """Returns what the page of `lockstep report` gets."""
        found = {"start": self.start, "run": self.end, "steps": self.step_points(), "epochs": self.epoch_points()}
        return found | {"confusion": self.confusion()}

    def confusion(self):
        """Of the last validation: counts by class and by what it was taken for; and the names of the classes, if they have any."""
        counts = self.epochs[-1][1].get("val_confusion_matrix") if self.epochs else None
        size = len(counts) if isinstance(counts, list) else 0
        if not size or any(not isinstance(row, list) or len(row) != size or None in map(number, row) for row in counts):
            return None
        names = self.start.get("classes") or []
        return {"counts": counts, "classes": names if len(names) == size else [str(i) for i in range(size)]}

    # ---- What a run has shown: a value each, for the page and the tables of `lockstep compare`

    def results(self, case):
        """By names; None: not known. case: what comparison.json says of the run, or {}."""
        times = sorted(step["seconds"] for step in self.timed())
        epochs, accuracies = self.of_epochs("seconds"), self.of_epochs("val_accuracy")
        ranks = self.end.get("each_rank")
        moved = self.bytes_moved()
        return {
            "training time": summed(self.steps, "seconds") if times else None,
            "time per epoch": median(epochs) if epochs else None,
            "samples/s": quotient(summed(self.timed(), "samples"), sum(times)),
            "step, median": median(times) if times else None,
            "step, mean": quotient(sum(times), len(times)),
            "computing, per step": self.computing(),
            "step, 95th percentile": times[len(times) * 95 // 100] if times else None,
            "training loss": self.loss(),
            "val. accuracy": accuracies[-1] if accuracies else None,
            "best val. accuracy": max(accuracies, default=None),
            "bytes moved": moved,
            "bytes moved in a step": quotient(moved, len(self.steps)),
            "busiest link, per step": max(case.get("busiest_link_bytes_per_step", {}).values(), default=None),
            "memory": case.get("peak_memory_bytes", sum(rank.get("pss_bytes", 0) for rank in ranks) if ranks else None),
            "waiting": self.waiting(),
            "mean delay": self.total("mean_delay"),
            "largest delay": self.total("max_delay"),
            "bubble": self.total("bubble"),
            "bubble by the formula": self.total("ideal_bubble"),
        }

    def total(self, name):
        return number(self.end.get(name))

    def of_epochs(self, name):
        return [event[name] for _, event in self.epochs if number(event.get(name)) is not None]

    def loss(self):
        """The mean of the last tenth of the steps."""
        losses = [step.get("loss") for step in self.steps[-len(self.steps) // 10 :]]
        return sum(losses) / len(losses) if losses and None not in losses else None

    def seconds_to(self, loss):
        """Training time until the mean over as many steps as in loss() is down to this one; None: it never is."""
        losses, size, seconds = [step.get("loss") for step in self.steps], -(-len(self.steps) // 10), 0
        for last, step in enumerate(self.steps, 1):
            seconds += step["seconds"]
            recent = losses[last - size : last] if last >= size else [None]
            if None not in recent and sum(recent) / size <= loss:
                return seconds
        return None

    def computing(self):
        """Seconds of rank 0, with the warm-up and what of the exchange runs behind backward."""
        parts = [self.total(f"{phase}_seconds") for phase in ("forward", "backward", "update")]
        return None if None in parts else quotient(sum(parts), len(self.steps))

    def bytes_moved(self):
        """Exchanged, or pushed and pulled; None: the strategy counts none."""
        exchanged, pushed = self.total("exchanged_bytes"), self.total("pushed_bytes")
        return exchanged if exchanged is not None or pushed is None else pushed + (self.total("pulled_bytes") or 0)

    def waiting(self):
        """The share of time in which rank 0 waits for others or for data; of no pipeline. Rank 0 of servers is a
        server: what it waits for tells nothing about the workers."""
        exchange, data, *computes = (
            self.total(f"{phase}_seconds") or 0 for phase in ("exchange", "data", "forward", "backward")
        )
        if any(computes) and self.total("bubble") is None:
            return quotient(exchange + data, summed(self.steps, "seconds"))
        return None


def metrics_in(folder):
    """Reads those of a run, which may be at work; there are no steps where there is no file yet."""
    path = folder / "metrics.jsonl"
    return Metrics(path if path.exists() else os.devnull)
