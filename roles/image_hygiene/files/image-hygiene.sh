#!/bin/sh
# Removes from this machine what belongs to the build of its image, and prints what it removed.
#
#   image-hygiene.sh [--dry-run] [--keep-authorized-keys] [PATTERN...]
#
# PATTERN: more absolute paths to remove, with shell patterns; ~/PATH is one of every user's home. The role gives
# those of machine-identities.txt and credential-files.txt next to this file, which the suite looks for too.
# It is one script, and the play's last task: what it removes is what a second connection would need.
set -eu

dry=
keep_keys=
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=yes; shift ;;
    --keep-authorized-keys) keep_keys=yes; shift ;;
    --) shift; break ;;
    -*) echo "image-hygiene: unknown option '$1'" >&2; exit 2 ;;
    *) break ;;
  esac
done
for pattern; do
  case $pattern in
    /?*/?* | '~'/?*) ;;
    *) echo "image-hygiene: '$pattern' is no absolute path below a folder of /, and none of ~" >&2; exit 2 ;;
  esac
done

# Removes what exists of the paths given.
remove() {
  for path; do
    if [ -e "$path" ] || [ -L "$path" ]; then
      echo "removed $path"
      [ -n "$dry" ] || rm -rf -- "$path"
    fi
  done
}

# Removes what exists of the many paths after the first argument, which names them.
remove_all() {
  label=$1
  shift
  count=$(remove "$@" | wc -l)
  if [ "$count" -gt 0 ]; then echo "removed $count $label"; fi
}

# Empties the files given; programs that have a log open keep writing to it.
empty() {
  for path; do
    if [ -f "$path" ] && [ -s "$path" ]; then
      echo "emptied $path"
      if [ -z "$dry" ]; then : >"$path"; fi
    fi
  done
}

homes=$(getent passwd | cut -d: -f6 | sort -u | while read -r home; do
  if [ "$home" != / ] && [ -d "$home" ]; then echo "$home"; fi
done)

# Packages: downloads and lists. apt fetches new lists when the folder is old.
remove_all "downloaded packages" /var/cache/apt/archives/*.deb /var/cache/apt/archives/partial/*
remove_all "package lists" /var/lib/apt/lists/*_* /var/lib/apt/lists/partial/* /var/lib/apt/lists/auxfiles/*
if [ -z "$dry" ] && [ -d /var/lib/apt/lists ]; then touch -d @0 /var/lib/apt/lists; fi
remove /var/cache/apt/pkgcache.bin /var/cache/apt/srcpkgcache.bin /var/cache/debconf/*-old /var/lib/dpkg/*-old
remove /var/lib/apt/periodic/*
# dnf keeps both in one place. Its history stays: it knows which packages somebody asked for.
remove_all "downloaded packages" /var/cache/dnf/*/packages/*.rpm
remove_all "package lists" /var/cache/dnf/* /var/cache/yum/* /var/cache/libdnf5/*

# DKMS: the build trees are as large as the driver's source; modules and registration stay. So does the
# certificate that a machine's owner enrols; the private key must not be in two places.
remove /var/lib/dkms/*/*/build /var/lib/dkms/mok.key /var/lib/dkms/mok.pub
remove /etc/gpukiln/secure-boot/*.key /etc/dkms/framework.conf.d/gpukiln.conf /var/lib/shim-signed/mok/MOK.priv

# What the tools of the build and its people left. The payload of the running Ansible module removes itself.
for home in $homes; do
  remove "$home/.ansible" "$home/.ansible_async" "$home/.cache" "$home/.bash_history" "$home/.zsh_history" \
    "$home/.python_history" "$home/.lesshst" "$home/.viminfo" "$home/.wget-hsts" \
    "$home/.sudo_as_admin_successful" "$home/.ssh/known_hosts" "$home/.ssh/known_hosts.old"
done
for path in /tmp/* /tmp/.[!.]* /var/tmp/* /var/tmp/.[!.]*; do
  case $path in
    # Of the running system; they are on no disk after its end.
    /tmp/ansible_*_payload_* | */systemd-private-* | /tmp/.X11-unix | /tmp/.ICE-unix | /tmp/.font-unix | /tmp/.XIM-unix) ;;
    *) remove "$path" ;;
  esac
done
remove /usr/sbin/policy-rc.d /usr/local/sbin/policy-rc.d
# Debian's open-iscsi does not start without this file, and makes a name where it says so (startup-checks.sh);
# elsewhere a unit makes the whole file where there is none.
iscsi=/etc/iscsi/initiatorname.iscsi
new_initiator=
if [ -f "$iscsi" ] && [ -e /lib/open-iscsi/startup-checks.sh ]; then new_initiator=yes; fi
# shellcheck disable=SC2086 # the patterns are there to be expanded
for pattern; do
  case $pattern in
    '~'/*) for home in $homes; do remove "$home"/${pattern#'~'/}; done ;;
    *) remove $pattern ;;
  esac
done
if [ -n "$new_initiator" ] && [ -z "$dry" ]; then echo GenerateName=yes >"$iscsi"; fi

# Identity: each machine makes its own.
remove /etc/ssh/ssh_host_*
remove /var/lib/systemd/random-seed /var/lib/urandom/random-seed
remove /var/lib/NetworkManager/*lease* /var/lib/NetworkManager/seen-bssids
remove /etc/udev/rules.d/70-persistent-net.rules /etc/udev/rules.d/70-persistent-cd.rules
remove /etc/netplan/50-cloud-init.yaml /etc/network/interfaces.d/50-cloud-init* /etc/systemd/network/10-cloud-init-*
remove /etc/NetworkManager/system-connections/cloud-init-*
for path in /etc/sysconfig/network-scripts/ifcfg-*; do
  if grep -qs 'Created by cloud-init' "$path"; then remove "$path"; fi
done
# Empty, not missing: systemd fills it at boot. Where it is missing, or says "uninitialized", systemd takes the
# boot for the machine's first and sets every unit to its preset.
empty /etc/machine-id
if [ ! -e /etc/machine-id ]; then
  echo "emptied /etc/machine-id"
  if [ -z "$dry" ]; then : >/etc/machine-id; fi
fi
if [ -f /var/lib/dbus/machine-id ] && [ ! -L /var/lib/dbus/machine-id ]; then
  echo "linked /var/lib/dbus/machine-id"
  [ -n "$dry" ] || ln -sf /etc/machine-id /var/lib/dbus/machine-id
fi

# cloud-init: its state, seed and logs, so that it runs again in full.
remove /var/lib/cloud/* /var/log/cloud-init.log /var/log/cloud-init-output.log

# Logs.
if [ -z "$dry" ] && [ -d /var/log/journal ]; then journalctl --quiet --relinquish-var; fi
remove /var/log/journal/* /var/log/apt/*.log.* /var/log/installer
find /var/log -type f \( -name '*.gz' -o -name '*.xz' -o -name '*.old' -o -name '*.[0-9]' \) | while read -r path; do
  remove "$path"
done
find /var/log -type f -size +0 | while read -r path; do empty "$path"; done

# The keys that let the build in, last.
if [ -z "$keep_keys" ]; then
  for home in $homes; do
    remove "$home/.ssh/authorized_keys" "$home/.ssh/authorized_keys2"
  done
fi
[ -n "$dry" ] || sync
