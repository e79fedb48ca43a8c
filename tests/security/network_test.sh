#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts train, and a third in their network attacks the meeting of their ranks (attack.py) while rank 0 waits for the
# other host. Under --insecure-network the attacks succeed; with the job's secret they don't, and the job has the losses of
# one rank. Then each way to a secret, and wrong ones. Everything is in namespaces of this script's own.
#
#   network_test.sh LOCKSTEP
set -euo pipefail
here=$(dirname "$0")
source "$here/../hosts/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1
make_hosts n1 n2 stranger
ip -n n1 link add second type veth peer name nowhere  # n1 has a second network
ip -n n1 address add 10.88.0.1/24 dev second
ip -n n1 link set second up
export HOME=$work  # which all hosts see
port=29500

train=("$lockstep" train --threads 1 --batch-size 37 --quiet --max-steps 3)
start() {  # HOST NODE_RANK METRICS OPTION...; in a subshell, whose process becomes the launcher
  exec /run/on-host "$1" "$lockstep" run --nnodes 2 --node-rank "$2" --master-addr 10.77.0.11 --master-port $port "${@:4}" -- \
    "${train[@]}" --timeout "${timeout:-30}" --metrics "$work/$3.jsonl"
}
attack() { on_host stranger "$here/attack.py" 10.77.0.11 $port "$@"; }

"${train[@]}" --metrics "$work/one.jsonl"

# Against a network without protection.
start n1 0 open --insecure-network 2>"$work/open.err" &
for each in join read delete replay fill replace; do attack $each || fail "$each does not bite"; done
kill $!
wait || true
grep -q 'whoever reaches this network can join the job' "$work/open.err" || fail "no word about the insecure network"

# Against a job with a secret.
LOCKSTEP_LOG=debug start n1 0 secret >"$work/said_0" 2>&1 &
job=$!
for each in join read delete replay fill replace; do
  if attack $each; then fail "$each succeeded"; elif [ $? -ne 3 ]; then fail "$each was not tried"; fi
done
# Another job at its port is told who has it; this one does not notice. It listens at its own address only.
if (start n1 0 second 2>"$work/second.err"); then fail "two jobs at one port"; fi
grep -q "can't listen on 10.77.0.11:$port" "$work/second.err" || fail "$(cat "$work/second.err")"
listeners=$(on_host n1 ss -Hltn | awk '{print $4}')
[ "$listeners" = "10.77.0.11:$port" ] || fail "listens at $listeners"
# Floods are at their height before the other host joins, and go on while both train.
floods=()
for each in idle noise preamble; do
  attack $each "$work/over" &
  floods+=($!)
done
for each in idle noise preamble; do
  until [ -e "$work/over.$each" ]; do
    kill -0 "${floods[@]}" $job || fail "a flood or the job has ended: $each is not at its height"
    sleep 0.02
  done
done
secret=$(cat "$work"/.lockstep/job-*)
[[ $secret =~ ^[0-9a-f]{64}$ ]] || fail "no secret in the home: $secret"
(LOCKSTEP_LOG=debug start n2 1 secret) >"$work/said_1" 2>&1 &
other=$!
while kill -0 $other 2>/dev/null; do
  cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' >>"$work/command_lines" || true
  sleep 0.02
done
wait $other || fail "$(cat "$work/said_1")"
wait $job || fail "$(cat "$work/said_0")"
touch "$work/over"
for flood in "${floods[@]}"; do
  code=0
  wait "$flood" || code=$?
  [ $code -eq 3 ] || fail "a flood ended with $code"
done
has_losses_of_one_rank secret 3 1e-4
# The secret is in no message, log or command line.
grep -q -- "--master-addr" "$work/command_lines" || fail "no command line of the job was seen"
[ -s "$work/said_0" ] || fail "rank 0 has said nothing"
! grep -lF "$secret" "$work"/* 2>/dev/null || fail "the secret is there"
[ -z "$(ls -A "$work/.lockstep")" ] || fail "the secret of a job that has ended is still there"

# Another secret on one of the hosts; hosts without a home in common.
export timeout=6
LOCKSTEP_SECRET=$(printf 'a%.0s' {1..64}) start n1 0 wrong &
if (LOCKSTEP_SECRET=$(printf 'b%.0s' {1..64}) start n2 1 wrong 2>"$work/wrong.err"); then fail "let in with a wrong secret"; fi
kill $! 2>/dev/null || true
wait || true
grep -q 'was refused at 10.77.0.11' "$work/wrong.err" || fail "$(cat "$work/wrong.err")"
mkdir "$work/other"
start n1 0 home &
if (HOME=$work/other start n2 1 home 2>"$work/home.err"); then fail "found a secret"; fi
kill $! 2>/dev/null || true
wait || true
grep -q 'openssl rand -hex 32' "$work/home.err" || fail "$(cat "$work/home.err")"

! grep -lE 'a{64}|b{64}' "$work"/*.err || fail "a secret is in a message"

# Packets to the first host are dropped on their way: its ports of a switch and the second's may not talk to each other.
ip -n n2 neigh replace 10.77.0.11 lladdr "$(ip netns exec n1 cat /sys/class/net/eth0/address)" dev eth0
for host in n1 n2; do bridge link set dev to-$host isolated on; done
export timeout=3
start n1 0 dropped 2>"$work/dropped_0.err" &
if (start n2 1 dropped 2>"$work/dropped_1.err"); then fail "packets arrived"; fi
wait || true
grep -q 'rank 1 got no answer at 10.77.0.11:29500' "$work/dropped_1.err" || fail "$(cat "$work/dropped_1.err")"
grep -q 'firewall' "$work/dropped_1.err" || fail "$(cat "$work/dropped_1.err")"
grep -q 'not all ranks have come: no machine from rank 1' "$work/dropped_0.err" || fail "$(cat "$work/dropped_0.err")"
for host in n1 n2; do bridge link set dev to-$host isolated off; done

# Hosts that have IPv6 only.
export timeout=30
for number in 1 2; do
  ip -n n$number address flush dev eth0
  ip -n n$number address add fd77::1$number/64 dev eth0 nodad
done
on_host n1 "$lockstep" run --nnodes 2 --node-rank 0 --master-addr fd77::11 --master-port $port -- "${train[@]}" \
  --metrics "$work/ipv6.jsonl" &
job=$!
on_host n2 "$lockstep" run --nnodes 2 --node-rank 1 --master-addr fd77::11 --master-port $port -- "${train[@]}"
wait $job
has_losses_of_one_rank ipv6 3 1e-4
echo "every attack succeeds without a secret, and none with it"
