#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks agent/recover/recovery.pml with Spin: every interleaving of 2 ranks with two losses, and of 3 ranks with one. Then
# shows that the same check finds each of the model's deliberate defects.
set -eu
model=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

check() {  # DEFINES...: leaves Spin's answer in result
  spin "$@" -a "$model"
  cc -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
  ./pan -m1000000 > result
  ! grep -q "max search depth too small" result
  echo "$*: $(grep -oE 'errors: [0-9]+' result), $(awk '/states, stored/ {print $1}' result) states"
}

for variant in "-DN=2" "-DN=2 -DLAYERWISE" "-DN=2 -DSKIPPED=1" "-DN=2 -DSKIPPED=2" \
    "-DN=3 -DLOSSES=1 -DSTEPS=1 -DLAYERWISE"; do
  check $variant
  grep -q "errors: 0" result
done
for defect in 1 2 "3 -DSKIPPED=1" 4 5 6 7 8 9; do
  check -DN=2 -DDEFECT=$defect
  ! grep -q "errors: 0" result
done
