#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real Slurm of two nodes, as root. `srun lockstep train` needs no variable set by hand, also where another program has
# the port that comes first. Everything is in namespaces of this script's own.
#
#   slurm_test.sh LOCKSTEP
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  [ "$(id -u)" -eq 0 ] || exec sudo -n --preserve-env "$0" "$@"
  exec unshare --net --mount --uts --pid --fork --mount-proc "$0" "$@"
fi
lockstep=$(realpath "$1")
work=$(mktemp -d)
trap 'stop_slurm; rm -rf "$work"' EXIT
source "$(dirname "$0")/hosts.sh"
source "$(dirname "$0")/slurm.sh"
make_hosts n1 n2
start_slurm "$work/slurm" n1 n2
cd "$work"

train=("$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 60 --max-steps 3)
"${train[@]}" --metrics one.jsonl
srun -N2 -n4 "${train[@]}" --metrics srun.jsonl

# In an allocation the next step's port is known: a program that is no store, and then another job's store, have the first two.
cat >taken.sh <<'SCRIPT'
#!/bin/bash
port=$(srun -N2 -n2 env SLURM_STEP_ID=1 "$LOCKSTEP" env | sed -n 's/^master_port *\([0-9]*\) .*/\1/p' | head -n 1)
python3 -c "
import socket, time
taken = socket.socket(); taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(('10.77.0.11', $port)); taken.listen(); time.sleep(60)" &
taker=$!
RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=$((port + 1)) "$LOCKSTEP" train --quiet --timeout 60 &
other=$!
until ss -Hltn | grep -q ":$port " && ss -Hltn | grep -q ":$((port + 1)) "; do sleep 0.1; done
srun --overlap -N2 -n4 "$@"
code=$?
kill $taker $other
exit $code
SCRIPT
LOCKSTEP=$lockstep sbatch --wait -N2 -n4 --output taken.log taken.sh "${train[@]}" --metrics taken.jsonl ||
  { cat taken.log; exit 1; }

python3 - <<'PYTHON'
import json
def losses(name):
    events = [json.loads(line) for line in open(f"{name}.jsonl")]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["ranks"]
one, _ = losses("one")
for name in "srun", "taken":
    many, ranks = losses(name)
    assert ranks == 4 and len(many) == len(one) == 3, (name, ranks, many, one)
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(many, one)), (name, many, one)
    print("four ranks on two nodes have the losses of one rank:", name, many)
PYTHON
