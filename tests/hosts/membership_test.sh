#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Launchers on several hosts: how the job goes on when one is killed, when a network says nothing any more, when a launcher is
# stopped, and when machines come; with the first machine's store, and with three members of etcd, which are killed, too. The ranks are a
# shell script, so this needs no training.
#
#   membership_test.sh LOCKSTEP [CASE...]
set -euo pipefail
source "$(dirname "$0")/hosts.sh"
in_own_namespaces "$0" "$@"
lockstep=$1
shift
hosts=(n1 n2 n3)
make_hosts "${hosts[@]}"
export LOCKSTEP_LOG=debug
export LOCKSTEP_SECRET=$(printf 'ab%.0s' {1..32})

# Writes its place for each generation, and then waits to be ended.
cat >"$work/rank" <<'RANK'
#!/bin/sh
echo "generation $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE machine $GROUP_RANK at $MASTER_ADDR" >>"$1"
[ ! -e "$2" ] || exit 0
while [ ! -e "$2" ]; do ${PAUSE:-sleep 0.1}; done
RANK
chmod +x "$work/rank"

# start HOST [OPTION...]: a launcher there, with one rank.
declare -A pid
start() {
  local host=$1
  shift
  on_host "$host" "$lockstep" run --nproc-per-node "${ranks:-1}" --max-restarts "${restarts:-5}" --rdzv-backend "${backend:-c10d}" \
    --rdzv-id job --rdzv-endpoint "${endpoint:-n1:29400}" --rdzv-conf "last_call_timeout=1,join_timeout=60${conf:-}" "$@" \
    -- "$work/rank" "$work/$host.out" "$work/over" >"$work/$host.log" 2>&1 &
  pid[$host]=$!
}

