#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Three hosts train. One is killed, it comes back, and one is switched off: every step is made, on the same samples, so
# the losses are those of one rank that nobody disturbed. Everything is in namespaces of this script's own.
#
#   lost_machine_test.sh LOCKSTEP
set -euo pipefail
source "$(dirname "$0")/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1
make_hosts n1 n2 n3
export LOCKSTEP_SECRET=$(printf 'ab%.0s' {1..32})
steps=${STEPS:-300}
train=("$lockstep" train --threads 1 --batch-size 36 --quiet --timeout 60 --max-steps "$steps" --seed 3 --lr 0.002)

declare -A pid
start() {
  on_host "$1" "$lockstep" run --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 \
    --rdzv-backend etcd --rdzv-id job --rdzv-endpoint 10.77.0.1 --rdzv-conf last_call_timeout=20,join_timeout=60 -- env AT="$1" "${train[@]}" --metrics "$work/many.jsonl" >"$work/$1.log" 2>&1 &
  pid[$1]=$!
}
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
steps_done() { cat "$work/many.jsonl" 2>/dev/null | grep -c '"event":"step"' || true; }
until_steps() {
  local deadline=$(($(milliseconds) + 60000))
  until [ "$(steps_done)" -ge "$1" ]; do
    [ "$(milliseconds)" -lt "$deadline" ] || fail "only $(steps_done) steps: $(tail -n 20 "$work"/n?.log)"
    sleep 0.02
  done
}
# What happened, and how long it takes until there are 5 more steps.
and_goes_on() {
  local before=$(milliseconds)
  until_steps $(($(steps_done) + 5))
  echo "$1: training goes on after $(($(milliseconds) - before)) ms, at step $(steps_done)"
}

start_etcd
for host in n1 n2 n3; do start "$host"; done
until_steps 20
kill -9 "$(pgrep -o -f "^[^ ]*lockstep run .* AT=n1 ")"
and_goes_on "machine 0 was killed"
start n1
until_steps 60
until grep -q "3 machines" "$work/n2.log"; do sleep 0.05; done
and_goes_on "machine 0 came back"
bridge link set dev to-n2 state 0
and_goes_on "a machine was switched off"
wait "${pid[n3]}" || fail "n3 ended with $?: $(cat "$work/n3.log")"
wait "${pid[n1]}" || fail "n1 ended with $?: $(cat "$work/n1.log")"

"${train[@]}" --metrics "$work/one.jsonl" 2>"$work/one.log" || fail "$(cat "$work/one.log")"
python3 - "$work" "$steps" <<'PYTHON'
import json, sys
work, steps = sys.argv[1], int(sys.argv[2])
def losses(name):
    events = [json.loads(line) for line in open(f"{work}/{name}.jsonl")]
    made = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    return len(made), dict(made)
_, one = losses("one")
made, many = losses("many")
assert set(one) == set(many) == set(range(steps)), set(one) - set(many)
worst = max(abs(many[step] - one[step]) / abs(one[step]) for step in many)
again = made - len(many)
print(f"{steps} steps, {again} of them made again; the losses are within {worst:.1e} of those of one rank")
assert worst < 1e-3
PYTHON
