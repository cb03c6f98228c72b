"""One of the two images of a comparison: its record and the files next to it."""

from dataclasses import dataclass
from pathlib import Path

from gpukiln.attest.attestation import baked_image
from gpukiln.attest.image_contents import ImageContents, read_image_contents
from gpukiln.errors import UsageError
from gpukiln.images.builds import Bake, Build, Builds, Record
from gpukiln.parsing import parse_json


@dataclass(frozen=True)
class ComparedImage:
    """An image.

    Args:
        baked: The image itself.
        installed: Facts of its packages.
        boot_s: Seconds of its first boot when it was verified, as systemd counts them; None: unknown.
    """

    record: Record
    baked: Bake
    installed: ImageContents
    boot_s: float | None

    @property
    def os_family(self) -> str:
        """The family whose rules order the package versions: debian or redhat."""
        return self.record.plan.base.os_family

    def version(self, component: str) -> str | None:
        """The version of a component that is on the image.

        Args:
            component: Its name.

        Returns:
            The version, or None: the image does not have it, or its version is unknown.
        """
        installed = self.baked.components.get(component, {})
        present = installed.get("status") in ("installed", "preinstalled")
        return str(installed["version"]) if present and installed.get("version") else None


def find_compared_image(builds: Builds, name: str) -> ComparedImage:
    """An image by the name of its build, or by its record.

    Args:
        name: A build id, an AMI id, `last`, a record file, or a folder that holds a record.json.

    Returns:
        The image.

    Raises:
        UsageError: There is no such build, its record is damaged, or it has no image.
    """
    path = Path(name)
    if name and path.is_dir():
        # a folder that a user names, such as an unpacked archive of another machine's build
        path = path / "record.json"
    elif not path.is_file():
        path = builds.find(name).record_file
    return read_compared_image(path)


def read_compared_image(path: Path) -> ComparedImage:
    """Read an image's record and the files next to it.

    Args:
        path: The record file.

    Returns:
        The image.

    Raises:
        UsageError: A file is damaged, or the build has no image.
    """
    record = Build.read_file(path)
    # The first boot of the newest verification: an older one may have been on another type.
    newest = Build(path.parent).report_folder(len(record.verdicts))
    return ComparedImage(record, baked_image(record), read_image_contents(path.parent), _boot_s(newest))


def _boot_s(report: Path) -> float | None:
    path = report / "facts.json"
    # A build that was not verified has no report.
    if not path.exists():
        return None
    try:
        facts = parse_json(path.read_text())

        seconds = facts.get("facts", facts).get("boot", {}).get("startup_s")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="`invoke ami.verify` writes it") from error
    return float(seconds) if seconds is not None else None
