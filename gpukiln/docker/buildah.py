"""Buildah, which needs neither a daemon nor the privileges of a container runtime."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gpukiln.docker.engine import (
    IMAGE_LABEL,
    VERIFY_PREFIX,
    BuildRequest,
    Engine,
    ImageInfo,
    Layer,
    buildah_command,
    full_id,
    instruction,
    last_line,
    run_command,
    try_command,
)
from gpukiln.errors import UsageError
from gpukiln.parsing import parse_json


@dataclass(frozen=True)
class Buildah(Engine):
    """Buildah, with chroot isolation: it needs neither a daemon nor the privileges of a container runtime."""

    name: ClassVar[str] = "buildah"

    @classmethod
    def find(cls) -> Engine | str:
        """See `Engine.find`."""
        if not shutil.which("buildah"):
            return "buildah is not on PATH"
        done = try_command("buildah", "version", "--json")
        if done.returncode:
            return f"buildah does not work: {last_line(done)}"
        return cls(str(parse_json(done.stdout).get("version", "")))

    def build_command(self, request: BuildRequest) -> list[str]:
        """See `Engine.build_command`."""
        return buildah_command("buildah", request)

    def build_environment(self) -> dict[str, str]:
        """See `Engine.build_environment`."""
        # chroot: the other kinds need privileges that a container of CI does not have.
        return {"BUILDAH_ISOLATION": "chroot"}

    def remove_unfinished(self, image: str) -> None:
        """See `Engine.remove_unfinished`."""
        # Buildah does not remove its working container when a signal ends it.
        for row in parse_json(run_command("buildah", "containers", "--json")) or ():
            inspected = try_command("buildah", "inspect", row["id"])
            if inspected.returncode or row["containername"].startswith(VERIFY_PREFIX):
                continue  # another process has just removed it; or it is being verified
            labels = parse_json(inspected.stdout)["OCIv1"]["config"].get("Labels") or {}
            if labels.get(IMAGE_LABEL) == image:
                run_command("buildah", "rm", row["id"])

    def load_base(self, tar: Path, reference: str) -> None:
        """See `Engine.load_base`."""
        container = run_command("buildah", "from", "scratch").strip()
        try:
            run_command("buildah", "add", "--quiet", container, str(tar), "/")
            run_command("buildah", "commit", "--quiet", container, reference)
        finally:
            run_command("buildah", "rm", container)

    def inspect(self, reference: str) -> ImageInfo | None:
        """See `Engine.inspect`."""
        # No command of Buildah prints the sizes of layers; containers/storage has them in layers.json.
        done = try_command("buildah", "inspect", "--type=image", reference)
        if done.returncode:
            return None
        document = parse_json(done.stdout)
        config = document["OCIv1"]
        sizes = self._layer_sizes()
        layers = [
            Layer(instruction(entry.get("created_by", "")), sizes.get(digest, 0))
            for entry, digest in zip(
                # diff_ids has no entry for instructions that change no file, such as ENV
                [entry for entry in config["history"] if not entry.get("empty_layer")],
                config["rootfs"]["diff_ids"],
                strict=True,
            )
        ]
        return ImageInfo(
            id=full_id(document["FromImageID"]),
            size=sum(layer.size for layer in layers),
            layers=tuple(layer for layer in layers if layer.size),
            user=config["config"].get("User") or "root",
            entrypoint=tuple(config["config"].get("Entrypoint") or ()),
        )

    def _layer_sizes(self) -> dict[str, int]:
        store = parse_json(run_command("buildah", "info"))["store"]
        # The file of containers/storage for its layers, by the name of the storage driver.
        index = Path(store["GraphRoot"], f"{store['GraphDriverName']}-layers", "layers.json")
        rows: list[dict[str, Any]] = parse_json(index.read_text())
        return {row["diff-digest"]: int(row["diff-size"]) for row in rows if "diff-digest" in row}

    def remove(self, reference: str) -> None:
        """See `Engine.remove`."""
        run_command("buildah", "rmi", reference)

    @contextlib.contextmanager
    def container(self, reference: str, *, name: str, gpus: bool) -> Iterator[str]:
        """See `Engine.container`. A working container runs no process but the commands of the suite."""
        if gpus:
            raise UsageError("buildah gives containers no GPU", hint="use --engine podman or docker")
        # An orphan of a killed verification has the same name.
        try_command("buildah", "rm", name)
        container = run_command("buildah", "from", f"--name={name}", reference).strip()
        try:
            yield f"buildah://{container}"
        finally:
            run_command("buildah", "rm", container)
