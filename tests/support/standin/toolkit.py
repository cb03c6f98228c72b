"""NVIDIA's container toolkit: four packages of one version, with an nvidia-ctk that configures engines."""

from pathlib import Path

from tests.support.standin.packages import Package

NAMES = (
    "libnvidia-container1",
    "libnvidia-container-tools",
    "nvidia-container-toolkit-base",
    "nvidia-container-toolkit",
)


def toolkit(version: str, *, rpm: bool = False) -> list[Package]:
    """The packages of one release; each wants the others in exactly its own version, as NVIDIA's do.

    Args:
        version: Version without the packaging's release.
        rpm: Relations in an rpm's words.
    """
    full = f"{version}-1"
    files = {"nvidia-container-toolkit-base": {"/usr/bin/nvidia-ctk": _nvidia_ctk()}}
    return [
        Package(
            name,
            full,
            tuple(f"{other} = {full}" if rpm else f"{other} (= {full})" for other in NAMES[:place]),
            files=files.get(name, {}),
        )
        for place, name in enumerate(NAMES)
    ]


def toolkit_and_nvidia_docker2(version: str) -> list[Package]:
    """The packages of one release, and the retired one: Docker's settings are a file of its own.

    Args:
        version: The toolkit's version without the packaging's release.
    """
    settings = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}\n'
    files: dict[str, str | dict[str, str]] = {
        "/etc/docker/daemon.json": settings,
        "/usr/bin/nvidia-docker": "#!/bin/sh\n",
    }
    return [*toolkit(version), Package("nvidia-docker2", "2.13.0-1", files=files)]


def _nvidia_ctk() -> str:
    return Path(__file__).with_name("nvidia-ctk").read_text()
