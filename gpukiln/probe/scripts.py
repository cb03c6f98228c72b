"""Scripts of this repository that the judged machine runs; `gpukiln.probe.packing` sends them as text."""

from pathlib import Path

SIGNATURE = (Path(__file__).parents[2] / "scripts/bootstrap/nvidia-module-signature.sh").read_text(
    encoding="utf-8"
)
