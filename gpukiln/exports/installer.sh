#!/bin/sh
# Writes an image to one disk of this machine, reads back what it wrote, and writes nothing unless the disk's
# name, serial number and size were named and are right: typed, or as gpukiln.device=, gpukiln.serial= and
# gpukiln.size= on the kernel's command line.
#
# Next to it: settings (rendered by installer.py) and map, whose lines are offset and length in bytes of what is
# not zero in the image. GPUKILN_SYS, GPUKILN_DEV and GPUKILN_PROC name other trees than /sys, /dev and /proc.
# Exit codes: 0 written and read back; 1 written, and not what it should be; 4 a tool or the image is missing;
# 6 refused, nothing was written.
set -u

here=$(dirname "$0")
sys=${GPUKILN_SYS:-/sys} dev=${GPUKILN_DEV:-/dev} proc=${GPUKILN_PROC:-/proc}
image='' raw_bytes='' raw_zst='' zst_sha256='' data_sha256='' table='' label='' url=''
# shellcheck source=/dev/null
. "$here/settings"

tries=3
end=$((1 << 20)) # bytes at a larger disk's end where RAID and ZFS keep what they know it by
medium=''

say() { printf '%s\n' "$*"; }

refuse() {
  say "Refused: $*"
  say "Nothing was written."
  exit 6
}

# Value of a word of the kernel's command line.
argument() {
  tr -s ' ' '\n' <"$proc/cmdline" | sed -n "s/^$1=//p" | tail -n 1
}

trimmed() { sed 's/^ *//; s/ *$//' "$1" | tr -d '\000' | head -n 1; }

first_of() {
  disk=$1
  shift
  for name in "$@"; do
    if [ -r "$sys/block/$disk/$name" ]; then
      trimmed "$sys/block/$disk/$name"
      return
    fi
  done
}

bytes_of() { echo $(($(cat "$sys/block/$1/size") * 512)); } # sysfs counts in 512 bytes, whatever the disk does

# As printed on disks: 512.1GB is 512.1 * 10^9 bytes.
size_of() {
  tenths=$((($(bytes_of "$1") + 50000000) / 100000000))
  echo "$((tenths / 10)).$((tenths % 10))GB"
}

# virtio and NVMe have it in sysfs; of SATA, SAS and USB udev asked the disk. `none` where it has none.
serial_of() {
  serial=$(first_of "$1" serial device/serial)
  if [ -z "$serial" ]; then
    properties=$(udevadm info --query=property --name="$dev/$1" 2>&1) || properties=''
    for key in ID_SCSI_SERIAL ID_SERIAL_SHORT; do
      [ -n "$serial" ] || serial=$(printf '%s\n' "$properties" | sed -n "s/^$key=//p")
    done
  fi
  echo "${serial:-none}"
}

disks() {
  for path in "$sys"/block/*; do
    case ${path##*/} in
      loop* | ram* | zram* | sr* | fd* | dm-* | md* | nbd* | '*') ;;
      *) [ "$(cat "$path/size")" = 0 ] || echo "${path##*/}" ;;
    esac
  done
}

list() {
  printf '%-12s %-10s %-28s %s\n' device size model serial
  for disk in $(disks); do
    printf '%-12s %-10s %-28s %s\n' "$disk" "$(size_of "$disk")" "$(first_of "$disk" device/model)" "$(serial_of "$disk")"
  done
}

