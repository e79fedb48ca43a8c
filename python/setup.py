"""Builds lockstep._C against the torch that is installed here, from the sources of the C++ library beside this folder.

Needs a C++20 compiler, the headers of fmt and a full torch:  pip install --no-build-isolation ./python
"""

import glob
import os

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(here)
flags = ["-std=c++20", "-O3", "-march=x86-64-v3", "-fvisibility=hidden"]


def relative(paths):
    return sorted(os.path.relpath(path, here) for path in paths)


# Without torch's include folder: it carries a fmt of its own.
core = glob.glob(os.path.join(root, "lockstep/collective/shm/**/*.cc"), recursive=True)
core = [path for path in core if not path.endswith("_test.cc")]
core += [os.path.join(root, "lockstep/base", name) for name in ("cores.cc", "error.cc", "file.cc", "text.cc")]

with_torch = glob.glob(os.path.join(root, "lockstep/collective/c10d/backend*.cc"))
with_torch = [path for path in with_torch if not path.endswith("_test.cc")]
with_torch += [os.path.join(here, "src/lockstep/module.cc")]

setup(
    libraries=[
        (
            "lockstep_core",
            {
                "sources": relative(core),
                "include_dirs": [root, os.path.join(root, "include")],
                "macros": [("FMT_HEADER_ONLY", "1")],
                "cflags": flags,
            },
        )
    ],
    ext_modules=[
        # libstdc++ goes first: libtorch.so exports a std::filesystem of its own, which crashes.
        CppExtension(
            "lockstep._C",
            sources=relative(with_torch),
            include_dirs=[root, os.path.join(root, "include")],
            libraries=["stdc++"],
            extra_compile_args=flags,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
