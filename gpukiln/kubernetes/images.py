"""Facts in the name of a container image."""

from __future__ import annotations

import re

from gpukiln.errors import RefusedError, UsageError

# distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST]
IMAGE = re.compile(
    r"(?P<name>(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


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


def check_reference(image: str, *, allow_latest: bool) -> None:
    """Check --image.

    Raises:
        UsageError: It is no reference of an image.
        RefusedError: Its tag is latest or missing, and that is not allowed.
    """
    if not image:
        raise UsageError("--image is missing", hint="name the container image, with its tag or digest")
    match = IMAGE.fullmatch(image)
    if not match:
        raise UsageError(
            f"--image {image!r} is no reference of an image",
            hint="wanted: [HOST/]NAME:TAG or [HOST/]NAME@sha256:..., in lower case",
        )
    if not match["digest"] and match["tag"] in (None, "latest") and not allow_latest:
        what = "tag latest" if match["tag"] else "no tag, which means latest"
        raise RefusedError(
            f"--image {image} has {what}: it changes, and nodes may run different images",
            hint="use a version tag or the digest; --allow-latest accepts it",
        )


def object_name_of(image: str) -> str:
    """The last part of an image's name as the name of an object.

    >>> object_name_of("registry.example/team/Train_LLM:1.2")
    'train-llm'
    """
    last = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "job"