begin() {  # OPTION...: a job on all hosts, n1 first
  rm -f "$work"/*.out "$work"/*.log "$work/over"
  local host
  for host in "${hosts[@]}"; do
    start "$host" "$@"
    [ "$host" != n1 ] || until [ -n "$(on_host n1 ss -Hltn 'sport = :29400')" ] || [ "${backend:-c10d}" = etcd ]; do sleep 0.02; done
  done
  for host in "${hosts[@]}"; do until_it_has "$host" "^generation 0? ?rank .+ of"; done
}

milliseconds() { echo $(($(date +%s%N) / 1000000)); }

# until_it_has HOST PATTERN [FILE]: a line in what its rank wrote, or in the launcher's words
until_it_has() {
  local deadline=$(($(milliseconds) + 20000)) file=$work/$1.${3:-out}
  until grep -Eq -- "$2" "$file" 2>/dev/null; do
    [ "$(milliseconds)" -lt "$deadline" ] || fail "$1 has no line '$2' in time; it has:
$(cat "$work/$1.out" "$work/$1.log" 2>/dev/null)"
    sleep 0.02
  done
}

has_not() { ! grep -Eq -- "$2" "$work/$1.out" || fail "$1 has a line '$2': $(cat "$work/$1.out" "$work/$1.log")"; }

# The launchers end well: each of those named, with the code.
end_job() {
  touch "$work/over"
  local host
  for host in "$@"; do wait "${pid[$host]}" || fail "$host ended with $?: $(tail -n 30 "$work"/*.log)"; done
  rm -f "$work/over"
}

ends_with() { # HOST CODE PATTERN
  local code=0
  wait "${pid[$1]}" || code=$?
  [ "$code" = "$2" ] || fail "$1 ended with $code, not $2: $(cat "$work/$1.log")"
  [ -z "${3:-}" ] || grep -Eq -- "$3" "$work/$1.log" || fail "$1 does not say '$3': $(cat "$work/$1.log")"
}

# What keeps in touch with the others, and the guardian of the ranks, are copies of the launcher, with higher pids.
launcher_of() { pgrep -o -f "^[^ ]*lockstep run --nproc.*$work/$1.out"; }

# The switch forwards nothing from or to a host, and nobody is told.
cut_off() { for host in "$@"; do bridge link set dev "to-$host" state 0; done; }
put_back() { for host in "$@"; do bridge link set dev "to-$host" state 3; done; }

killed() {
  begin --nnodes 2:3
  local before=$(milliseconds)
  kill -9 "$(launcher_of n2)"
  until_it_has n1 "generation 1 rank . of 2 machine 0"
  until_it_has n3 "generation 1 rank . of 2 machine 1"
  echo "killed: two of three go on after $(($(milliseconds) - before)) ms"
  ! pgrep -f "$work/n2.out" >/dev/null || fail "a rank has outlived its launcher"
  start n2 --nnodes 2:3
  until_it_has n2 "generation 2 rank 2 of 3 machine 2"
  for host in n1 n3; do until_it_has "$host" "generation 2 rank . of 3"; done
  echo "killed: the machine is back"
  end_job n1 n2 n3
}

first_machine_killed() {
  begin --nnodes 2:3
  kill -9 "$(launcher_of n1)"
  for host in n2 n3; do ends_with "$host" 1 "it has lost the first machine, n1:29400"; done
  echo "first machine killed: the others end, and say why"
}

switched_off() {
  begin --nnodes 2:3
  local before=$(milliseconds)
  cut_off n2
  until_it_has n1 "generation 1 rank 0 of 2 machine 0"
  until_it_has n3 "generation 1 rank 1 of 2 machine 1"
  echo "switched off: the others go on after $(($(milliseconds) - before)) ms"
  until_it_has n1 "machine n2 .* is lost" log
  ends_with n2 1 "it has lost the first machine"
  put_back n2
  end_job n1 n3
}

stopped() {
  begin --nnodes 2:3
  local one
  one=$(launcher_of n3)
  kill -STOP "$one"
  sleep 1  # a third of the silence: the time itself is what is tested here
  kill -CONT "$one"
  sleep 2
  has_not n1 "generation 1"
  kill -STOP "$one"
  until_it_has n1 "generation 1 rank 0 of 2"
  kill -CONT "$one"
  ends_with n3 1 "this machine ends its ranks"
  echo "stopped: for a while nothing happens, for longer the others go on"
  end_job n1 n2
}

leaves() {
  begin --nnodes 1:3
  local before=$(milliseconds)
  kill -TERM "$(launcher_of n3)"
  until_it_has n1 "generation 1 rank 0 of 2"
  ends_with n3 143
  kill -TERM "$(launcher_of n2)"
  until_it_has n1 "generation 2 rank 0 of 1"
  ends_with n2 143
  echo "leaves: after $(($(milliseconds) - before)) ms one machine is left and goes on"
  end_job n1
}

rank_fails() {
  begin --nnodes 3
  local before=$(milliseconds)
  kill -9 "$(pgrep -f "^/bin/sh $work/rank $work/n2.out")"
  for host in n1 n2 n3; do until_it_has "$host" "generation 1 rank . of 3"; done
  echo "rank fails: all ranks go on in the next generation after $(($(milliseconds) - before)) ms"
  end_job n1 n2 n3
}

no_restarts() {
  restarts=0
  begin --nnodes 3
  unset restarts
  kill -9 "$(launcher_of n2)"
  for host in n1 n3; do ends_with "$host" 1 "lost machine n2"; done
  echo "no restarts: a lost machine ends the job on all"
}

# 24 ranks that compute without a pause: on a machine of 2 cores a launcher gets its turn late, but is not called dead.
busy() {
  export PAUSE=:
  ranks=8
  begin --nnodes 2:3
  sleep 6  # twice the silence: the time itself is what is tested here
  for host in "${hosts[@]}"; do has_not "$host" "generation 1"; done
  echo "busy: machines that have more to do than they can are not lost"
  end_job n1 n2 n3
  unset PAUSE ranks
}

# 16 kbit/s: whatever a launcher says is on its way for long.
slow() {
  begin --nnodes 2:3
  for host in "${hosts[@]}"; do tc qdisc add dev "to-$host" root tbf rate 16kbit burst 1600 limit 100000; done
  sleep 5  # more than the silence: the time itself is what is tested here
  for host in "${hosts[@]}"; do has_not "$host" "generation 1"; done
  for host in "${hosts[@]}"; do tc qdisc del dev "to-$host" root; done
  end_job n1 n2 n3
  echo "slow: a slow network is no loss"
}

# ---- etcd: three members on a machine of their own, over TLS that asks for the launchers' certificates

make_certificates() {
  (
    cd "$work"
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=authority -days 2
    for name in etcd user; do
      openssl req -newkey rsa:2048 -nodes -keyout $name.key -out $name.csr -subj /CN=$name
      openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out $name.crt -days 2 \
        -extfile <(echo subjectAltName=IP:10.77.0.1)
    done
  ) 2>"$work/openssl.log" || fail "$(cat "$work/openssl.log")"
}

declare -A member
start_member() {  # NUMBER
  etcd --name "e$1" --data-dir "$work/etcd$1" --listen-client-urls "https://10.77.0.1:2${1}79" \
    --advertise-client-urls "https://10.77.0.1:2${1}79" --listen-peer-urls "http://127.0.0.1:2${1}80" \
    --initial-advertise-peer-urls "http://127.0.0.1:2${1}80" \
    --initial-cluster e1=http://127.0.0.1:2180,e2=http://127.0.0.1:2280,e3=http://127.0.0.1:2380 \
    --cert-file "$work/etcd.crt" --key-file "$work/etcd.key" --client-cert-auth --trusted-ca-file "$work/ca.crt" \
    >>"$work/etcd$1.txt" 2>&1 &
  member[$1]=$!
}

start_etcd() {
  [ -e "$work/ca.crt" ] || make_certificates
  rm -rf "$work"/etcd[123]
  for each in 1 2 3; do start_member $each; done
  backend=etcd
  endpoint=10.77.0.1:2179,10.77.0.1:2279,10.77.0.1:2379
  conf=",cacert=$work/ca.crt,cert=$work/user.crt,key=$work/user.key"
}

kill_member() {  # NUMBER
  kill -9 "${member[$1]}"
  wait "${member[$1]}" 2>/dev/null || true
}

stop_etcd() {
  kill "${member[@]}" 2>/dev/null || true  # one of them may be dead
  wait "${member[@]}" || true
  unset backend endpoint conf
}

etcd_first_machine_killed() {
  start_etcd
  begin --nnodes 1:3
  local before=$(milliseconds)
  kill -9 "$(launcher_of n1)"
  for host in n2 n3; do until_it_has "$host" "generation 1 rank . of 2 machine . at 10.77.0.1[23]"; done
  echo "etcd: the first machine was killed, and two of three go on after $(($(milliseconds) - before)) ms"
  ! pgrep -f "$work/n1.out" >/dev/null || fail "a rank has outlived its launcher"
  start n1 --nnodes 1:3
  until_it_has n1 "generation 2 rank 2 of 3 machine 2 at 10.77.0.1[23]"
  before=$(milliseconds)
  cut_off n2
  for host in n1 n3; do until_it_has "$host" "generation 3 rank . of 2"; done
  echo "etcd: a machine was switched off, and two go on after $(($(milliseconds) - before)) ms"
  put_back n2
  ends_with n2 1 "the other machines go on without this one"
  kill -TERM "$(launcher_of n3)"
  until_it_has n1 "generation 4 rank 0 of 1"
  ends_with n3 143
  end_job n1
  stop_etcd
}

# Members of etcd are killed one by one. Without two of three nothing is decided, and nothing that runs stops.
etcd_members_killed() {
  start_etcd
  begin --nnodes 1:3
  kill_member 1
  kill -9 "$(pgrep -f "^/bin/sh $work/rank $work/n2.out")"
  for host in n1 n2 n3; do until_it_has "$host" "generation 1 rank . of 3"; done
  echo "etcd: with two of its three members a lost rank is replaced"
  kill_member 2
  sleep 5  # longer than a lease: the time itself is what is tested here
  for host in n1 n2 n3; do has_not "$host" "generation 2"; done
  kill -9 "$(pgrep -f "^/bin/sh $work/rank $work/n2.out")"
  start_member 1
  for host in n1 n2 n3; do until_it_has "$host" "generation 2 rank . of 3"; done
  kill_member 3
  start_member 2
  kill -9 "$(pgrep -f "^/bin/sh $work/rank $work/n3.out")"
  for host in n1 n2 n3; do until_it_has "$host" "generation 3 rank . of 3"; done
  echo "etcd: the job has outlived each of its members"
  end_job n1 n2 n3
  stop_etcd
}

etcd_away() {
  start_etcd
  begin --nnodes 1:3
  kill -STOP "${member[@]}"
  sleep 1  # less than a lease
  kill -CONT "${member[@]}"
  sleep 1
  kill -STOP "${member[@]}"
  sleep 6  # more than a lease
  kill -CONT "${member[@]}"
  sleep 3
  for host in n1 n2 n3; do has_not "$host" "generation 1"; done
  echo "etcd: away for less and for more than a lease, nothing changes"
  end_job n1 n2 n3
  stop_etcd
}

etcd_asks_for_certificates() {
  start_etcd
  rm -f "$work/over"
  conf=",join_timeout=3,cacert=$work/ca.crt"
  start n1 --nnodes 1:3
  ends_with n1 1 "etcd does not answer"
  echo "etcd: who has no certificate is refused"
  stop_etcd
}

cases=(killed first_machine_killed switched_off stopped leaves rank_fails no_restarts busy slow etcd_first_machine_killed
  etcd_members_killed etcd_away etcd_asks_for_certificates)
[ $# = 0 ] || cases=("$@")
for each in "${cases[@]}"; do "$each"; done
