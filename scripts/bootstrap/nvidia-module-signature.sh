#!/bin/bash
# Says whether the running kernel would load a module, as far as its signature goes.
#
#   nvidia-module-signature MODULE
#
# Exit 0: it would; 1: it would not, and why; 2: wrong usage. Loads nothing.
set -euo pipefail

readonly module=${1:?wanted: nvidia-module-signature MODULE}
readonly sys=${GPUKILN_SYS:-/sys}
readonly keys=${GPUKILN_KEYS:-/proc/keys}
readonly release=${GPUKILN_KERNEL:-$(uname -r)}

secure_boot=off
for variable in "$sys"/firmware/efi/efivars/SecureBoot-*; do
  # Four bytes of attributes, one of value.
  if [[ -r $variable && $(od -An -j4 -N1 -tu1 "$variable" | tr -d ' ') == 1 ]]; then secure_boot=on; fi
done

enforced=no
if [[ -r $sys/module/module/parameters/sig_enforce && $(<"$sys/module/module/parameters/sig_enforce") == Y ]]; then
  enforced="yes (module.sig_enforce)"
elif [[ -r $sys/kernel/security/lockdown && $(<"$sys/kernel/security/lockdown") != *"[none]"* ]]; then
  enforced="yes (kernel lockdown)"
fi

if ! signer=$(modinfo --set-version "$release" --field signer "$module" 2>&1); then
  echo "Found no module $module for kernel $release: $signer"
  exit 1
fi
# Debian's alternatives answer with more than one row for one name.
signer=${signer%%$'\n'*}

if [[ $enforced == no ]]; then
  echo "Secure Boot is $secure_boot and the kernel takes every module; $module is signed by '${signer:-nobody}'"
elif [[ -z $signer ]]; then
  echo "Found no signature on $module for kernel $release, and Secure Boot $secure_boot, enforced: $enforced;" \
    "wanted one by an enrolled key. Set nvidia_driver_sign, or take signed modules."
  exit 1
elif awk -v name="$signer: " '/asymmetri/ && index($0, name) { found = 1 } END { exit !found }' "$keys"; then
  echo "$module is signed by '$signer', which the kernel trusts; Secure Boot is $secure_boot"
else
  echo "Found $module for kernel $release signed by '$signer', which is not enrolled, and Secure Boot" \
    "$secure_boot, enforced: $enforced. Enrol the certificate (mokutil --import CERTIFICATE.der), reboot," \
    "and confirm on the console."
  exit 1
fi
