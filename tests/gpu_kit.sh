#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs what tries lockstep on GPUs into one folder of at most 50 MiB, build/gpu-kit: for a machine without registries that
# has a GPU, python3 with torch and CUDA, and perhaps g++ (the Python module is compiled there). Its run.py does the rest.
#
#   tests/gpu_kit.sh        after `cmake --preset cuda`, which `make cuda` calls, for the release of torch of that machine
set -euo pipefail
cd "$(dirname "$0")/.."
readonly build=build/cuda kit=build/gpu-kit
readonly programs=(strategy_test step_fuzz gpu_command_test lockstep_command lockstep_bench lockstep_train lockstep_gpus)

cmake --build "$build" -j "$(nproc)" --target "${programs[@]}"
rm -rf "$kit"
mkdir -p "$kit"/{bin,lib,debian,libexec/lockstep,python,source/python}
cp tests/gpu_kit/* "$kit"
cp "$build"/gpu_filters.json "$kit/filters.json"
cp "$build"/bin/{lockstep,strategy_test,step_fuzz,gpu_command_test} "$kit/bin"
cp "$build"/libexec/lockstep/lockstep-{bench,train,gpus} "$kit/libexec/lockstep"
cp -r bench/peers "$kit/libexec/lockstep"
cp "$build"/lib/liblockstep.so.0 "$kit/lib"

# Debian's libraries, for a machine that lacks them: all but the C and C++ runtimes, torch's and the driver's.
for program in "$kit"/bin/* "$kit"/libexec/lockstep/lockstep-* "$kit"/lib/*; do
  ldd "$program" | awk '$3 ~ /^\/(usr\/)?lib/ {print $3}'
done | sort -u | grep -vE '/(libc|libm|libdl|librt|libutil|libpthread|libstdc\+\+|libgcc_s|libgomp|ld-linux.*)\.so' | xargs -I{} cp -L {} "$kit/debian"
strip --strip-unneeded "$kit"/bin/* "$kit"/libexec/lockstep/lockstep-* "$kit"/lib/* "$kit"/debian/*

# The Python module, as one unit.
cp -r python/src/lockstep "$kit/python"
mkdir "$kit/python/lockstep/torch$(grep -oP "__version__ = '\K\d+\.\d+" "$(realpath .deps/pytorch)/torch/version.py")"
cp -r include "$kit/source"
git ls-files 'lockstep/*.h' 'agent/*.h' | xargs cp --parents -t "$kit/source"
cp python/src/lockstep/*.h python/src/lockstep/*.cc "$kit/source/python"
(cd "$kit/source/python" && ls ./*.cc) | sed 's|^./\(.*\)|#include "python/\1"|' > "$kit/source/module.cc"
du -sh "$kit"
