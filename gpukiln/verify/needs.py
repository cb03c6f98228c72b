"""The needs of checks: a table with each need's text and the function of the facts that decides it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from gpukiln.verify.facts import Facts

if TYPE_CHECKING:
    from gpukiln.verify.checks import Profile

SIMULATED = "GPUs are simulated"
RECORD_PATH = "/etc/gpukiln/image.json"
FEWER_GPUS = (
    "`lspci -d 10de:` lists the GPUs on the bus. On bare metal check whether the machine's firmware lists "
    "the "
    "missing GPU, then its power cables and seat; of a virtual machine check its type or the devices that "
    "are "
    "passed through. If fewer GPUs are right, give their number as `--expect-gpus`."
)
# systemd-detect-virt(1), "container"
CONTAINERS = frozenset(
    ("openvz", "lxc", "lxc-libvirt", "systemd-nspawn", "docker", "podman", "rkt", "wsl", "proot", "pouch")
)
COMPONENT = re.compile(r"component:(?P<name>[a-z0-9_]+)")


@dataclass(frozen=True)
class Applicability:
    """Whether a check can be run.

    Args:
        answer: `run`; `not_run` with a reason; or `fail`: a need is missing that the profile expects.
        reason: Empty for `run`.
        remedy: The fix of `fail`; empty where the check's own fix holds.
    """

    answer: Literal["run", "not_run", "fail"]
    reason: str = ""
    remedy: str = ""


RUN = Applicability("run")


def _not_run(reason: str) -> Applicability:
    return Applicability("not_run", reason)


@dataclass(frozen=True)
class ExpectedMachine:
    """The facts of a machine, and the hardware and record that it must have."""

    facts: Facts
    expected_gpus: int
    needs_record: bool


def _record(machine: ExpectedMachine) -> Applicability:
    if machine.facts.record:
        return RUN
    problem = machine.facts["record"]["error"] or f"{RECORD_PATH} is missing"
    return Applicability("fail", problem) if machine.needs_record else _not_run(f"no record: {problem}")


def _gpu(machine: ExpectedMachine) -> Applicability:
    facts, expected = machine.facts, machine.expected_gpus
    # Simulated GPUs are never verified by accident: without the option they count as missing, without a
    # failure.
    if facts.has_simulated_gpus and not facts.allow_simulated:
        return _not_run(SIMULATED)
    if facts.allow_simulated and not facts.has_simulated_gpus:
        # Raises where it is unknown, as of a node on which no pod ran: that has its own finding.
        facts["simulated"]
        return Applicability(
            "fail",
            "found no simulated GPUs on this machine, which `--simulated` asks for",
            "Omit `--simulated`, or give the machine simulated GPUs (docs/simulated-gpus.md).",
        )
    count, where = facts.gpu_count, "simulated" if facts.has_simulated_gpus else "on the PCI bus"
    # A missing GPU fails even where others work, because the checks would silently verify fewer.
    if count < expected:
        return Applicability(
            "fail", f"{count} GPUs {where}, at least {expected} expected on this machine", FEWER_GPUS
        )
    return RUN if count else _not_run("no GPU")


def _real_gpu(machine: ExpectedMachine) -> Applicability:
    return _not_run(SIMULATED) if machine.facts.has_simulated_gpus else RUN


def _several_gpus(machine: ExpectedMachine) -> Applicability:
    count = machine.facts.gpu_count
    return RUN if count > 1 else _not_run("one GPU" if count else "no GPU")


def _systemd(machine: ExpectedMachine) -> Applicability:
    booted = machine.facts["boot"]["booted"]
    return RUN if booted else _not_run("systemd is not running: this is a container that was not booted")


def _own_kernel(machine: ExpectedMachine) -> Applicability:
    kind = machine.facts["boot"]["virtualization"]
    return _not_run(f"the kernel is the host's: this is a container of {kind}") if kind in CONTAINERS else RUN


def _dkms(machine: ExpectedMachine) -> Applicability:
    return RUN if machine.facts["dkms"]["installed"] else _not_run("DKMS is not installed here")


def _build_tools(machine: ExpectedMachine) -> Applicability:
    said = "keep_build_tools" in machine.facts.component("nvidia_driver")
    return RUN if said else _not_run("the record does not say whether build tools are kept")


def _apt(machine: ExpectedMachine) -> Applicability:
    family = machine.facts["os"]["family"]
    return RUN if family == "debian" else _not_run(f"no apt on {family or 'this machine'}")


def _entrypoint(machine: ExpectedMachine) -> Applicability:
    """Buildah's containers are root file systems only: process 1 is the host's."""
    started = machine.facts["runner"]["process_1"].endswith("sleep infinity")
    return RUN if started else _not_run("the entrypoint started no process: this is a container of Buildah")


def _gpu_tools(machine: ExpectedMachine) -> Applicability:
    facts = machine.facts
    # The record decides: gpukiln-gpu that a user copied there is not the image's.
    if facts.record:
        return RUN if "gpu_tools" in facts.record else _not_run("gpukiln-gpu is not in the image's record")
    installed = facts["gpu_tools"]["sha256"] is not None
    return RUN if installed else _not_run("gpukiln-gpu is not installed, and no record names it")


def _services(machine: ExpectedMachine) -> Applicability:
    return RUN if machine.facts["services"] else _not_run("no service")


def _ollama(machine: ExpectedMachine) -> Applicability:
    return _service_on_gpu(machine, "ollama")


def _vllm(machine: ExpectedMachine) -> Applicability:
    return _service_on_gpu(machine, "vllm")


def _service_on_gpu(machine: ExpectedMachine, how: str) -> Applicability:
    services = machine.facts["services"].values()
    return (
        RUN
        if any(service["wanted"]["computes"] == how for service in services)
        else _not_run(f"no {how} with a GPU")
    )


def _component(machine: ExpectedMachine, name: str) -> Applicability:
    facts = machine.facts
    said = facts.component(name)
    if facts.record and not said:
        return _not_run(f"{name} is not in the image's record")
    # A component that the plan left out is no fault of the image; its reason is in the record.
    if said.get("status") == "left_out":
        return _not_run(f"{name} left out: {said.get('reason') or 'no reason recorded'}")
    if not facts.record and not facts.expects(name):
        return _not_run(f"{name} is not installed, and no record names it")
    return RUN


class Need(NamedTuple):
    """A need's text, and the function that decides whether a machine has it."""

    text: str
    applies: Callable[[ExpectedMachine], Applicability]


