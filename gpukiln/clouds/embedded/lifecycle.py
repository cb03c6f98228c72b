"""Starts, stops and terminates machines: a call sets the transitional state, a thread does the work.

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
    """Set an instance's state in DescribeInstances.

    Args:
        instance: moto's instance.
        reason: Reason of a state that no call requested.
    """
    instance._state.name, instance._state.code = name, STATES[name]
    if reason:
        instance._reason = reason
        instance.state_reason = StateReason(reason, "Server.InternalError")


def _set_stopped(instance: Any, reason: str = "") -> None:
    """The private address stays, a public one goes (EC2 user guide, "How instance stop and start works")."""
    for nic in instance.nics.values():
        nic.stop()
    set_state(instance, "stopped", reason=reason)


class Lifecycle:
    """Starts and ends the machines of moto's instances.

    Args:
        machines: The machines behind the instances.
        terminate: moto's Instance.terminate, which detaches volumes and interfaces.
    """

    def __init__(self, machines: Machines, *, terminate: Callable[[Any], Any]) -> None:
        self._machines, self._terminate = machines, terminate

    def launch(self, instance: Any) -> None:
        """Create the machine of a new instance and boot it.

        Args:
            instance: moto's instance.
        """
        set_state(instance, "pending")
        if self._machines.kind(instance) != "vm":
            # cloud-init requests a token only where the firmware identifies EC2, and a container has no
            # firmware: tokens work there but can't be required, and DescribeInstances has to report that.
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
            The previous state.
        """
        before = _state(instance)
        if before.name == "stopped":
            set_state(instance, "pending")
            instance._reason, instance.state_reason = "", StateReason()
            instance.launch_time = utcnow()  # the time of the last start (API reference, Instance$LaunchTime)
            for nic in instance.nics.values():  # a start gets another public address
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
            The previous state.
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
        """Remove a machine and the volumes with DeleteOnTermination.

        Args:
            instance: moto's instance.

        Returns:
            The previous state.
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
            set_state(instance, "pending")  # EC2 reports running; pending shows that no login works meanwhile
            self._machines.stop(instance.id, clean=True)
            self._boot(instance, machine)

        self._in_background(instance, work)

    def _boot(self, instance: Any, machine: LocalMachine) -> None:
        if instance._state.name != "pending":
            return  # terminated or stopped while this thread waited
        self._machines.start(instance, machine)
        if instance._state.name == "pending":  # a stop that was requested meanwhile waits for this lock
            set_state(instance, "running")
        threading.Thread(target=self._wait_for_end, args=(instance, machine), daemon=True).start()

    def _wait_for_end(self, instance: Any, machine: LocalMachine) -> None:
        """Handle a machine that ends by itself: stopped, or terminated if the launch requested that."""
        process = machine.process
        # Kept: after a reboot the machine has another process, which has a thread of its own.
        code = process.wait() if process else None

        def work() -> None:
            if instance._state.name != "running" or machine.process is not process:
                return
            self._machines.stop(instance.id, clean=False)
            if code == REBOOT:  # for EC2 a reboot inside the machine changes no state
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
        """Remove the machine, then terminate: a volume is free only when the machine has stopped writing."""
        try:
            self._machines.remove(instance.id)
        finally:
            self._terminate(instance)
            set_state(instance, "terminated", reason=reason)

    def _discard_failed_launch(self, instance: Any, reason: str) -> None:
        """End a launch that failed, with all its volumes: no data was written to them."""
        for _, attached in instance.get_block_device_mapping:
            attached.delete_on_termination = True
        self._terminate_machine(instance, reason)

    def _power_off(self, instance: Any, reason: str) -> None:
        """Stop a machine after a failed start, stop or reboot; its disks stay."""
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
        """Do a thread's work under the machine's lock; a failure becomes the reason in DescribeInstances."""
        with self._machines.lock(instance.id):
            try:
                work()
            except Exception as error:  # the end of the thread: no caller would report it
                log.exception("%s", instance.id)
                more = (*error.details, error.hint) if isinstance(error, GpukilnError) else ()
                try:
                    failed("; ".join(filter(None, (str(error), *more))))
                except Exception:
                    log.exception("%s: cleaning up", instance.id)


def _state(instance: Any) -> InstanceState:
    return InstanceState(instance._state.name, instance._state.code)
