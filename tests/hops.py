#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows the functions of lockstep that one of two ranks enters in a plain step, or in one all-reduce.

    make hops                           # builds, and checks HACKING.md
    tests/hops.py                       # shows both walks
    tests/hops.py --check HACKING.md    # fails where a numbered walk there names a function or file that is not on it

gdb stops at each function of the library, lambdas included, when rank 0's thread enters it for the first time (tests/hops.cc, built
without inlining). Each is shown once, at its depth; what its body fits on one line is left out. A `*` marks the hops: functions
that are on the stack when the rank waits for the other or an innermost loop over elements runs. The others check, look up and
note.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WALKS = {"step": "One training step", "all_reduce": "One all-reduce"}
OURS = re.compile(r"_ZZ*N[KVRO]*8lockstep")
# The waits for other ranks, and the innermost loops over elements.
ENDS = ("shm::Group::arrive", "shm::Group::wait", "shm::avx512::reduce_arrays", "shm::baseline::reduce_arrays", "weighted_sum",
        "SGDRule::apply")
SEEN = "LOCKSTEP_HOPS"  # names the file with what gdb has seen


def symbols(library):
    """(offset, size, name) of each function of ours."""
    listed = subprocess.run(["nm", "-S", "--defined-only", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[2] in "tTwW" and OURS.match(fields[3]) and int(fields[1], 16) > 0:
            found[int(fields[0], 16)] = (int(fields[1], 16), fields[3])
    return [(offset, *found[offset]) for offset in sorted(found)]


def short_name(demangled):
    """lockstep::shm::(anonymous namespace)::work<int>(Group&)::{lambda()#1}::operator()() const -> shm::work::lambda"""
    text = re.sub(r"^.* \(\*([^)].*)\)\(.*\)$", r"\1", demangled)  # of a function that returns one
    text = text.replace("(anonymous namespace)::", "").replace("[abi:cxx11]", "").replace("operator()", "call")
    text = re.sub(r"operator(<=>|<<|>>|->|<|>)", "operator", text)
    kept, depth = [], 0
    for letter in text:
        depth += letter in "<("
        if depth == 0:
            kept.append(letter)
        depth -= letter in ">)"
    text = "".join(kept).replace(" const", "")
    text = re.sub(r"\{lambda#\d+\}::call", "lambda", text)
    return text.split()[-1].replace("lockstep::", "")


# ---- Inside gdb


def look_on():
    import bisect
    import gdb

    for setting in ("pagination off", "confirm off", "breakpoint always-inserted on", "print thread-events off"):
        gdb.execute(f"set {setting}")
    gdb.Breakpoint("hops_begin")
    gdb.execute("run")
    functions = []
    for mapped in Path(f"/proc/{gdb.selected_inferior().pid}/maps").read_text().splitlines():
        fields = mapped.split()
        if len(fields) == 6 and fields[2] == "00000000" and re.search(r"/(liblockstep\.so|hops$)", fields[5]):
            base = int(fields[0].split("-")[0], 16)
            functions += [(base + offset, size, name) for offset, size, name in symbols(fields[5])]
    functions.sort()
    starts = [start for start, _, _ in functions]
    entered = []

    def stack():
        """The functions of ours under which the thread is, innermost first."""
        frame, found = gdb.newest_frame(), []
        while frame is not None and frame.is_valid():
            index = bisect.bisect(starts, frame.pc()) - 1
            if index >= 0 and frame.pc() < starts[index] + functions[index][1]:
                found.append(index)
            frame = frame.older()
        return found

    class Entry(gdb.Breakpoint):
        def __init__(self, index, thread):
            super().__init__(f"*{starts[index]:#x}", internal=True)
            self.index, self.thread = index, thread
            self.is_end = names[index] in ENDS

        def stop(self):
            entered.append(stack())
            self.enabled = self.is_end
            return False

    names = subprocess.run(["c++filt"], input="\n".join(name for _, _, name in functions), stdout=subprocess.PIPE,
                           text=True, check=True).stdout.splitlines()
    names = [short_name(name) for name in names]
    if gone := set(ENDS) - set(names):
        raise SystemExit(f"ENDS in {__file__} names what is not there: {', '.join(gone)}")
    thread = gdb.selected_thread().num
    for index in range(len(functions)):
        Entry(index, thread)
    gdb.Breakpoint("hops_end")
    gdb.execute("continue")

    def lines_of(index):
        pc, end, lines, file = starts[index], starts[index] + functions[index][1], set(), None
        while pc < end:
            line = gdb.find_pc_line(pc)
            if line.symtab is None:
                break
            file = file or line.symtab.fullname()
            if line.symtab.fullname() == file and line.line:
                lines.add(line.line)
            pc = (line.last or pc) + 1
        return file, len(lines)

    used = sorted({index for each in entered for index in each})
    where = {index: lines_of(index) for index in used}
    Path(os.environ[SEEN]).write_text(json.dumps({"stacks": entered, "names": {i: names[i] for i in used}, "where": where}))
    gdb.execute("kill")


# ---- Outside


def seen_of(walk):
    program = str(ROOT / "build/hops/bin/hops")
    environment = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                                "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder, "seen.json")
        other = subprocess.Popen([program, walk], env=environment | {"RANK": "1", "LOCAL_RANK": "1"})
        try:
            subprocess.run(["gdb", "-q", "-batch", "-nx", "-x", __file__, "--args", program, walk], check=True,
                           stdout=subprocess.DEVNULL, env=environment | {"RANK": "0", "LOCAL_RANK": "0", SEEN: str(seen)})
            return json.loads(seen.read_text())
        finally:
            other.kill()
            other.wait()


class Walk:
    """The functions in the order in which they are entered, each once: (depth, name, file, is a hop)."""

    def __init__(self, seen):
        names = {int(index): name for index, name in seen["names"].items()}
        where = {int(index): place for index, place in seen["where"].items()}
        ends = [stack for stack in seen["stacks"] if names[stack[0]] in ENDS]
        hops = {names[index] for stack in ends for index in stack}
        counts = {index for index in names if where[index][1] > 1 and (where[index][0] or "").startswith(str(ROOT))}
        self.functions, known = [], set()
        for stack in seen["stacks"]:
            index = stack[0]
            if index in counts and names[index] not in known:
                known.add(names[index])
                file = str(Path(where[index][0]).relative_to(ROOT))
                self.functions.append((len(counts.intersection(stack[1:])), names[index], file, names[index] in hops))

    def show(self, title):
        print(f"{title}:")
        for depth, name, file, is_hop in self.functions:
            print(f"  {'*' if is_hop else ' '} {'  ' * depth}{name}  ({file})")
        for what, some in (("hops", [each for each in self.functions if each[3]]), ("functions", self.functions)):
            print(f"{len(some)} {what} in {len({file for _, _, file, _ in some})} files")


def missing(text, title, walk):
    """The functions and files that the numbered walk of a chapter names and the walk has not."""
    chapter = re.search(rf"^## {title}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL).group(1)
    steps = "\n".join(re.findall(r"^\d+\. .*(?:\n   .*)*", chapter, re.MULTILINE))
    files = {file for _, _, file, _ in walk.functions}
    names = [name for _, name, _, _ in walk.functions]
    for named in re.findall(r"`([^`]+)`", steps):
        if re.fullmatch(r"[\w/]+\.(h|cc)", named):
            if named not in files:
                yield named
        elif re.fullmatch(r"[\w:]+(\(\))?", named) and ("(" in named or "::" in named):
            name = named.removesuffix("()")
            if not any(f"::{each}::".find(f"::{name}::") >= 0 for each in names):
                yield named


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="HACKING.md")
    page, wrong = parser.parse_args().check, []
    for name, title in WALKS.items():
        walk = Walk(seen_of(name))
        walk.show(title)
        if page:
            wrong += [f"{title}: {each} is not on the walk" for each in missing(page.read_text(), title, walk)]
    sys.exit("\n".join(wrong) or 0)


if SEEN in os.environ:
    look_on()
elif __name__ == "__main__":
    main()
