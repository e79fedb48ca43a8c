#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real Slurm of two nodes, as root. `srun lockstep train` needs no variable set by hand, also where another program has
# the port that comes first. A job that is preempted, or asked to stop before its time limit, loses no step: it is requeued,
# resumed and finished with the losses of one that was left alone. One `lockstep run` per node survives the loss of a node's.
# Everything is in namespaces of this script's own.
#
#   slurm_test.sh LOCKSTEP
set -euo pipefail
lockstep=$(realpath "$1")
repository=$(realpath "$(dirname "$0")/../..")
source "$(dirname "$0")/hosts.sh"
as_root_in_own_namespaces "$0" "$@"
source "$(dirname "$0")/slurm.sh"
make_hosts n1 n2 n3
start_slurm "$work/slurm" n1 n2 n3
cd "$work"

train=("$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 60 --max-steps 3)
"${train[@]}" --metrics one.jsonl
srun -N2 -n4 "${train[@]}" --metrics srun.jsonl >srun.log 2>&1 || { cat srun.log; exit 1; }
if grep -F '[c10d]' srun.log; then exit 1; fi  # hosts without names in DNS are no reason to warn

# In an allocation the next step's port is known: a silent program, and then another job's store, have the first two.
cat >taken.sh <<'SCRIPT'
#!/bin/bash
port=$(srun -N2 -n2 env SLURM_STEP_ID=1 "$LOCKSTEP" env | sed -n '0,/^master_port/s/^master_port *\([0-9]*\) .*/\1/p')
python3 -c "
import socket, time
taken = socket.socket(); taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(('10.77.0.11', $port)); taken.listen(); time.sleep(600)" &
taker=$!
RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.77.0.11 MASTER_PORT=$((port + 1)) "$LOCKSTEP" train --quiet --timeout 600 &
other=$!
for _ in {1..300}; do
  listening=$(ss -Hltn "sport = $port or sport = $((port + 1))" | wc -l)
  [ "$listening" -lt 2 ] || break
  sleep 0.1
done
[ "$listening" -eq 2 ] || { echo "nobody has taken the ports within 30 s"; exit 1; }
srun --overlap -N2 -n4 "$@"
code=$?
kill -KILL $taker $other
exit $code
SCRIPT
LOCKSTEP=$lockstep sbatch --wait -N2 -n4 --output taken.log taken.sh "${train[@]}" --metrics taken.jsonl ||
  { cat taken.log; exit 1; }

# The script of docs/clusters.md, with fewer cores and steps.
sed -n '/^## Slurm/,/^```$/p' "$repository/docs/clusters.md" | sed -n '/^#!/,/^srun/p' |
  sed -e 's/-per-node 4/-per-node 2/; s/-per-task 4/-per-task 1/g; s/lockstep train .*\(--checkpoint-dir\) [^ ]*/"$@" \1 page/' >page.sh
sbatch --wait --output page.log page.sh "${train[@]}" --metrics page.jsonl || { cat page.sh page.log; exit 1; }

python3 - <<'PYTHON'
import json
def losses(name):
    events = [json.loads(line) for line in open(f"{name}.jsonl")]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["ranks"]
one, _ = losses("one")
for name in "srun", "taken", "page":
    many, ranks = losses(name)
    assert ranks == 4 and len(many) == len(one) == 3, (name, ranks, many, one)
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(many, one)), (name, many, one)
    print("four ranks on two nodes have the losses of one rank:", name, many)
PYTHON

# A job that is asked to stop, and is requeued, goes on where it was; it has the losses of one that was left alone.
train=("$lockstep" train --threads 1 --batch-size 256 --quiet --timeout 60)
cat >job.sh <<'SCRIPT'
#!/bin/bash
steps=1000000
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || steps=$(($(grep -c '"event":"step"' "$SLURM_JOB_NAME.jsonl") + 5))
srun "$@" --max-steps $steps
SCRIPT
wait_for() {  # WHAT COMMAND...
  local give_up=$((SECONDS + 60))
  until "${@:2}"; do
    [ $SECONDS -lt $give_up ] || { cat "$name.log"; scontrol show job "$job"; echo "not within 60 s: $1"; exit 1; }
    sleep 0.1
  done
}
has() { grep -qs "$1" "$name.jsonl"; }
job_shows() { [[ $(scontrol show job "$job") == *"$1"* ]]; }
state_is() { job_shows "JobState=$1 "; }
requeued() { state_is PENDING && job_shows " Restarts=1 "; }  # on all nodes it is over
stop_and_requeue() {  # NAME ON_STOP COMMAND..., which asks it to stop
  name=$1
  job=$(sbatch --parsable --job-name "$name" -p low -N2 -n2 --requeue --open-mode=append --output "$name.log" job.sh \
    "${train[@]}" --checkpoint-dir "$name" --metrics "$name.jsonl" --on-stop "$2")
  wait_for "the third step" has '"step":3,'
  "${@:3}"
  wait_for "the checkpoint" has '"event":"stop"'
  wait_for "the requeue" requeued
  # Slurm would wait two minutes. Its nodes refuse a job that starts in the very second in which they have ended it.
  scontrol update "JobId=$job" StartTime=now+2
}
preempt() { srun -p high -N2 -n4 true; }  # SIGTERM, 2 s of grace, then Slurm kills the job of `low` and requeues it
send_signal() { scancel --signal=USR1 "$job"; }  # as sbatch --signal does it before the time limit
stop_and_requeue preempted wait preempt
preempted=$job
stop_and_requeue signalled requeue send_signal
wait_for "the end" state_is COMPLETED
name=preempted job=$preempted
wait_for "the end" state_is COMPLETED
most=$(grep -hc '"event":"step"' preempted.jsonl signalled.jsonl | sort -n | tail -n 1)
srun -N2 -n2 "${train[@]}" --metrics alone.jsonl --max-steps "$most"

python3 - <<'PYTHON'
import json
def events(name):
    return [json.loads(line) for line in open(f"{name}.jsonl")]
def losses(name):
    return [(event["step"], event["loss"]) for event in events(name) if event["event"] == "step"]
for name in "preempted", "signalled":
    kinds = [event["event"] for event in events(name)]
    assert kinds.count("stop") == kinds.count("resume") == 1 and kinds[-1] == "run", (name, kinds)
    steps = len(losses(name))
    assert losses(name) == losses("alone")[:steps], (name, losses(name), losses("alone"))
    stop = next(event["step"] for event in events(name) if event["event"] == "stop")
    print(f"{name} after step {stop} of {steps}, requeued, resumed and finished with the same bits")
PYTHON

survives_a_lost_machine lost_of_slurm srun -N3 -n3 --no-kill --kill-on-bad-exit=0
