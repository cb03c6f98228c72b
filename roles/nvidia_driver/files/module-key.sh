#!/bin/sh
# Prints what the driver's modules for one kernel are made of, NAME=VALUE a line. Modules of the same text are
# the same but for the build's time and DKMS's throw-away signature.
#
#   module-key.sh VERSION KIND KERNEL [CERTIFICATE]
set -eu

version=$1
kind=$2
kernel=$3
certificate=${4:-}
root=${GPUKILN_ROOT:-}
headers=$root/lib/modules/$kernel/build

sum() {
  sha256sum | cut -d' ' -f1
}

# Packages of one version in two kinds conflict: there is one.
for conf in "$root"/usr/src/nvidia*-"$version"/dkms.conf; do folder=${conf%/*}; done
if [ ! -f "$conf" ]; then
  echo "module-key: found no $conf, wanted the source that the driver's packages bring" >&2
  exit 1
fi
# The compiler that the kernel's headers name: the first word of its version.
compiler=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\{0,1\}\([^ "]*\).*/\1/p' "$headers/include/config/auto.conf")
command -v "$compiler" >/dev/null || compiler=gcc

name=${folder##*/}
echo "module=${name%-"$version"}"
echo "version=$version"
echo "kind=$kind"
echo "kernel=$kernel"
echo "architecture=$(uname -m)"
echo "source=$(cd "$folder" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sum)"
echo "headers=$(cat "$headers/Module.symvers" "$headers/include/generated/autoconf.h" | sum)"
echo "compiler=$(LC_ALL=C "$compiler" --version | head -n 1)"
echo "signer=$(if [ -n "$certificate" ]; then sum <"$certificate"; else echo none; fi)"
