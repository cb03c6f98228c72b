#!/bin/bash
# Has DKMS build and install the driver's modules for kernels that have none, several at a time.
#
#   build-modules.sh MODULE VERSION KERNEL...
#
# All builds of a module in one tree of DKMS use the same folder of it (DKMS 3.0.10). So where there are
# several, each gets a tree of its own, and what it compiled is moved to where DKMS looks for what is built.
set -euo pipefail

module=$1 version=$2
shift 2
tree=/var/lib/dkms/$module/$version
# Always the same: its name is in what is compiled. DKMS does not look at it, and a rename is enough.
work=/var/lib/dkms/.building
rm -rf "$work"
mkdir "$work"
# No debugging symbols (docs.kernel.org/kbuild/kbuild.html, KCFLAGS): DKMS strips them from what it installs
# (dkms(8), STRIP), and without them driver 535 takes 160 s of processor time in place of 178 s.
export KCFLAGS="${KCFLAGS:+$KCFLAGS }-g0"
trap 'jobs -rp | xargs --no-run-if-empty kill; rm -rf "$work"' EXIT

is_built() {
  [[ $(dkms status -m "$module" -v "$version" -k "$1") == *": "@(built|installed)* ]]
}

# Once it compiles there is a make.log; it is moved when everything is compiled.
make_log() {
  local file
  for file in "$work/$1/$module/$version"/{build,"$1"/*/*}/make.log "$tree"/{build,"$1"/*/*}/make.log; do
    [[ ! -f $file ]] || { echo "$file"; break; }
  done
}

build() {
  local kernel=$1 tree_of_its_own=$work/$1
  mkdir "$tree_of_its_own"
  if dkms build --dkmstree "$tree_of_its_own" -m "$module" -v "$version" -k "$kernel" -j "$jobs_each" \
    >"$work/$kernel.log" 2>&1; then
    rm -rf "${tree:?}/$kernel" # an interrupted build's
    mv "$tree_of_its_own/$module/$version/$kernel" "$tree/$kernel"
  fi
}

missing=()
for kernel; do is_built "$kernel" || missing+=("$kernel"); done
if ((${#missing[@]} > 1)); then
  cores=$(nproc)
  at_once=$((${#missing[@]} < cores ? ${#missing[@]} : cores))
  jobs_each=$((cores / at_once))
  echo "building $module/$version for ${#missing[@]} kernels, $at_once at a time with $jobs_each jobs each"
  for kernel in "${missing[@]}"; do
    while (($(jobs -rp | wc -l) >= at_once)); do wait -n; done
    build "$kernel" &
    # Before it compiles DKMS makes the pair that it signs with, if there is none: not two at a time.
    while kill -0 $! 2>/dev/null && [[ -z $(make_log "$kernel") ]]; do sleep 0.2; done
  done
  wait
fi

failed=0
for kernel; do
  # What could not be built is not tried again; one kernel alone is built here.
  if [[ ! -d $work/$kernel ]] || is_built "$kernel"; then
    if dkms autoinstall --kernelver "$kernel" >"$work/$kernel.log" 2>&1; then
      echo "$module/$version for $kernel: installed"
      continue
    fi
  fi
  failed=1
  log=$(make_log "$kernel")
  {
    echo "build-modules: DKMS has no $module/$version for $kernel. It said:"
    tail -n 5 "$work/$kernel.log"
    if [[ -n $log ]]; then
      cp "$log" "/var/log/dkms-$kernel.log"
      # The first errors: what a compiler says after them comes of them.
      echo "Its make.log is kept as /var/log/dkms-$kernel.log, and begins to fail with:"
      grep -m 5 -E '(^|[^[:alnum:]_-])error: ' "$log" || tail -n 6 "$log"
    fi
  } >&2
done
exit "$failed"
