#!/usr/bin/env bash
# Two hosts of two ranks each, as network namespaces joined by a link: trains as one rank does, over Gloo.
#
# Everything happens in namespaces of this script's own (a user namespace where it is not run by root): when it ends,
# however it ends, they are gone, and nothing outside was touched.
#
#   two_hosts_test.sh LOCKSTEP
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --pid --fork --mount-proc "$0" "$@"
fi
lockstep=$1
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

options=(train --threads 1 --max-steps 6 --batch-size 37 --quiet --timeout 60)
on_host() {
  ip netns exec "host$1" "$lockstep" run --nproc-per-node 2 --nnodes 2 --node-rank "$1" --master-addr 10.77.0.1 \
    --master-port 29500 --grace 1 -- "$lockstep" "${options[@]}" --metrics "$work/hosts.jsonl"
}
on_host 1 &
on_host 0
wait $!
"$lockstep" "${options[@]}" --metrics "$work/one.jsonl"

python3 - "$work" <<'PYTHON'
import json, sys
def losses(name):
    events = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
    return [event["loss"] for event in events if event["event"] == "step"], events[-1]["ranks"]
many, ranks = losses("hosts")
one, _ = losses("one")
assert ranks == 4 and len(many) == len(one) == 6, (ranks, many, one)
assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(many, one)), (many, one)
print("two hosts train as one rank does:", many)
PYTHON
