#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A disk that is really full (a small tmpfs): training goes on and says so, ends with an error if the last state is not saved,
# leaves no part of a checkpoint behind, and saves again as soon as there is room. In namespaces of this script's own.
#
#   full_disk_test.sh LOCKSTEP
set -euo pipefail
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  export IN_OWN_NAMESPACES=1
  exec unshare --map-root-user --user --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
mount -t tmpfs tmpfs /run
work=/run/work
mkdir -p "$work/disk" "$work/elsewhere"
train=("$1" train --threads 1 --batch-size 37 --quiet)
fail() { echo "$*" >&2; exit 1; }

"${train[@]}" --max-steps 1 --checkpoint-dir "$work/elsewhere"
size=$(stat -c %s "$work"/elsewhere/step-*.safetensors)
mount -t tmpfs -o size=$((4 * size + 65536)) tmpfs "$work/disk"
head -c $((3 * size + size / 2)) /dev/zero >"$work/disk/filler"

code=0
"${train[@]}" --max-steps 6 --checkpoint-every 2 --checkpoint-dir "$work/disk" --metrics "$work/full" 2>"$work/err" || code=$?
[ $code -eq 1 ] || fail "exit code $code: $(cat "$work/err")"
grep -q 'the checkpoint of step 2 is not saved: .*No space left on device' "$work/err" || fail "$(cat "$work/err")"
grep -q 'the checkpoint of the last step, 6, is not saved' "$work/err" || fail "$(cat "$work/err")"
[ "$(grep -c '"event":"step"' "$work/full")" -eq 6 ] || fail "not all steps"
[ "$(ls "$work/disk")" = filler ] || fail "left behind: $(ls -A "$work/disk")"

# Room comes while it trains.
"${train[@]}" --max-steps 600 --checkpoint-every 2 --checkpoint-dir "$work/disk" 2>"$work/err" &
until grep -q 'is not saved' "$work/err"; do kill -0 $! || fail "it has ended: $(cat "$work/err")"; sleep 0.02; done
rm "$work/disk/filler"
wait $! || fail "$(cat "$work/err")"
[ -e "$work/disk/step-00000600.safetensors" ] || fail "not saved: $(ls "$work/disk")"
"${train[@]}" --max-steps 602 --resume --checkpoint-dir "$work/disk"
echo "a full disk ends no run, and loses no checkpoint that there was"
