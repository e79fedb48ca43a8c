# SPDX-License-Identifier: Apache-2.0
"""Makes folders like site-packages from .deps/, with a torch that can be imported without its 3.4 GB of CUDA libraries.

Its libraries are loaded with all they need, but on a machine without a GPU nothing of CUDA is ever called. So each
CUDA library that is missing is made here, with the functions that torch names and a trap in each.
"""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

UNVERSIONED = re.compile(r"(nccl|nvshmem|curand|cusparseLt|cuFile)")
DEPS = Path(__file__).resolve().parent.parent / ".deps"


def release():
    """Of the libtorch in .deps/, such as 2.15."""
    return re.search(r"\d+\.\d+", (DEPS / "libtorch/torch/version.py").read_text())[0]


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def add_packages(site_packages, *wheels):
    """Puts these folders of .deps/ into site_packages, torch (libtorch) among them, unless they are there."""
    for name in wheels:
        stamp = site_packages / f".{name}"
        wanted = (DEPS / name / ".complete").read_text()
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.copytree(DEPS / name, site_packages, copy_function=link_or_copy, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns(".complete"))
            stamp.write_text(wanted)
    add_missing_libraries(site_packages)


def lines(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def add_missing_libraries(site_packages):
    """Writes the libraries beside those that are there; torch's own run path finds them."""
    torch = sorted((site_packages / "torch/lib").glob("lib*.so"))
    folder = site_packages / "nvidia/cu13/lib"
    needed = {name for line in lines("readelf", "-d", *torch) for name in re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc|nvshmem).*)\]", line)}
    missing = {name for name in needed if not (folder / name).exists()}
    functions = defaultdict(set)  # by library and version
    for line in lines("nm", "-D", "--undefined-only", *torch):
        name, _, version = line.split()[-1].partition("@") if line else ("", "", "")
        if version == "NVSHMEM":
            functions["libnvshmem_host.so.3", version].add(name)
        elif version in missing:
            functions[version, version].add(name)
        elif not version and UNVERSIONED.match(name):
            functions["libnccl.so.2", "NONE"].add(name)
    for library in missing:
        write_library(folder / library, {version: names for (owner, version), names in functions.items() if owner == library})


def write_library(path, functions):
    source = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for names in functions.values() for name in sorted(names))
    versions = "".join(f"{version} {{ {' '.join(name + ';' for name in names)} }};\n"
                       for version, names in functions.items() if version != "NONE")
    script = Path(f"{path}.map")
    script.write_text(versions)
    options = [f"-Wl,--version-script={script}"] if versions else []
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", path, f"-Wl,-soname,{path.name}", *options],
                   input=source, text=True, check=True)
    script.unlink()
