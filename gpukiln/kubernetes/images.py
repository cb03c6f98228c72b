"""What the name of a container image says."""

from __future__ import annotations

import re


def cuda_of_image(image: str) -> str:
    """The CUDA version that an image's tag says, such as 12.4 in 2.5.1-cuda12.4-runtime, or nothing."""
    name, _, tag = image.partition("@")[0].rpartition(":")
    if match := re.search(r"(?:cuda|cu)-?(\d{2})\.(\d+)", tag) or re.search(r"cu(\d{2})(\d)\b", tag):
        return f"{match[1]}.{match[2]}"
    own = name.endswith("nvidia/cuda") and re.match(r"(\d+)\.(\d+)", tag)
    return f"{own[1]}.{own[2]}" if own else ""
