#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A pipeline over three hosts, each with one stage. A rank that is killed is replaced, with what its host has kept. When a host is
# killed its stage is lost: the others go on from the last checkpoint, as two stages; without one they end, and say why. Where each
# host has all stages, as replicas, nothing is lost.
#
#   lost_stage_test.sh LOCKSTEP PROGRAM      PROGRAM: misbehaving_task, a model of three pieces
set -euo pipefail
source "$(dirname "$0")/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1 program=$2
make_hosts n1 n2 n3
export LOCKSTEP_SECRET=$(printf 'ab%.0s' {1..32})
steps=250
start_etcd
one=("$program" --threads 1 --batch-size 36 --quiet --timeout 60 --max-steps "$steps" --lr 0.002)
train=("${one[@]}" --strategy pipeline --devices-per-worker 1 --metrics "$work/many.jsonl")

declare -A pid
runs=0
start() {  # RANKS OPTION...: so many on each host
  local ranks=$1
  shift
  rm -f "$work"/n?.log "$work/many.jsonl"
  local host keys=$((runs == 0 ? 1 : 2))  # the record of the run before, and n1, which gets rank 0 and the first stage
  runs=$((runs + 1))
  for host in n1 n2 n3; do
    on_host "$host" "$lockstep" run --nnodes 2:3 --nproc-per-node "$ranks" --max-restarts 3 \
      --rdzv-backend etcd --rdzv-id job --rdzv-endpoint 10.77.0.1 --rdzv-conf last_call_timeout=20,join_timeout=60 -- \
      env AT="$host" "${train[@]}" "$@" >"$work/$host.log" 2>&1 &
    pid[$host]=$!
    [ "$host" != n1 ] || until_etcd_has "$keys"
  done
}
until_it_has() {  # PATTERN FILE...
  local deadline=$((SECONDS + 60))
  until grep -Eqs -- "$1" "${@:2}"; do
    [ $SECONDS -lt $deadline ] || fail "no '$1' within 60 s: $(tail -n 20 "$work"/n?.log)"
    sleep 0.02
  done
}
kill_n1() { kill -9 "$(pgrep -o -f "^[^ ]*lockstep run .* AT=n1 ")"; }

LOCKSTEP_FAULT="rank=1,step=95,phase=between" start 1 --checkpoint-dir "$work/checkpoints" --checkpoint-every 50
until_it_has '"event":"resume"' "$work/many.jsonl"
until_it_has '"event":"step".*"step":120,' "$work/many.jsonl"
! grep -h "resuming from" "$work"/n?.log || fail "a rank that was replaced has begun with a checkpoint"
echo "a rank was killed: its stage goes on from its host's memory"
kill_n1
until_it_has "resuming from .* at step [0-9]+" "$work"/n[23].log
for host in n2 n3; do wait "${pid[$host]}" || fail "$host ended with $?: $(cat "$work"/n?.log)"; done
grep -h "no machine that is left has\|resuming from" "$work"/n[23].log
"${one[@]}" --metrics "$work/one.jsonl" 2>"$work/one.log" || fail "$(cat "$work/one.log")"
has_every_loss_of_one_rank many "$steps"
echo "a host was killed: the others go on from the last checkpoint, as two stages"

start 2 --stages 2
until_it_has '"event":"step".*"step":60,' "$work/many.jsonl"
kill_n1
for host in n2 n3; do wait "${pid[$host]}" || fail "$host ended with $?: $(cat "$work"/n?.log)"; done
grep -q '"event":"resume","step":[1-9]' "$work/many.jsonl" || fail "they have begun anew"
has_every_loss_of_one_rank many "$steps"
echo "a host was killed: the others have its stages, too"

start 1
until_it_has '"event":"step".*"step":20,' "$work/many.jsonl"
kill_n1
for host in n2 n3; do
  code=0
  wait "${pid[$host]}" || code=$?
  [ "$code" != 0 ] || fail "$host has succeeded without the stage that is lost"
done
grep -h "a part of the model was lost with its machine" "$work"/n[23].log || fail "no word about what is lost: $(cat "$work"/n?.log)"
echo "a host was killed: without a checkpoint the others end"
