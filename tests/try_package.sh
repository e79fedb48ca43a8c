#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tries a wheel or a source package with releases of Python: for each a fresh virtual environment with torch, the package, and two
# ranks that train examples/pytorch_training.py. Prints a row for docs/install.md for each. Fails if one fails.
#
#   tests/try_package.sh FILE RELEASE PYTHON...      such as dist/torch_lockstep-*.whl 2.15.0 python3.12 python3.13
set -euo pipefail
[ $# -gt 2 ] || { sed -n '3,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
package=$(realpath "$1")
readonly package release=$2
shift 2
cd "$(dirname "$0")/.."
readonly root=$PWD

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CCACHE_DISABLE=1
try() {
  local python=$1 site
  rm -rf "$folder/venv"
  "$python" -m venv "$folder/venv"
  . "$folder/venv/bin/activate"
  pip install --quiet --no-compile --no-deps "torch==$release" 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cupti==13.*'
  pip install --quiet numpy filelock fsspec jinja2 networkx sympy 'typing-extensions>=4.13' setuptools
  site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  (cd tests && python -c "import pathlib, torch_without_cuda; torch_without_cuda.add_missing_libraries(pathlib.Path('$site'))")
  pip install --quiet --no-deps "$package"
  cd "$folder"
  lockstep train --ranks 2 --max-steps 3 --quiet
  lockstep run --nproc-per-node 2 -- python "$root/examples/pytorch_training.py"
}
. /etc/os-release
code=0
for python in "$@"; do
  begin=$SECONDS
  set +e
  (set -e; try "$python") >"$folder/log" 2>&1
  [ $? -eq 0 ] || { code=1; cat "$folder/log"; }
  set -e
  version=$("$python" -c 'import platform; print(platform.python_version())')
  echo "| $release | $version | $NAME ${VERSION_ID:-$VERSION_CODENAME}, $(uname -m) | ${package##*.} | $(date +%F) |" \
    "$((SECONDS - begin)) s | $(tail -n 1 "$folder/log") |"
done
exit "$code"
