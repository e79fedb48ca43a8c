# SPDX-License-Identifier: Apache-2.0
"""Keeps a run in MLflow, on this disk unless MLFLOW_TRACKING_URI names a server:
lockstep train --on-event "python3 examples/on_event_mlflow.py" """

import json
import sys

import mlflow

with mlflow.start_run():
    for event in map(json.loads, sys.stdin):
        kind = event.pop("event")
        if kind == "start":
            mlflow.log_params(event["settings"])
        elif kind in ("step", "epoch"):
            numbers = {f"{kind}/{name}": value for name, value in event.items() if isinstance(value, float)}
            mlflow.log_metrics(numbers, step=event[kind])
