#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether lockstep's KVStore computes what MXNet 1.9.1's does: the largest difference between the weights of both after each step.

    bench/kvstore_values.py

`tools/setup.sh originals` fetches MXNet. Fails above 1e-5, in float32.
"""

import json
import os
import subprocess
import sys

from common import ROOT, require_peers, run_mxnet, run_peer

SITE = ROOT / "build/release/python/site"  # of `make test`
SCRIPT = "kvstore_values.py"


def of_mxnet(kind):
    return run_peer(SCRIPT, "mxnet", kind, package="mxnet") if kind == "local" else run_mxnet(2, SCRIPT, "mxnet", kind)


def of_lockstep(kind):
    (home,) = SITE.glob("lockstep/torch*")
    launcher = [] if kind == "local" else [home / "bin/lockstep", "run", "--servers", "1", "--nproc-per-node", "3", "--"]
    command = [*launcher, sys.executable, ROOT / "bench/peers" / SCRIPT, "lockstep", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "PYTHONPATH": str(SITE)})
    lines = [line[line.index("[[") :] for line in done.stdout.splitlines() if "[[" in line]
    assert len(set(lines)) == 1, lines  # both workers read the same
    return json.loads(lines[0])


def main():
    require_peers("originals", "mxnet")
    for kind in ("local", "dist_sync", "dist_async"):
        theirs, ours = of_mxnet(kind), of_lockstep(kind)
        assert len(theirs) == len(ours)
        largest = max(abs(one - other) for step, same in zip(theirs, ours) for one, other in zip(step, same))
        print(f"{kind}: {len(ours) - 1} steps, largest difference {largest:.1e}, last weights {[round(each, 3) for each in ours[-1]]}")
        assert largest < 1e-5, (theirs[-1], ours[-1])


if __name__ == "__main__":
    main()
