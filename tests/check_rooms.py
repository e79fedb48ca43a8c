#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps the layout true. It is one of the tests.

Planner:  tools/plan/ includes rooms up to strategy/; only lockstep/train/run.cc includes it, with one header.
Rooms:    agent/ and the folders of lockstep/ are those in HACKING.md. A room includes itself and the rooms before it, and no torch where
          HACKING.md says "no"; spdlog and fmt stay in .cc files of base/.
Public:   include/lockstep/ is what is installed. Each of its headers belongs to the room that has a source of its name, or to
          that in PUBLIC, and includes nothing but its like, torch and the standard library.
Headers:  say what they are in their first line and have #pragma once (x_body.h is included several times on purpose).
Comments: paths named in comments and in documentation exist.
Licence:  every source file names it.
Examples: are at most 80 lines long.
Scripts:  no pipe ends in a command that stops reading early (grep -q, head): pipefail makes an error of that, now and then.
Docs:     functions that HACKING.md names exist; README.md, docs/command.md and docs/python-frameworks.md quote the examples as they are.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read(path):
    return (ROOT / path).read_text()


HACKING = read("HACKING.md")
ROWS = re.findall(r"^\| `((?:lockstep/[\w/]+|agent)/)` .* (yes|no) \|$", HACKING, re.MULTILINE)  # rooms, and whether they have torch
ROOMS = [folder.split("/")[-2] for folder, _ in ROWS if folder.count("/") == 2 or folder == "agent/"]
PUBLIC = {  # headers that have no source of their name in their room alone
    "base": "deadline stop_all",
    "agent": "recovery",
    "collective": "mpi named_tensor",
    "data": "dataset datasets images torch_dataset",
    "model": "task layout script_module",
    "step": "batch_totals ddp optimizers update_rule",
    "strategy": "kvstore",
    "checkpoint": "checkpoint",
    "train": "lockstep",
}
PLANNER = ("lockstep/train/run.cc", "tools/plan/auto.h")
VERSIONS = "lockstep/base/torch_version.h"  # what differs between releases of torch
NO_TORCH = tuple(folder for folder, torch in ROWS if torch == "no")
LICENCE = "SPDX-License-Identifier: Apache-2.0"
TREES = "lockstep|agent|include|cli|tests|bench|examples|cmake|docs|tools|python"

INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.MULTILINE)
FULL_PATH = re.compile(rf"(?<![\w/.$}}>-])((?:{TREES})/[\w./-]+\.(?:h|cc|py|md|sh|cmake|pml|txt|json))(?![\w/])")
SHORT_PATH = re.compile(rf"(?<![\w/.$}}>-])((?:{'|'.join(ROOMS)})/[\w/]+\.(?:h|cc|pml))(?![\w/])")

problems = []


def complain(path, message):
    problems.append(f"{path}: {message}")


def tracked(*patterns):
    """The files of the checkout, without what git ignores, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", *patterns], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return [Path(name) for name in sorted(set(listed.splitlines())) if (ROOT / name).is_file()]


SOURCES = tracked("lockstep/*.h", "lockstep/*.cc", "agent/*.h", "agent/*.cc")
ROOM_OF_PUBLIC = {path.stem: "agent" if path.parts[0] == "agent" else path.parts[1] for path in SOURCES}
ROOM_OF_PUBLIC |= {header: room for room, headers in PUBLIC.items() for header in headers.split()}


def room_of(path):
    """The room of a source, or of the text of an #include of lockstep; None: it belongs to none."""
    top, room, *rest = Path(path).parts
    if top == "agent":
        return "agent"
    if top == "tools":
        return "train" if rest == ["command.cc"] else "strategy"
    if top == "include" or not rest:
        return ROOM_OF_PUBLIC.get(Path(path).stem) if len(rest) < 2 else None
    return room if room in ROOMS else None


