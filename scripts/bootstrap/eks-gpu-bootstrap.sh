#!/bin/bash
# Readies a GPU node at boot, before containers, user data and the kubelet start. Safe to run again.
#
#   1. no NVIDIA GPU on the PCI bus: says so and succeeds
#   2. loads the driver and waits until it lists every GPU
#   3. persistence on (nvidia-persistenced; the kernel's own mode where that is missing)
#   4. the device nodes of CUDA and the CDI specification, where the container toolkit is installed
#   5. node labels for the kubelet: $run/node-labels, and a drop-in where the image has nodeadm
#
# What fails is said on stderr, which the unit sends to the console, and the unit fails.
# Settings, from /etc/gpukiln/bootstrap.env: WAIT_S, NODE_LABELS (name=value,...).
set -Eeuo pipefail

readonly wait_s=${WAIT_S:-180}
readonly labels=${NODE_LABELS:-}
readonly run=${GPUKILN_RUN:-/run/gpukiln}
readonly nodeadm=${GPUKILN_NODEADM:-/etc/eks/nodeadm.d}
readonly cdi=${GPUKILN_CDI:-/var/run/cdi/nvidia.yaml}

say() { echo "gpukiln: $*"; }

fail() {
  echo "gpukiln-bootstrap: FAILED: $*" >&2
  exit 1
}
trap 'fail "unexpected error in line $LINENO: $BASH_COMMAND"' ERR

# A GPU that fell off the bus can make a command hang; seconds come first.
within() { timeout --kill-after=5 "$@"; }

# Readers never see half a file: it is written under a name that they ignore, and renamed.
write() {
  local file=$1
  mkdir -p "${file%/*}"
  cat >"$file.new"
  chmod 0644 "$file.new"
  mv -f "$file.new" "$file"
}

# Waits twice as long after each try, 8 s at most. nvidia-smi prints its errors on stdout.
wait_for_driver() {
  local wanted=$1 started=$SECONDS pause=1 left out listed
  while :; do
    left=$((wait_s - (SECONDS - started)))
    if ((left < 1)); then
      fail "the driver is not ready after $((SECONDS - started)) s: ${out//$'\n'/; }"
    fi
    if out=$(within "$left" modprobe nvidia 2>&1) &&
      out=$(within "$left" nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1); then
      listed=$(wc -l <<<"$out")
      if ((listed == wanted)); then
        say "driver ready after $((SECONDS - started)) s: ${out//$'\n'/; }"
        driver=${out##*, }
        return
      fi
      out="nvidia-smi lists $listed of $wanted GPUs"
    fi
    : "${out:=no answer from modprobe or nvidia-smi}"
    sleep "$pause"
    ((pause = pause < 8 ? pause * 2 : 8))
  done
}

persistence_is_on() {
  local modes
  modes=$(within 60 nvidia-smi --query-gpu=persistence_mode --format=csv,noheader)
  ! grep -qv '^Enabled$' <<<"$modes"
}

set_persistence() {
  local out
  if persistence_is_on; then
    say "persistence is on"
    return
  fi
  # With the daemon running the call is passed to it.
  out=$(within 60 nvidia-smi -pm 1 2>&1) || fail "nvidia-smi -pm 1: ${out//$'\n'/; }"
  persistence_is_on || fail "persistence is off after nvidia-smi -pm 1"
  say "persistence switched on"
}

# To standard output: nvidia-ctk adds .yaml to other names that it is given, and engines read every .yaml.
write_cdi() {
  local spec out
  if ! command -v nvidia-ctk >/dev/null; then
    say "no container toolkit: no CDI specification"
    return
  fi
  out=$(within 60 nvidia-device-nodes 2>&1) || fail "nvidia-device-nodes exits $?: ${out//$'\n'/; }"
  spec=$(within 120 nvidia-ctk cdi generate --format=yaml 2>"$run/cdi.log") ||
    fail "nvidia-ctk cdi generate: $(tail -n 3 "$run/cdi.log")"
  # It holds paths of the driver's libraries, by version.
  [[ $spec == *".so.$driver"* ]] ||
    fail "Found driver $driver loaded and none of its libraries in the CDI specification, wanted both of one \
version. Reboot, or install the libraries of $driver."
  [[ $spec =~ /dev/nvidia-uvm([^-]|$) ]] ||
    fail "Found no /dev/nvidia-uvm in the CDI specification, wanted it: CUDA starts in no container without \
it. \`nvidia-modprobe -u -c 0\` makes it; \`journalctl -k\` says why the module nvidia-uvm does not load."
  if [[ -e $cdi ]] && ! grep -qF ".so.$driver" "$cdi"; then
    say "$cdi is of another driver: written anew"
  fi
  write "$cdi" <<<"$spec"
  say "CDI specification $cdi"
}

# nodeadm-run merges the drop-ins anew after user data; flags are appended to those of the user's NodeConfig.
write_labels() {
  local all="nvidia.com/gpu.present=true,gpukiln/driver=$driver${labels:+,$labels}"
  write "$run/node-labels" <<<"$all"
  if [[ -d $nodeadm ]]; then
    write "$nodeadm/50-gpukiln.yaml" <<YAML
apiVersion: node.eks.aws/v1alpha1
kind: NodeConfig
spec:
  kubelet:
    flags:
      - --node-labels=$all
YAML
  fi
  say "node labels $all"
}

# An earlier boot's, or another machine's whose disk this was: a node without a driver must not ask for GPU work.
rm -f "$nodeadm/50-gpukiln.yaml"

[[ $wait_s =~ ^[1-9][0-9]*$ ]] || fail "Found WAIT_S=$wait_s, wanted a number of seconds. Correct it."

gpus=$(nvidia-gpu-present --list) || {
  status=$?
  [[ $status == 1 ]] || fail "nvidia-gpu-present exits $status"
  say "no NVIDIA GPU on the PCI bus: nothing to do"
  exit 0
}
say "$(wc -l <<<"$gpus") GPU(s) on the PCI bus: ${gpus//$'\n'/, }"

mkdir -p "$run"
driver=
wait_for_driver "$(wc -l <<<"$gpus")"
set_persistence
write_cdi
write_labels
say "node is ready"
