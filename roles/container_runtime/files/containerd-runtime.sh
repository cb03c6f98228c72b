#!/bin/sh
# Makes a runtime known in containerd's main file, whoever wrote it, and changes nothing else there. systemd runs
# it before containerd: on Ubuntu's EKS images /etc/eks/bootstrap.sh writes that file anew when a node joins.
#
#   gpukiln-containerd-runtime NAME BINARY default|extra [FILE]
#
# In the file itself and not in a drop-in: before containerd 2.1 a drop-in replaces the plug-in's whole table, and
# with it the pause image that the join script has just written (containerd/containerd#5837).
set -eu
export LC_ALL=C

name=$1 binary=$2 place=$3 file=${4:-/etc/containerd/config.toml}
mkdir -p "$(dirname "$file")"
# In the same folder, so that a rename replaces the file.
new=$(mktemp "$file.XXXXXX")
old=$(mktemp)
trap 'rm -f "$new" "$old"' EXIT

# Every containerd reads schema 2.
if [ -s "$file" ]; then cat "$file"; else echo "version = 2"; fi >"$old"

# Read twice: the first time for the schema and for runc's cgroup driver, which is the kubelet's.
awk -v name="$name" -v binary="$binary" -v place="$place" '
  function table_of(line) {
    gsub(/^[ \t]*\[|\][ \t]*(#.*)?$|["\047 \t]/, "", line)
    return line
  }
  function key_of(line) {
    sub(/[ \t]*=.*/, "", line)
    sub(/^[ \t]*/, "", line)
    return line
  }
  function value_of(line) {
    sub(/^[^=]*=[ \t]*/, "", line)
    sub(/[ \t]*(#.*)?$/, "", line)
    return line
  }
  function want(table, key, value) {
    if (!(table in wanted)) { order[++tables] = table; headers[table] = header }
    wanted[table] = wanted[table] key " = " value "\n"
    own[table, key] = 1
  }
  function decide(   plugin, base, options) {
    plugin = schema >= 3 ? "io.containerd.cri.v1.runtime" : schema == 2 ? "io.containerd.grpc.v1.cri" : "cri"
    top = "plugins." plugin ".containerd"
    base = header = "plugins.\"" plugin "\".containerd"
    if (place == "default") want(top, "default_runtime_name", "\"" name "\"")
    # A table of runtimes takes the place of the one that containerd has of itself.
    header = base ".runtimes.runc"
    if (!((top ".runtimes.runc") in seen)) want(top ".runtimes.runc", "runtime_type", "\"io.containerd.runc.v2\"")
    header = base ".runtimes." name
    want(top ".runtimes." name, "runtime_type", "\"io.containerd.runc.v2\"")
    header = header ".options"
    options = top ".runtimes." name ".options"
    want(options, "BinaryName", "\"" binary "\"")
    if ((top ".runtimes.runc.options") in cgroup)
      want(options, "SystemdCgroup", cgroup[top ".runtimes.runc.options"])
  }
  BEGIN { schema = 1 }
  FNR == 1 { current = "" }
  FNR == 1 && NR > 1 { decide() }
  /^[ \t]*\[[^][]+\][ \t]*(#.*)?$/ { current = table_of($0) }
  /^[ \t]*\[\[[^][]+\]\]/ { current = "an array of tables" }
  NR == FNR {
    seen[current] = 1
    if (current == "" && key_of($0) == "version") schema = value_of($0) + 0
    if (key_of($0) == "SystemdCgroup") cgroup[current] = value_of($0)
    next
  }
  !((current, key_of($0)) in own)
  current in wanted && !(current in done) { printf "%s", wanted[current]; done[current] = 1 }
  END {
    for (number = 1; number <= tables; number++)
      if (!(order[number] in done)) printf "\n[%s]\n%s", headers[order[number]], wanted[order[number]]
  }
' "$old" "$old" >"$new"

if cmp -s "$new" "$file"; then exit 0; fi

# What containerd makes of it, before it is put into its place.
if ! said=$(containerd --config "$new" config dump 2>&1) ||
  ! printf '%s\n' "$said" | grep -q "runtimes\.[\"']*${name}[\"']*\]"; then
  echo "gpukiln: found that the runtime $name can't be added to $file, wanted Kubernetes' plug-in in tables with" \
    "headers. containerd says: $(printf '%s\n' "$said" | tail -n 3). Add the runtime to what writes the file, and" \
    "remove /etc/systemd/system/containerd.service.d/gpukiln.conf." >&2
  exit 1
fi
chmod 0644 "$new"
mv "$new" "$file"
