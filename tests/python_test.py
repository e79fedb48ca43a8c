#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tests of the Python package as a build folder has it.

    python_test.py BUILD stage          makes BUILD/python/site: torch and lockstep, as site-packages has them
    python_test.py BUILD MODULE...      runs modules of python/tests there
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from torch_without_cuda import DEPS, add_packages

ROOT = Path(__file__).resolve().parent.parent
def stage(build):
    site = build / "python/site"
    site.mkdir(parents=True, exist_ok=True)
    add_packages(site, *(name for name in ("libtorch", "torch-imports", "frameworks") if (DEPS / name).exists()))
    shutil.rmtree(site / "lockstep", ignore_errors=True)
    shutil.copytree(ROOT / "python/src/lockstep", site / "lockstep", ignore=shutil.ignore_patterns("*.cc", "*.h"))
    subprocess.run(["cmake", "--install", build, "--prefix", site / "lockstep", "--component", "python"],
                   check=True, stdout=subprocess.DEVNULL)


def main():
    build, *tests = sys.argv[1:]
    build = Path(build).resolve()
    if tests == ["stage"]:
        stage(build)
        return
    site = build / "python/site"
    (home,) = site.glob("lockstep/torch*")
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "unittest", "--verbose", *tests]
    sys.exit(subprocess.run(command, cwd=ROOT / "python/tests", env=environment).returncode)


if __name__ == "__main__":
    main()
