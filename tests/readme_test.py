#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Types what README.md says under "The command", with the command $1, in a clean folder. follow() does so for a tutorial.

Placeholders get a value, training is cut to a few steps, and each benchmark has its smallest case (a minute for all). A line
that is not handled here fails the test, so a new one in the README can't go untested.
"""
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"

# A small case of each benchmark.
BENCHMARKS = {
    "collectives": "--turns 1 --ranks 2 --operation all_reduce --memory arena --max-bytes 64",
    "step": "--turns 1 --models lenet --steps 1 --json step.json",
    "scaling": "--turns 1 --models lenet --steps 1",
    "data": "--turns 1 --photographs 2 --shards-mib 1",
    "hosts": "--turns 1 --hosts 2 --ranks-per-host 1 --operation all_reduce --sizes 65536",
    "memory": "--models lenet --stages 2",
    "plan": "--rounds 1 --models lenet --only ddp",
}


def png(path, grey):
    """An 8 x 8 grey PNG."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([grey] * 8) for _ in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def commands():
    section = README.read_text().split("\n## The command\n")[1].split("\n## ")[0]
    block = re.search(r"```\n(lockstep .*?)```", section, re.DOTALL).group(1)
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


def typed(words, folder):
    """What to run for a line of the README."""
    values = {"DIR": folder / "checkpoints", "PACKED": folder / "packed", "imagefolder:PHOTOS": f"imagefolder:{folder}/photos"}
    words = [str(values.get(word, word)) for word in words]
    if words[1] == "train":
        return [words + ["--max-steps", "3"]]
    if words[1] == "run":
        return [words[: words.index("--") + 1] + ["true"]]
    if words[1] == "top":
        return [words + ["--once"]]
    if words[1] == "bench":
        names = [name for name in words[2:] if name != "|"]
        if os.geteuid() != 0:
            names.remove("hosts")
            print("SKIPPED: lockstep bench hosts, which needs root")
        return [["lockstep", "bench", name, *BENCHMARKS[name].split()] for name in names]
    if words[1] == "compare":
        return [words + ["--list"]]
    if words[1] in ("verify", "plan", "data", "report", "env"):
        return [words]
    raise SystemExit(f"README.md: nobody has told this test how to type {shlex.join(words)}")


def follow(page, folder, type_in, done):
    """Does in the folder what a tutorial says.

    A block after "write `NAME`:" is the file NAME. One without a language is commands; the block `done` has been typed already.
    One of ```text is how their output ends, and decimal numbers in it are rounded or differ by less than 5 %. Any other block
    fails the test, so nothing on the page goes untested.
    """
    output = ""
    blocks = re.compile(r"(?:write `([^`\n]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL | re.IGNORECASE)
    for name, language, text in blocks.findall(page.read_text()):
        if name:
            (folder / name).write_text(text)
        elif language == "text":
            expect_output(text.split(), output.split()[-len(text.split()):])
        elif language:
            raise SystemExit(f"{page}: nobody has told this test what to do with a block of {language}")
        elif text != done:
            output = type_in(text)


def expect_output(expected, words):
    for want, got in zip(expected, words, strict=True):
        if got != want and not (re.fullmatch(r"\d+\.\d+", want) and abs(float(got) / float(want) - 1) < 0.05):
            raise SystemExit(f"{' '.join(expected)} was promised, not {' '.join(words)}")


def expect_operations(results):
    """LeNet's products for a batch of 256: twice in its first layer, whose input needs no gradient, three times in the others."""
    expected = 256 * 2 * (2 * 20 * 9 * 26**2 + 3 * (50 * 500 * 9**2 + 800 * 128 + 128 * 10))
    lenet = json.loads(results.read_text())["models"]["lenet"]
    found = lenet["lockstep"]["operations"], lenet["lockstep_alone"]["operations"]
    if found != (expected, expected):
        raise SystemExit(f"lockstep bench step counted {found} operations, not {expected}")


def main():
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, kind in enumerate(("cats", "dogs", "cats", "dogs")):
            png(folder / "photos" / kind / f"{index}.png", 60 * index)
        for line in commands():
            for command in typed(line, folder):
                print("$", shlex.join(command), flush=True)
                subprocess.run([program] + command[1:], check=True, cwd=folder, timeout=200)
        expect_operations(folder / "step.json")


if __name__ == "__main__":
    main()
