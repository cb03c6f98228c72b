#!/bin/bash
# Prints "PID NAME" of each process that has an NVIDIA device open. nvidia-smi lists only those with a CUDA or
# graphics context, and nothing at all while driver and libraries disagree.
set -euo pipefail

readonly proc=${GPUKILN_PROC:-/proc}
readonly devices=${GPUKILN_DEVICES:-/dev/nvidia}

# 1: a process ended meanwhile, or is another user's, whose files only root may see.
files=$(find "$proc"/[0-9]*/fd -maxdepth 1 -lname "$devices*" -printf '%h\n' 2>/dev/null) || (($? == 1))

while read -r fds; do
  pid=${fds%/fd}
  pid=${pid##*/}
  if [[ -z $pid ]] || ! read -r name <"$proc/$pid/comm"; then continue; fi
  # It is restarted with the driver, and no work is lost.
  [[ $name == nvidia-persiste* ]] || echo "$pid $name"
done < <(sort -u <<<"$files")
