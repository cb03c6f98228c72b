"""The firmware of a virtual machine, as arguments of QEMU."""

import shutil
from pathlib import Path
from typing import Literal

from gpukiln.disks.table import BIOS_BOOT_TYPE, ESP_TYPE, SECTOR, read_table
from gpukiln.errors import UnavailableError
from gpukiln.files import name_full_disk_error

Firmware = Literal["bios", "uefi"]
OVMF = Path("/usr/share/OVMF")
CODE, VARIABLES = "OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"  # Debian's ovmf, without Secure Boot


def firmware_of(disk: Path) -> Firmware:
    """The firmware that boots a raw disk; BIOS where both can, and where there is no GPT."""
    with disk.open("rb") as file:
        if not file.read(2 * SECTOR)[SECTOR:].startswith(b"EFI PART"):
            return "bios"
    types = {part.type for part in read_table(disk).partitions}
    return "uefi" if ESP_TYPE in types and BIOS_BOOT_TYPE not in types else "bios"


def firmware_arguments(firmware: Firmware, folder: Path) -> tuple[str, ...]:
    """QEMU's arguments for a firmware.

    Args:
        folder: The machine's folder; a UEFI has its variables there.

    Raises:
        UnavailableError: OVMF is not installed.
    """
    if firmware == "bios":
        return ()  # QEMU's own SeaBIOS
    if not (OVMF / CODE).exists():
        raise UnavailableError(
            f"{OVMF / CODE} is missing: a disk that boots by UEFI needs it",
            hint="apt-get install ovmf, or run the command through scripts/run, which installs it",
        )
    variables = folder / VARIABLES
    if not variables.exists():
        with name_full_disk_error(variables):
            shutil.copyfile(OVMF / VARIABLES, variables)
    flash = "if=pflash,format=raw,unit"
    return (
        *("-drive", f"{flash}=0,readonly=on,file={OVMF / CODE}"),
        *("-drive", f"{flash}=1,file={variables}"),
    )