# In addition: `component:<name>`, a key of the record's components.
NEEDS: dict[str, Need] = {
    "record": Need(RECORD_PATH, _record),
    "gpu": Need("an NVIDIA GPU on the PCI bus", _gpu),
    "real-gpu": Need("a real GPU: a simulated one has no kernel module and can't compute", _real_gpu),
    "several-gpus": Need("two GPUs or more", _several_gpus),
    "systemd": Need("a system that systemd has booted", _systemd),
    "own-kernel": Need("its own kernel: no container", _own_kernel),
    "dkms": Need("modules built by DKMS", _dkms),
    "build-tools": Need("a record that says whether build tools are kept", _build_tools),
    "apt": Need("a Debian or Ubuntu machine", _apt),
    "gpu-tools": Need("gpukiln-gpu, by the image's record or the file itself", _gpu_tools),
    "services": Need("services of a workspace, by /etc/gpukiln/compose.yaml", _services),
    "ollama": Need("a service Ollama with GPUs", _ollama),
    "vllm": Need("a service vLLM with GPUs", _vllm),
    "entrypoint": Need("a container that its image's entrypoint started", _entrypoint),
}


def is_need(name: str) -> bool:
    """Whether a need exists, of the table or of a component.

    >>> is_need("gpu"), is_need("component:docker")
    (True, True)
    >>> is_need("docker")
    False
    """
    return name in NEEDS or COMPONENT.fullmatch(name) is not None


def applicability(
    needs: Iterable[str], facts: Facts, profile: Profile, *, expect_gpus: int | None = None
) -> Applicability:
    """Decide whether a check can be run on a machine.

    Args:
        needs: Keys of `NEEDS`, or `component:<name>`.
        profile: The kind of the machine.
        expect_gpus: GPUs that the machine must have; None takes the profile's number.

    Returns:
        The first answer that is not `run`. Missing hardware or a missing record is `fail` where the profile
        expects it.
    """
    expected_gpus = profile.min_gpus if expect_gpus is None else expect_gpus
    machine = ExpectedMachine(facts, expected_gpus, profile.needs_record)
    for name in needs:
        component = COMPONENT.fullmatch(name)
        result = _component(machine, component["name"]) if component else NEEDS[name].applies(machine)
        if result.answer != "run":
            return result
    return RUN
