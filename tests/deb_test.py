#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks the Debian package of the folder $1 into an empty folder, gives it torch as its description says, and uses it."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch_without_cuda

ROOT = Path(__file__).resolve().parent.parent


def output(*command, **options):
    print("$", *command, flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300, **options).stdout


def main():
    (package,) = Path(sys.argv[1]).resolve().glob("lockstep_*.deb")
    about = output("dpkg-deb", "--info", package)
    torch = torch_without_cuda.release()
    if f"torch=={torch}." not in about or not all(re.search(f"Depends: .*{name}", about) for name in ("libfmt", "python3")):
        raise SystemExit(f"it does not say what it needs:\n{about}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output("dpkg-deb", "--extract", package, folder)
        lockstep = folder / "usr/bin/lockstep"
        without = subprocess.run([lockstep, "train"], stderr=subprocess.PIPE, text=True, timeout=60)
        print(without.stderr)
        if f"needs torch {torch} and found none" not in without.stderr:
            raise SystemExit("it does not say that torch is missing")
        (folder / "usr/lib/lockstep").mkdir(exist_ok=True)
        (folder / "usr/lib/lockstep/torch").symlink_to(ROOT / ".deps/libtorch/torch")
        print(output(lockstep, "train", "--ranks", "2", "--max-steps", "3"))
        print(output(lockstep, "compare", "--list", "--devices", "2"))  # a tool in Python
        prefix = output(lockstep, "env", "--cmake-prefix").strip()
        output("cmake", "-S", ROOT / "examples", "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
        output("cmake", "--build", folder / "build", "--target", "towers")
        if "accuracy 0." not in output(folder / "build/towers", "1"):
            raise SystemExit("the program of one's own did not train")
    print("the package works")


if __name__ == "__main__":
    main()
