# SPDX-License-Identifier: Apache-2.0
"""Reads what `lockstep train --trace FILE.json` writes."""
import re
from bisect import bisect_left
from collections import Counter, defaultdict, namedtuple

from files import Error, has_number, parse, read, require_known_format, text_of

FORMAT = 1  # kTraceFormat of lockstep/base/timeline_file.h
POINTS = 300  # of a rank
KINDS = {"forward": "forward", "backward": "backward", "exchange": "exchange", "update": "update", "barrier": "waiting",
         "wait for rank": "waiting", "receive": "waiting", "wait for batch": "data", "load batch": "data", "checkpoint": "checkpoint",
         "end of epoch": "validation"}  # of spans whose names begin so

Span = namedtuple("Span", "begin end name number thread bytes")  # times in microseconds; name: without the number at its end

# ---- Reading


class Rank:
    def __init__(self):
        self.name, self.spans, self.counters = "", [], defaultdict(list)

    def add(self, event):
        kind, name, args = text_of(event, "ph"), text_of(event, "name"), event.get("args")
        if kind == "M" and name == "process_name":
            self.name = text_of(args, "name")
        elif kind == "C" and has_number(args, "value") and has_number(event, "ts"):
            self.counters[name].append((event["ts"], args["value"]))
        elif kind == "X" and all(has_number(event, key) for key in ("tid", "ts", "dur")):
            name, number = re.fullmatch(r"(.+?)(?: (\d+))?", name, re.DOTALL).groups("") if name else ("", "")
            self.spans.append(Span(event["ts"], event["ts"] + event["dur"], name, number, event["tid"],
                                   args["bytes"] if has_number(args, "bytes") else -1))


def events_in(content):
    """What the file says about itself, its events, and whether it is cut off. Then its events are one a line."""
    everything = parse(content)
    if isinstance(everything, dict) and isinstance(everything.get("traceEvents"), list):
        return everything.get("otherData", {}), everything["traceEvents"], False
    lines = content.split("\n")
    first = parse(lines[0] + "]}")
    return first.get("otherData", {}) if isinstance(first, dict) else {}, [parse(line.removesuffix(",")) for line in lines], True


def ranks_of(events):
    ranks = defaultdict(Rank)
    for event in events:
        if has_number(event, "pid"):
            ranks[event["pid"]].add(event)
    return dict(sorted(ranks.items()))


def missing_in(about, cut_off):
    if cut_off:
        yield "the trace is cut off"
    if about.get("complete") is False:
        yield "the trace is of a run that failed"
    overwritten = about.get("overwritten_spans", {})
    for rank in overwritten:
        if has_number(overwritten, rank) and overwritten[rank] > 0:
            yield f"the oldest {overwritten[rank]} spans of {rank} are overwritten"


# ---- Where the time goes


def kind_of(span):
    """Empty: the same as the span around it."""
    return next((kind for start, kind in KINDS.items() if span.name.startswith(start)), "")


def time_by_kind(spans):
    """A span's time is its kind's, less that of the spans within it. spans: of one thread, outer ones first."""
    times, around = Counter(), []
    for span in spans:
        while around and around[-1][0] <= span.begin:
            around.pop()
        kind = kind_of(span) or (around[-1][1] if around else "other")
        if around:
            times[around[-1][1]] -= span.end - span.begin
        times[kind] += span.end - span.begin
        around.append((span.end, kind))
    return times


def waited_in(step, spans):
    waited, until = 0, step.begin
    for span in spans[bisect_left(spans, step.begin, key=lambda span: span.begin):]:
        if span.begin >= step.end:
            break
        if span.begin >= until and kind_of(span) == "waiting":
            waited += span.end - span.begin
            until = span.end  # what lies within is counted
    return waited


def parts(values):
    each = -(-len(values) // POINTS) or 1
    return [values[at:at + each] for at in range(0, len(values), each)]


def busy_of(steps, spans):
    """A step's time without waiting: the means of a few."""
    few = parts(steps)
    return {"step": [int(part[-1].number) for part in few],
            "ms": [sum(step.end - step.begin - waited_in(step, spans) for step in part) / 1e3 / len(part) for part in few]}


def points_of(counts):
    """Where there are many: the greatest of each few."""
    most = [max(part, key=lambda count: count[1]) for part in parts(sorted(counts, key=lambda count: count[0]))]
    return {"seconds": [time / 1e6 for time, _ in most], "value": [value for _, value in most]}


def per_step(values, steps):
    return {key: values[key] / steps for key in sorted(values)}


def facts_of(number, rank):
    facts = {"rank": number, "name": rank.name, "steps": 0,
             "counters": {name: points_of(rank.counters[name]) for name in sorted(rank.counters)}}
    thread = next((span.thread for span in rank.spans if span.name == "step" and span.number), None)
    if thread is None:  # a server
        return facts
    spans = sorted((span for span in rank.spans if span.thread == thread), key=lambda span: (span.begin, -span.end))
    steps = [span for span in spans if span.name == "step" and span.number]
    waits, moved = Counter(), Counter()
    for span in spans:
        if span.name == "wait for rank":
            waits[span.number] += (span.end - span.begin) / 1e3
    for span in rank.spans:  # what a rank hands over and what machines then exchange are the same bytes
        if span.bytes >= 0 and span.name != "send bucket":
            moved[span.name] += span.bytes
    times = {kind: time / 1e3 for kind, time in time_by_kind(spans).items()}
    return facts | {"steps": len(steps), "ms": per_step(times, len(steps)), "waits_for": per_step(waits, len(steps)),
                    "bytes": per_step(moved, len(steps)), "busy": busy_of(steps, spans)}


def trace_of_ring(file):
    """The trace to which what one rank has left belongs, or nothing."""
    found = re.fullmatch(r"(.*\.(?:json|pftrace))\.rank\d+", str(file))
    return found and found[1]


def is_trace(file):
    if str(file).endswith(".pftrace") or trace_of_ring(file):
        return True
    try:
        with open(file, errors="replace") as content:
            line = content.readline(1 << 20)
    except OSError:
        return False
    return '"traceEvents"' in line or '"displayTimeUnit"' in line


def read_trace(file):
    """{"ranks": [{"rank": 0, "name": "rank 0 on host, pid 1", "steps": n,
        "ms": {"forward": …, …},      a step's mean, by what the thread of the loop did; inner spans are not counted twice
        "waits_for": {"1": ms},       likewise, by the rank that had not come
        "bytes": {"all_reduce": …},   a step's mean, all threads
        "counters": {"memory": {"seconds": […], "value": […]}, …},
        "busy": {"step": […], "ms": […]}}], "partial": [text, …]}"""
    if trace := trace_of_ring(file):
        raise Error("DataError", f"{file} is what one rank kept for its trace", likely="the run was ended before its trace was written",
                    next=f"lockstep trace {trace}, and report that file")
    if str(file).endswith(".pftrace"):
        raise Error("DataError", f"{file} is in Perfetto's format, which the report does not read", next="train with --trace FILE.json")
    content = read(file)
    about, events, cut_off = events_in(content)
    require_known_format(about, "format", FORMAT, file)
    ranks = ranks_of(events)
    if not any(rank.spans for rank in ranks.values()):
        raise Error("DataError", f"{file} has no span in it" if content else f"{file} is empty",
                    likely="the run died before its first step, or another kind of file",
                    next="give what `lockstep train --trace FILE.json` has written")
    return {"ranks": [facts_of(number, rank) for number, rank in ranks.items()], "partial": list(missing_in(about, cut_off))}
