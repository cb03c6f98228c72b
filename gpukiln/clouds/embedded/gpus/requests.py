"""Answers `invoke cloud.gpus`: adds, removes, shows and changes a machine's simulated GPUs."""

from dataclasses import replace
from typing import Any

from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds.embedded.container import ContainerMachine
from gpukiln.clouds.embedded.gpus import machine_files
from gpukiln.clouds.embedded.gpus.settings import apply_setting, play_scenario
from gpukiln.clouds.embedded.gpus.simulated import SimulatedGpus, is_simulated
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import Rows, encoded, gpu_count
from gpukiln.clouds.embedded.machine import LocalMachine
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.clouds.tags import GPUS_TAG, SIMULATED
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.typed import load, strict, unknown
from gpukiln.units import is_whole

MOST_GPUS = 64  # more than any machine has; a choice of this project


@strict
class GpuChange:
    """A request; its fields are applied in this order.

    Args:
        switch: `on` or `off`; empty: no change.
        recording: The section `nvml` of a recording, from which the GPUs answer from now on.
        board: KEY[:COUNT] of a board of the catalogue that replaces the GPUs, for example rtx-4090:2.
        healthy: Whether to reset the state to that after a start.
        scenario: A key of `settings.SCENARIOS`.
        settings: Each is `GPU.NAME=VALUE`.
        reset: Indices of GPUs to reset, as `nvidia-smi --gpu-reset` does.
        load: Arguments of `gpukiln-gpu-load`: GPU, process id in the machine, MiB and percent.
    """

    instance_id: str
    switch: str = ""
    recording: dict[str, Any] | None = None
    board: str = ""
    healthy: bool = False
    scenario: str = ""
    settings: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    load: tuple[str, ...] = ()


def answer(machines: Machines, document: dict[str, Any]) -> dict[str, Any]:
    """Apply a request and return the state of the machine's GPUs.

    Raises:
        UsageError: The request is malformed; nothing was changed.
        IncompatibleError: The machine can't change like this while it runs.
    """
    request = load(GpuChange, document, where="request")
    if request.recording is not None:
        _check_recording(request.recording)
    instance, machine = _machine(machines, request.instance_id)
    with machines.lock(instance.id):
        if request.switch == "on":
            _switch_on(machines, instance, machine)
        elif request.switch == "off":
            machines.gpus_of(instance).use_profile()
            _switch_off(instance, machine)
        gpus, files = machine.gpus, machine.gpu_files
        if request.board and machine.gpus and machine.gpu_files:
            request = replace(
                request, recording=_board_document(request.board, machine.gpus, machine.gpu_files)
            )
        changes = (
            request.recording
            or request.board
            or request.healthy
            or request.scenario
            or request.settings
            or request.reset
            or request.load
        )
        if changes and not files:
            raise IncompatibleError(
                f"{instance.id} has no simulated GPUs",
                hint=f"run `invoke cloud.gpus {instance.id} --on`, or launch it with {GPUS_TAG}={SIMULATED}",
            )
        if files and gpus:
            _apply_request(machine, gpus, files, request)
        return {
            "instance_id": instance.id,
            "instance_type": instance.instance_type,
            "machine": machine.spec.kind,
            "simulated": is_simulated(instance),
            **describe_gpus(files.state.rows() if files else {}),
        }


def _apply_request(
    machine: LocalMachine, gpus: SimulatedGpus, files: machine_files.MachineFiles, request: GpuChange
) -> None:
    """Check the request, run commands that the machine may refuse, then write the state."""
    before = files.state.rows()
    anew = request.recording is not None or request.healthy
    rows = initial_rows(request.recording or gpus.document(files)) if anew else dict(before)
    # The namespace is that of the running machine, which a recording can't have.
    if "pid_namespace" in before:
        rows["pid_namespace"] = before["pid_namespace"]
    # On a copy: a wrong setting is an error before anything is written.
    _change(dict(rows), request)
    if request.recording is not None:
        gpus.use_recording(request.recording)
    if anew:
        files.state.write(rows)
    for words in _commands_inside(request):
        _run_in_machine(machine, words)
    files.state.change(lambda rows: _change(rows, request))


def _board_document(text: str, gpus: SimulatedGpus, files: machine_files.MachineFiles) -> dict[str, Any]:
    """The document of a number of boards, with the machine's driver."""
    key, _, count = text.partition(":")
    if count and not (count.isascii() and is_whole(count) and 0 < int(count) <= MOST_GPUS):
        raise UsageError(
            f"--board {text}: {count!r} is not a number from 1 to {MOST_GPUS}",
            hint="for example --board rtx-4090:2",
        )
    return gpus.board_document(files, key, int(count or 1))


