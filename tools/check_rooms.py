#!/usr/bin/env python3
"""Keeps the layout true: the include rules of the rooms, the map in HACKING.md, and the programs quoted in README.md.

Rules: a room includes itself and rooms above it in ROOMS; base/, launch/ and collective/shm/ include no torch; spdlog and fmt
stay in .cc files of base/; every header says what it is in its first line, and has #pragma once
(x_body.h is included several times on purpose).
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["base", "launch", "collective", "data", "model", "gradient", "optimizer", "strategy", "checkpoint", "train"]
NO_TORCH = ("lockstep/base/", "lockstep/launch/", "lockstep/collective/shm/")
INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.MULTILINE)

problems = []


def complain(path, message):
    problems.append(f"{path.relative_to(ROOT)}: {message}")


def check_includes(path, room):
    name = str(path.relative_to(ROOT))
    is_test = name.endswith("_test.cc")
    for included in INCLUDE.findall(path.read_text()):
        if included.startswith("lockstep/") and included != "include/lockstep/lockstep.h" and not is_test:
            other = included.split("/")[1]
            if ROOMS.index(other) > ROOMS.index(room):
                complain(path, f"includes {included}, but {other}/ comes after {room}/")
        if name.startswith(NO_TORCH) and re.match(r"(torch|ATen|c10)/", included):
            complain(path, f"includes {included}, but this part has no torch")
        if re.match(r"(spdlog|fmt)/", included) and not (room == "base" and path.suffix == ".cc"):
            complain(path, f"includes {included}, which only base/*.cc may")


def check_header(path):
    text = path.read_text()
    short = "/".join(path.relative_to(ROOT / "lockstep").parts)
    if not text.startswith(f"// {short}: ") and not text.startswith(f"// lockstep/{short}: ") and path.name != "pch.h":
        complain(path, f'does not begin with "// {short}: what it is"')
    if "#pragma once" not in text and not path.stem.endswith("_body"):
        complain(path, "has no #pragma once")


def check_map():
    hacking = (ROOT / "HACKING.md").read_text()
    for path in re.findall(r"`((?:lockstep|cli|tests|bench|examples|cmake|docs|tools)/[\w./-]+)`", hacking):
        if not (ROOT / path).exists():
            problems.append(f"HACKING.md: {path} does not exist")
    for room in ROOMS:
        if f"`lockstep/{room}/`" not in hacking:
            problems.append(f"HACKING.md: the map does not mention lockstep/{room}/")


def check_quoted_programs():
    readme = (ROOT / "README.md").read_text()
    for example in ("own_loop", "own_task"):
        program = (ROOT / f"examples/{example}.cc").read_text().split("\n", 1)[1].strip()
        if program not in readme:
            problems.append(f"README.md: does not quote examples/{example}.cc as it is")


def main():
    for room in ROOMS:
        for path in sorted((ROOT / "lockstep" / room).rglob("*")):
            if path.suffix in (".h", ".cc"):
                check_includes(path, room)
            if path.suffix == ".h":
                check_header(path)
    check_map()
    check_quoted_programs()
    print("\n".join(problems) or "the rooms are in order")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
