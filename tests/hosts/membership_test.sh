#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Launchers on several hosts stay connected: what they agree on when one is killed, when a network says nothing any more, is
# cut in two, or a launcher is stopped; and when machines come. The ranks are a shell script, so this needs no training.
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
  on_host "$host" "$lockstep" run --nproc-per-node "${ranks:-1}" --max-restarts 5 --rdzv-backend c10d --rdzv-endpoint n1:29400 \
    --rdzv-conf last_call_timeout=1,join_timeout=60 "$@" -- "$work/rank" "$work/$host.out" "$work/over" \
    >"$work/$host.log" 2>&1 &
  pid[$host]=$!
}

begin() {  # OPTION...: a job on all hosts
  rm -f "$work"/*.out "$work"/*.log "$work/over"
  local host
  for host in "${hosts[@]}"; do start "$host" "$@"; done
  for host in "${hosts[@]}"; do are_connected "$host" "generation 0 rank .+ of"; done
}

# HOST PATTERN: its rank runs, and its launcher is connected to all others
are_connected() {
  until_it_has "$1" "$2"
  until_it_has "$1" "generation ${2:11:1}: connected to all machines" log
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

# The guardian of the ranks is a copy of the launcher, with a higher pid.
launcher_of() { pgrep -o -f "^[^ ]*lockstep run --nproc.*$work/$1.out"; }

# The switch forwards nothing from or to a host, and nobody is told.
cut_off() { for host in "$@"; do bridge link set dev "to-$host" state 0; done; }
put_back() { for host in "$@"; do bridge link set dev "to-$host" state 3; done; }

killed() {
  begin --nnodes 2:3
  local before=$(milliseconds)
  kill -9 "$(launcher_of n1)"  # machine 0, where the machines have met
  until_it_has n2 "generation 1 rank . of 2 machine . at 10.77.0.1[23]"
  until_it_has n3 "generation 1 rank . of 2 machine . at 10.77.0.1[23]"
  grep -q "machine n1 .* is lost: its launcher has closed the connection" "$work"/n[23].log || fail "n1 was waited for"
  echo "killed: two of three go on after $(($(milliseconds) - before)) ms"
  ! pgrep -f "$work/n1.out" >/dev/null || fail "a rank has outlived its launcher"
  start n1 --nnodes 2:3  # it is started again, listens where the job began, and is called in
  until_it_has n1 "generation 2 rank 2 of 3 machine 2 at 10.77.0.1[23]"
  until_it_has n2 "generation 2 rank . of 3"
  until_it_has n3 "generation 2 rank . of 3"
  echo "killed: machine 0 is back"
  end_job n1 n2 n3
}

switched_off() {
  begin --nnodes 2:3
  local before=$(milliseconds)
  cut_off n2
  until_it_has n1 "generation 1 rank 0 of 2 machine 0"
  until_it_has n3 "generation 1 rank 1 of 2 machine 1"
  echo "switched off: the others go on after $(($(milliseconds) - before)) ms"
  until_it_has n1 "machine n2 .* is lost: silent" log
  ends_with n2 1 "only 1 of 3 machines are left on this side, and more than half have to go on"
  put_back n2
  end_job n1 n3
}

cut_in_halves() {
  hosts=(n1 n2)
  rm -f "$work"/*.out
  for host in n1 n2; do start "$host" --nnodes 1:2; done
  for host in n1 n2; do are_connected "$host" "generation 0 rank . of 2"; done
  cut_off n1 n2
  for host in n1 n2; do ends_with "$host" 1 "of exactly half an arbiter has to say which goes on"; done
  put_back n1 n2
  echo "cut in halves: none of the two goes on"
  hosts=(n1 n2 n3)
}

# HOST OTHER: frames from HOST to OTHER go to a card that nobody has.
no_way_from() { ip -n "$1" neigh replace "$(sed -n "s/ $2\$//p" /run/hosts)" lladdr 02:00:00:00:00:01 dev eth0; }
all_ways_from() { ip -n "$1" neigh flush all nud permanent; }

# Two machines that do not hear each other, but both the arbiter.
etcd_decides() {
  hosts=(n1 n2)
  rm -f "$work"/*.out "$work"/*.log
  etcd --data-dir "$work/etcd" --listen-client-urls http://10.77.0.1:2379 --advertise-client-urls http://10.77.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 >"$work/etcd.log" 2>&1 &
  local etcd=$! host winner loser
  for host in n1 n2; do start "$host" --nnodes 1:2 --arbiter etcd:10.77.0.1; done
  for host in n1 n2; do are_connected "$host" "generation 0 rank . of 2"; done
  until curl -s http://10.77.0.1:2379/health | grep -q true; do sleep 0.1; done
  no_way_from n1 n2
  no_way_from n2 n1
  until grep -q "generation 1 rank 0 of 1" "$work"/n[12].out; do sleep 0.02; done
  winner=$(basename "$(grep -l "generation 1 rank 0 of 1" "$work"/n[12].out)" .out)
  loser=n1
  [ "$winner" = n2 ] || loser=n2
  ends_with "$loser" 1 "the other machines go on without this one"
  has_not "$loser" "generation 1"
  all_ways_from n1
  all_ways_from n2
  echo "etcd decides: of two halves $winner goes on, and $loser ends"
  # What is left is one machine. The other comes again; then it is the one that is switched off.
  start "$loser" --nnodes 1:2 --arbiter etcd:10.77.0.1
  are_connected "$loser" "generation 2 rank 1 of 2"
  cut_off "$loser"
  until_it_has "$winner" "generation 3 rank 0 of 1"
  kill -9 "${pid[$loser]}" $(pgrep -f "$work/$loser.out") 2>/dev/null || true
  put_back "$loser"
  echo "etcd decides: of two machines the one goes on that reaches the arbiter"
  end_job "$winner"
  kill "$etcd"
  wait "$etcd" || true
  hosts=(n1 n2 n3)
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
  kill -TERM "$(launcher_of n1)"  # of two, without an arbiter: it votes before it goes
  until_it_has n2 "generation 2 rank 0 of 1"
  ends_with n3 143
  ends_with n1 143
  echo "leaves: after $(($(milliseconds) - before)) ms one machine is left and goes on"
  end_job n2
}

rank_fails() {
  begin --nnodes 3
  kill -9 "$(pgrep -f "^/bin/sh $work/rank $work/n2.out")"
  for host in n1 n2 n3; do until_it_has "$host" "generation 1 rank . of 3"; done
  echo "rank fails: all ranks go on in the next generation"
  end_job n1 n2 n3
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

# Two of three machines do not hear each other.
pair_cut() {
  begin --nnodes 2:3
  local a b
  a=$(grep -El "machine 1 at" "$work"/*.out) && a=$(basename "$a" .out)
  b=$(grep -El "machine 2 at" "$work"/*.out) && b=$(basename "$b" .out)
  no_way_from "$a" "$b"
  no_way_from "$b" "$a"
  until_it_has "$a" "generation 1 rank 1 of 2 machine 1"
  ends_with "$b" 1 "this machine ends its ranks"
  all_ways_from "$a"
  all_ways_from "$b"
  echo "pair cut: of two machines that do not hear each other the later one goes"
  local -A left=([n1]=1 [n2]=1 [n3]=1)
  unset "left[$b]"
  end_job "${!left[@]}"
}

cases=(killed switched_off cut_in_halves pair_cut etcd_decides stopped leaves rank_fails busy slow)
[ $# = 0 ] || cases=("$@")
for each in "${cases[@]}"; do "$each"; done
