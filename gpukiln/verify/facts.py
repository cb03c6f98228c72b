"""What was found on a machine, and whether a check can be run with it.

The facts are gathered by `gpukiln.probe.gather`, in one round trip. Each section stands alone: one that
could not be gathered fails the checks that read it, with the reason, and no other. Of one that was not
reached, because a tool hangs or the time was up, nothing is known: its checks are not reached either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpukiln.probe.base import NOT_REACHED, NotReachedError
from gpukiln.verify.checks import PROFILES, Check

RECORD_PATH = "/etc/gpukiln/image.json"
ERROR = "_error"


def known(value: Any) -> Any:
    """A value of the facts.

    Raises:
        NotReachedError: Nothing is known of it: the tool that tells it hangs, or the time was up.
    """
    if isinstance(value, dict) and NOT_REACHED in value:
        raise NotReachedError(value[NOT_REACHED])
    return value


# Package by which a component is recognised on a machine that has no record.
COMPONENT_PACKAGES = {
    "nvidia_container_toolkit": ("nvidia-container-toolkit",),
    "docker": ("docker.io", "docker-ce", "docker"),
    "containerd": ("containerd", "containerd.io"),
    "nvtop": ("nvtop",),
    "dcgm": ("datacenter-gpu-manager", "datacenter-gpu-manager-4-core"),
}


class Facts(Mapping[str, Any]):
    """The facts of one machine, by section.

    Args:
        data: Section name to what was found; `{"_error": text}` where gathering failed,
            `{"_not_reached": text}` where it was not done.
        profile: Key of `PROFILES` that the machine is judged by; empty is the strictest.

    Example:
        `facts["kernel"]["running"]` is `uname -r`; see the docstrings of `gpukiln.probe.gather`.
    """

    def __init__(self, data: Mapping[str, Any], profile: str = "") -> None:
        self.profile = profile
        self._data = data
        self._note = ""
        self._read: dict[str, None] = {}

    def __getitem__(self, section: str) -> Any:
        self._read[section] = None
        value = known(self._data[section])
        if isinstance(value, dict) and ERROR in value:
            raise AssertionError(f"the facts about {section} could not be gathered: {value[ERROR]}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def note(self, text: str) -> None:
        """Keep what a passing check measured; it becomes the reason shown beside its result."""
        self._note = text

    def take_note(self) -> str:
        """Return the note of the last check, and forget it."""
        text, self._note = self._note, ""
        return text

    def take_read(self) -> tuple[str, ...]:
        """Return the sections that were read since the last call, in that order, and forget them."""
        names, self._read = tuple(self._read), {}
        return names

    def to_dict(self) -> dict[str, Any]:
        """Return all that was found."""
        return dict(self._data)

    @property
    def record(self) -> dict[str, Any]:
        """The image's own record, or an empty dict where there is none or it can't be read."""
        data = self["record"]["data"]
        return data if isinstance(data, dict) else {}

    def component(self, name: str) -> dict[str, Any]:
        """What the record says of a component, or an empty dict."""
        found = self.record.get("components", {}).get(name, {})
        return found if isinstance(found, dict) else {}

    def has_package(self, *names: str) -> bool:
        """Whether one of these packages is installed."""
        return any(name in self["packages"]["installed"] for name in names)

    def expects(self, name: str) -> bool:
        """Whether a component should be on this machine: recorded as there, or, without a record, found."""
        if self.record:
            return self.component(name).get("status") in ("installed", "install", "preinstalled")
        return self.has_package(*COMPONENT_PACKAGES.get(name, (name,)))


def environment(facts: Facts) -> dict[str, str]:
    """Say what was judged, as reports show it.

    Returns:
        Name to text; what could not be found out is left out.
    """
    data = facts.to_dict()

    def get(*path: str) -> str:
        value: Any = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return str(value) if value else ""

    gpus = get("gpus", "pci") and [gpu.get("name") or "NVIDIA GPU" for gpu in data["gpus"]["pci"]]
    rows = {
        "host name": get("hostname"),
        "system": get("os", "title"),
        "kernel": get("kernel", "running"),
        "driver": get("driver", "nvidia_smi", "version"),
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) if gpus else "none",
        "machine": get("boot", "virtualization"),
        "image": get("record", "data", "image"),
        "image's digest": get("record", "data", "digest"),
        "image's commit": get("record", "data", "git_commit"),
    }
    return {name: text for name, text in rows.items() if text}


@dataclass(frozen=True)
class Applies:
    """Whether a check can be run.

    Args:
        answer: `run`; `not_run` with a reason; or `fail`: what it needs is missing and should be there.
        reason: Empty for `run`.
    """

    answer: Literal["run", "not_run", "fail"]
    reason: str = ""


RUN = Applies("run")
NOT_BOOTED = Applies("not_run", "systemd does not run here: a container, which nothing has booted")


def applies(check: Check, facts: Facts, *, profile: str, expect_gpus: int | None = None) -> Applies:
    """Decide whether a check can be run on a machine.

    Args:
        profile: Key of `PROFILES`.
        expect_gpus: GPUs that the machine must have; None takes the profile's number.

    Returns:
        The answer. Hardware or a record that the profile expects and that is missing is `fail`.
    """
    for need in check.needs:
        if need == "gpu":
            found = _gpu(facts, PROFILES[profile].min_gpus if expect_gpus is None else expect_gpus)
        elif need == "several-gpus":
            found = _several(facts)
        elif need == "record":
            found = _record(facts, required=PROFILES[profile].needs_record)
        elif need == "systemd":
            found = RUN if facts["boot"]["booted"] else NOT_BOOTED
        elif need == "dkms":
            found = _dkms(facts)
        elif need == "build-tools":
            found = _build_tools(facts)
        elif need == "entrypoint":
            found = _entrypoint(facts)
        elif need == "apt":
            family = facts["os"]["family"]
            found = RUN if family == "debian" else Applies("not_run", f"no apt on {family or 'this machine'}")
        else:
            found = _component(facts, need.partition(":")[2])
        if found.answer != "run":
            return found
    return RUN


def _gpu(facts: Facts, wanted: int) -> Applies:
    count = len(facts["gpus"]["pci"])
    if count < wanted:
        return Applies("fail", f"{count} GPUs on the PCI bus, at least {wanted} expected on this machine")
    return RUN if count else Applies("not_run", "no GPU")


def _several(facts: Facts) -> Applies:
    count = len(facts["gpus"]["pci"])
    return RUN if count > 1 else Applies("not_run", "one GPU" if count else "no GPU")


def _record(facts: Facts, *, required: bool) -> Applies:
    if facts.record:
        return RUN
    problem = facts["record"]["error"] or f"{RECORD_PATH} is missing"
    return Applies("fail", problem) if required else Applies("not_run", f"no record: {problem}")


def _dkms(facts: Facts) -> Applies:
    return RUN if facts["dkms"]["installed"] else Applies("not_run", "DKMS is not installed here")


def _build_tools(facts: Facts) -> Applies:
    if "keep_build_tools" in facts.component("nvidia_driver"):
        return RUN
    return Applies("not_run", "the record does not say whether build tools stay")


def _entrypoint(facts: Facts) -> Applies:
    """Buildah's containers are root file systems: process 1 is the host's."""
    if facts["runner"]["process_1"].endswith("sleep infinity"):
        return RUN
    return Applies("not_run", "no process was started by the entrypoint: a container of Buildah")


def _component(facts: Facts, name: str) -> Applies:
    said = facts.component(name)
    if facts.record and not said:
        return Applies("not_run", f"{name} is not in the image's record")
    if said.get("status") == "left_out":
        return Applies("not_run", f"{name} left out: {said.get('reason') or 'no reason recorded'}")
    if not facts.record and not facts.expects(name):
        return Applies("not_run", f"{name} is not installed, and no record asks for it")
    return RUN
