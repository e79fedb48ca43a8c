# SPDX-License-Identifier: Apache-2.0
"""Reads what `lockstep train --trace FILE.json` writes: Chrome's JSON, with an event a line."""

import re
from collections import defaultdict, namedtuple

from common import DataError, number, parse, read, require_format
from metrics import chunks

FORMAT = 1  # kTraceFormat of lockstep/observe/timeline_file.h
MOST_POINTS = 300
KINDS = {name: name for name in ("forward", "backward", "exchange", "update", "checkpoint")} | {
    "barrier": "waiting",
    "wait for rank": "waiting",
    "receive": "waiting",
    "wait for batch": "data",
    "load batch": "data",
    "end of epoch": "validation",
}  # how names of spans begin, and where their time goes
RING = re.compile(r"(.*\.json)\.rank\d+")

Span = namedtuple("Span", "name number thread begin end bytes")  # microseconds; "step 7": its name is "step"


def is_step(span):
    return span.name == "step" and span.number


def kind_of(span):
    return next((kind for start, kind in KINDS.items() if span.name.startswith(start)), None)


class Rank:
    """One rank, and what it did."""

    def __init__(self):
        self.spans = []

    def add(self, event):
        name, args = event.get("name", ""), event.get("args") or {}
        at, lasts = number(event.get("ts")), number(event.get("dur"))
        if event.get("ph") == "X" and None not in (at, lasts):
            name, which = re.fullmatch(r"(.+?)(?: (\d+))?", name, re.DOTALL).groups() if name else ("", None)
            self.spans.append(Span(name, which, event.get("tid"), at, at + lasts, number(args.get("bytes"))))

    def facts(self, rank):
        """Means of a step. `ms`: what the thread of the loop did, by kind; `bytes`: of all threads; `busy`: the time of
        some steps without waiting."""
        facts = {"rank": rank, "steps": 0}
        first = next(filter(is_step, self.spans), None)
        if first is None:
            return facts  # a server
        spans = [span for span in self.spans if span.thread == first.thread]
        spans.sort(key=lambda span: (span.begin, -span.end))
        steps = list(filter(is_step, spans))
        moved = defaultdict(float)
        for span in self.spans:
            if span.bytes is not None and span.name != "send bucket":  # which are the bytes that machines then exchange
                moved[span.name] += span.bytes / len(steps)
        times, busy = times_of(spans)
        parts = chunks(list(zip(steps, busy)), MOST_POINTS)
        points = {
            "step": [int(part[-1][0].number) for part in parts],
            "ms": [sum(time for _, time in part) / 1e3 / len(part) for part in parts],
        }
        times = {kind: time / 1e3 / len(steps) for kind, time in times.items()}
        return facts | {"steps": len(steps), "ms": times, "bytes": moved, "busy": points}


def times_of(spans):
    """Returns the time of each kind, and that of each step without waiting. A span's time is its kind's, less that of
    the spans within it. Outer spans come first."""
    times, busy, open_spans, end_of_step = defaultdict(float), [], [], 0
    for span in spans:
        while open_spans and open_spans[-1][0].end <= span.begin:
            open_spans.pop()
        lasts, around = span.end - span.begin, open_spans[-1][1] if open_spans else "other"
        kind = kind_of(span) or around
        if open_spans:
            times[around] -= lasts
        times[kind] += lasts
        if is_step(span):
            busy.append(lasts)
            end_of_step = span.end
        elif kind == "waiting" and around != "waiting" and span.begin < end_of_step:
            busy[-1] -= lasts
        open_spans.append((span, kind))
    return times, busy


def is_trace(path):
    """Judges by the name, or by how the file begins."""
    if RING.fullmatch(path.name):
        return True
    with open(path, errors="replace") as file:
        line = file.readline()
    return '"traceEvents"' in line or '"displayTimeUnit"' in line


def require_no_ring(path):
    if ring := RING.fullmatch(str(path)):
        raise DataError(
            f"{path} is what one rank kept for its trace",
            likely="the run was ended before its trace was written",
            next=f"lockstep trace {ring[1]}, and report that file",
        )


def read_trace(path):
    """Returns what the page of `lockstep report` gets of a trace."""
    require_no_ring(path)
    text = read(path)
    whole = parse(text)
    cut_off = not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list)
    if cut_off:
        first, *lines = text.split("\n")
        whole = (parse(first + "]}") or {}) | {"traceEvents": [parse(line.removesuffix(",")) for line in lines]}
    about, ranks = whole.get("otherData", {}), defaultdict(Rank)
    require_format(about.get("format"), FORMAT, path)
    for event in whole["traceEvents"]:
        if isinstance(event, dict) and number(event.get("pid")) is not None:
            ranks[event["pid"]].add(event)
    if not any(rank.spans for rank in ranks.values()):
        raise DataError(
            f"{path} {'has no span in it' if text else 'is empty'}",
            likely="the run died before its first step, or another kind of file",
            next="give what `lockstep train --trace FILE.json` has written",
        )
    missing = ["the trace is cut off"] * cut_off
    missing += ["the trace is of a run that failed"] * (about.get("complete") is False)
    for rank, spans in about.get("overwritten_spans", {}).items():
        if spans > 0:
            missing.append(f"the oldest {spans} spans of {rank} are overwritten")
    return {"ranks": [rank.facts(number) for number, rank in sorted(ranks.items())], "partial": missing}
