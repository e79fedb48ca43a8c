#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# srun on a real Slurm starts a program in Python that has the two lines of docs/python.md: two ranks on one node, and on
# two. As root. Everything is in namespaces of this script's own.
#
#   slurm_python_test.sh PYTHON     one that has lockstep
set -euo pipefail
here=$(realpath "$(dirname "$0")")
source "$here/hosts.sh"
as_root_in_own_namespaces "$0" "$@"
source "$here/slurm.sh"
make_hosts n1 n2
start_slurm "$work/slurm" n1 n2

for nodes in 1:one 2:several; do
  output=$(srun "-N${nodes%:*}" -n2 "$1" "$here/../../python/tests/test_step_launchers.py" train none)
  for rank in 0 1; do
    grep "rank $rank of 2 has trained on ${nodes#*:} machine" <<<"$output" || { echo "$output"; exit 1; }
  done
done
