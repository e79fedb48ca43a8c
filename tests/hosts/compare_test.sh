#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `lockstep compare` over shaped links. server-vs-ring: the ring's links carry what the formula says, and so does the server's.
# slow-links: so do those of what is sent in 16 and in 8 bits. In namespaces of this script's own.
#
#   compare_test.sh LOCKSTEP
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# 60 steps: the bytes of the step under way when counting begins may be in or out.
"$1" compare server-vs-ring --links shaped --rate 1000 --strategies ddp-ring,servers-1 --devices 3 --seeds 1 --steps 60 \
  --output "$work/out" | tee "$work/table"
grep -q '^| servers-1-3 .* N \* K ' "$work/table"
"$1" compare slow-links --links shaped --rate 1000 --strategies ddp,ddp-bf16,streaming-diloco --vary average-every=4 \
  --model gpt-mini --seeds 1 --steps 60 --output "$work/slow" | tee "$work/table"
grep -q '^| streaming-diloco-4-average_every=4 .* |$' "$work/table"

python3 - "$work" <<'PYTHON'
import json, sys

def check(folder, first, expected):
    runs = {run["group"]: run for run in json.load(open(f"{folder}/comparison.json"))["runs"]}
    bytes_of = {name: max(run["busiest_link_bytes_per_step"].values()) for name, run in runs.items()}
    events = [json.loads(line) for line in open(f"{folder}/{runs[first]['folder']}/metrics.jsonl")]
    gradient = events[-1]["exchanged_bytes"] / events[-1]["steps"]
    for name, times in expected.items():
        found = bytes_of[name] / gradient  # in K; with headers
        assert 0.9 * times < found < 1.25 * times, (name, found, times)
        print(f"{name}: {found:.3f} K a step, {times:.3f} by the formula")

check(f"{sys.argv[1]}/out", "ddp-ring-3", {"ddp-ring-3": 4 / 3, "servers-1-3": 3})
check(f"{sys.argv[1]}/slow", "ddp-4-average_every=4", {
    "ddp-4-average_every=4": 1, "ddp-bf16-4-average_every=4": 1 / 2, "streaming-diloco-4-average_every=4": 1 / 4 / 4})
PYTHON
