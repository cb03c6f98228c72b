"""A build that its user ends with Ctrl-C: the image is baked, and no machine has verified it."""

import os
import signal
import subprocess

from tests.support.harness import Here, wait_for

STEP = ".. boot from the image"


def interrupt_boot(here: Here, build: subprocess.Popen[str]) -> str:
    """Interrupt a build when the virtual machine runs that is to verify its image.

    Args:
        here: The build's cloud, which has no other machine.
        build: As `Here.start` started it.

    Returns:
        What it said.
    """

    said: list[str] = []

    def runs() -> bool:
        assert build.poll() is None, "".join(said)
        machines = here.status()["server"]["machines"]
        return [machine["kind"] for machine in machines if machine["running"]] == ["vm"]

    assert build.stdout
    for line in build.stdout:
        said.append(line)
        if line.startswith(STEP):
            wait_for(runs)
            os.killpg(build.pid, signal.SIGINT)
    assert build.wait() == 130, "".join(said)
    left = here.leftovers()
    assert not any(left.values()), left
    return "".join(said)
