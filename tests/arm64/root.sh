#!/bin/bash
# root.sh FOLDER   makes FOLDER a Debian arm64 root file system with Python, from the mirror that apt uses here.
#
# debootstrap chooses, fetches and verifies the packages. They are unpacked by this machine, not configured: their
# scripts would take half an hour of emulation, and Python needs nothing from them but the list of users.
set -euo pipefail
root=$1 suite=bookworm
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk -v suite=$suite '$2 == suite && $3 == "main" { print $1; exit }')}
rm -rf "$root"
debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,python3-venv $suite "$root" ${mirror:+"$mirror"}
for package in "$root"/var/cache/apt/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -f - -C "$root"
  rm "$package"
done
cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
if [ -L "$root/proc" ]; then rm "$root/proc"; fi # in some containers a link to the machine's own

# The four cores of a Raspberry Pi 4, as its kernel describes them.
mkdir -p "$root/sys/devices/system/cpu"
for list in possible present online; do echo 0-3 >"$root/sys/devices/system/cpu/$list"; done
for core in 0 1 2 3; do
  printf '%s\t: %s\n' processor $core BogoMIPS 108.00 Features 'fp asimd evtstrm crc32 cpuid' \
    'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x0 'CPU part' 0xd08 'CPU revision' 3
  echo
done >"$root/etc/cpuinfo"