def _check_recording(recording: dict[str, Any]) -> None:
    """Check a recording before it is stored, because later starts use it too."""
    try:
        rows = initial_rows(recording)
        describe_gpus(rows)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"the recording does not describe GPUs: {type(error).__name__}: {error}",
            hint="give the unchanged file that `python -m gpukiln.probe.recording FILE` writes on a machine",
        ) from None
    if gpu_count(rows) > MOST_GPUS:
        raise UsageError(
            f"the recording has {gpu_count(rows)} GPUs, and the limit is {MOST_GPUS}",
            hint="remove some from its list `gpus`",
        )
    encoded(rows)


def _machine(machines: Machines, instance_id: str) -> tuple[Any, LocalMachine]:
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto is slow to import
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto is slow to import

    machine = machines.get(instance_id)
    if machine is None:
        raise unknown("machine", instance_id, [machine.spec.instance_id for machine in machines.all()])
    for backend in ec2_backends[DEFAULT_ACCOUNT_ID].values():
        if instance := backend.get_instance_by_id(instance_id):
            return instance, machine
    raise UsageError(
        f"{instance_id} is no longer an instance", hint="`invoke cloud.status` lists the machines"
    )


def _switch_on(machines: Machines, instance: Any, machine: LocalMachine) -> None:
    known = instance_types().get(instance.instance_type)
    if known is None:
        raise IncompatibleError(
            f"the instance type {instance.instance_type} has no GPU",
            hint="launch an instance type with GPUs, for example g4dn.xlarge",
        )
    # The tag first: it also decides about the next start.
    instance.ec2_backend.create_tags([instance.id], {GPUS_TAG: SIMULATED})
    if machine.gpu_files:
        return
    if not machine.running:
        return  # it gets them at its next start
    if not isinstance(machine, ContainerMachine):
        raise IncompatibleError(
            f"{instance.id} is a virtual machine and gets its GPUs at its next start; its tag is set",
            hint=f"restart it: aws ec2 reboot-instances --instance-ids {instance.id}",
        )
    machine.show_gpus(machines.gpus_of(instance))


def _switch_off(instance: Any, machine: LocalMachine) -> None:
    instance.ec2_backend.delete_tags([instance.id], {GPUS_TAG: None})
    if not machine.gpu_files:
        return
    if not isinstance(machine, ContainerMachine):
        raise IncompatibleError(
            f"{instance.id} is a virtual machine and loses its GPUs at its next start; its tag is removed",
            hint=f"restart it: aws ec2 reboot-instances --instance-ids {instance.id}",
        )
    machine.hide_gpus()


def _change(rows: Rows, request: GpuChange) -> None:
    if request.scenario:
        play_scenario(rows, request.scenario)
    for text in request.settings:
        apply_setting(rows, text)
    for index in request.reset:
        if not (index.isascii() and is_whole(index) and int(index) < gpu_count(rows)):
            raise UsageError(
                f"--reset {index}: the machine has {gpu_count(rows)} GPUs and none with this index",
                hint="indices begin at 0",
            )


def _commands_inside(request: GpuChange) -> list[list[str]]:
    commands = [[machine_files.SMI, "--gpu-reset", f"--id={index}"] for index in request.reset]
    return commands + ([[machine_files.LOAD, *request.load]] if request.load else [])


def _run_in_machine(machine: LocalMachine, words: list[str]) -> None:
    program, *arguments = words
    command = [str(machine_files.FOLDER / program), *arguments]
    if not isinstance(machine, ContainerMachine):
        raise IncompatibleError(
            "the server can't run programs in a virtual machine",
            hint="run there: " + " ".join(command),
        )
    try:
        machine.run_inside(*command)
    except UnavailableError as error:
        raise UsageError(
            f"the machine refused `{' '.join(words)}`",
            details=error.details,
            hint="see the machine's processes and GPUs",
        ) from None


def describe_gpus(rows: Rows) -> dict[str, Any]:
    """The state of the GPUs, for the command's output.

    Returns: driver, error (NVML's code with which it does not start), and for each GPU its identity, its
    settings and its processes.
    """

    def number(key: str) -> float | None:
        return float(rows[key]) if key in rows else None

    gpus = []
    for index in range(gpu_count(rows)):
        key = f"gpus.{index}"
        processes = int(rows.get(f"{key}.processes.count", 0))
        gpus.append(
            {
                "index": index,
                **{name: rows.get(f"{key}.{name}") for name in ("name", "uuid", "bus_id")},
                "memory_total_mib": number(f"{key}.memory.total"),
                "temperature_celsius": number(f"{key}.temperature.gpu"),
                "power_watts": number(f"{key}.power.draw"),
                "mig_enabled": rows[f"{key}.mig.current"] == "1" if f"{key}.mig.current" in rows else None,
                "error": number(f"{key}.error.code"),
                "hung": f"{key}.hung" in rows,
                "processes": [
                    int(rows[f"{key}.processes.{n}.pid"])
                    for n in range(processes)
                    if f"{key}.processes.{n}.pid" in rows
                ],
            }
        )
    return {
        "driver": rows.get("driver"),
        "error": number("error.code"),
        "reason": rows.get("error._error"),
        "gpus": gpus,
    }
