#!/usr/bin/env bash
# Installs what building lockstep needs, and nothing that is there already:
# Debian's packages system-wide, libtorch out of its PyPI wheel into .deps/ of this checkout.
#
#   tools/setup.sh demo     to build and to train
#   tools/setup.sh test     that, and what the tests need
#   tools/setup.sh cuda     that, and the CUDA libraries of libtorch
#   tools/setup.sh bench    the peers of the benchmarks: full PyTorch, in .deps/peers
#
# A second run needs no network. Root, or a user with sudo, is needed only while packages are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly torch_version=2.11.0
readonly deps=.deps

demo_packages=(
  g++ cmake ninja-build make ccache mold git ca-certificates python3 python3-pip
  libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev zlib1g-dev libxxhash-dev libgloo-dev
  dataset-fashion-mnist
)
test_packages=(libgtest-dev googletest openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2)
bench_packages=(python3-venv)

missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$name" 2>/dev/null | grep --quiet '^installed$' ||
      echo "$name"
  done
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -gt 0 ] || return 0
  echo "setup: installing ${missing[*]}"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Installs wheels into the folder $1 and leaves a stamp, so that a half-finished download is begun again.
install_wheels() {
  local folder=$1
  shift
  [ ! -e "$folder/.complete" ] || return 0
  echo "setup: fetching $* into $folder"
  rm -rf "$folder"
  mkdir -p "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$folder" "$@"
  touch "$folder/.complete"
}

install_libtorch() {
  install_wheels "$deps/libtorch" "torch==$torch_version" 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*'
}

# The wheel's own list of CUDA libraries, less the compilers (triton) that only Python uses.
install_cuda_libraries() {
  local wanted
  mapfile -t wanted < <(sed -n 's/^Requires-Dist: \(nvidia-[^;]*\|cuda-toolkit[^;]*\).*/\1/p' \
    "$deps/libtorch/torch-$torch_version.dist-info/METADATA" | tr -d ' ')
  echo "${wanted[@]}"
}

case "${1:-}" in
  demo) install_packages "${demo_packages[@]}" && install_libtorch ;;
  test) install_packages "${demo_packages[@]}" "${test_packages[@]}" && install_libtorch ;;
  *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
