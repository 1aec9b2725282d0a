#!/bin/bash
# root.sh FOLDER   makes FOLDER a Debian arm64 root file system with Python, from the mirror that apt uses here.
set -euo pipefail
root=$1 here=$(cd "$(dirname "$0")" && pwd) suite=bookworm
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk -v suite=$suite '$2 == suite && $3 == "main" { print $1; exit }')}
rm -rf "$root"
debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,python3-venv $suite "$root" ${mirror:+"$mirror"}
if [ -L "$root/proc" ]; then rm "$root/proc"; fi # in some containers a link to the machine's own
mkdir -p "$root/proc" "$root/etc/dpkg/dpkg.cfg.d"
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/unsafe-io"
DEBOOTSTRAP_DIR=/debootstrap "$here/emulate.sh" "$root" /debootstrap/debootstrap --second-stage
cp /etc/resolv.conf "$root/etc/resolv.conf"
