# SPDX-License-Identifier: Apache-2.0
"""Builds lockstep._C against the torch that is installed here, from the sources of the C++ library beside this folder.

Needs a C++20 compiler, ninja and a full torch:  pip install --no-build-isolation ./python
"""

import glob
import os

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(here)


def sources(pattern):
    found = glob.glob(os.path.join(root, "lockstep", pattern), recursive=True)
    return sorted(path for path in found if not path.endswith("_test.cc"))


base = [os.path.join(root, "lockstep/base", name) for name in ("cores.cc", "error.cc", "file.cc", "text.cc")]
call_sources = ("call.cc", "call_queue.cc", "collective_types.cc", "future.cc", "shared_memory_transport.cc", "tensor_call.cc")
calls = [os.path.join(root, "lockstep/collective", name) for name in call_sources]
backend = sources("collective/shm/**/*.cc") + sources("collective/c10d/backend*.cc")

setup(
    ext_modules=[
        # libstdc++ goes first: libtorch.so exports a std::filesystem of its own, which crashes.
        CppExtension(
            "lockstep._C",
            sources=base + calls + backend + [os.path.join(here, "src/lockstep/module.cc")],
            include_dirs=[root, os.path.join(root, "include")],
            define_macros=[("FMT_HEADER_ONLY", "1")],  # torch's own fmt
            libraries=["stdc++"],
            extra_compile_args=["-std=c++20", "-O3", "-march=x86-64-v3", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
