#!/bin/sh
# Makes the device nodes that CUDA opens in addition to the GPU's own: /dev/nvidia-uvm and /dev/nvidiactl.
#
# `modprobe nvidia` and nvidia-smi make no /dev/nvidia-uvm, and nvidia-ctk writes into a CDI specification the
# nodes that it finds. NVIDIA's own unit makes them before it since August 2026
# (NVIDIA/nvidia-container-toolkit, issue 50 and pull request 1979). nvidia-modprobe is the driver's tool for
# it; where the driver's packages have it apart, the container toolkit's does the same.
set -eu

if command -v nvidia-modprobe >/dev/null; then
  exec nvidia-modprobe -u -c 0
fi
exec nvidia-ctk system create-device-nodes --control-devices --load-kernel-modules
