#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the build tree $1, builds examples/ against it as a user has it, and runs them on two ranks.
set -euo pipefail
build=$1
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/installed" >/dev/null
cmake -S "$source/examples" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/installed" \
  -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON  # hosts.ranks_find_each_other builds and runs from_mpi
cmake --build "$work/build"

unset LD_LIBRARY_PATH
"$work/installed/bin/lockstep" run --nproc-per-node 2 -- "$work/build/own_loop" | tee "$work/loop.log"
grep --quiet 'epoch 1 loss 0\.' "$work/loop.log"
"$work/installed/bin/lockstep" run --nproc-per-node 2 --max-restarts 1 -- "$work/build/surviving_loop" | tee "$work/surviving.log"
grep --quiet 'epoch 1 loss 0\.' "$work/surviving.log"
"$work/build/own_task" --ranks 2 --epochs 1 | tee "$work/task.log"
grep --quiet 'done: 235 steps' "$work/task.log"
"$work/build/towers" 1 | tee "$work/towers.log"
grep --quiet 'epoch 0: .* accuracy 0\.' "$work/towers.log"
for system in process_groups parameter_server shared_variables averaged_nets; do  # each fails if it computes something else
  "$work/build/$system"
done
"$work/installed/bin/lockstep" train --max-steps 2 --quiet --metrics "$work/run.jsonl"
"$work/installed/bin/lockstep" report "$work/run.jsonl" --output "$work/run.html"
echo "an installed lockstep works"
