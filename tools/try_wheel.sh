#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries the wheel in dist/ with other Pythons: for each a fresh virtual environment with torch, the wheel, and two ranks that
# train examples/pytorch_training.py. Prints a row for docs/install.md for each. Fails if one fails.
#
#   tools/try_wheel.sh RELEASE PYTHON...      such as 2.15.0 python3.12 python3.13
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 1 ] || { sed -n '3,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
readonly release=$1 root=$PWD
shift

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
try() {
  local python=$1 site
  rm -rf "$folder/venv"
  "$python" -m venv "$folder/venv"
  . "$folder/venv/bin/activate"
  pip install --quiet --no-compile --no-deps "torch==$release" 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cupti==13.*'
  pip install --quiet numpy filelock fsspec jinja2 networkx sympy 'typing-extensions>=4.13' setuptools
  site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  (cd tests && python -c "import pathlib, torch_without_cuda; torch_without_cuda.add_missing_libraries(pathlib.Path('$site'))")
  pip install --quiet --no-deps --no-index "$root"/dist/*.whl
  cd "$folder"
  lockstep train --ranks 2 --max-steps 3 --quiet
  lockstep run --nproc-per-node 2 -- python "$root/examples/pytorch_training.py"
}
code=0
for python in "$@"; do
  begin=$SECONDS
  set +e
  (set -e; try "$python") >"$folder/log" 2>&1
  [ $? -eq 0 ] || { code=1; cat "$folder/log"; }
  set -e
  version=$("$python" -c 'import platform; print(platform.python_version())')
  echo "| $release | $version | $(date +%F) | $((SECONDS - begin)) s | $(tail -n 1 "$folder/log") |"
done
exit "$code"
