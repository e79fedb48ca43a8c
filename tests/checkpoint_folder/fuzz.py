#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder with foreign files in it: random operations and kills, and a kill, a full disk and a failing one at every system
call of a save. $1 is folder_program. Afterwards nothing foreign has changed, no whole checkpoint is lost, and the newest one is found.

LOCKSTEP_FOLDER_FUZZ: how many random rounds; then every system call is tried, else one of twelve.
"""
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

OWN = re.compile(r"step-\d{8}(\.safetensors(\.index\.json)?|(-again)?-\d{5}-of-\d{5}\.safetensors)(\.(damaged|after-\d+)(-\d+)?)?|\.lock")
CALLS = {"openat", "write", "lseek", "fsync", "rename", "unlink", "mkdir", "ftruncate", "flock", "newfstatat", "fstat", "getdents64", "pread64",
         "read", "close", "statx"}
KEEP = 2


class Program:
    """Runs lines of operations, each in a process."""

    def __init__(self, path):
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1)

    def start(self, line):
        self.process.stdin.write(line + "\n")
        return int(self.process.stdout.readline().split()[1])

    def answers(self):
        lines = []
        while not (line := self.process.stdout.readline().strip()).startswith("end "):
            assert line, "the program has ended"
            lines.append(line)
        return lines

    def run(self, *operations):
        self.start(";".join(operations))
        return self.answers()

    def run_under_strace(self, arguments, *operations):
        pid = self.start("stop " + ";".join(operations))
        while " T " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.0005)
        strace = subprocess.Popen(["strace", "-f", *arguments, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        first = strace.stderr.readline()
        assert "attached" in first, first
        os.kill(pid, signal.SIGCONT)
        answers = self.answers()
        strace.stderr.read()
        strace.wait()
        return answers


def look(path):
    if path.is_symlink():
        return os.readlink(path)
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else path.read_bytes()


def foreign_name(rng):
    """Nearly one that lockstep makes."""
    step = rng.choice(["00000001", "00000002", "00000003", "00000005", "5", "000000005", "-0000005", "0000000x"])
    name = rng.choice(["step-{}{}.safetensors", "step-{}{}.safetensors.index.json", "step-{}{}-00001-of-00004.safetensors", "Step-{}{}.safetensors",
                       "step-{}-again{}-00001-of-00004.safetensors"])
    change = rng.choice(["-best", ".bak", ".tmp-4711", ".tmp-0123456789ABCDEF", ".tmp-0123456789abcdef0", ".damaged", "~", ".tmp-", ".part"])
    name = name.format(step, change if rng.random() < 0.3 else "")
    if OWN.fullmatch(name) or rng.random() < 0.5:
        name += change
    return rng.choice([name] * 9 + [".writable", "model.safetensors", ".lock~", "step-00000001-00000-of-00004.safetensors",
                                    "step-00000002-00005-of-00004.safetensors", "step-00000001-0001-of-0004.safetensors"])


def add_foreign(folder, rng, count):
    (folder / rng.choice(["step-00000099.safetensors", "step-00000099-00001-of-00004.safetensors"])).mkdir()  # no file
    for _ in range(count):
        path = folder / foreign_name(rng)
        if path.exists() or path.is_symlink():
            continue
        kind = rng.random()
        if kind < 0.7:
            path.write_bytes(rng.randbytes(20))
        elif kind < 0.8:
            path.mkdir()
        elif kind < 0.9:
            path.symlink_to(folder.parent / "precious")
        else:
            path.symlink_to("nowhere")


def foreign_in(folder):
    return {path.name: look(path) for path in folder.iterdir() if path.is_dir() or not OWN.fullmatch(path.name) and not is_half(path.name)}


def is_half(name):
    match = re.fullmatch(r"(.*)\.tmp-[0-9a-f]{16}", name)
    return match is not None and OWN.fullmatch(match[1]) is not None and re.search(r"damaged|after", name) is None


def whole_in(program, folder):
    """{step: tags}"""
    [line] = program.run(f"list {folder}")
    found = {}
    for entry in line.split(",")[1:]:
        step, tag = entry.split()
        assert tag != "mixed", entry
        found.setdefault(int(step), set()).add(tag)
    return found


def aside_in(program, folder):
    found = {}
    for end in {path.name[path.name.index(".after-"):] for path in folder.glob("step-????????*.after-*") if OWN.fullmatch(path.name)}:
        with tempfile.TemporaryDirectory() as back:
            for path in folder.glob(f"*{end}"):
                shutil.copy(path, Path(back, path.name.removesuffix(end)))
            for step, tags in whole_in(program, back).items():
                found.setdefault(step, set()).update(tags)
    return found


def check(program, folder, before, foreign, saves, answers, back=None):
    """before: {step: tags}, several where a kill came between a new one and the removal of the one before. saves: [(step, tag)] that may
    have been made, in this order; those that were are "saved" in `answers`. back: the step above which checkpoints are put aside; if that
    was interrupted, it is done again."""
    assert foreign_in(folder) == foreign, "something foreign has changed"
    after, aside = whole_in(program, folder), aside_in(program, folder)
    newest = max(after, default=-1)
    done = [answer.startswith("saved") for answer in answers if answer.startswith(("saved", "failed"))]
    if True in done:
        last = len(done) - 1 - done[::-1].index(True)
        step = saves[last][0]
        assert any(other == step and tag in after.get(step, ()) for other, tag in saves[last:]), f"{saves[last]} was saved"
    tags = {step: set(found) for step, found in before.items()}
    for step, tag in saves:
        tags.setdefault(step, set()).add(tag)
    for step, found in after.items():
        assert found <= tags.get(step, set()), f"step {step} has {found}"
    for step, known in before.items():
        is_there = known & (after.get(step, set()) | aside.get(step, set()))
        replaced = any(step == other and value in after.get(step, ()) for other, value in saves)
        pruned = any(other > step and value in after.get(other, ()) for other, value in saves) and sum(other > step for other in after) >= KEEP
        if not (is_there or replaced or pruned) and back is not None:
            assert program.run(f"open {folder}", f"back {back}")[1:] == ["back"]
            after, newest = whole_in(program, folder), back
            is_there = known & aside_in(program, folder).get(step, set())
        assert is_there or replaced or pruned, f"step {step} is lost"
    [opened, found] = program.run(f"open {folder}", "newest")
    if newest >= 0:
        [word, step, tag] = found.split()
        assert (word, int(step)) == ("newest", newest) and tag in after[newest], f"{found}, not {newest} {after[newest]}"
    else:
        assert found in ("newest none", "error lockstep: CheckpointError: none of") or found.startswith("error"), found
    for path in folder.iterdir():
        assert path.name in foreign or OWN.fullmatch(path.name), f"left behind: {path.name}"
    if newest >= 0:
        assert program.run(f"open {folder}", "newest", f"save {newest + 1} 99 1", "newest")[2:] == ["saved", f"newest {newest + 1} 99"]
    assert foreign_in(folder) == foreign, "something foreign has changed"


def damage(folder, step):
    for path in folder.glob(f"step-{step:08}*"):
        if OWN.fullmatch(path.name) and path.suffix == ".safetensors" and "damaged" not in path.name:
            path.write_bytes(path.read_bytes()[:-4])
            return


def leave_half(folder):
    for name in (".lock", "step-00000002.safetensors", "step-00000003-00001-of-00004.safetensors"):
        (folder / f"{name}.tmp-0123456789abcdef").write_text("half")
    (folder / "step-00000003-00001-of-00004.safetensors").write_text("half")


# Name: what is there, what is damaged, what is done, what it may save.
def scenarios():
    for kind, shards in (("file", 0), ("shards", 1)):
        two = [f"save 1 1 {shards}", f"save 2 2 {shards}"]
        yield f"first {kind}", [], None, [f"save 1 7 {shards}"], [(1, "7")]
        yield f"third {kind}", two, None, ["newest", f"save 3 7 {shards}"], [(3, "7")]
        yield f"{kind} again", two, None, ["newest", f"save 2 7 {shards}"], [(2, "7")]
        yield f"{kind} over the other kind", two, None, ["newest", f"save 2 7 {1 - shards}"], [(2, "7")]
        yield f"{kind} beside a damaged one", [*two, f"save 3 3 {shards}"], 3, ["newest", f"save 4 7 {shards}"], [(4, "7")]
        yield f"{kind} after going back", two, None, ["back 1", f"save 2 7 {shards}"], [(2, "7")]
        yield f"{kind} below a known one", two, None, ["newest", f"save 1 7 {shards}"], [(1, "7")]
    yield "shards again and again", ["save 1 1 1", "save 1 2 1"], None, ["newest", "save 1 7 1", "save 1 8 1"], [(1, "7"), (1, "8")]


def calls_in(log):
    counts = {}
    for line in log.read_text().splitlines():
        if match := re.match(r"(\d+ +)?(\w+)\(", line):
            counts[match[2]] = counts.get(match[2], 0) + 1
    return {call: count for call, count in counts.items() if call in CALLS}


def at_every_call(program, root, every):
    counts = Counter()
    rng = random.Random(2)
    for name, there, damaged, operations, saves in scenarios():
        template = root / "template"
        template.mkdir()
        assert program.run(f"open {template}", *there) == ["opened"] + ["saved"] * len(there), name
        before = whole_in(program, template)
        if damaged:
            damage(template, damaged)
            before.pop(damaged)
        leave_half(template)
        add_foreign(template, rng, 20)
        foreign = foreign_in(template)
        back = 1 if "back" in name or "below" in name else None
        folder, log = root / "folder", root / "log"

        def one(how, inject):
            shutil.copytree(template, folder, symlinks=True)
            answers = program.run_under_strace(["-o", str(log), *inject], f"open {folder}", *operations)
            try:
                check(program, folder, before, foreign, saves, answers, back)
            except AssertionError as error:
                print(f"{name}, {how}: {error}\n{answers}\n{sorted(os.listdir(folder))}\n{log.read_text()}"[:3000], file=sys.stderr)
                counts["failed"] += 1
            shutil.rmtree(folder)

        one("nothing", ["-e", "trace=" + ",".join(sorted(CALLS))])
        for call, count in calls_in(log).items():
            for when in range(1, count + 1):
                for how in ("signal=KILL", "error=ENOSPC", "error=EIO"):
                    if call == "close" and how != "signal=KILL" or rng.randrange(every) != 0:
                        continue
                    one(f"{call} {when} {how}", ["-e", f"trace={call}", "-e", f"inject={call}:{how}:when={when}"])
                    counts[how] += 1
        shutil.rmtree(template)
    return counts


def random_rounds(program, root, rounds):
    counts = Counter()
    for seed in range(rounds):
        rng = random.Random(seed)
        folder = root / "folder"
        folder.mkdir()
        add_foreign(folder, rng, rng.randrange(20))
        history = []
        try:
            for _ in range(rng.randrange(1, 5)):
                before = whole_in(program, folder)
                foreign = foreign_in(folder)
                newest = max(before, default=0)
                operations, saves = ["newest"], []
                back = min(before) if len(before) > 1 and rng.random() < 0.2 else None
                if back is not None:
                    newest = back
                    operations = [f"back {newest}"]
                for step in range(newest + rng.randrange(2), newest + rng.randrange(2, 5)):
                    tag = str(rng.randrange(10, 90))
                    if step > 0:
                        operations.append(f"save {step} {tag} {rng.randrange(2)}")
                        saves.append((step, tag))
                history.append(operations)
                pid = program.start(";".join([f"open {folder}", *operations]))
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 0.02)
                    try:
                        os.kill(pid, signal.SIGKILL)
                        counts["kills"] += 1
                    except ProcessLookupError:
                        pass
                answers = program.answers()
                check(program, folder, before, foreign, saves, answers, back)
                counts["operations"] += len(operations) + 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{history}\n{sorted(os.listdir(folder))}") from error
        counts["rounds"] += 1
        counts["foreign files"] += len(foreign_in(folder))
        shutil.rmtree(folder)
    return counts


def main():
    told = os.environ.get("LOCKSTEP_FOLDER_FUZZ")
    program = Program(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as root:
        (Path(root) / "precious").write_text("precious")
        print("random:", dict(random_rounds(program, Path(root), int(told or 60))))
        counts = at_every_call(program, Path(root), 1 if told else 12)
        print("at system calls:", dict(counts))
        assert (Path(root) / "precious").read_text() == "precious"
    return 1 if counts["failed"] else 0


sys.exit(main())
