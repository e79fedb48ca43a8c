#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""lockstep top: shows what the ranks of the jobs of this user on this machine are doing, and what holds them up."""

import argparse
import curses
import json
import os
import select
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple

from common import COMMAND, Error, UsageError, count, human_bytes, human_seconds, numbers, parse, run
from jobs import Job, up_to_now
from verdicts import verdicts_on

FORMAT = 1  # of --json; docs/watching.md lists its fields
WIDTH_OF_ALL_COLUMNS = 120
NO_JOB = "no job of this user is running on this machine"

Line = namedtuple("Line", "text style", defaults=["plain"])


# ---- A job as lines of text, none longer than the terminal is wide


def share(key):
    return lambda rank: f"{100 * rank.shares[key]:.0f}%" if rank.is_known and not rank.server else "-"


def phase(rank):
    if rank.state in ("died", "stopped") or not rank.is_known:
        return rank.state if rank.is_known else "no lockstep"
    return "serving" if rank.server else rank.phase


def age(rank):
    seconds = rank.seconds_since_progress
    if not rank.is_known or seconds < 1:
        return f"{999 * seconds:.0f} ms" if rank.is_known else "-"
    return human_seconds(seconds) if seconds < 3600 else f"{seconds / 3600:.0f} h"


def awaited_rank(rank):
    if not rank.now["wait_since"]:
        return "net" if rank.now["calls_others"] else "-"
    return "any" if rank.waits_for is None else str(rank.waits_for)


Column = namedtuple("Column", "name width keep text")  # the column with the least `keep` is the first that is left out
COLUMNS = [
    Column("rank", 4, 99, lambda rank: str(rank.number)),
    Column("step", 8, 12, lambda rank: str(rank.step) if rank.step >= 0 else "-"),
    Column("samples/s", 9, 7, lambda rank: f"{rank.samples_per_second:,.0f}" if rank.samples_per_second > 0 else "-"),
    Column("comp", 4, 11, share("compute")),
    Column("wait", 4, 13, share("wait")),
    Column("exch", 4, 4, share("exchange")),
    Column("data", 4, 10, share("data")),
    Column("upd", 4, 9, share("update")),
    Column("memory", 10, 5, lambda rank: human_bytes(rank.now["memory_bytes"]) if rank.now["memory_bytes"] else "-"),
    Column("age", 6, 8, age),
    Column("phase", 11, 6, phase),
    Column("for", 4, 3, awaited_rank),
    Column("pid", 8, 2, lambda rank: str(rank.pid or "-")),
    Column("loss", 10, 1, lambda rank: f"{rank.now['loss'] or 0:.4f}" if rank.now["samples"] else "-"),
]


def columns_within(width):
    columns = list(COLUMNS)
    while sum(column.width + 1 for column in columns) > width + 1 and len(columns) > 1:
        columns.remove(min(columns, key=lambda column: column.keep))
    return columns


def row(columns, text_of, width):
    def cell(column):
        text = text_of(column)[: column.width]
        return text.ljust(column.width) if column.name == "phase" else text.rjust(column.width)

    return " ".join(map(cell, columns)).rstrip()[:width]


def as_many_as_fit(parts, width):
    line, *parts = parts
    for part in parts:
        if len(line) + len(part) + 2 > width:
            break
        line += ", " + part
    return line[:width]


def facts_of(job):
    ranks, world = len(job.ranks), job.now["world_size"]
    facts = [
        f"job {job.number}",
        f"up {human_seconds(max(1, int(job.seconds)))}",
        count(ranks, "rank") if world == ranks else f"{ranks} of {world} ranks",
    ]
    if job.samples_per_second > 0:
        facts.append(f"{job.samples_per_second:,.0f} samples/s")
    if job.now["machines"] > 1:
        facts.append(f"machine {job.now['machine']} of {job.now['machines']}")
    return facts


def server_text(rank):
    server = rank.server
    return (
        f"server {rank.number}: {server['clients']} clients, {server['requests_in_hand']:.1f} requests in hand, "
        f"{server['requests_per_second']:.0f} a second, {human_seconds(server['seconds_per_request'])} each; delay "
        f"{server['mean_delay']:.1f}, at most {server['most_delay']}"
    )


def lines_of(job, width, skip=0):
    """`skip` ranks are left out at the top of the table."""

    def folded(text, style="plain"):
        return [Line(line, style) for line in textwrap.wrap(text, max(width, 1), break_on_hyphens=False)]

    lines = [Line(job.now["command"][:width], "title"), Line(as_many_as_fit(facts_of(job), width))]
    for verdict in verdicts_on(job):
        lines += folded(f"> {verdict.text}", "fine" if verdict.kind == "fine" else "warning")
    columns = columns_within(width)
    lines.append(Line(row(columns, lambda column: column.name, width), "heading"))
    lines += [Line(row(columns, lambda column: column.text(rank), width)) for rank in job.ranks[skip:]]
    for rank in job.ranks:
        lines += folded(server_text(rank)) if rank.server else []
    return lines


def line_of(job, width):
    number, *facts = facts_of(job)
    return as_many_as_fit([number, job.now["name"], *facts], width)


# ---- Looking


