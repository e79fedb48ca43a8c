#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Random bytes and spoilt messages (fuzz.py) to every socket at which a job listens, while its ranks meet and while they train:
# on two hosts from a third one, with the job's secret; and to the Unix sockets of a job on one machine. The job has the losses
# of one rank, and rank 0 no more memory than before. Everything is in namespaces of this script's own.
#
#   fuzz_test.sh LOCKSTEP       LOCKSTEP_SECURITY_FUZZ: messages to each job while its ranks meet, 400 by default
set -euo pipefail
here=$(dirname "$0")
source "$here/../hosts/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1
make_hosts n1 n2 stranger
export HOME=$work
messages=${LOCKSTEP_SECURITY_FUZZ:-400}
train=("$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 3000 --max-steps 60 --lr 0.02)

start() {  # HOST NODE_RANK; its process becomes the launcher
  exec /run/on-host "$1" "$lockstep" run --nnodes 2 --node-rank "$2" --master-addr 10.77.0.11 --master-port 29500 -- \
    "${train[@]}" --metrics "$work/two_hosts.jsonl"
}
fuzz() { on_host stranger "$here/fuzz.py" "$messages" "$@"; }
while_they_train() { fuzz "$@" || [ $? -eq 3 ]; }  # they may listen no more
most=64  # MiB
if grep -q __asan_init "$lockstep"; then most=512; fi  # it keeps what was freed

"${train[@]}" --metrics "$work/one.jsonl"

start n1 0 2>"$work/two_hosts.err" &
job=$!
fuzz 1 $job $most || fail "while rank 0 waits: $?"
(start n2 1) 2>>"$work/two_hosts.err" &
while_they_train 2 $job
wait $job || fail "$(cat "$work/two_hosts.err")"
has_losses_of_one_rank two_hosts 60 1e-4

"$lockstep" run --nproc-per-node 2 -- sh -c '[ $RANK = 0 ] || until [ -e "$0" ]; do sleep 0.02; done; exec "$@"' "$work/go" \
  "${train[@]}" --metrics "$work/one_host.jsonl" 2>"$work/one_host.err" &
job=$!
fuzz 3 $job $most || fail "while rank 0 waits at a Unix socket: $?"
touch "$work/go"
while_they_train 4 $job
wait $job || fail "$(cat "$work/one_host.err")"
has_losses_of_one_rank one_host 60 1e-4
echo "a job under $messages spoilt messages has the losses of one rank"
