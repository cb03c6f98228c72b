#!/bin/bash
# What the two hooks of a CI runner share. Sourced, not run.
#
# RUNNER_TEMP  where the start of the job is noted (GitHub's runner sets it); else the home folder
set -euo pipefail

readonly proc=${GPUKILN_PROC:-/proc}
readonly devices=${GPUKILN_DEVICES:-/dev/nvidia}
readonly present=${GPUKILN_GPU_PRESENT:-/run/nvidia-gpu-present}
readonly journal=${GPUKILN_JOURNAL:-/dev/log}
# Read by the scripts that source this one.
# shellcheck disable=SC2034
readonly start_file=${RUNNER_TEMP:-$HOME}/gpukiln-job-started

# The job's log goes with the job; the machine keeps its own, where it has one.
log() {
  if [[ -S $journal ]]; then
    logger -u "$journal" -t gpukiln-ci -- "${RUNNER_NAME:-runner}: $*" ||
      echo "gpukiln: the journal was not written" >&2
  fi
}

say() {
  echo "gpukiln: $*"
  log "$*"
}

# Usage: annotate warning|error TEXT. GitHub shows it next to the job. The text may hold a process' name, which
# must not begin another command.
annotate() {
  local text=${2//'%'/%25}
  text=${text//$'\r'/%0D}
  echo "::$1 title=GPU::${text//$'\n'/%0A}"
  log "$2"
}

# A host is marked at boot, so that a driver that did not load is seen; a container has its devices.
has_gpu() { [[ -e $present ]] || compgen -G "${devices}[0-9]*" >/dev/null; }

# A GPU that fell off the bus can make it hang. It prints its errors on stdout.
smi() { timeout --kill-after=5 60 nvidia-smi "$@" --format=csv,noheader,nounits 2>&1; }

# When a process began, in clock ticks since the machine's start; fails when it is gone, or a zombie.
started_at() {
  local stat
  stat=$(cat "$proc/$1/stat" 2>/dev/null) || return 1
  # The name, in brackets, may hold anything.
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[0]} != Z ]] || return 1
  echo "${stat[19]}"
}

# Usage: describe PID NAME
describe() {
  local owner
  owner=$(stat -c %U "$proc/$1" 2>/dev/null) || owner="not seen from here"
  echo "$1 $2 (user $owner)"
}
