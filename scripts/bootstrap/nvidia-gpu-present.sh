#!/bin/sh
# Exit 0 when this machine has an NVIDIA GPU on the PCI bus, 1 when not; no driver is needed.
#
#   nvidia-gpu-present [--nvswitch [--or-gpus IDS]] [--mark FILE] [--list]
#
# --nvswitch   look for NVSwitches instead
# --or-gpus    device ids, with commas between: GPUs that stand for their NVSwitches, which are no PCI devices
# --mark FILE  make FILE when there is one, remove it when not; the exit code is 0 in both cases, so that
#              units can have ConditionPathExists=FILE (systemd has no condition on a PCI vendor)
# --list       print the address and device id of each
set -eu

pci=${GPUKILN_PCI_DEVICES:-/sys/bus/pci/devices}
mark=
list=
what=GPU
# Class 0300 is a VGA controller, 0302 a 3D controller, 0680 a bridge. Audio and USB have others.
classes='0x0300 0x0302'
gpus=
while [ $# -gt 0 ]; do
  case $1 in
    --mark) mark=${2:?--mark wants a file}; shift 2 ;;
    --list) list=yes; shift ;;
    --or-gpus) gpus=${2:?--or-gpus wants device ids}; shift 2 ;;
    --nvswitch) what=NVSwitch; classes=0x0680; shift ;;
    *)
      echo "nvidia-gpu-present: unknown option '$1'; wanted --nvswitch, --or-gpus IDS, --mark FILE, --list" >&2
      exit 2
      ;;
  esac
done

found=1
for device in "$pci"/*; do
  [ -r "$device/vendor" ] || continue
  read -r vendor <"$device/vendor"
  # 10de is NVIDIA.
  [ "$vendor" = 0x10de ] || continue
  read -r class <"$device/class"
  read -r id <"$device/device"
  there=
  for wanted in $classes; do
    case $class in "$wanted"*) there=yes ;; esac
  done
  case ,$gpus, in *",$id,"*) there=yes ;; esac
  if [ -n "$there" ]; then
    found=0
    if [ -n "$list" ]; then
      echo "${device##*/} $id"
    fi
  fi
done

if [ -n "$mark" ]; then
  if [ "$found" = 0 ]; then
    : >"$mark"
    echo "NVIDIA $what present"
  else
    rm -f -- "$mark"
    echo "no NVIDIA $what on the PCI bus"
  fi
  exit 0
fi
exit "$found"
