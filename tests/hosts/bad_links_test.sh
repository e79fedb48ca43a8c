#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Three hosts train over links that delay every frame, so that frames overtake each other, repeat some and lose some. Nobody is
# taken for lost. Then one is killed, and the others go on: every step is made, with the losses of one rank.
#
#   bad_links_test.sh LOCKSTEP PROGRAM      PROGRAM: misbehaving_task, a small model
set -euo pipefail
source "$(dirname "$0")/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1 program=$2
make_hosts n1 n2 n3
export LOCKSTEP_SECRET=$(printf 'ab%.0s' {1..32})
steps=${STEPS:-40} seed=${SEED:-$RANDOM}
train=("$program" --threads 1 --batch-size 36 --quiet --timeout 60 --max-steps "$steps" --lr 0.05)
echo "SEED=$seed"

start() {
  on_host "$1" "$lockstep" run --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-conf last_call_timeout=20,join_timeout=60 -- \
    env AT="$1" "${train[@]}" --metrics "$work/many.jsonl" >"$work/$1.log" 2>&1 &
}
milliseconds() { echo $(($(date +%s%N) / 1000000)); }
steps_done() { cat "$work/many.jsonl" 2>/dev/null | grep -c '"event":"step"' || true; }
until_steps() {
  local deadline=$(($(milliseconds) + 90000))
  until [ "$(steps_done)" -ge "$1" ]; do
    [ "$(milliseconds)" -lt "$deadline" ] || fail "only $(steps_done) steps: $(tail -n 20 "$work"/n?.log)"
    sleep 0.02
  done
}

make_links_bad --delay 20:50 --duplicate 0.15 --drop 0.015 --seed "$seed"
begin=$(milliseconds)
declare -A pid
for host in n1 n2 n3; do
  start "$host"
  pid[$host]=$!
done
until_steps 1
echo "the first step is made after $(($(milliseconds) - begin)) ms"
begin=$(milliseconds)
until_steps $((steps / 2))
echo "a step takes $((($(milliseconds) - begin) / (steps / 2 - 1))) ms"
! grep -h "generation [1-9]\|is lost\|PeerLost" "$work"/n?.log || fail "a machine was taken for lost"

before=$(milliseconds)
kill -9 "$(pgrep -o -f "^[^ ]*lockstep run .* AT=n3 ")"
for host in n1 n2; do
  until grep -q "generation 1: 2 machines" "$work/$host.log"; do
    [ $(($(milliseconds) - before)) -lt 30000 ] || fail "n3 is not missed: $(tail -n 20 "$work"/n?.log)"
    sleep 0.02
  done
done
echo "n3 was killed: the others have agreed after $(($(milliseconds) - before)) ms"
done_before=$(steps_done)
until_steps $((done_before + 2))
echo "n3 was killed: they train after $(($(milliseconds) - before)) ms"
for host in n1 n2; do wait "${pid[$host]}" || fail "$host ended with $?: $(cat "$work/$host.log")"; done
! grep -h "generation [2-9]" "$work"/n[12].log || fail "another machine was taken for lost"

kill -TERM "$switch"
wait "$switch"
cat "$work/links"
for fate in dropped duplicated overtaken; do
  grep -Eq "[1-9][0-9]+ $fate" "$work/links" || fail "the links were not bad: no 10 frames were $fate"
done
"${train[@]}" --metrics "$work/one.jsonl" 2>"$work/one.log" || fail "$(cat "$work/one.log")"
has_every_loss_of_one_rank many "$steps"
