"""NVIDIA's container toolkit: four packages of one version, with an nvidia-ctk that configures engines."""

from pathlib import Path

from standin.packages import Package

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

    Returns:
        The packages.
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


def _nvidia_ctk() -> str:
    return Path(__file__).with_name("nvidia-ctk").read_text()
