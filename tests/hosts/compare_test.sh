#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `lockstep compare server-vs-ring` over shaped links: the ring's links carry what the formula says, and so does the server's.
# In namespaces of this script's own.
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

python3 - "$work/out" <<'PYTHON'
import json, sys
runs = {run["group"]: run for run in json.load(open(f"{sys.argv[1]}/comparison.json"))["runs"]}
bytes_of = {name: max(run["busiest_link_bytes_per_step"].values()) for name, run in runs.items()}
events = [json.loads(line) for line in open(f"{sys.argv[1]}/{runs['ddp-ring-3']['folder']}/metrics.jsonl")]
gradient = events[-1]["exchanged_bytes"] / events[-1]["steps"]
for name, times in {"ddp-ring-3": 4 / 3, "servers-1-3": 3}.items():
    found = bytes_of[name] / gradient  # in K; with headers
    assert 0.95 * times < found < 1.25 * times, (name, found, times)
    print(f"{name}: {found:.2f} K a step, {times:.2f} by the formula")
PYTHON
