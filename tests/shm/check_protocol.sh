#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks a protocol, such as collective/shm/protocol.pml, with Spin: every interleaving of 2 and 3 ranks.
set -eu
model=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for ranks in 2 3; do
  spin -DN=$ranks -a "$model"
  cc -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
  ./pan -m1000000 > result
  grep -E "errors: |states, stored" result
  grep -q "errors: 0" result
  ! grep -q "max search depth too small" result
done
