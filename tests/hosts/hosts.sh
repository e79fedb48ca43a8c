# SPDX-License-Identifier: Apache-2.0
# Sourced by tests that need several hosts: network, UTS and mount namespaces of this machine, joined by a bridge. The caller
# runs in namespaces of its own (unshare --net --mount --uts --pid --kill-child), so the kernel removes everything when it
# ends, however it ends. What it writes to $work is gone then, too.
#
#   in_own_namespaces SCRIPT ARGUMENT...   begins the script anew in such namespaces, unless it runs in them
#   fail WORDS             ends the script with an error
#   has_losses_of_one_rank NAME STEPS TOLERANCE   whether $work/NAME.jsonl has the losses of $work/one.jsonl, within a relative tolerance
#   has_every_loss_of_one_rank NAME STEPS   the same of a run that lost ranks, in which steps may have been made again
#   make_hosts NAME...     ctl (this namespace, 10.77.0.1) and one host per NAME (10.77.0.11, .12, …); names resolve. As
#                          Debian does it, a host's own name is 127.0.1.1 there.
#   on_host NAME COMMAND   runs a command there
#   make_links_bad OPTION...   from now on frames between hosts go through bad_links.py, with these options; ctl is not joined
#                          to them any more. Its pid is in $switch; what it says at its end in $work/links.
#   start_etcd             one member on ctl, at 10.77.0.1:2379, for --rdzv-backend etcd
#   until_etcd_has COUNT   keys: a job's launchers are numbered as they come
#   survives_a_lost_machine NAME LAUNCHER...   whether a job goes on, with the losses of one rank, that has one `lockstep run`
#                          on each of n1, n2 and n3, started by LAUNCHER, when the one on n2 is killed

in_own_namespaces() {
  [ -z "${IN_OWN_NAMESPACES:-}" ] || return 0
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --uts --pid --fork --kill-child --mount-proc "$@"
}

# Not in a user namespace: for servers that have to be root.
as_root_in_own_namespaces() {
  [ -z "${IN_OWN_NAMESPACES:-}" ] || return 0
  export IN_OWN_NAMESPACES=1
  [ "$(id -u)" -eq 0 ] || exec sudo -n --preserve-env "$@"
  exec unshare --net --mount --uts --pid --fork --kill-child --mount-proc "$@"
}

fail() { echo "$*" >&2; exit 1; }

has_losses_of_one_rank() {
  python3 - "$work/one.jsonl" "$work/$1.jsonl" "$2" "$3" <<'PYTHON'
import json, sys
steps, tolerance = int(sys.argv[3]), float(sys.argv[4])
one, other = ([e["loss"] for e in map(json.loads, open(path)) if e["event"] == "step"] for path in sys.argv[1:3])
assert len(one) == len(other) == steps and all(abs(a - b) <= tolerance * abs(b) for a, b in zip(one, other)), (one, other)
PYTHON
}

has_every_loss_of_one_rank() {
  python3 - "$work/one.jsonl" "$work/$1.jsonl" "$2" <<'PYTHON'
import json, sys
one, many = ({e["step"]: e["loss"] for e in map(json.loads, open(path)) if e["event"] == "step"} for path in sys.argv[1:3])
assert set(one) == set(many) == set(range(int(sys.argv[3]))), set(one) ^ set(many)
off = {step: abs(many[step] - one[step]) / abs(one[step]) for step in many}
worst = max(off.values())
print(f"{len(many)} steps; the losses are within {worst:.1e} of those of one rank")
assert worst < 1e-3, next((step, one[step], many[step]) for step in sorted(off) if off[step] >= 1e-3)
PYTHON
}

start_etcd() {
  etcd --data-dir "$work/etcd" --listen-client-urls http://10.77.0.1:2379 --advertise-client-urls http://10.77.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 >"$work/etcd.txt" 2>&1 &
}

until_etcd_has() {
  python3 - "$1" <<'PYTHON'
import json, sys, time, urllib.request
for _ in range(3000):
    try:
        asked = urllib.request.Request("http://10.77.0.1:2379/v3/kv/range", b'{"key": "AA==", "range_end": "AA==", "count_only": true}')
        if int(json.load(urllib.request.urlopen(asked, timeout=5)).get("count", 0)) >= int(sys.argv[1]):
            sys.exit(0)
    except OSError:
        pass
    time.sleep(0.01)
sys.exit("etcd has no such key after 30 s")
PYTHON
}

