# SPDX-License-Identifier: Apache-2.0
"""Keeps a run for Weights & Biases, on this disk unless WANDB_MODE says otherwise; `wandb sync` uploads it:
lockstep train --on-event "python3 examples/on_event_wandb.py" """

import json
import os
import sys

import wandb

os.environ.setdefault("WANDB_MODE", "offline")
with wandb.init(project="lockstep") as run:
    for event in map(json.loads, sys.stdin):
        kind = event.pop("event")
        if kind == "start":
            run.config.update(event["settings"])
        elif kind in ("step", "epoch"):
            run.log({f"{kind}/{name}": value for name, value in event.items() if isinstance(value, (int, float))})
