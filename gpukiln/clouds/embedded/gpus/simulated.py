"""The simulated GPUs of one machine: their document at a start, and their files."""

import json
import logging
from pathlib import Path
from typing import Any

from gpukiln.catalog.drivers import branches
from gpukiln.clouds.embedded.gpus.machine_files import MachineFiles, driver_version
from gpukiln.clouds.embedded.gpus.profile import make_machine, make_profile
from gpukiln.clouds.embedded.gpus.settings import DRIVER_NOT_LOADED
from gpukiln.clouds.tags import GPUS_TAG, SIMULATED
from gpukiln.errors import GpukilnError
from gpukiln.files import write_atomic
from gpukiln.parsing import parse_json

log = logging.getLogger(__name__)


def is_simulated(instance: Any) -> bool:
    """Whether an instance's tags request simulated GPUs.

    Args:
        instance: moto's instance.
    """
    return bool(instance.ec2_backend.tags.get(instance.id, {}).get(GPUS_TAG) == SIMULATED)


def default_driver() -> str:
    """The driver for an image without one: the last release of the newest long-term branch."""
    long_term = [branch for branch in branches().values() if branch.type == "LTSB" and branch.latest]
    return str(max(long_term, key=lambda branch: branch.branch).latest)


class SimulatedGpus:
    """The simulated GPUs of one machine.

    Args:
        machine: The machine's folder.
        built: Folder of the compiled files, shared by all machines.
        instance_type: The type that has these GPUs.
        seed: Seed of their UUIDs, constant for an instance.
    """

    def __init__(self, machine: Path, built: Path, *, instance_type: str, seed: str) -> None:
        self.files = MachineFiles(machine / "gpus")
        self._recording = machine / "gpus-recording.json"
        self._built, self._instance_type, self._seed = built, instance_type, seed

    def prepare(self, root: Path) -> None:
        """Create its files, and the changes on its disk.

        Args:
            root: The machine's mounted root file system.

        Raises:
            UnavailableError: Compiling failed.
        """
        driver = driver_version(root) or default_driver()
        self.files.make(root, self._built, self._document(driver), branch=_branch(driver))

    def document(self, files: MachineFiles) -> dict[str, Any]:
        """The document that they answer from after a start.

        Args:
            files: Files of the running machine.
        """
        return self._document(files.state.rows().get("driver") or default_driver())

    def board_document(self, files: MachineFiles, key: str, count: int) -> dict[str, Any]:
        """The document of boards of the catalogue, with the machine's driver.

        Args:
            files: Files of the running machine.

        Raises:
            UsageError: The catalogue does not have the board.
            IncompatibleError: The driver does not support it.
        """
        driver = files.state.rows().get("driver") or default_driver()
        return make_machine(key, count, seed=self._seed, driver=driver, cuda=_cuda(driver))

    def use_recording(self, nvml: dict[str, Any]) -> None:
        """Answer from now on from a recording of a real machine, in place of the type's profile."""
        write_atomic(self._recording, json.dumps(nvml))

    def use_profile(self) -> None:
        """Answer from now on from the instance type's profile."""
        self._recording.unlink(missing_ok=True)

    def _document(self, driver: str) -> dict[str, Any]:
        if self._recording.exists():
            recorded: dict[str, Any] = parse_json(self._recording.read_text())
            return recorded
        try:
            return make_profile(self._instance_type, seed=self._seed, driver=driver, cuda=_cuda(driver))
        except GpukilnError as error:
            # as on a real machine: a driver that supports none of its GPUs is not loaded, and the machine
            # boots
            log.warning("%s: %s", self._seed, error)
            return {"driver": driver, "error": {"code": DRIVER_NOT_LOADED, "_error": str(error)}, "gpus": []}


def _cuda(driver: str) -> str:
    """A driver's CUDA version; an unknown branch has that of the newest."""
    known = branches().get(_branch(driver)) or max(branches().values(), key=lambda branch: branch.branch)
    return known.native_cuda


def _branch(driver: str) -> int:
    return int(driver.partition(".")[0])