make_hosts() {
  mount -t tmpfs tmpfs /run
  work=/run/work
  mkdir -p /run/netns /run/uts "$work"
  hostname ctl
  ip link set lo up
  ip link add bridge0 type bridge
  ip address add 10.77.0.1/24 dev bridge0
  ip link set bridge0 up
  printf '127.0.0.1 localhost\n10.77.0.1 ctl\n' >/run/hosts
  local number=10 host
  for host in "$@"; do
    number=$((number + 1))
    ip netns add "$host"
    ip link add "to-$host" type veth peer name eth0 netns "$host"
    ip link set "to-$host" master bridge0 up
    ip -n "$host" link set lo up
    ip -n "$host" address add "10.77.0.$number/24" dev eth0
    ip -n "$host" link set eth0 up
    touch "/run/uts/$host"
    unshare --uts="/run/uts/$host" hostname "$host"
    echo "10.77.0.$number $host" >>/run/hosts
  done
  mount --bind /run/hosts /etc/hosts
  for host in "$@"; do sed "s/^[0-9.]* $host\$/127.0.1.1 $host/" /run/hosts >"/run/hosts-$host"; done
  cat >/run/on-host <<'ON_HOST'
#!/bin/sh
host=$1
shift
exec nsenter --net="/run/netns/$host" --uts="/run/uts/$host" \
  unshare --mount sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "/run/hosts-$host" "$@"
ON_HOST
  chmod +x /run/on-host
}

on_host() { /run/on-host "$@"; }

make_links_bad() {
  local host card hosts address
  hosts=($(ls /run/netns))
  python3 "$(dirname "${BASH_SOURCE[0]}")/bad_links.py" "${hosts[@]/#/bad-}" "$@" >"$work/links" &
  switch=$!
  for host in "${hosts[@]}"; do
    card=bad-$host
    until ip link show "$card" >/dev/null 2>&1; do
      kill -0 "$switch" || fail "no switch with bad links"
      sleep 0.02
    done
    address=$(sed -n "s/ $host\$//p" /run/hosts)
    ip -n "$host" link del eth0
    ip link set "$card" netns "$host" name eth0
    ip -n "$host" address add "$address/24" dev eth0
    ip -n "$host" link set eth0 up
  done
}

survives_a_lost_machine() {
  local name=$1 steps=60 job pid give_up=$((SECONDS + 60))
  local train=("$lockstep" train --threads 1 --batch-size 36 --quiet --timeout 60 --max-steps "$steps" --lr 0.002)
  shift
  "${train[@]}" --metrics "$work/undisturbed.jsonl"
  "$@" "$lockstep" run --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint n1:29400 -- \
    "${train[@]}" --metrics "$work/$name.jsonl" >"$work/$name.log" 2>&1 &
  job=$!
  until grep -qs '"event":"step".*"step":20,' "$work/$name.jsonl"; do
    [ $SECONDS -lt $give_up ] || fail "$name: no step 20 within 60 s: $(tail -n 30 "$work/$name.log")"
    sleep 0.02
  done
  for pid in $(pgrep -f "^$lockstep run "); do
    [ "$(nsenter --target "$pid" --uts hostname 2>/dev/null)" != n2 ] || kill -KILL "$pid" || true  # its child may be gone by now
  done
  wait $job || true  # the launcher says that a process of its was killed
  python3 - "$work" "$name" "$steps" <<'PYTHON' || { tail -n 40 "$work/$name.log"; exit 1; }
import json, sys
work, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
events = [json.loads(line) for line in open(f"{work}/{name}.jsonl")]
one, many = ({e["step"]: e["loss"] for e in each if e["event"] == "step"}
             for each in ([json.loads(line) for line in open(f"{work}/undisturbed.jsonl")], events))
assert set(one) == set(many) == set(range(steps)), sorted(set(one) - set(many))
assert events[-1]["event"] == "run" and events[-1]["ranks"] == 2, events[-1]
worst = max(abs(many[step] - one[step]) / abs(one[step]) for step in many)
assert worst < 1e-3, worst
print(f"{name}: the job went on without n2; its losses are within {worst:.1e} of those of one rank")
PYTHON
}