class Watch:
    """`lockstep jobs`, which prints a line now and one after each interval."""

    def __init__(self, interval):
        self.process = subprocess.Popen(
            [COMMAND, "jobs", "--interval", str(interval)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.rest, self.before = b"", {}

    def jobs(self):
        """Blocks until the next line; of several it takes the last. The first jobs have no rates."""
        lines = []
        while not lines:
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise Error("`lockstep jobs` has ended", likely="its own message is above")
            *lines, self.rest = (self.rest + part).split(b"\n")
        now = parse(lines[-1])
        for job in now["jobs"]:
            for rank in job["ranks"]:
                up_to_now(rank)
        jobs = [Job(job, now["time"], self.before.get(job["job"])) for job in now["jobs"]]
        self.before = {job["job"]: job for job in now["jobs"]}
        self.time, self.unreadable = now["time"], now["unreadable"]
        return jobs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def print_jobs(watch, options):
    watch.jobs()
    for pid in watch.unreadable:
        what = f"process {pid} is a job of another version of lockstep: look at it with that version"
        print(f"lockstep: warning: {what}", file=sys.stderr)
    while True:
        jobs = watch.jobs()
        if options.json:
            found = [job.json(verdicts_on(job)) for job in jobs]
            print(json.dumps({"format": FORMAT, "time": watch.time, "jobs": found}), flush=True)
        else:
            width = shutil.get_terminal_size((WIDTH_OF_ALL_COLUMNS, 0)).columns
            texts = ["\n".join(line.text for line in lines_of(job, width)) for job in jobs]
            print("\n\n".join(texts) or NO_JOB, flush=True)
        if options.once:
            return


# ---- The screen


class Screen:
    HELP = ("q quits", "arrows or tab: job", "PgUp, PgDn: ranks")
    STEPS = {curses.KEY_DOWN: 1, ord("\t"): 1, ord("j"): 1, curses.KEY_UP: -1, curses.KEY_BTAB: -1, ord("k"): -1}

    def __init__(self, window):
        self.window, self.jobs, self.chosen, self.skip = window, [], 0, 0
        curses.curs_set(0)
        curses.use_default_colors()
        curses.init_pair(1, curses.COLOR_RED, -1)
        curses.init_pair(2, curses.COLOR_GREEN, -1)
        self.styles = {
            "plain": curses.A_NORMAL,
            "title": curses.A_BOLD,
            "heading": curses.A_REVERSE,
            "warning": curses.color_pair(1) | curses.A_BOLD,
            "fine": curses.color_pair(2),
        }
        window.nodelay(True)

    def show(self, watch):
        """Draws until q is pressed. The terminal tells of a new size by a key."""
        while True:
            ready, _, _ = select.select([sys.stdin, watch.process.stdout], [], [])
            if watch.process.stdout in ready:
                self.jobs = watch.jobs()
            while (key := self.window.getch()) != curses.ERR:
                if key in (ord("q"), ord("Q")):
                    return
                self.press(key)
            self.draw()

    def index(self):
        return next((i for i, job in enumerate(self.jobs) if job.number == self.chosen), 0)

    def press(self, key):
        lines = self.window.getmaxyx()[0]
        if key in self.STEPS and self.jobs:
            self.chosen, self.skip = self.jobs[(self.index() + self.STEPS[key]) % len(self.jobs)].number, 0
        elif key in (curses.KEY_NPAGE, curses.KEY_PPAGE) and self.jobs:
            further = lines // 2 if key == curses.KEY_NPAGE else -lines // 2
            self.skip = min(max(self.skip + further, 0), len(self.jobs[self.index()].ranks) - 1)

    def draw(self):
        height, width = self.window.getmaxyx()
        self.window.erase()
        for y, line in enumerate(self.lines(width)[:height]):
            self.put(y, line, width)
        if self.jobs:
            text = next((text for some in (3, 2, 1) if len(text := "   ".join(self.HELP[:some])) <= width), "")
            self.put(height - 1, Line(text.ljust(width)), width)
        self.window.refresh()

    def lines(self, width):
        if not self.jobs:
            return [Line(text) for text in textwrap.wrap(f"{NO_JOB}; q quits", width)]
        chosen = self.jobs[self.index()]
        self.chosen = chosen.number

        def marked(job):
            mark, style = ("* ", "title") if job is chosen else ("  ", "plain")
            return Line(mark + line_of(job, width - 2), style)

        listed = [*map(marked, self.jobs), Line("")] if len(self.jobs) > 1 else []
        return listed + lines_of(chosen, width, self.skip)

    def put(self, y, line, width):
        try:
            self.window.addnstr(y, 0, line.text, width, self.styles[line.style])
        except curses.error:  # the cursor has no place after the last character of the screen
            pass


def show_screen(watch):
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("`lockstep top` without a terminal", next="use --once, or --json")
    os.environ.setdefault("ESCDELAY", "25")
    try:
        curses.wrapper(lambda window: Screen(window).show(watch))
    except curses.error as error:
        raise UsageError(
            f"this terminal is not known: {error}",
            likely="TERM is not set, or names no terminal",
            next="use --once, or set TERM",
        ) from None


def main():
    parser = argparse.ArgumentParser("lockstep top", description=__doc__.split(":", 1)[1].strip(), allow_abbrev=False)
    add, interval = parser.add_argument, numbers(float, 0.1, 3600, one=True)
    add("--once", action="store_true", help="print the jobs as text, and end")
    add("--json", action="store_true", help="print one JSON object per line, repeatedly; with --once a single one")
    add("--interval", type=interval, default=1, metavar="SECONDS", help="between two lines or views [%(default)s]")
    options = parser.parse_args()
    with Watch(options.interval) as watch:
        print_jobs(watch, options) if options.once or options.json else show_screen(watch)


if __name__ == "__main__":
    run(main)
