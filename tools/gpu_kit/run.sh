#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the kit on a machine with a GPU (tools/gpu_kit.sh): within 9 minutes. The results come into the folder $OUT, or out/ here.
exec python3 "$(dirname "$0")/run.py" "$@"
