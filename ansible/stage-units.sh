#!/bin/sh
# hold: units do not start when a machine boots from a stage; an image must hold nothing that they write.
# release: they start again, and no trace is left that they were stopped.
#
#   stage-units.sh hold|release UNIT...
set -eu

what=$1
shift
for unit in "$@"; do
  folder=/etc/systemd/system/$unit.d
  case $what in
    hold)
      mkdir -p "$folder"
      printf '[Unit]\nConditionPathExists=/run/gpukiln/never\n' >"$folder/gpukiln-stage.conf"
      ;;
    release)
      rm -f "$folder/gpukiln-stage.conf"
      if [ -d "$folder" ]; then rmdir --ignore-fail-on-non-empty "$folder"; fi
      ;;
  esac
done
# What was written is in the snapshot.
sync --file-system /
