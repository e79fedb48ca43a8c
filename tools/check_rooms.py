#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the layout true. It is one of the tests.

Planner:  tools/plan/ includes rooms up to strategy/; only lockstep/train/choose_strategy.cc includes it, with one header.
Rooms:    the folders of lockstep/ are those in ROOMS and SUB_ROOMS. A room includes itself and the rooms before it; base/, observe/,
          launch/ and collective/shm/ include no torch; spdlog and fmt stay in .cc files of base/.
Public:   include/lockstep/ is what is installed. Each of its headers belongs to a room (PUBLIC) and includes nothing but
          its like, torch and the standard library.
Headers:  say what they are in their first line and have #pragma once (x_body.h is included several times on purpose).
Comments: paths named in comments and in documentation exist; no labels of a design paper (S0 to S4) in the code.
Licence:  every source file names it, once one does.
Examples: are at most 80 lines long.
Docs:     HACKING.md maps every room; README.md and docs/python-frameworks.md quote the examples as they are.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["base", "observe", "launch", "collective", "data", "model", "step", "strategy", "checkpoint", "train"]
SUB_ROOMS = {
    "train": {"options", "reports", "state"},
    "base": {"files", "process", "sockets"},
    "collective": {"world", "calls", "transport", "meet", "store", "shm", "shm/connect", "shm/memory", "machines", "c10d"},
    "data": {"formats", "images", "packed", "loader"},
    "step": {"guards", "update"},
    "strategy": {"ddp", "devices", "averaging", "pipeline", "kvstore"},
}
PUBLIC = {
    "base": "error deadline cores memory stop stop_all",
    "launch": "recovery",
    "collective": "collective_types world spawn timeline",
    "data": "dataset datasets images sampler loader",
    "model": "task models layout named_tensor sync_batch_norm",
    "step": "communication_hook batch_totals batch_weight optimizer optimizers update_rule gradient_scaler schedule",
    "strategy": "activation_checkpoint strategy ddp device_place devices towers data_parallel average_nets periodic_average kvstore verify",
    "checkpoint": "checkpoint checkpoints",
    "train": "run loop_recovery lockstep",
}
ROOM_OF_PUBLIC = {header: room for room, headers in PUBLIC.items() for header in headers.split()}
PLANNER = ("lockstep/train/choose_strategy.cc", "tools/plan/auto.h")
NO_TORCH = ("lockstep/base/", "lockstep/observe/", "lockstep/launch/", "lockstep/collective/shm/")
LICENCE = "SPDX-License-Identifier: Apache-2.0"
TREES = "lockstep|include|cli|tests|bench|examples|cmake|docs|tools|python"

INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.MULTILINE)
FULL_PATH = re.compile(rf"(?<![\w/.$}}>-])((?:{TREES})/[\w./-]+\.(?:h|cc|py|md|sh|cmake|pml|txt|json))(?![\w/])")
SHORT_PATH = re.compile(rf"(?<![\w/.$}}>-])((?:{'|'.join(ROOMS)})/[\w/]+\.(?:h|cc|pml))(?![\w/])")
LABEL = re.compile(r"(?<![\w.])S[0-4](?![\w.]*\.py)(?=_|\b)")

problems = []


def complain(path, message):
    problems.append(f"{path}: {message}")


def tracked(*patterns):
    """The files of the checkout, without what git ignores, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", *patterns], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return [Path(name) for name in sorted(set(listed.splitlines())) if (ROOT / name).is_file()]


def room_of(included):
    """The room of a header of lockstep, by the text of its #include; None for one that nobody knows."""
    parts = included.split("/")
    return ROOM_OF_PUBLIC.get(Path(parts[1]).stem) if len(parts) == 2 else parts[1]


def check_includes(path, room, text):
    name = str(path)
    for included in INCLUDE.findall(text):
        if included.startswith("tools/") and path.parts[0] != "tools" and (name, included) != PLANNER:
            complain(path, f"includes {included}, but only {PLANNER[0]} needs the planner")
        if included.startswith("lockstep/") and not name.endswith("_test.cc"):
            other = room_of(included)
            if other not in ROOMS:
                complain(path, f"includes {included}, which belongs to no room")
            elif ROOMS.index(other) > ROOMS.index(room):
                complain(path, f"includes {included}, but {other}/ comes after {room}/")
            if path.parts[0] == "include" and included.count("/") != 1:
                complain(path, f"includes {included}, which is not installed")
        if path.parts[0] == "include" and re.match(r"(spdlog|fmt|nlohmann|CLI)/", included):
            complain(path, f"includes {included}, which users need not have")
        if name.startswith(NO_TORCH) and re.match(r"(torch|ATen|c10)/", included):
            complain(path, f"includes {included}, but this part has no torch")
        if re.match(r"(spdlog|fmt)/", included) and not (room == "base" and path.suffix == ".cc"):
            complain(path, f"includes {included}, which only base/*.cc may")


