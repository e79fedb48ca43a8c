#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes one wheel of several, each built for one release of torch: what differs stands in folders of the releases. Its name and
what it asks for say which releases of torch and of Python it has modules for.

    one_wheel.py FOLDER WHEEL...      writes it to FOLDER

pip then keeps the user's torch, if its release is among them; two wheels for two releases would need two names.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def wheel(*arguments):
    subprocess.run([sys.executable, "-m", "wheel", *arguments], check=True, stdout=subprocess.DEVNULL)


def requirement(minors):
    """The releases 2.X of these X."""
    first, last = min(minors), max(minors)
    missing = [f"!=2.{minor}.*" for minor in range(first, last) if minor not in minors]
    return ",".join([f"torch>=2.{first}", f"<2.{last + 1}", *missing])


def main():
    target, *wheels = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        for each in wheels:
            wheel("unpack", "--dest", name, each)
        (tree,) = Path(name).iterdir()
        minors = [int(folder.name.removeprefix("torch2.")) for folder in tree.glob("lockstep/torch*")]
        (metadata,) = tree.glob("*.dist-info/METADATA")
        metadata.write_text(re.sub(r"(?m)^Requires-Dist: torch.*$", f"Requires-Dist: {requirement(minors)}", metadata.read_text()))
        pythons = sorted({re.search(r"cpython-(\d+)", module.name)[1] for module in tree.glob("lockstep/torch*/_C.*.so")})
        (tags,) = tree.glob("*.dist-info/WHEEL")
        platform = re.search(r"(?m)^Tag: \S+-(\w+)$", tags.read_text())[1]
        text = re.sub(r"(?m)^Tag: .*\n", "", tags.read_text()).rstrip("\n")
        tags.write_text("\n".join([text, *(f"Tag: cp{python}-none-{platform}" for python in pythons), ""]))
        wheel("pack", "--dest-dir", target, tree)


if __name__ == "__main__":
    main()