def check_includes(path, room, text):
    name = str(path)
    for included in INCLUDE.findall(text):
        if included.startswith("tools/") and path.parts[0] != "tools" and (name, included) != PLANNER:
            complain(path, f"includes {included}, but only {PLANNER[0]} needs the planner")
        if included.startswith(("lockstep/", "agent/")) and not name.endswith("_test.cc"):
            other = room_of(included)
            if not other:
                complain(path, f"includes {included}, which belongs to no room")
            elif ROOMS.index(other) > ROOMS.index(room):
                complain(path, f"includes {included}, but {other}/ comes after {room}/")
            if path.parts[0] == "include" and included.count("/") != 1:
                complain(path, f"includes {included}, which is not installed")
        if path.parts[0] == "include" and re.match(r"(spdlog|fmt|nlohmann|CLI)/", included):
            complain(path, f"includes {included}, which users need not have")
        if name.startswith(NO_TORCH) and name != VERSIONS and re.match(r"(torch|ATen|c10)/", included):
            complain(path, f"includes {included}, but this part has no torch")
        if re.match(r"(spdlog|fmt)/", included) and not (room == "base" and path.suffix == ".cc"):
            complain(path, f"includes {included}, which only base/*.cc may")


def check_header(path, text):
    short = "/".join(path.parts[0 if path.parts[0] == "agent" else 1:])
    first = next((line for line in text.splitlines() if LICENCE not in line), "")
    if not first.startswith((f"// {short}: ", f"// {path}: ")) and path.name != "pch.h":
        complain(path, f'does not begin with "// {short}: what it is"')
    if "#pragma once" not in text and not path.stem.endswith("_body"):
        complain(path, "has no #pragma once")


def check_rooms():
    for path in [*SOURCES, *tracked("tools/plan/*.h", "tools/plan/*.cc", "include/*.h")]:
        if len(path.parts) == 2:  # lockstep/pch.h
            continue
        room, text = room_of(path), read(path)
        if not room:
            complain(path, "belongs to no room: it is neither in a folder of HACKING.md nor in PUBLIC of tests/check_rooms.py")
            continue
        check_includes(path, room, text)
        if path.suffix == ".h":
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
        text = read(path)
        comments = comments_of(path, text)
        for named in FULL_PATH.findall(comments):
            if not any((base / named).exists() for base in (ROOT, ROOT / "include", ROOT / path.parent)):
                complain(path, f"names {named}, which does not exist")
        for named in SHORT_PATH.findall(comments):
            if not any((base / named).exists() for base in (ROOT / "lockstep", ROOT)):
                complain(path, f"names {named}, which does not exist in lockstep/ or at the top")


def check_licence():
    for path in tracked("*.h", "*.cc", "*.py", "*.sh", "*.cmake", "*CMakeLists.txt", "*.pml"):
        if LICENCE not in "\n".join(read(path).splitlines()[:3]):
            complain(path, f"has no {LICENCE}")


def check_map():
    for path in re.findall(rf"`((?:{TREES})/[\w./-]+)`", HACKING):
        if not (ROOT / path).exists():
            complain("HACKING.md", f"{path} does not exist")
    words = set(re.findall(r"\w+", "".join(read(path) for path in tracked("*.h", "*.cc", "python/*.py"))))
    for named in re.findall(r"`(\w+(?:::\w+)*(?:::\w+|\(\)))`", HACKING):
        if not words.issuperset(re.findall(r"\w+", named)):
            complain("HACKING.md", f"{named} does not exist")


def check_examples():
    for path in tracked("examples/*.cc", "examples/*.py"):
        length = len(read(path).splitlines())
        if length > 80:
            complain(path, f"has {length} lines, more than 80")


def check_pipes():
    for path in tracked("*.sh"):
        for pipe in re.findall(r"[^|]\| *(?:grep -\w*q|head)\b.*", read(path)):
            complain(path, f"the command before this may fail: {pipe.strip()}")


def check_quoted_programs():
    for page, example in (("README.md", "own_loop"), ("docs/command.md", "own_task")):
        program = read(f"examples/{example}.cc")
        program = "\n".join(line for line in program.splitlines() if LICENCE not in line)
        if program.split("\n", 1)[1].strip() not in read(page):
            complain(page, f"does not quote examples/{example}.cc as it is")
    page = "docs/python-frameworks.md"
    programs = [read(path) for path in tracked("examples/*.py")]
    for block in re.findall(r"```diff\n(.*?)```", read(page), re.DOTALL):
        kept = "\n".join(line[1:] for line in block.splitlines() if not line.startswith("-"))
        if not any(kept in program for program in programs):
            complain(page, f"what it shows is in none of examples/*.py:\n{kept}")


def main():
    for check in (check_rooms, check_comments, check_licence, check_map, check_examples, check_pipes, check_quoted_programs):
        check()
    left = list(dict.fromkeys(problems))
    print("\n".join(left) or "the rooms are in order")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
