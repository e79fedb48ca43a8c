#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts exchange tensors, and a third in their network listens in and attacks the ports at which Gloo listens. Under
# --insecure-network it finds a known pattern on the link, and ends a rank by a crowd of connections; else neither. Then a
# firewall that drops the tensors' packets: an error that names the rank behind it. Everything is in namespaces of this script's own.
#
#   tensors_test.sh LOCKSTEP PATTERN_RANKS
set -euo pipefail
here=$(dirname "$0")
source "$here/../hosts/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1 pattern_ranks=$2
make_hosts n1 n2 stranger
export HOME=$work  # which all hosts see
port=29500
declare -a jobs

until_there() {
  local give_up=$((SECONDS + 60))
  until [ -e "$1" ]; do
    [ $SECONDS -lt $give_up ] || fail "no $1 in 60 s: $(cat "$work"/*.err)"
    sleep 0.05
  done
}
# Few descriptors: a crowd of connections would need more.
begin_exchange() {  # MODE OPTION...
  local mode=$1
  shift
  rm -f "$work"/capture.* "$work"/exchange.*
  /run/on-host n1 "$here/capture.py" eth0 "$work/capture.ready" >"$work/capture.$mode" &
  capture=$!
  until_there "$work/capture.ready"
  for node in 0 1; do
    (ulimit -n 256 && exec /run/on-host n$((node + 1)) "$lockstep" run --nnodes 2 --node-rank $node --master-addr 10.77.0.11 \
      --master-port $port "$@" -- "$pattern_ranks" "$work/exchange.begun" "$work/exchange.end" 2>"$work/$mode.$node.err") &
    jobs[$node]=$!
  done
  until_there "$work/exchange.begun"
}
listening() {  # HOST: an address and a port in each line
  on_host "$1" awk '$4 == "0A" { print $2 }' /proc/net/tcp | while IFS=: read -r number port; do
    echo "$((16#${number:6:2})).$((16#${number:4:2})).$((16#${number:2:2})).$((16#${number:0:2})) $((16#$port))"
  done
}
crowd_somewhere() {  # at any port of n1
  local address number
  while read -r address number <&3; do
    if on_host stranger "$here/crowd.py" 10.77.0.11 "$number"; then return 0; fi
  done 3< <(listening n1)
  return 1
}
crowd_from_the_machine_itself() {  # at any address and port of n1
  local address number code
  while read -r address number <&3; do
    code=0
    on_host n1 "$here/crowd.py" "$address" "$number" || code=$?
    [ $code -ne 0 ] || return 0
    [ $code -eq 3 ] || fail "crowd.py did not run"
  done 3< <(listening n1)
  return 1
}
end_capture() {  # MODE
  kill "$capture"
  wait "$capture" || true
  read -r seen found <"$work/capture.$1"
  [ "$seen" -gt 1000000 ] || fail "$1: the capture has seen only $seen bytes"
}

begin_exchange clear --insecure-network
end_capture clear
[ "$found" -gt 0 ] || fail "the pattern is not on an insecure link: $seen bytes"
[ -n "$(listening n1)" ] || fail "Gloo does not listen"
crowd_somewhere || fail "a crowd does not bite"
touch "$work/exchange.end"
if wait "${jobs[0]}"; then fail "a crowd ended nothing"; fi
wait "${jobs[1]}" || true

begin_exchange tls
[ -n "$(listening n1)" ] || fail "Gloo does not listen"
listening n1 | grep -v '^127\.' && fail "a port is open to the network"
if crowd_somewhere; then fail "a crowd got in"; fi
if crowd_from_the_machine_itself; then fail "a crowd from the machine itself got in"; fi
touch "$work/exchange.end"
wait "${jobs[0]}" || fail "$(cat "$work"/tls.?.err)"
wait "${jobs[1]}" || fail "$(cat "$work"/tls.?.err)"
end_capture tls
[ "$found" -eq 0 ] || fail "$found packets have the pattern"

# A firewall: only answers at the port of the meeting get from n1 to n2.
on_host n1 ip rule add pref 10 sport $port lookup main
on_host n1 ip rule add pref 20 to 10.77.0.12 blackhole
start() {  # NODE_RANK; in a subshell, whose process becomes the launcher
  exec /run/on-host n$(($1 + 1)) "$lockstep" run --nnodes 2 --node-rank "$1" --master-addr 10.77.0.11 --master-port $port -- \
    "$lockstep" train --threads 1 --batch-size 37 --quiet --timeout 6 --max-steps 3 2>"$work/firewall.$1.err"
}
start 0 &
if (start 1); then fail "trained through a firewall"; fi
if wait $!; then fail "trained through a firewall"; fi
grep -q "can't connect to rank [01] at 10.77.0.1[12]" "$work"/firewall.?.err || fail "$(cat "$work"/firewall.?.err)"
grep -q 'a firewall between the machines' "$work/firewall.1.err" || fail "$(cat "$work"/firewall.?.err)"
echo "the pattern and the crowd get through without TLS, and neither with it"
