#!/bin/bash
# run.sh PYTHON [OPTIONS OF check.py]   tries the base install on Debian arm64 under qemu-user; docs/devices.md says what.
#
# PYTHON has maskfleet[server,bench]: it runs the coordinator and the devices that are not emulated. The first run builds
# a root file system; it and pip's downloads stay in the cache. Packages come from where apt and pip are set to.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) python=$1 cache=${XDG_CACHE_HOME:-$HOME/.cache}/maskfleet/arm64
shift
root=$cache/root
for tool in qemu-aarch64-static debootstrap; do
  command -v "$tool" >/dev/null && continue
  echo "there is no $tool here: apt-get install qemu-user-static debootstrap proot" >&2
  exit 2
done

if [ ! -e "$root/.complete" ]; then
  mkdir -p "$cache"
  echo "building a Debian arm64 root file system in $root (about two minutes)"
  "$here/root.sh" "$root" >"$cache/root.log" 2>&1 || { tail -5 "$cache/root.log" >&2; exit 1; }
  touch "$root/.complete"
fi
cp /etc/resolv.conf "$root/etc/resolv.conf"

# pip inside asks the same indexes as pip here, but for folders of this machine, and trusts the same certificates.
for key in index-url extra-index-url trusted-host proxy; do
  value=$("$python" -m pip config get "global.$key" 2>/dev/null | tr ' ' '\n' | grep -v ^file: | paste -sd ' ') || continue
  name=${key^^}
  export "PIP_${name//-/_}=$value"
done
authorities=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
if [ -e "$authorities" ]; then
  mkdir -p "$root/etc/ssl/certs"
  cp "$authorities" "$root/etc/ssl/certs/ca-certificates.crt"
  export PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
fi
unset PIP_FIND_LINKS
export PIP_CACHE_DIR=$cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore SHARED=$cache

inside() { "$here/emulate.sh" "$root" "$@"; }
rm -rf "$cache/wheel"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$cache/wheel" "$here/../.."
wheel=$(echo "$cache"/wheel/maskfleet-*.whl)
wanted=$(sed -n '/^dependencies = /,/^]/p' "$here/../../pyproject.toml" | sha256sum)
if [ "$wanted" != "$(cat "$root/.installed" 2>/dev/null)" ]; then
  echo "installing the base package from wheels alone"
  rm -rf "$root/opt"
  inside python3 -m venv /opt/maskfleet
  inside /opt/maskfleet/bin/pip install --quiet --no-compile --only-binary :all: --report "$cache/installed.json" "$wheel"
  inside /opt/maskfleet/bin/pip install --quiet --no-compile --only-binary :all: --target /opt/tests pytest hypothesis
  echo "$wanted" >"$root/.installed"
else
  inside /opt/maskfleet/bin/pip install --quiet --no-deps --no-index --force-reinstall "$wheel"
fi
exec "$python" "$here/check.py" "$cache" "$@"
