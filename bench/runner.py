"""What a second build of the container image costs, against the first, in one run: prints ratios.

    scripts/run python -m bench.runner

Buildah in a storage of its own: everything; then with a Python package less, which must leave CUDA's layer as
it is; then with nothing changed. What the first build fetched is there for the others.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ("docker.build", "runner-gpu", "--base", "debian-12", "--engine", "buildah", "--no-verify", "--json")
LOCK = "docker/runner-gpu/python.lock"
DROPPED = "expecttest"  # nothing depends on it
CUDA_LAYER = "in /usr/local/cuda"


def build(tree: Path, environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """Run docker.build.

    Args:
        tree: A checkout.
        environment: Of the command.

    Returns:
        Seconds, and the record.
    """
    started = time.monotonic()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "invoke"), *BUILD],
        cwd=tree,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return time.monotonic() - started, record


def cuda_layer(record: dict[str, Any]) -> str:
    """The instruction of CUDA's layer, which has the hash of its content."""
    (found,) = [
        layer["created_by"] for layer in record["image"]["layers"] if CUDA_LAYER in layer["created_by"]
    ]
    return str(found)


def main() -> None:
    """Measure, and print the table."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        folder = Path(name)
        tree, home = folder / "tree", folder / "home"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".cache"))
        conf = folder / "storage.conf"
        conf.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/s"\nrunroot = "{folder}/r"\n')
        environment = {**os.environ, "GPUKILN_HOME": str(home), "CONTAINERS_STORAGE_CONF": str(conf)}
        try:
            cold, first = build(tree, environment)
            lines = (tree / LOCK).read_text().replace("\\\n", "\0").splitlines(keepends=True)
            kept = [line for line in lines if not line.startswith(f"{DROPPED}==")]
            (tree / LOCK).write_text("".join(kept).replace("\0", "\\\n"))
            changed, second = build(tree, environment)
            again, third = build(tree, environment)
        finally:
            # The overlay driver binds this folder onto itself; a Buildah that was killed leaves it so.
            subprocess.run(["umount", str(folder / "s/overlay")], check=False, capture_output=True)
    if len(kept) != len(lines) - 1 or not second["built"] or third["built"]:
        raise SystemExit("the builds were not the three that are compared")
    if cuda_layer(first) != cuda_layer(second):
        raise SystemExit("a change of the Python packages made another layer of CUDA")
    print(f"everything                 {cold:7.1f} s")
    print(f"one Python package less    {changed:7.1f} s  {changed / cold:.2f} of it")
    print(f"nothing changed            {again:7.1f} s  {again / cold:.3f} of it")


if __name__ == "__main__":
    main()
