#!/bin/bash
# After a CI job (ACTIONS_RUNNER_HOOK_JOB_COMPLETED): ends the processes that the job left on a GPU and says
# which. Without a GPU, or when nothing was left, it says so and succeeds; it fails when one can't be ended.
#
# A process belongs to the job when it is of the runner's own user, has an NVIDIA device open, and
#   - carries this job's RUNNER_TRACKING_ID, or
#   - carries no other job's, runs in the runner's cgroup, and began after the job did.
# All others are left alone: other users' and other runners', nvidia-persistenced, DCGM, other containers.
#
# GPU_JOB_GRACE_S  seconds between SIGTERM and SIGKILL, 10 unless set
# shellcheck source-path=SCRIPTDIR source=gpu-job-common.sh
. "${BASH_SOURCE[0]%/*}/gpu-job-common.sh"

readonly grace_s=${GPU_JOB_GRACE_S:-10}

if ! has_gpu; then
  say "no GPU here: nothing to free"
  exit 0
fi

job_began=
if [[ -r $start_file ]]; then read -r job_began <"$start_file"; fi
if [[ ! $job_began =~ ^[0-9]+$ ]]; then
  job_began=
  say "nobody noted when the job began: only what carries its RUNNER_TRACKING_ID is taken for its own"
fi
own_cgroup=$(cat "$proc/self/cgroup")

is_the_jobs() {
  local pid=$1 id cgroup began
  [[ $(stat -c %u "$proc/$pid" 2>/dev/null) == "$EUID" ]] || return 1
  id=$(tr '\0' '\n' 2>/dev/null <"$proc/$pid/environ" | sed -n 's/^RUNNER_TRACKING_ID=//p') || return 1
  if [[ -n ${RUNNER_TRACKING_ID:-} && $id == "$RUNNER_TRACKING_ID" ]]; then return 0; fi
  # Jobs set it to nothing or to 0 to outlive themselves; another job's has the form that the runner gives it.
  [[ -n $job_began && $id != github_* ]] || return 1
  began=$(started_at "$pid") && ((began >= job_began)) || return 1
  cgroup=$(cat "$proc/$pid/cgroup" 2>/dev/null) || return 1
  [[ $cgroup == "$own_cgroup" || $cgroup == "${own_cgroup%/}/"* ]]
}

# Prints those of the processes (PID NAME) that are the job's, as PID TICKS NAME: a number that was given to a
# new process is noticed by the ticks.
the_jobs() {
  local pid name began
  while read -r pid name; do
    if [[ -n $pid ]] && is_the_jobs "$pid" && began=$(started_at "$pid"); then echo "$pid $began $name"; fi
  done <<<"$1"
}

# Usage: wait_for_the_end SECONDS PROCESSES; prints those that are still there.
wait_for_the_end() {
  local deadline=$((SECONDS + $1)) processes=$2 still pid began name
  while :; do
    still=
    while read -r pid began name; do
      if [[ -n $pid && $(started_at "$pid") == "$began" ]]; then still+="$pid $began $name"$'\n'; fi
    done <<<"$processes"
    processes=${still%$'\n'}
    if [[ -z $processes ]] || ((SECONDS >= deadline)); then break; fi
    sleep 0.2
  done
  echo "$processes"
}

# Usage: send SIGNAL PROCESSES. One that has ended by itself is what was wanted.
send() {
  local pid began name
  while read -r pid began name; do
    if [[ -n $pid && $(started_at "$pid") == "$began" ]]; then kill "-$1" "$pid" || say "$pid is gone"; fi
  done <<<"$2"
}

memory_of() {
  awk -F', *' -v pid="$1" '$1 == pid { mib += $2 } END { if (mib) print " with " mib " MiB" }' <<<"$apps"
}

if ! apps=$(smi --query-compute-apps=pid,used_gpu_memory); then
  annotate warning "Found a GPU that nvidia-smi can't use after the job: ${apps:-no answer in 60 s}."
  apps=
fi

freed=
holders=$(nvidia-gpu-processes)
left=$(the_jobs "$holders")
# One that its parent starts again within a second is found again.
for _ in 1 2 3; do
  [[ -n $left ]] || break
  send TERM "$left"
  stubborn=$(wait_for_the_end "$grace_s" "$left")
  send KILL "$stubborn"
  undying=$(wait_for_the_end 5 "$stubborn")
  while read -r pid began name; do
    if [[ $'\n'$undying == *$'\n'"$pid $began "* ]]; then continue; fi
    how=SIGTERM
    if [[ $'\n'$stubborn == *$'\n'"$pid $began "* ]]; then how=SIGKILL; fi
    freed=yes
    annotate warning "Ended $pid $name with $how: the job left it on the GPU$(memory_of "$pid")."
  done <<<"$left"
  sleep 1
  holders=$(nvidia-gpu-processes)
  left=$(the_jobs "$holders")
done

while read -r pid name; do
  if [[ -z $pid ]] || is_the_jobs "$pid"; then continue; fi
  say "left alone, not the job's: $(describe "$pid" "$name")"
done <<<"$holders"

if [[ -n $left ]]; then
  annotate error "Found $(wc -l <<<"$left") processes of the job on the GPU, and could not end\
 them: ${left//$'\n'/, }. Wanted none. Drain this machine and reboot it."
  exit 1
fi
[[ -n $freed ]] || say "the job left nothing on the GPU"
