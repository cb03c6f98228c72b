"""Facts in the name of a container image."""

from __future__ import annotations

import re


def cuda_of_image(image: str) -> str:
    """The CUDA version in an image's tag; empty if it has none.

    >>> cuda_of_image("pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime")
    '12.4'
    >>> cuda_of_image("nvidia/cuda:12.9.1-base-ubuntu24.04")
    '12.9'
    """
    name, _, tag = image.partition("@")[0].rpartition(":")
    if match := re.search(r"(?:cuda|cu)-?(\d{2})\.(\d+)", tag) or re.search(r"cu(\d{2})(\d)\b", tag):
        return f"{match[1]}.{match[2]}"
    own = name.endswith("nvidia/cuda") and re.match(r"(\d+)\.(\d+)", tag)
    return f"{own[1]}.{own[2]}" if own else ""
