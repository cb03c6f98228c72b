#!/bin/bash
# Readies a GPU node at boot, before containers and the kubelet start. Safe to run again.
#
#   1. no NVIDIA GPU on the PCI bus: says so and succeeds
#   2. loads the driver and waits until it lists every GPU
#   3. persistence on (nvidia-persistenced; the kernel's own mode where that is missing)
#   4. the CDI specification, where the container toolkit is installed
#   5. node labels for the kubelet
#
# What fails is said on the console and in the journal, and the unit fails.
# Settings, from /etc/gpukiln/bootstrap.env: WAIT_S, NODE_LABELS (name=value,...).
set -Eeuo pipefail

readonly wait_s=${WAIT_S:-180}
readonly labels=${NODE_LABELS:-}
readonly run=${GPUKILN_RUN:-/run/gpukiln}
readonly nodeadm=${GPUKILN_NODEADM:-/etc/eks/nodeadm.d}
readonly cdi=${GPUKILN_CDI:-/var/run/cdi/nvidia.yaml}

say() { echo "gpukiln: $*"; }

fail() {
  say "FAILED: $*" >&2
  # The console's output is what a cloud shows of a machine that nobody can log in to.
  if [[ -w /dev/console ]]; then echo "gpukiln-bootstrap: FAILED: $*" >/dev/console; fi
  exit 1
}
trap 'fail "unexpected error in line $LINENO: $BASH_COMMAND"' ERR

gpus=$(nvidia-gpu-present --list) || {
  status=$?
  [[ $status == 1 ]] || fail "nvidia-gpu-present exits $status"
  say "no NVIDIA GPU on the PCI bus: nothing to do"
  exit 0
}
wanted=$(wc -l <<<"$gpus")
say "$wanted GPU(s) on the PCI bus: ${gpus//$'\n'/, }"

# Waits twice as long after each try, 8 s at most. nvidia-smi prints its errors on stdout.
wait_for_driver() {
  local started=$SECONDS pause=1 out listed
  while :; do
    if out=$(modprobe nvidia 2>&1) && out=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1); then
      listed=$(wc -l <<<"$out")
      if ((listed == wanted)); then
        say "driver ready after $((SECONDS - started)) s: ${out//$'\n'/; }"
        driver=${out##*, }
        return
      fi
      out="nvidia-smi lists $listed of $wanted GPUs"
    fi
    if ((SECONDS - started + pause > wait_s)); then
      fail "the driver is not ready after $((SECONDS - started)) s: ${out//$'\n'/; }"
    fi
    sleep "$pause"
    ((pause = pause < 8 ? pause * 2 : 8))
  done
}

persistence_is_on() {
  local modes
  modes=$(nvidia-smi --query-gpu=persistence_mode --format=csv,noheader)
  ! grep -qv '^Enabled$' <<<"$modes"
}

set_persistence() {
  if persistence_is_on; then
    say "persistence is on"
    return
  fi
  # With the daemon running the call is passed to it.
  nvidia-smi -pm 1 >/dev/null
  persistence_is_on || fail "persistence is off after nvidia-smi -pm 1"
  say "persistence switched on"
}

write_cdi() {
  if ! command -v nvidia-ctk >/dev/null; then
    say "no container toolkit: no CDI specification"
    return
  fi
  mkdir -p "${cdi%/*}"
  # Written beside and moved, so that an engine never reads half of it.
  nvidia-ctk cdi generate --format=yaml --output="$cdi.new.yaml" 2>"$run/cdi.log" ||
    fail "nvidia-ctk cdi generate: $(tail -n 3 "$run/cdi.log")"
  mv -f "$cdi.new.yaml" "$cdi"
  say "CDI specification $cdi"
}

write_labels() {
  local all="nvidia.com/gpu.present=true,gpukiln/driver=$driver${labels:+,$labels}"
  printf '%s\n' "$all" >"$run/node-labels.new"
  mv -f "$run/node-labels.new" "$run/node-labels"
  if [[ -d $nodeadm ]]; then
    cat >"$nodeadm/50-gpukiln.yaml.new" <<YAML
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  kubelet:
    flags:
      - --node-labels=$all
YAML
    mv -f "$nodeadm/50-gpukiln.yaml.new" "$nodeadm/50-gpukiln.yaml"
  fi
  say "node labels $all"
}

mkdir -p "$run"
driver=
wait_for_driver
set_persistence
write_cdi
write_labels
say "node is ready"