# The whole disk that a device is, or is part of.
disk_of() {
  name=${1##*/}
  if [ -e "$sys/class/block/$name/partition" ]; then
    name=$(basename "$(dirname "$(readlink -f "$sys/class/block/$name")")")
  fi
  echo "$name"
}

# Why a disk is not written to; nothing where it can be.
why_not() {
  if [ ! -d "$sys/block/$1" ]; then
    if [ -n "$1" ] && [ -e "$sys/class/block/$1/partition" ]; then
      echo "$1 is a partition of $(disk_of "$1"); a whole disk is wanted"
    else
      echo "there is no disk '$1' here; wanted is one of: $(disks | tr '\n' ' ')"
    fi
  elif ! disks | grep -qx "$1"; then
    echo "$1 is no disk that a machine starts from; wanted is one of: $(disks | tr '\n' ' ')"
  elif [ "$1" = "$medium" ]; then
    echo "$1 is the medium that this installer was started from"
  elif [ "$(cat "$sys/block/$1/ro")" != 0 ]; then
    echo "$1 can only be read"
  elif [ "$(bytes_of "$1")" -lt "$raw_bytes" ]; then
    echo "$1 has $(bytes_of "$1") bytes, the image needs $raw_bytes"
  else
    for path in "$sys/block/$1" "$sys/block/$1/$1"*; do
      [ -e "$path/dev" ] || continue
      if grep -q "^[0-9]* [0-9]* $(cat "$path/dev") " "$proc/self/mountinfo"; then
        echo "${path##*/} is mounted"
      elif grep -q "/${path##*/} " "$proc/swaps"; then
        echo "${path##*/} is swapped to"
      elif set -- "$path/holders/"* && [ -e "$1" ]; then
        echo "${path##*/} is part of ${1##*/}"
      else
        continue
      fi
      break
    done
  fi
}

size_matches() { [ "$2" = "$(size_of "$1")" ] || [ "$2" = "$(bytes_of "$1")" ]; }

chosen=''
choose_unattended() {
  device=$(argument gpukiln.device) serial=$(argument gpukiln.serial) size=$(argument gpukiln.size)
  [ -n "$device$serial$size" ] || return 1
  list
  for pair in "device=$device" "serial=$serial" "size=$size"; do
    [ -n "${pair#*=}" ] || refuse "gpukiln.${pair%=} is not on the kernel's command line, and all of device, serial and size are wanted"
  done
  chosen=${device#/dev/}
  reason=$(why_not "$chosen")
  [ -z "$reason" ] || refuse "$reason"
  [ "$serial" = "$(serial_of "$chosen")" ] || refuse "$chosen has the serial number '$(serial_of "$chosen")', gpukiln.serial is '$serial'"
  size_matches "$chosen" "$size" || refuse "$chosen has $(bytes_of "$chosen") bytes ($(size_of "$chosen")), gpukiln.size is '$size'"
}

choose_by_asking() {
  list
  while [ "$tries" -gt 0 ]; do
    printf 'Device to be overwritten: '
    IFS= read -r device || break
    chosen=${device#/dev/}
    reason=$(why_not "$chosen")
    if [ -z "$reason" ]; then
      printf 'Its serial number, as above: '
      IFS= read -r serial || break
      printf 'Its size, as above or in bytes: '
      IFS= read -r size || break
      if [ "$serial" != "$(serial_of "$chosen")" ]; then
        reason="$chosen has another serial number than '$serial'"
      elif ! size_matches "$chosen" "$size"; then
        reason="$chosen has another size than '$size'"
      else
        return
      fi
    fi
    say "$reason"
    tries=$((tries - 1))
  done
  refuse "no disk was named three times"
}

find_medium() {
  found=''
  for _ in $(seq "${GPUKILN_WAIT_S:-30}"); do
    found=$(blkid --cache-file /dev/null --match-token "LABEL=$label" --output device | head -n 1)
    [ -z "$found" ] || break
    sleep 1
  done
  [ -n "$found" ] || {
    say "The medium with the label $label is not seen by this kernel: it may lack the driver of USB or CD drives."
    say "Make the installer with an address to fetch the image from instead. Nothing was written."
    exit 4
  }
  medium=$(disk_of "$found")
}

# The image, packed, on standard output.
packed() {
  if [ -n "$url" ]; then wget -q -O - "$url"; else cat "$here/medium/$raw_zst"; fi
}

write() {
  target=$dev/$1 size=$(bytes_of "$1")
  # opens the disk for itself alone: fails where somebody uses it
  blkdiscard --zeroout --length "$raw_bytes" "$target" || refuse "$1 is in use, or can't be written to"
  if [ "$((size - raw_bytes))" -ge "$end" ]; then
    blkdiscard --zeroout --offset "$((size - end))" "$target" || return 1
  fi
  packed | zstd --decompress --stdout --sparse --no-progress >"$target" || return 1
  sync
  blockdev --flushbufs "$target"
}

read_back() {
  while read -r offset length; do
    dd if="$1" bs=1M iflag=skip_bytes,count_bytes skip="$offset" count="$length" status=none || return 1
  done <"$here/map" | sha256sum | cut -d ' ' -f 1
}

say "gpukiln: writes $image ($raw_bytes bytes) to one disk of this machine; all that is on it goes."
if [ -z "$url" ]; then
  find_medium
  mkdir -p "$here/medium"
  mount -o ro "$found" "$here/medium" || exit 4
  trap 'umount "$here/medium"' EXIT
fi
choose_unattended || choose_by_asking
if [ -z "$url" ]; then
  say "Reading the image of the medium ..."
  [ "$(sha256sum <"$here/medium/$raw_zst")" = "$zst_sha256  -" ] || refuse "the image on the medium is damaged: another SHA-256 than $zst_sha256"
fi
say "Writing $chosen ..."
if ! write "$chosen"; then
  say "Failed: $chosen is not whole. Start the installer again."
  exit 1
fi
say "Reading $chosen back ..."
found=$(read_back "$dev/$chosen")
if [ "$found" != "$data_sha256" ]; then
  say "Failed: what was read back has the SHA-256 $found, wanted $data_sha256. The disk, or the way to it, is not to be trusted."
  exit 1
fi
if [ "$table" = gpt ]; then
  # the second copy of the partition table belongs at the end of the disk, which is larger than the image's
  sgdisk --move-second-header "$dev/$chosen" >"$here/sgdisk.log" 2>&1 && sgdisk --verify "$dev/$chosen" >>"$here/sgdisk.log" 2>&1
  grep -q '^No problems found' "$here/sgdisk.log" || {
    cat "$here/sgdisk.log"
    say "Failed: the partition table of $chosen can't be finished."
    exit 1
  }
fi
say "Done: $chosen has $image, SHA-256 of its data $data_sha256."
