#!/bin/bash
# Prints "PID NAME" of each process that has an NVIDIA device open. nvidia-smi lists only those with a CUDA or
# graphics context, and nothing at all while driver and libraries disagree.
set -euo pipefail

readonly proc=${GPUKILN_PROC:-/proc}
readonly devices=${GPUKILN_DEVICES:-/dev/nvidia}

for fds in "$proc"/[0-9]*/fd; do
  pid=${fds%/fd}
  pid=${pid##*/}
  for fd in "$fds"/*; do
    # A process may end between the two looks at it.
    target=$(readlink "$fd") || continue
    if [[ $target == "$devices"* ]]; then
      read -r name <"$proc/$pid/comm" || continue
      # It is restarted with the driver, and no work is lost.
      [[ $name == nvidia-persiste* ]] || echo "$pid $name"
      break
    fi
  done
done
