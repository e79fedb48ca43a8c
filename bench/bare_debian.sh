#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# As root: how long it takes from a bare Debian 12 (debootstrap's) to the first run of a C++ program of one's own on two
# ranks, by the wheel: Debian's packages, the virtual environment, pip, CMake, the run. Torch and what it needs are
# fetched before the clock starts. Needs `debootstrap` and a wheel in dist/ (`make wheel`).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=("$root"/dist/lockstep-*.whl)
debian=$(mktemp -d)
clean() {
  umount "$debian/proc" 2>/dev/null || true
  rm -rf "$debian"
}
trap clean EXIT

debootstrap --variant=minbase --include=ca-certificates bookworm "$debian" >/dev/null
mount -t proc proc "$debian/proc"
cp /etc/resolv.conf "$debian/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$debian/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$debian/etc/"
mkdir "$debian/dist" "$debian/fetched" "$debian/program"
cp "${wheels[0]}" "$debian/dist/"
python3 -m pip download --quiet --dest "$debian/fetched" "${wheels[0]}"

cp "$root/examples/own_loop.cc" "$debian/program/my_program.cc"
cat > "$debian/program/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(my_program LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(lockstep REQUIRED)
add_executable(my_program my_program.cc)
target_link_libraries(my_program PRIVATE lockstep::lockstep)
CMAKE

cat > "$debian/first.sh" <<'DEBIAN'
set -e
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
since() { echo "$((SECONDS - before)) s: $1"; before=$SECONDS; }
before=$SECONDS
apt-get -qq update
apt-get -qq install --no-install-recommends g++ cmake ninja-build python3-venv \
  dataset-fashion-mnist >/dev/null 2>&1
since "Debian's packages"
python3 -m venv /venv
. /venv/bin/activate
pip install --quiet --no-index --find-links /fetched /dist/lockstep-*.whl
since "the wheel, and torch unpacked"
cd /program
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$(lockstep env --cmake-prefix)" >/dev/null
cmake --build build >/dev/null
since "the program compiled"
lockstep run --nproc-per-node 2 -- build/my_program
since "its run"
echo "$SECONDS s from a bare Debian to here"
DEBIAN
chroot "$debian" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash /first.sh
