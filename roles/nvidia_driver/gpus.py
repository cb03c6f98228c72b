"""Which driver and which kernel modules GPUs need."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from ..plan import shared


@dataclass(frozen=True)
class Fit:
    """What GPUs mean for the driver.

    Args:
        modules: `proprietary` or `open`.
        nvlink5: Whether a GPU's NVSwitches, which are no PCI devices, need NVLink's subnet manager.
        problems: What can't work, in words.
    """

    modules: str
    nvlink5: bool
    problems: list[str]


@cache
def catalogue() -> dict[str, Any]:
    """Branches, GPUs and architectures, as the plan of an image knows them."""
    text = shared("gpukiln/catalog/data/nvidia_matrix.yaml")
    tables: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return tables


def last_release(branch: int) -> str:
    """The last version of a driver branch that the catalogue knows; empty where it knows none."""
    releases = [row.get("latest", "") for row in catalogue()["driver_branches"] if row["branch"] == branch]
    return str(releases[0]) if releases else ""


def nvlink5_ids() -> list[str]:
    """PCI device ids of GPUs whose NVSwitches are no PCI devices."""
    boards = (board for board in catalogue()["gpus"].values() if "nvlsm" in board)
    return [f"0x{pci_id.lower()}" for board in boards for pci_id in board["pci_ids"]]


def driver_fit(version: str, modules: str, present: list[str], keys: list[str]) -> Fit:
    """Choose the kind of kernel modules, and find what can't work.

    Args:
        version: The driver's version, for example `535.309.01`.
        modules: `proprietary`, `open` or `auto`.
        present: PCI device ids of the GPUs on the bus, for example `["0x1eb8"]`.
        keys: Keys of the catalogue, for example `["t4"]`: what the machine is for.
    """
    # An image for no GPU in particular: proprietary modules drive every GPU up to Hopper.
    if not present and not keys:
        return Fit("proprietary" if modules == "auto" else modules, nvlink5=False, problems=[])
    known = catalogue()["gpus"]
    by_id = {pci_id: board for board in known.values() for pci_id in board.get("pci_ids", [])}
    # sysfs has 0x1eb8, the catalogue 1EB8.
    ids = [pci_id.lower().removeprefix("0x").upper() for pci_id in present]
    problems = [
        f"no GPU '{key}' in the catalogue, wanted one of {', '.join(known)}"
        for key in keys
        if key not in known
    ]
    boards = [known[key] for key in keys if key in known] + [
        by_id[pci_id] for pci_id in ids if pci_id in by_id
    ]
    unknown = sorted({pci_id for pci_id in ids if pci_id not in by_id})
    # With an explicit kind the administrator has decided.
    if unknown and modules == "auto":
        problems.append(
            f"the catalogue does not know the GPU 10DE:{', 10DE:'.join(unknown)}: set nvidia_driver_modules"
            " to proprietary or open yourself"
        )
    chosen = _choose(boards, version) if modules == "auto" else modules
    for board in boards:
        problems += _problems(board, version, chosen)
    nvlink5 = any(board.get("nvlsm") for board in boards)
    return Fit(chosen, nvlink5, sorted(set(problems)))


def _choose(boards: list[dict[str, Any]], version: str) -> str:
    """Open modules where every GPU can have them and NVIDIA suggests them (560 and later), or must."""
    # Blackwell and Grace Hopper have no proprietary modules.
    if any(board["modules"] == "open" for board in boards):
        return "open"
    suggested = _key(version) >= (560,) and boards
    return "open" if suggested and all(_listed(board, version) for board in boards) else "proprietary"


def _listed(board: dict[str, Any], version: str) -> bool:
    first = board.get("open_first")
    return board["modules"] != "proprietary" and bool(first) and _key(version) >= _key(str(first))


def _problems(board: dict[str, Any], version: str, modules: str) -> list[str]:
    name = f"the {board['name']} ({board['arch']})"
    last = {a["name"]: a.get("last_driver") for a in catalogue()["architectures"]}.get(board["arch"])
    if last and _key(version)[0] > last:
        return [f"driver {version} has dropped {name}, wanted branch {last} or older"]
    first = board.get("min_driver")
    if first and _key(version) < _key(str(first)):
        return [f"driver {version} does not know {name}, wanted {first} or later"]
    if modules == "proprietary" and board["modules"] == "open":
        return [f"proprietary kernel modules can't drive {name}, wanted nvidia_driver_modules: open"]
    if modules == "open" and not _listed(board, version):
        since = f"from {board['open_first']} on" if board.get("open_first") else "in no release"
        return [f"the open kernel modules list {name} {since}, found {version}: take proprietary ones"]
    return []


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
