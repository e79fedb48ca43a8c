#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command in a checkout of what is committed, on a bare Debian: a fresh one in a folder, with nothing but git, make and
# certificates. Also dist/ is there, as it is here. Root only; debootstrap has to be installed.
#
#   tests/bare_debian.sh SUITE COMMAND...      such as trixie make demo
#
# DEBIAN=FOLDER before it keeps the system there for the next time; MIRROR=URL takes Debian from elsewhere. The network and pip's
# index are this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 1 ] || { sed -n '3,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
readonly suite=$1
shift

readonly system=${DEBIAN:-$(mktemp -d)}
finish() {
  for folder in dev/shm dev/pts sys proc .; do
    mountpoint --quiet "$system/$folder" && umount --lazy "$system/$folder"
  done
  [ -n "${DEBIAN:-}" ] || rm -rf "$system"
}
trap finish EXIT

if [ ! -e "$system/etc/debian_version" ]; then
  debootstrap --variant=minbase --include=ca-certificates,git,make "$suite" "$system" "${MIRROR:-http://deb.debian.org/debian}" >&2
fi
mount --bind "$system" "$system" # so that its / is a mount point, which unshare wants
mount -t proc proc "$system/proc"
mount -t sysfs sys "$system/sys"
mkdir -p "$system/dev/shm" "$system/dev/pts"
mount -t tmpfs shm "$system/dev/shm"
mount -t devpts devpts "$system/dev/pts"

rm -rf "$system/lockstep"
git clone --quiet . "$system/lockstep"
[ ! -d dist ] || cp -r dist "$system/lockstep/"
index=$(python3 -m pip config get global.index-url 2>/dev/null || true)
chroot "$system" env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 ${index:+PIP_INDEX_URL="$index"} \
  bash -c 'cd /lockstep && "$@"' bash "$@"
