#!/bin/bash
# emulate.sh ROOT COMMAND...   runs an arm64 program in the root file system ROOT.
#
# The folders of $SHARED (separated by colons) have the same path inside. The environment passes, but for this machine's
# paths. The processor is a Raspberry Pi 4's; /proc/cpuinfo and /sys say so too, because ONNX Runtime crashes when it
# reads an x86 processor's there. Where the kernel hands arm64 programs to qemu (binfmt_misc; installing qemu-user-static
# registers it) this is chroot in a mount namespace of its own, so that no mount outlives the program. Elsewhere, or with
# EMULATE=proot, it is proot.
set -euo pipefail
root=$(realpath "$1")
shift
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 QEMU_CPU=${QEMU_CPU:-cortex-a72}
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV TMPDIR
IFS=: read -ra shared <<<"${SHARED:-}"
folders=(/proc /dev "${shared[@]}")
for folder in "${folders[@]}"; do mkdir -p "$root$folder"; done

if [ "${EMULATE:-}" != proot ] && [ "$(id -u)" = 0 ] && unshare --mount chroot "$root" /bin/true 2>/dev/null; then
  # shellcheck disable=SC2016  # the inner shell expands
  exec unshare --mount sh -ec '
    root=$1; shift
    while [ "$1" != -- ]; do mount --rbind "$1" "$root$1"; shift; done; shift
    mount --bind "$root/etc/cpuinfo" "$root/proc/cpuinfo"
    exec chroot "$root" "$@"' sh "$root" "${folders[@]}" -- "$@"
fi
proot -0 -q qemu-aarch64-static -r "$root" -w / "${folders[@]/#/--bind=}" -b "$root/etc/cpuinfo:/proc/cpuinfo" "$@" &
proot=$!
trap 'pkill -TERM -P $proot' TERM INT # proot itself ignores them, and killed it would leave the program running
while kill -0 $proot 2>/dev/null; do wait $proot || true; done
wait $proot
