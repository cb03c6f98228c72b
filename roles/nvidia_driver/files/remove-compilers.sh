#!/bin/bash
# Removes compilers, with kernel headers that depend on them and what nothing else needs. DKMS stays: in the
# place of the compiler that its package wants there is an empty package that says what to install for a later
# kernel. Prints what was removed.
#
#   remove-compilers.sh NAME-OF-THE-EMPTY-PACKAGE
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

name=$1
work=$(mktemp -d /var/tmp/remove-compilers.XXXXXX)
trap 'rm -rf "$work"' EXIT
package=$work/$name.deb

# make and patch stay: they compile nothing, and nothing would bring them back for a later kernel.
dpkg-query --show --showformat '${db:Status-Abbrev}\t${Package}\t${Provides}\n' >"$work/packages"
awk -F '\t' -v name="$name" '
  $1 ~ /^.i/ && $2 != name &&
    ($2 ~ /^(binutils|build-essential|dpkg-dev)$/ || $3 ~ /(^|[ ,])c(\+\+)?-compiler/) { print $2 }
' "$work/packages" | sort >"$work/tools"
[[ -s $work/tools ]] || exit 0

make_package() {
  local tree=$work/tree wanted
  # What of this DKMS's package depends on.
  wanted=$(dpkg-query --show --showformat '${Depends}' dkms | tr ',|' '\n' |
    awk '$1 ~ /^(gcc(-[0-9]+)?|dpkg-dev)$/ { print $1 }' | sort -u | paste -sd ,)
  install -d "$tree/DEBIAN" "$tree/etc/kernel/postinst.d"
  cat >"$tree/DEBIAN/control" <<CONTROL
Package: $name
Version: 1
Architecture: all
Maintainer: gpukiln <gpukiln@localhost>
Provides: c-compiler${wanted:+, ${wanted//,/, }}
Description: stands for the compiler, which this machine does not have
 The modules of its kernels are compiled (nvidia_driver_keep_build_tools: false).
 For a later kernel install gcc and linux-headers-RELEASE: DKMS then builds.
CONTROL
  cat >"$tree/etc/kernel/postinst.d/zz-$name" <<'HOOK'
#!/bin/sh
# A kernel without headers gets no modules of the driver.
[ -e "/lib/modules/$1/build/include" ] ||
  echo "gpukiln: found no headers of kernel $1 and no compiler, so DKMS built nothing for it. Before it is" \
    "booted: apt-get install gcc linux-headers-$1" >&2
HOOK
  chmod 0755 "$tree/etc/kernel/postinst.d/zz-$name"
  dpkg-deb --root-owner-group --build "$tree" "$package" >/dev/null
}

apt_get() {
  apt-get --yes --purge --no-install-recommends --ignore-hold --allow-change-held-packages \
    --option=DPkg::Lock::Timeout=600 "$@"
}

# Names of packages that a call of apt would remove.
removed_by() {
  apt_get --simulate "$@" >"$work/simulated"
  sed -En 's/^(Remv|Purg) ([^ :]*).*/\2/p' "$work/simulated" | sort -u
}

make_package
mapfile -t without < <(sed 's/$/-/' "$work/tools")
removed_by install "$package" "${without[@]}" >"$work/taken"
others=$(comm -23 "$work/taken" "$work/tools" | awk '!/^linux-(headers|compiler|kbuild)-/' | paste -sd ' ')
if [[ -n $others ]]; then
  echo "remove-compilers: found that $others would go with the compiler, wanted kernel headers alone." \
    "Remove them before, or set nvidia_driver_keep_build_tools: true." >&2
  exit 1
fi
# Of what nothing needs any more only that which was needed until now.
removed_by autoremove >"$work/spare"
removed_by --auto-remove install "$package" "${without[@]}" | comm -23 - "$work/spare" |
  sort -u - "$work/taken" >"$work/all"
mapfile -t without < <(sed 's/$/-/' "$work/all")
apt_get install "$package" "${without[@]}" >&2
cat "$work/all"
