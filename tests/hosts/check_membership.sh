#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks launch/membership.pml with Spin: every interleaving of 2 and 3 machines. Two defects have to be found.
set -eu
model=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
check() {
  echo "$*"
  spin "$@" -a "$model"
  cc -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
  ./pan -m1000000 > result
  grep -E "errors: |states, stored" result
  ! grep -q "max search depth too small" result
}
check -DN=2 -DDECISIONS=1 -DTRIES=2
grep -q "errors: 0" result
check -DN=2 -DDECISIONS=2
grep -q "errors: 0" result
check -DN=3 -DDECISIONS=1
grep -q "errors: 0" result
for defect in HALF FORGET; do
  check -DN=2 -DDECISIONS=2 -D$defect
  grep -q "assertion violated" result
done