def check_header(path, text):
    short = "/".join(path.parts[1:])
    first = next((line for line in text.splitlines() if LICENCE not in line), "")
    if not first.startswith((f"// {short}: ", f"// {path}: ")) and path.name != "pch.h":
        complain(path, f'does not begin with "// {short}: what it is"')
    if "#pragma once" not in text and not path.stem.endswith("_body"):
        complain(path, "has no #pragma once")


def check_rooms():
    for path in tracked("lockstep/*.h", "lockstep/*.cc"):
        room, sub = path.parts[1], "/".join(path.parts[2:-1])
        if len(path.parts) == 2:
            continue
        if room not in ROOMS or (sub and sub not in SUB_ROOMS.get(room, ())):
            complain(path, "stands in a folder that is no room")
            continue
        text = (ROOT / path).read_text()
        check_includes(path, room, text)
        if path.suffix == ".h":
            check_header(path, text)
    for path in tracked("tools/plan/*.h", "tools/plan/*.cc"):
        text = (ROOT / path).read_text()
        check_includes(path, "train" if path.name == "command.cc" else "strategy", text)
        if path.suffix == ".h":
            check_header(path, text)
    for path in tracked("include/*.h"):
        room = ROOM_OF_PUBLIC.get(path.stem)
        text = (ROOT / path).read_text()
        if room is None or len(path.parts) != 3:
            complain(path, "is public, but PUBLIC in tools/check_rooms.py has no room for it")
            continue
        check_includes(path, room, text)
        check_header(path, text)


def comments_of(path, text):
    """The text of a file in which paths are named for a reader."""
    if path.suffix in (".h", ".cc"):
        return "\n".join(re.findall(r"//(.*)", text))
    if path.suffix == ".md":
        return text
    return "\n".join(re.findall(r"(?m)(?:^|\s)#(.*)", text)) + "\n".join(re.findall(r'"""(.*?)"""', text, re.DOTALL))


def check_comments():
    for path in tracked("*.h", "*.cc", "*.py", "*.sh", "*.cmake", "*.md", "*CMakeLists.txt"):
        if path.name in ("CHANGELOG.md", "check_rooms.py"):
            continue  # these name what is gone
        text = (ROOT / path).read_text()
        comments = comments_of(path, text)
        for named in FULL_PATH.findall(comments):
            if not any((base / named).exists() for base in (ROOT, ROOT / "include", ROOT / path.parent)):
                complain(path, f"names {named}, which does not exist")
        for named in SHORT_PATH.findall(comments):
            if not (ROOT / "lockstep" / named).exists():
                complain(path, f"names {named}, which does not exist in lockstep/")
        if path.suffix in (".h", ".cc", ".py", ".sh", ".cmake") and LABEL.search(text):
            complain(path, f"has the label {LABEL.search(text).group(0)}")


def check_licence():
    sources = tracked("*.h", "*.cc", "*.py", "*.sh", "*.cmake", "*CMakeLists.txt", "*.pml")
    without = [path for path in sources if LICENCE not in "\n".join((ROOT / path).read_text().splitlines()[:3])]
    if len(without) < len(sources) - 1:  # this file is one of them
        for path in without:
            complain(path, f"has no {LICENCE}")


def check_map():
    hacking = (ROOT / "HACKING.md").read_text()
    for path in re.findall(rf"`((?:{TREES})/[\w./-]+)`", hacking):
        if not (ROOT / path).exists():
            complain("HACKING.md", f"{path} does not exist")
    for room in ROOMS:
        if f"`lockstep/{room}/`" not in hacking:
            complain("HACKING.md", f"the map does not mention lockstep/{room}/")


def check_examples():
    for path in tracked("examples/*.cc", "examples/*.py"):
        length = len((ROOT / path).read_text().splitlines())
        if length > 80:
            complain(path, f"has {length} lines, more than 80")


def check_quoted_programs():
    readme = (ROOT / "README.md").read_text()
    for example in ("own_loop", "own_task"):
        program = (ROOT / f"examples/{example}.cc").read_text()
        program = "\n".join(line for line in program.splitlines() if LICENCE not in line)
        if program.split("\n", 1)[1].strip() not in readme:
            complain("README.md", f"does not quote examples/{example}.cc as it is")
    page = "docs/python-frameworks.md"
    programs = [(ROOT / path).read_text() for path in tracked("examples/*.py")]
    for block in re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        kept = "\n".join(line[1:] for line in block.splitlines() if not line.startswith("-"))
        if not any(kept in program for program in programs):
            complain(page, f"what it shows is in none of examples/*.py:\n{kept}")


def main():
    for check in (check_rooms, check_comments, check_licence, check_map, check_examples, check_quoted_programs):
        check()
    left = list(dict.fromkeys(problems))
    print("\n".join(left) or "the rooms are in order")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
