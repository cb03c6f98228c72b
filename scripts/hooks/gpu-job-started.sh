#!/bin/bash
# Before a CI job (ACTIONS_RUNNER_HOOK_JOB_STARTED): refuses to start it on a GPU that can't be used. Notes
# when it starts, so that gpu-job-completed.sh knows what is its. Without a GPU it says so and succeeds.
#
# CUDA_VISIBLE_DEVICES    the GPUs of this runner, as indexes or UUIDs; unset: all of the machine
# GPU_JOB_MAX_MEMORY_MIB  what may be in use on an idle GPU (a desktop, the driver's own), 1024 unless set
# shellcheck source-path=SCRIPTDIR source=gpu-job-common.sh
. "${BASH_SOURCE[0]%/*}/gpu-job-common.sh"

readonly max_mib=${GPU_JOB_MAX_MEMORY_MIB:-1024}
readonly visible=${CUDA_VISIBLE_DEVICES-all}

started_at $$ >"$start_file"

if ! has_gpu || [[ -z $visible || $visible == -1* ]]; then
  say "no GPU for this runner: nothing to check"
  exit 0
fi

fields=index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending
if ! gpus=$(smi "--query-gpu=$fields,reset_status.reset_required"); then
  annotate error "Found a GPU that nvidia-smi can't use: ${gpus:-no answer in 60 s}. Wanted a working driver.\
 Drain this machine and reboot it; journalctl -k has the driver's reason."
  exit 1
fi
if [[ $visible == *MIG-* ]]; then
  say "MIG instances: only the driver is checked, what is used is counted for the whole GPU"
  exit 0
fi
# Only for the text below: whether a GPU is in use is decided by the GPUs' own numbers.
apps=$(smi --query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name) || apps=

users_of() {
  local uuid pid mib name found=
  while IFS=, read -r uuid pid mib name; do
    [[ $uuid == "$1" ]] || continue
    found+="${found:+, }$(describe "${pid# }" "${name# }") with$mib MiB"
  done <<<"$apps"
  echo "${found:-nobody that can be seen from here}"
}

# Usage: is_mine INDEX UUID
is_mine() {
  local one
  [[ $visible != all ]] || return 0
  for one in ${visible//,/ }; do
    if [[ $one == "$1" || $2 == "$one"* ]]; then return 0; fi
  done
  return 1
}

unusable=0
# Usage: refuse INDEX WHAT NEXT-STEP
refuse() {
  unusable=1
  annotate error "Found GPU $1 $2. $3"
}

mine=0
while IFS=, read -r index uuid used ecc pending reset; do
  uuid=${uuid# } used=${used# } ecc=${ecc# } pending=${pending# } reset=${reset# }
  is_mine "$index" "$uuid" || continue
  mine=1
  # A board without a feature answers with words, which are no trouble; a broken one answers with these.
  case $uuid$used$ecc$pending$reset in
    *lost*) refuse "$index" "lost, wanted a working one" "Reboot this machine." ;;
    *"requires reset"*) reset=Yes ;;
  esac
  if [[ $reset == Yes || $pending == Yes ]]; then
    refuse "$index" "in need of a reset, wanted a working one" \
      "Drain this machine and run nvidia-smi --gpu-reset -i $index, or reboot."
  elif [[ $ecc =~ ^[0-9]+$ ]] && ((ecc > 0)); then
    refuse "$index" "with $ecc uncorrected memory errors since its driver was loaded, wanted none" \
      "Drain this machine and run nvidia-smi --gpu-reset -i $index; if they come back, replace the board."
  fi
  if [[ $used =~ ^[0-9]+$ ]] && ((used > max_mib)); then
    refuse "$index" "with $used MiB in use by $(users_of "$uuid"), wanted at most $max_mib before a job" \
      "End that on the machine, or give this runner another GPU."
  else
    say "GPU $index: $used MiB in use, by $(users_of "$uuid")"
  fi
done <<<"$gpus"

if ((mine == 0)); then
  annotate error "Found no GPU of CUDA_VISIBLE_DEVICES=$visible, wanted this runner's own; nvidia-smi lists\
 ${gpus//$'\n'/; }. Correct the runner's environment."
  exit 1
fi
exit "$unusable"
