#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts of two ranks each: network namespaces joined by a link, whose clocks are an hour apart
# and drift. Shared memory inside each
# host, Gloo between them. First they train, and must get the losses of one rank and a common timeline. Then a rank is killed while they train: all ranks of both hosts
# must end.
#
# Everything happens in namespaces of this script's own (in a user namespace where it is not run by root). The kernel
# removes them when the script ends, however it ends; nothing outside is touched.
#
#   two_hosts_test.sh LOCKSTEP DRIFTING_CLOCK
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --pid --fork --mount-proc "$0" "$@"
fi
lockstep=$1 drifting_clock=$2 drift_ppm=0
since=$(python3 -c 'import time; print(time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 3600 * 10**9)')  # of host 1's clock
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
for host in 0 1; do
  ip netns add "host$host"
  ip -n "host$host" link set lo up
done
ip link add link0 netns host0 type veth peer name link1 netns host1
for host in 0 1; do
  ip -n "host$host" address add "10.77.0.$((host + 1))/24" dev "link$host"
  ip -n "host$host" link set "link$host" up
done

options=(train --threads 1 --batch-size 37 --quiet --timeout 60)
on_host() {  # HOST METRICS OPTION...
  local clock=()
  [ "$1" -eq 0 ] || clock=(unshare --time --monotonic 3600 --boottime 3600 --fork --kill-child
    env ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD="$drifting_clock" DRIFT_SINCE="$since" DRIFT_PPM="$drift_ppm")
  ip netns exec "host$1" "${clock[@]}" "$lockstep" run --nproc-per-node 2 --nnodes 2 --node-rank "$1" --master-addr 10.77.0.1 \
    --master-port 29500 --grace 1 -- "$lockstep" "${options[@]}" --metrics "$work/$2" "${@:3}"
}
for algorithm in direct ring; do
  # As clocks do; and so fast that the 1 ms would not be kept without a correction for it.
  [ $algorithm = direct ] && drift_ppm=50 || drift_ppm=5000
  on_host 1 $algorithm.jsonl --max-steps 6 --algorithm $algorithm --trace "$work/$algorithm.json" &
  on_host 0 $algorithm.jsonl --max-steps 6 --algorithm $algorithm --trace "$work/$algorithm.json"
  wait $!
  "$(dirname "$0")/../trace_test.py" --machines "$work/$algorithm.json"
done
drift_ppm=0
"$lockstep" "${options[@]}" --metrics "$work/one.jsonl" --max-steps 6

python3 - "$work" <<'PYTHON'
import json, sys
def losses(name):
    events = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["ranks"]
one, _ = losses("one")
for algorithm in "direct", "ring":
    many, ranks = losses(algorithm)
    assert ranks == 4 and len(many) == len(one) == 6, (ranks, many, one)
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(many, one)), (many, one)
    print("two hosts have the losses of one rank,", algorithm, many)
PYTHON

steps_done() { grep -s '"step"' "$work/lost.jsonl" | wc -l; }
rank_on_host1() {  # the launcher has its own environment, the ranks have RANK
  for pid in $(ip netns pids host1); do
    if grep -qsz '^RANK=' "/proc/$pid/environ"; then echo "$pid"; fi
  done | tail -n 1
}
on_host 1 lost.jsonl --max-steps 1000000 >"$work/host1.log" 2>&1 &
host1=$!
on_host 0 lost.jsonl --max-steps 1000000 >"$work/host0.log" 2>&1 &
host0=$!
give_up=$((SECONDS + 40))
until [ "$(steps_done || true)" -ge 5 ]; do
  [ $SECONDS -lt $give_up ] || { cat "$work"/host?.log; echo "no 5 steps in 40 s"; exit 1; }
  sleep 0.1
done
kill -KILL "$(rank_on_host1)"
killed=$SECONDS
if wait $host0 || wait $host1; then echo "a launcher that lost a rank exited with 0"; exit 1; fi
ended=$((SECONDS - killed))
[ -z "$(ip netns pids host0)$(ip netns pids host1)" ] || { echo "processes are left"; exit 1; }
[ $ended -le 20 ] || { cat "$work"/host?.log; echo "the ranks needed $ended s to end"; exit 1; }
grep -h -m 1 PeerLost "$work/host0.log" || { cat "$work/host0.log"; echo "no rank of host 0 says why it ended"; exit 1; }
echo "a rank was killed: all ranks of both hosts ended within $((ended + 1)) s"
