#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries lockstep with releases of torch: `make test` for each, in a fresh clone of what is committed. Its last lines are rows for
# docs/design/tested.md. Fails if one fails.
#
#   tests/versions.sh RELEASE...      such as 2.11.0; the logs stay in build/versions/
set -euo pipefail
cd "$(dirname "$0")/.."
readonly logs=$PWD/build/versions
[ $# -gt 0 ] || { sed -n '3,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

clone=$(mktemp -d)
trap 'rm -rf "$clone"' EXIT
mkdir -p "$logs"
rows=() code=0
for release in "$@"; do
  rm -rf "$clone" && git clone --quiet . "$clone"
  make --no-print-directory -C "$clone" test TORCH="$release" >"$logs/$release.log" 2>&1 || code=1
  rows+=("| torch $release, make test | $(git rev-parse --short HEAD) | $(date +%F) | $(tail -n 1 "$logs/$release.log") |")
  echo "${rows[-1]}"
done
printf '%s\n' "" "${rows[@]}"
exit "$code"
