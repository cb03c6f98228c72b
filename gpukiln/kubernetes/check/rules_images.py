"""Rules on images: they exist, are maintained, and do not change."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import Path, Violation, Workload

CUDA = re.compile(r"(?:(?:docker\.io|nvcr\.io)/)?nvidia/cuda:(?P<tag>[^@]+)")
# gitlab.com/nvidia/container-images/cuda, doc/supported-tags.md
CUDA_TAG = re.compile(
    r"\d+\.\d+\.\d+-(?:cudnn\d*-)?(?:base|runtime|devel|tensorrt-\w+)(?:-cudnn\d*)?(?:-(?:base|runtime|devel))?"
    r"-(?:ubuntu\d\d\.\d\d|ubi\d+|rockylinux\d+|oraclelinux\d+|amzn\d+|azl\d+|centos\d|opensuse\d+|sles\d+)"
    r"(?:-(?:amd64|arm64|\d{8}))?"
)
RETIRED = {
    "bitnami/": "bitnami moved its free images away in 2025-09; bitnamilegacy is frozen",
    "bitnamilegacy/": "bitnamilegacy is frozen since 2025-09 and gets no fixes",
    "k8s.gcr.io/": "k8s.gcr.io is frozen since 2023-04; registry.k8s.io replaces it",
    "gcr.io/google_containers/": "gcr.io/google_containers is frozen; registry.k8s.io replaces it",
    "summerwind/actions-runner": "the legacy controller's runner; now ghcr.io/actions/actions-runner",
}
# Newest CUDA minor version past its end of life; NVIDIA deletes its images half a year later.
LAST_GONE = (12, 1)


def images(workload: Workload) -> Iterator[tuple[str, Path]]:
    """Image and path of every container that has one."""
    for container in workload.containers:
        if container.image:
            yield container.image, workload.at(*container.where, "image")


@rule(
    "image-latest",
    "warning",
    Workload,
    title="Images have a fixed tag or a digest",
    reason="`latest` changes: nodes run different images, and a rollback is impossible",
    source="kubernetes.io/docs/concepts/containers/images",
    fix="a version tag, preferably with @ and the digest",
)
def image_latest(workload: Workload, _: Context) -> Iterator[Violation]:
    for image, path in images(workload):
        name, at, _digest = image.partition("@")
        # A colon before the last slash belongs to the port of the registry.
        _name, colon, tag = name.rpartition("/")[2].partition(":")
        if not at and (tag == "latest" or not colon) and "$" not in image and "{" not in image:
            yield Violation(f"{image}: {'tag latest' if tag else 'no tag, which means latest'}", path)


@rule(
    "image-missing",
    "warning",
    Workload,
    title="Every container has an image",
    reason="the API server rejects a container without an image; only some controllers add one",
    source="kubernetes/kubernetes:pkg/apis/core/validation/validation.go",
    fix="image: NAME:TAG",
    fragments=False,
)
def image_missing(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        if not container.spec.get("image"):
            yield Violation(
                f"container {container.name or '(no name)'} has no image", workload.at(*container.where)
            )


@rule(
    "image-never-was",
    "error",
    Workload,
    title="Tags of nvidia/cuda have version, flavour and operating system",
    reason="the image can't be pulled; nvidia/cuda has no `latest` and no short tags",
    source="gitlab.com/nvidia/container-images/cuda, doc/supported-tags.md",
    fix="for example nvidia/cuda:12.9.1-base-ubuntu24.04, or your own image",
)
def image_never_was(workload: Workload, _: Context) -> Iterator[Violation]:
    for image, path in images(workload):
        # Without a tag it means `latest`, which nvidia/cuda does not have.
        bare = image in ("nvidia/cuda", "docker.io/nvidia/cuda", "nvcr.io/nvidia/cuda")
        match = CUDA.fullmatch(image.partition("@")[0])
        if (
            (bare or (match and not CUDA_TAG.fullmatch(match["tag"])))
            and "@" not in image
            and "$" not in image
        ):
            yield Violation(f"{image}: no such tag; they are X.Y.Z-FLAVOUR-SYSTEM", path)


@rule(
    "image-ends",
    "warning",
    Workload,
    title="The CUDA of an image is still maintained",
    reason="NVIDIA deletes tags of nvidia/cuda about half a year after a version's end of life, and "
    "pulls fail",
    source="gitlab.com/nvidia/container-images/cuda, doc/support-policy.md",
    fix="a newer version that the driver supports, or a copy in your own registry",
)
def image_ends(workload: Workload, _: Context) -> Iterator[Violation]:
    for image, path in images(workload):
        match = CUDA.fullmatch(image.partition("@")[0])
        version = re.match(r"(\d{1,9})\.(\d{1,9})\.\d+-", match["tag"]) if match else None
        if version and (int(version[1]), int(version[2])) <= LAST_GONE:
            yield Violation(f"{image}: CUDA {version[1]}.{version[2]} is past its end of life", path)


@rule(
    "image-retired",
    "error",
    Workload,
    title="Images come from a registry that still maintains them",
    reason="the image was deleted, or gets no fixes any more",
    source="bitnami/containers issue 83267; kubernetes.io/blog/2023/02/06/k8s-gcr-io-freeze-announcement",
    fix="registry.k8s.io/kubectl for kubectl; otherwise the project's own image, or your own",
)
def image_retired(workload: Workload, _: Context) -> Iterator[Violation]:
    for image, path in images(workload):
        name = image.removeprefix("docker.io/")
        for prefix, why in RETIRED.items():
            if name.startswith(prefix):
                yield Violation(f"{image}: {why}", path)
