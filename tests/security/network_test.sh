#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts train, and a third in their network attacks the meeting of their ranks (attack.py) while rank 0 waits for the
# other host. Under --insecure-network the attacks succeed; with the job's secret they don't, and the job has the losses of
# one rank. Then each way to a secret, and wrong ones. Everything is in namespaces of this script's own.
#
#   network_test.sh LOCKSTEP
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --uts --pid --fork --kill-child --mount-proc "$0" "$@"
fi
lockstep=$1
here=$(dirname "$0")
source "$here/../hosts/hosts.sh"
make_hosts n1 n2 stranger
export HOME=$work  # which all hosts see
port=29500

start() {  # HOST NODE_RANK METRICS OPTION...; in a subshell, whose process becomes the launcher
  exec /run/on-host "$1" "$lockstep" run --nnodes 2 --node-rank "$2" --master-addr 10.77.0.11 --master-port $port "${@:4}" -- \
    "$lockstep" train --threads 1 --batch-size 37 --quiet --timeout "${timeout:-30}" --max-steps 3 \
    --metrics "$work/$3.jsonl"
}
attack() { on_host stranger "$here/attack.py" 10.77.0.11 $port "$1"; }
fail() { echo "$*" >&2; exit 1; }
has_losses_of_one_rank() {
  python3 - "$work/one.jsonl" "$work/$1.jsonl" <<'PYTHON'
import json, sys
one, other = ([e["loss"] for e in map(json.loads, open(path)) if e["event"] == "step"] for path in sys.argv[1:])
assert len(one) == len(other) == 3 and all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(one, other)), (one, other)
PYTHON
}

"$lockstep" train --threads 1 --batch-size 37 --quiet --max-steps 3 --metrics "$work/one.jsonl"

# Against a network without protection.
start n1 0 open --insecure-network 2>"$work/open.err" &
for each in join delete fill replace; do attack $each || fail "$each does not bite"; done
kill $!
wait || true
grep -q 'whoever reaches this network can join the job' "$work/open.err" || fail "no word about the insecure network"

# Against a job with a secret.
start n1 0 secret &
job=$!
for each in join delete fill replace idle noise; do
  if attack $each; then fail "$each succeeded"; elif [ $? -ne 3 ]; then fail "$each was not tried"; fi
done
(start n2 1 secret)
wait $job
has_losses_of_one_rank secret
[ -z "$(ls -A "$work/.lockstep")" ] || fail "the secret of a job that has ended is still there"

# Another secret on one of the hosts; hosts without a home in common.
export timeout=6
LOCKSTEP_SECRET=$(printf 'a%.0s' {1..64}) start n1 0 wrong &
if (LOCKSTEP_SECRET=$(printf 'b%.0s' {1..64}) start n2 1 wrong 2>"$work/wrong.err"); then fail "let in with a wrong secret"; fi
kill $! 2>/dev/null || true
wait || true
grep -q 'was not let in at 10.77.0.11' "$work/wrong.err" || fail "$(cat "$work/wrong.err")"
mkdir "$work/other"
start n1 0 home &
if (HOME=$work/other start n2 1 home 2>"$work/home.err"); then fail "found a secret"; fi
kill $! 2>/dev/null || true
wait || true
grep -q 'openssl rand -hex 32' "$work/home.err" || fail "$(cat "$work/home.err")"
echo "every attack succeeds without a secret, and none with it"
