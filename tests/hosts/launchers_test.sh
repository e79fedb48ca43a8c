#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Over two hosts, without a variable set by hand: mpirun of Open MPI and of MPICH, and two `lockstep run` that number
# themselves. The ranks find each other, and get the losses of one rank. In place of ssh, mpirun enters the hosts'
# namespaces. A job of one `lockstep run` per host, which mpirun has started, survives the loss of one of them. Everything is in
# namespaces of this script's own.
#
#   launchers_test.sh LOCKSTEP FOLDER     FOLDER: with from_mpi and from_mpi_by_hand
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --uts --pid --fork --kill-child --mount-proc "$0" "$@"
fi
lockstep=$1 programs=$2
source "$(dirname "$0")/hosts.sh"
make_hosts n1 n2 n3

cat >/run/agent <<'AGENT'
#!/bin/sh
# [OPTION...] HOST COMMAND..., as mpirun calls ssh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec /run/on-host "$host" sh -c "$*"
AGENT
chmod +x /run/agent
unset DISPLAY
train=("$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 60 --max-steps 3)
"${train[@]}" --metrics "$work/one.jsonl"
mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent /run/agent --host n1:2,n2:2 -np 4 \
  "${train[@]}" --metrics "$work/open_mpi.jsonl"
mpirun.mpich -launcher rsh -launcher-exec /run/agent -hosts n1,n2 -ppn 2 -np 4 "${train[@]}" --metrics "$work/mpich.jsonl"
for host in n2 n1; do  # n1's name is a loopback address on n1
  on_host $host "$lockstep" run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n1:29400 -- \
    "${train[@]}" --metrics "$work/lockstep_run.jsonl" &
done
wait -n
wait -n

python3 - "$work" <<'PYTHON'
import json, sys
def losses(name):
    events = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["ranks"]
one, _ = losses("one")
for launcher in "open_mpi", "mpich", "lockstep_run":
    many, ranks = losses(launcher)
    assert ranks == 4 and len(many) == len(one) == 3, (launcher, ranks, many, one)
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(many, one)), (launcher, many, one)
    print("four ranks on two hosts have the losses of one rank:", launcher, many)
PYTHON

[ -x "$programs/from_mpi" ] || fail "from_mpi was not built: tools/setup.sh check installs MPI"
for program in from_mpi_by_hand from_mpi; do
  mpirun.openmpi --allow-run-as-root --mca plm_rsh_agent /run/agent --host n1:2,n2:2 -np 4 "$programs/$program" >"$work/$program.txt"
done
grep -q '^loss 0\.' "$work/from_mpi.txt"
diff "$work/from_mpi_by_hand.txt" "$work/from_mpi.txt"

survives_a_lost_machine lost_of_open_mpi mpirun.openmpi --allow-run-as-root --enable-recovery --mca plm_rsh_agent /run/agent \
  --host n1,n2,n3 -np 3
survives_a_lost_machine lost_of_mpich mpirun.mpich -disable-auto-cleanup -launcher rsh -launcher-exec /run/agent \
  -hosts n1,n2,n3 -ppn 1 -np 3
