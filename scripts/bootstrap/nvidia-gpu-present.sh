#!/bin/sh
# Exit 0 when this machine has an NVIDIA GPU on the PCI bus, 1 when not; no driver is needed.
#
#   nvidia-gpu-present [--mark FILE] [--list]
#
# --mark FILE  make FILE when there is a GPU, remove it when not; the exit code is 0 in both cases, so that
#              units can have ConditionPathExists=FILE (systemd has no condition on a PCI vendor)
# --list       print the address and device id of each GPU
set -eu

pci=${GPUKILN_PCI_DEVICES:-/sys/bus/pci/devices}
mark=
list=
while [ $# -gt 0 ]; do
  case $1 in
    --mark) mark=${2:?--mark wants a file}; shift 2 ;;
    --list) list=yes; shift ;;
    *) echo "nvidia-gpu-present: unknown option '$1'; wanted --mark FILE or --list" >&2; exit 2 ;;
  esac
done

found=1
for device in "$pci"/*; do
  [ -r "$device/vendor" ] && [ -r "$device/class" ] || continue
  read -r vendor <"$device/vendor"
  read -r class <"$device/class"
  # 10de is NVIDIA; class 0300 a VGA controller, 0302 a 3D controller. Audio and bridges have others.
  case $vendor$class in
    0x10de0x0300* | 0x10de0x0302*)
      found=0
      if [ -n "$list" ]; then
        read -r id <"$device/device"
        echo "${device##*/} $id"
      fi
      ;;
  esac
done

if [ -n "$mark" ]; then
  if [ "$found" = 0 ]; then
    : >"$mark"
    echo "NVIDIA GPU present"
  else
    rm -f -- "$mark"
    echo "no NVIDIA GPU on the PCI bus"
  fi
  exit 0
fi
exit "$found"
