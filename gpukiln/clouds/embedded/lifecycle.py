"""How an instance lives: each call sets the honest in-between state, a thread does the work.

State names and codes: EC2 API reference, InstanceState.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models.instances import InstanceState, StateReason

from gpukiln.clouds.embedded.machine import LocalMachine
from gpukiln.clouds.embedded.machines import Machines
from gpukiln.errors import GpukilnError

STATES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
REBOOT = (
    133  # exit code of systemd-nspawn when the container asks for a reboot (systemd, src/nspawn/nspawn.c)
)
log = logging.getLogger(__name__)


def set_state(instance: Any, name: str, *, reason: str = "") -> None:
    """Set what DescribeInstances says.

    Args:
        instance: moto's instance.
        reason: Why, for a state nobody asked for.
    """
    instance._state.name, instance._state.code = name, STATES[name]
    if reason:
        instance._reason = reason
        instance.state_reason = StateReason(reason, "Server.InternalError")


def _set_stopped(instance: Any, reason: str = "") -> None:
    """Its private address stays, a public one goes (EC2 user guide, "How instance stop and start works")."""
    for nic in instance.nics.values():
        nic.stop()
    set_state(instance, "stopped", reason=reason)


class Lifecycle:
    """Starts and ends the machines of moto's instances.

    Args:
        machines: Where machines run.
        terminate: moto's own way to terminate an instance, which detaches volumes and interfaces.
    """

    def __init__(self, machines: Machines, *, terminate: Callable[[Any], Any]) -> None:
        self._machines, self._terminate = machines, terminate

    def launch(self, instance: Any) -> None:
        """Make the machine of a new instance and boot it.

        Args:
            instance: moto's instance.
        """
        set_state(instance, "pending")
        if self._machines.kind(instance) != "vm":
            # cloud-init takes a token only where the firmware says EC2, and a container shows no firmware:
            # tokens work there but can't be required, and DescribeInstances says so
            instance.metadata_options.http_tokens = "optional"
        self._in_background(
            instance,
            lambda: self._boot(instance, self._machines.create(instance)),
            failed=lambda reason: self._discard_failed_launch(instance, reason),
        )

    def start(self, instance: Any) -> InstanceState:
        """Boot a stopped machine again.

        Args:
            instance: moto's instance.

        Returns:
            The state before.
        """
        before = _state(instance)
        if before.name == "stopped":
            set_state(instance, "pending")
            instance._reason, instance.state_reason = "", StateReason()
            instance.launch_time = utcnow()  # API reference, Instance$LaunchTime: the last one
            for nic in instance.nics.values():  # another public address
                nic.start()
            self._in_background(
                instance, lambda: self._boot(instance, self._machines.require_machine(instance))
            )
        return before

    def stop(self, instance: Any) -> InstanceState:
        """Shut a machine down cleanly.

        Args:
            instance: moto's instance.

        Returns:
            The state before.
        """
        before = _state(instance)

        def work() -> None:
            self._machines.stop(instance.id, clean=True)
            _set_stopped(instance)

        if before.name in ("running", "pending"):
            set_state(instance, "stopping")
            self._in_background(instance, work)
        return before

    def terminate(self, instance: Any) -> InstanceState:
        """Remove a machine, and the volumes that end with it.

        Args:
            instance: moto's instance.

        Returns:
            The state before.
        """
        before = _state(instance)

        if before.name not in ("terminated", "shutting-down"):
            set_state(instance, "shutting-down")
            self._in_background(
                instance,
                lambda: self._terminate_machine(instance),
                failed=lambda reason: set_state(instance, "terminated", reason=reason),
            )
        return before

    def reboot(self, instance: Any) -> None:
        """Shut a machine down cleanly and boot it again.

        Args:
            instance: moto's instance.
        """

        def work() -> None:
            machine = self._machines.require_machine(instance)
            set_state(instance, "pending")  # EC2 says running; nobody can log in meanwhile
            self._machines.stop(instance.id, clean=True)
            self._boot(instance, machine)

        self._in_background(instance, work)

    def _boot(self, instance: Any, machine: LocalMachine) -> None:
        if instance._state.name != "pending":
            return  # terminated or stopped before its turn came
        self._machines.start(instance, machine)
        if instance._state.name == "pending":  # a stop that was asked for meanwhile waits for this lock
            set_state(instance, "running")
        threading.Thread(target=self._wait_for_end, args=(instance, machine), daemon=True).start()

    def _wait_for_end(self, instance: Any, machine: LocalMachine) -> None:
        """A machine that ends by itself is stopped, or terminated where the launch said so."""
        process = machine.process
        code = process.wait() if process else None

        def work() -> None:
            if instance._state.name != "running" or machine.process is not process:
                return
            self._machines.stop(instance.id, clean=False)
            if code == REBOOT:  # the machine is the same for EC2, and goes on running
                set_state(instance, "pending")
                self._boot(instance, machine)
                return
            if instance.instance_initiated_shutdown_behavior == "terminate":
                self._terminate_machine(instance)
                if code == 0:
                    text = "Client.InstanceInitiatedShutdown"
                    instance.state_reason = StateReason(f"{text}: Instance initiated shutdown", text)
            else:
                _set_stopped(instance)

        self._run_locked(instance, work, failed=lambda reason: self._power_off(instance, reason))

    def _terminate_machine(self, instance: Any, reason: str = "") -> None:
        """The machine first: a volume that stays is free only when nobody writes to it any more."""
        try:
            self._machines.remove(instance.id)
        finally:
            self._terminate(instance)
            set_state(instance, "terminated", reason=reason)

    def _discard_failed_launch(self, instance: Any, reason: str) -> None:
        """Nobody has written to what a launch made that failed, so it keeps no volume."""
        for _, attached in instance.get_block_device_mapping:
            attached.delete_on_termination = True
        self._terminate_machine(instance, reason)

    def _power_off(self, instance: Any, reason: str) -> None:
        """A machine that could not be started, stopped or booted again is stopped, with all that it has."""
        try:
            self._machines.stop(instance.id, clean=False)
        finally:
            _set_stopped(instance, reason)

    def _in_background(
        self, instance: Any, work: Callable[[], None], *, failed: Callable[[str], None] | None = None
    ) -> None:
        on_failure = failed or (lambda reason: self._power_off(instance, reason))
        threading.Thread(target=self._run_locked, args=(instance, work, on_failure), name=instance.id).start()

    def _run_locked(self, instance: Any, work: Callable[[], None], failed: Callable[[str], None]) -> None:
        """A thread's work; DescribeInstances tells why it failed."""
        with self._machines.lock(instance.id):
            try:
                work()
            except Exception as error:  # the thread's end: nobody above would tell it
                log.exception("%s", instance.id)
                details = "; ".join([*error.details, error.hint]) if isinstance(error, GpukilnError) else ""
                try:
                    failed(f"{error} {details}".strip())
                except Exception:
                    log.exception("%s: cleaning up", instance.id)


def _state(instance: Any) -> InstanceState:
    return InstanceState(instance._state.name, instance._state.code)
