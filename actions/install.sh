#!/usr/bin/env bash
# Has `gpukiln` on PATH for the steps after this one: a step before it installed it, or it is installed now,
# as it is at the action's own commit, with the versions of requirements.lock.
set -euo pipefail

if command -v gpukiln >/dev/null; then
  exit
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: found $(python3 --version), wanted Python 3.11 or newer" >&2
  echo "next: a step with actions/setup-python before this action" >&2
  exit 4
fi
# Without hashes: pip would want one of the checkout itself, too.
grep -oE '^[A-Za-z0-9._-]+(\[[^]]*\])?==[^ ;]+' "$root/requirements.lock" | sed 's/\[[^]]*\]//' \
  >"$RUNNER_TEMP/gpukiln-pins.txt"
python3 -m venv "$RUNNER_TEMP/gpukiln"
"$RUNNER_TEMP/gpukiln/bin/pip" install --quiet --disable-pip-version-check \
  --constraint "$RUNNER_TEMP/gpukiln-pins.txt" "$root"
echo "$RUNNER_TEMP/gpukiln/bin" >>"$GITHUB_PATH"
