#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts without a home in common train with a secret that munge carries, by real munged. A stranger who asks for the
# secret gets a credential that only this user can read, where munged has the key. Hosts whose munged differ, or where only
# one has it, get an error that says so. As root. Everything is in namespaces of this script's own.
#
#   munge_test.sh LOCKSTEP
set -euo pipefail
here=$(dirname "$0")
source "$here/../hosts/hosts.sh"
as_root_in_own_namespaces "$0" "$@"
lockstep=$1
make_hosts n1 n2 stranger
port=29500
meeting=(--nnodes 2 --nproc-per-node 1)

start_munged() {  # FOLDER KEY
  mkdir -p -m 0755 "$1"
  /usr/sbin/munged --force --socket="$1/munge.socket.2" --key-file="$2" --pid-file="$1/pid" --log-file="$1/log" \
    --seed-file="$1/seed" 2>/dev/null
}
(umask 077; for key in one other; do head -c 32 /dev/urandom >"$work/$key.key"; done)
start_munged "$work/one" "$work/one.key"
start_munged "$work/other" "$work/other.key"
mkdir /run/munge "$work/none"

# HOST FOLDER-OF-MUNGED COMMAND...: libmunge knows its munged by a path in /run. Each host has a home of its own.
with_munged() {
  env HOME="$work/home-$1" /run/on-host "$1" sh -c 'mount --bind "$0" /run/munge && exec "$@"' "$work/$2" "${@:3}"
}
launch() {  # HOST FOLDER-OF-MUNGED NODE_RANK NAME
  with_munged "$1" "$2" "$lockstep" run "${meeting[@]}" --node-rank "$3" --master-addr 10.77.0.11 --master-port $port -- \
    "$lockstep" train --threads 1 --batch-size 37 --quiet --timeout "${timeout:-30}" --max-steps 3 --metrics "$work/$4.jsonl"
}
ask() {  # what a stranger gets who asks for the secret
  on_host stranger python3 - $port <<'PYTHON'
import socket, sys, time
for _ in range(1500):
    try:
        connection = socket.create_connection(("10.77.0.11", int(sys.argv[1])), 20)
        break
    except OSError:
        time.sleep(0.02)
connection.sendall(b"munge?\n")
print(b"".join(iter(lambda: connection.recv(4096), b"")).decode())
PYTHON
}

# With munge. A stranger asks first, and reads nothing.
launch n1 one 0 munged 2>"$work/munged.err" &
job=$!
ask >"$work/credential"
grep -q '^MUNGE:' "$work/credential" || fail "no credential: $(cat "$work/credential")"
if with_munged stranger other unmunge <"$work/credential" >/dev/null 2>&1; then fail "read with another key"; fi
if with_munged stranger one setpriv --reuid 65534 --clear-groups unmunge <"$work/credential" >"$work/read" 2>&1; then
  fail "another user read it"
fi
grep -q Unauthorized "$work/read" || fail "$(cat "$work/read")"
with_munged n1 one unmunge <"$work/credential" >"$work/read" && grep -Eqx '[0-9a-f]{64}' "$work/read" ||
  fail "this user can't read it"
launch n2 one 1 munged
wait $job || fail "$(cat "$work/munged.err")"
[ "$(grep -c '"event":"step"' "$work/munged.jsonl")" -eq 3 ] || fail "no three steps"
[ ! -e "$work/home-n1/.lockstep" ] || fail "a secret in the home in spite of munge"
if grep -q 'openssl rand' "$work/munged.err"; then fail "a job that munge has a secret for is asked for one"; fi

# Launchers that number themselves have it, too.
for host in n1 n2; do
  with_munged $host one "$lockstep" run "${meeting[@]}" --rdzv-backend c10d --rdzv-endpoint 10.77.0.11:$port -- true &
done
wait -n
wait -n

# Another key on the other host; and no munged there.
launch n1 one 0 key 2>/dev/null &
job=$!
if launch n2 other 1 key 2>"$work/key.err"; then fail "let in with another key of munge"; fi
grep -q 'munged has another key' "$work/key.err" || fail "$(cat "$work/key.err")"
timeout=3
if launch n2 none 1 key 2>"$work/none.err"; then fail "let in without munge"; fi
grep -q 'machine has no munged' "$work/none.err" || fail "$(cat "$work/none.err")"
kill $job
wait || true
echo "munge carries the secret to this user alone"
