#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real Slurm of two nodes, as root. `srun lockstep train` needs no variable set by hand, also where another program has
# the port that comes first. A job that is preempted loses no step: it is requeued, resumed and finished with the losses of
# one that was left alone. Everything is in namespaces of this script's own.
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
kill -KILL $taker $other
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

# A job of `low` that a job of `high` preempts: SIGTERM, 2 s of grace, then it is killed and requeued.
train=("$lockstep" train --threads 1 --batch-size 1024 --quiet --timeout 60 --max-steps 30)
printf '#!/bin/bash\nsrun "$@"\n' >low.sh
job=$(sbatch --parsable -p low -N2 -n2 --requeue --open-mode=append --output low.log low.sh \
  "${train[@]}" --checkpoint-dir checkpoints --on-stop wait --metrics low.jsonl)
wait_for() {  # WHAT COMMAND...
  local give_up=$((SECONDS + 60))
  until "${@:2}"; do
    [ $SECONDS -lt $give_up ] || { cat low.log; scontrol show job "$job"; echo "not within 60 s: $1"; exit 1; }
    sleep 0.1
  done
}
has() { grep -qs "$1" low.jsonl; }
state_is() { scontrol show job "$job" | grep -q "JobState=$1 "; }
requeued() { scontrol show job "$job" | grep -q " Restarts=1 "; }
start_now() { scontrol update "JobId=$job" StartTime=now 2>/dev/null && state_is RUNNING; }
wait_for "the third step" has '"step":3,'
srun -p high -N2 -n4 true
wait_for "the checkpoint" has '"event":"stop"'
wait_for "the requeue" requeued
wait_for "the second start" start_now  # Slurm would wait two minutes
wait_for "the end" state_is COMPLETED
srun -N2 -n2 "${train[@]}" --metrics alone.jsonl

python3 - <<'PYTHON'
import json
def events(name):
    return [json.loads(line) for line in open(f"{name}.jsonl")]
def losses(name):
    return [(event["step"], event["loss"]) for event in events(name) if event["event"] == "step"]
kinds = [event["event"] for event in events("low")]
assert kinds.count("stop") == kinds.count("resume") == 1 and kinds[-1] == "run", kinds
assert losses("low") == losses("alone"), (losses("low"), losses("alone"))
stop = next(event["step"] for event in events("low") if event["event"] == "stop")
print(f"preempted after step {stop} of 30, requeued, resumed and finished with the same bits")
PYTHON
