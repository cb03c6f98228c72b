"""The facts of a machine.

`gpukiln.probe.gather` gathers them in one round trip. Sections are independent: if one could not be gathered,
only the checks that read it fail, with the reason. If one was not reached, because a tool hangs or the time
was up, its checks are not reached either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpukiln.probe.base import read_section

# A machine without a record: the packages of each component in Debian, Docker's and NVIDIA's repositories.
COMPONENT_PACKAGES = {
    "nvidia_container_toolkit": ("nvidia-container-toolkit",),
    "docker": ("docker.io", "docker-ce", "docker"),
    "containerd": ("containerd", "containerd.io"),
    "docker_compose": ("docker-compose", "docker-compose-v2", "docker-compose-plugin"),
    "nvtop": ("nvtop",),
    "kasmvnc": ("kasmvncserver",),
    "dcgm": ("datacenter-gpu-manager", "datacenter-gpu-manager-4-core"),
}


class Facts(Mapping[str, Any]):
    """The facts of one machine, by section.

    Args:
        data: Section name to what was found; `{"_error": text}` where gathering failed,
            `{"_not_reached": text}` where it was not done.
        profile: Key of `PROFILES` by which the machine is verified; empty is the strictest.
        allow_simulated: Whether `--simulated` asked for simulated GPUs.

    Example:
        `facts["kernel"]["running"]` is `uname -r`; see the docstrings of `gpukiln.probe.gather`.
    """

    def __init__(self, data: Mapping[str, Any], profile: str = "", *, allow_simulated: bool = False) -> None:
        self.profile, self.allow_simulated = profile, allow_simulated
        self._data = data
        self._note = self._remedy = ""
        # A dict keeps the order in which sections were read, for the report.
        self._read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        # Evidence of a check is what it has really read.
        self._read[name] = None
        return read_section(self._data, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def note(self, text: str) -> None:
        """Keep what a passing check measured; reports show it as the reason of the result."""
        self._note = text

    def take_note(self) -> str:
        """Return the note of the last check, and forget it."""
        text, self._note = self._note, ""
        return text

    def remedy(self, text: str) -> None:
        """Keep a remedy that depends on the finding; it replaces the check's `fix`."""
        self._remedy = text

    def take_remedy(self) -> str:
        """Return the remedy of the last check, and forget it."""
        text, self._remedy = self._remedy, ""
        return text

    def take_read(self) -> tuple[str, ...]:
        """Return the sections that were read since the last call, in that order, and forget them."""
        names, self._read = tuple(self._read), {}
        return names

    def to_dict(self) -> dict[str, Any]:
        """Return all sections."""
        return dict(self._data)

    @property
    def has_simulated_gpus(self) -> bool:
        """Whether this machine's GPUs are simulated; the read does not count as evidence of a check.

        False where that is unknown: `hygiene.simulated` reports it then.
        """
        # Not by self[...]: the need of every GPU check asks this, and it is no evidence of the check.
        return bool(self._data.get("simulated", {}).get("machine"))

    @property
    def gpu_count(self) -> int:
        """The number of GPUs on the PCI bus; simulated ones, which are on no bus, are counted by NVML."""
        if self.has_simulated_gpus:
            return len(self["nvml"]["gpus"])
        return len(self["gpus"]["pci"])

    @property
    def record(self) -> dict[str, Any]:
        """The image's own record, or an empty dict where there is none or it can't be read."""
        data = self["record"]["data"]
        return data if isinstance(data, dict) else {}

    def component(self, name: str) -> dict[str, Any]:
        """The record's entry of a component, or an empty dict."""
        entry = self.record.get("components", {}).get(name, {})
        return entry if isinstance(entry, dict) else {}

    def has_package(self, *names: str) -> bool:
        """Whether one of these packages is installed."""
        return any(name in self["packages"]["installed"] for name in names)

    def expects(self, name: str) -> bool:
        """Whether a component should be on this machine: by the record, or without one by its packages."""
        # With a record, a package that was added later is not expected.
        if self.record:
            return self.component(name).get("status") in ("installed", "install", "preinstalled")
        return self.has_package(*COMPONENT_PACKAGES.get(name, (name,)))


def environment(facts: Facts) -> dict[str, str]:
    """Describe the verified machine for reports.

    Returns:
        Name to text, without what is unknown.
    """
    data = facts.to_dict()

    def get(*path: str) -> str:
        value: Any = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return str(value) if value else ""

    simulated = " (simulated)" if facts.has_simulated_gpus else ""
    there = (
        get("nvml", "gpus") and data["nvml"]["gpus"]
        if simulated
        else get("gpus", "pci") and data["gpus"]["pci"]
    )
    gpus = [
        f"{name if isinstance(name := gpu.get('name'), str) else 'NVIDIA GPU'}{simulated}"
        for gpu in there or ()
    ]
    rows = {
        "host name": get("hostname"),
        "system": get("os", "title"),
        "kernel": get("kernel", "running"),
        "driver": get("driver", "nvidia_smi", "version"),
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) if gpus else "none",
        "machine": get("boot", "virtualization"),
        "Kubernetes": get("cluster", "kubernetes"),
        "image": get("record", "data", "image"),
        "image's digest": get("record", "data", "digest"),
        "image's commit": get("record", "data", "git_commit"),
    }
    return {name: text for name, text in rows.items() if text}
