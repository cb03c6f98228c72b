"""The SSM parameter that is a channel: its value is an image id, its history is every release.

Each version's description is a small JSON document (SSM: at most 1024 characters, botocore), so another
machine can read what was released, and roll it back. SSM keeps the newest 100 versions.
"""

from __future__ import annotations

import getpass
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.tags import CHANNEL_TAG, IMAGE_TAG
from gpukiln.errors import UnavailableError
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.parsing import parse_json
from gpukiln.units import Duration

ROOT = "/gpukiln"
# Other parameters below /gpukiln belong to statements and releases.
_PATH = re.compile(rf"{ROOT}/(?P<image>[^/]+)/(?P<kubernetes>[^/]+)/(?P<channel>[^/]+)/image_id")
# Seconds that SSM gets to show an image id. PutParameter answers 200 before it has looked the image up, and
# no document states how long that takes (Systems Manager API reference, PutParameter, DataType): a late value
# must not be reported as a refused one.
SETTLE_S = 900.0
LOOK_S = 10.0  # the longest pause between two reads


@dataclass(frozen=True, order=True)
class Pointer:
    """A channel of an image, which a parameter's name stands for.

    Args:
        image: Name of the image.
        kubernetes: Kubernetes version, or `catalog.bases.NO_KUBERNETES`.
        channel: Name of the channel.
    """

    image: str
    kubernetes: str
    channel: str

    @property
    def path(self) -> str:
        """The parameter's name."""
        return f"{ROOT}/{self.image}/{self.kubernetes}/{self.channel}/image_id"


def parse_path(path: str) -> Pointer | None:
    """The pointer that a parameter's name stands for; None: the parameter is no channel.

    >>> parse_path("/gpukiln/eks-gpu/1.34/stable/image_id")
    Pointer(image='eks-gpu', kubernetes='1.34', channel='stable')
    >>> parse_path("/gpukiln/releases/eks-gpu") is None
    True
    """
    match = _PATH.fullmatch(path)
    return Pointer(**match.groupdict()) if match else None


@dataclass(frozen=True)
class PointerVersion:
    """One version of a pointer.

    Args:
        image_id: The image that it points at.
        build: The build of that image; an empty string where another program wrote the version.
        action: release or rollback.
        replaces: The image id that it pointed at before, or an empty string.
        regions: Every region of the release.
        by: The user who did it.
        at: When, ISO 8601; not kept in the description.
        number: Number of the version; not kept in the description.
    """

    image_id: str
    build: str
    action: str = "release"
    replaces: str = ""
    regions: tuple[str, ...] = ()
    by: str = ""
    at: str = ""
    number: int = 0

    @property
    def description(self) -> str:
        """The document that is kept with the value."""
        # Not the image id, which is the value, nor time and number, which SSM has itself.
        kept = {
            name: value for name, value in asdict(self).items() if name not in ("image_id", "at", "number")
        }
        # Without spaces: SSM's limit of 1,024 characters is for the description of many regions.
        return json.dumps(kept, separators=(",", ":"))


def _version(parameter: dict[str, Any]) -> PointerVersion:
    try:
        document = parse_json(parameter.get("Description") or "{}")
        known = {name: document[name] for name in ("build", "action", "replaces", "by") if name in document}
        regions = tuple(document.get("regions", ()))
    except (ValueError, TypeError, AttributeError):  # a description that a person wrote
        known, regions = {}, ()
    at = parameter.get("LastModifiedDate")
    return PointerVersion(
        image_id=str(parameter["Value"]),
        regions=regions,
        at=at.isoformat(timespec="seconds") if at else "",
        number=int(parameter["Version"]),
        **{"build": "", **known},
    )


def history(ssm: Any, pointer: Pointer) -> list[PointerVersion]:
    """Every version that SSM still has, oldest first; empty where there is no such parameter."""
    # Sorted here: GetParameterHistory documents no order.
    try:
        parameters = list(calls.pages(ssm, "get_parameter_history", "Parameters", Name=pointer.path))
    except ssm.exceptions.ParameterNotFound:
        return []
    return sorted(map(_version, parameters), key=lambda version: version.number)


def releases(versions: list[PointerVersion]) -> list[PointerVersion]:
    """The releases that a rollback can return to, oldest first; the last is the current one.

    A rollback removes the releases after the one that it returned to. A version that was written by hand and
    released afterwards counts as released.

    >>> [v.build for v in releases([PointerVersion("ami-1", "b1"), PointerVersion("ami-2", "b2")])]
    ['b1', 'b2']
    >>> back = PointerVersion("ami-1", "b1", action="rollback")
    >>> [v.build for v in releases([PointerVersion("ami-1", "b1"), PointerVersion("ami-2", "b2"), back])]
    ['b1']

    Args:
        versions: The history.
    """
    stack: list[PointerVersion] = []
    for version in versions:
        # Its image must be in the stack: what came after it is no longer a release.
        if version.action == "rollback":
            same = [place for place, old in enumerate(stack) if old.image_id == version.image_id]
            stack = stack[: same[-1]] if same else stack
        if not stack or stack[-1].image_id != version.image_id:
            stack.append(version)
        # The same image with a build replaces the entry that was written by hand.
        elif not stack[-1].build:
            stack[-1] = version
    return stack


def read_all(ssm: Any) -> dict[Pointer, str]:
    """Every pointer of a region with its image id."""
    image_ids: dict[Pointer, str] = {}
    for parameter in calls.pages(ssm, "get_parameters_by_path", "Parameters", Path=ROOT, Recursive=True):
        if pointer := parse_path(parameter["Name"]):
            image_ids[pointer] = str(parameter["Value"])
    return image_ids


def write(
    ssm: Any, pointer: Pointer, version: PointerVersion, *, pause: Callable[[float], None] = time.sleep
) -> None:
    """Point a channel at an image: one PutParameter, then wait until SSM shows it.

    Args:
        version: The new version.
        pause: Sleeps for so many seconds.

    Raises:
        UnavailableError: SSM accepted the call, but not the value.
    """
    # With this data type SSM checks that the image exists, after it has answered
    # (AWS Systems Manager user guide, parameter-store-ec2-aliases).
    ssm.put_parameter(
        Name=pointer.path,
        Value=version.image_id,
        Type="String",
        DataType="aws:ec2:image",
        Description=version.description,
        Overwrite=True,
    )
    # monotonic: a change of the clock must not end or prolong the wait
    deadline, wait_s = time.monotonic() + SETTLE_S, 1.0
    while (shown := _value(ssm, pointer)) != version.image_id:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"{pointer.path} still says {shown or 'nothing'} instead of {version.image_id}, "
                f"{Duration(SETTLE_S).shown} after SSM accepted it",
                hint="SSM refused the value or still validates it: run the same command again, it completes "
                "the release. SSM accepts only images that this account can use",
            )
        pause(wait_s)
        wait_s = min(wait_s * 1.5, LOOK_S)


def ensure_tags(ssm: Any, pointer: Pointer) -> None:
    """Tag a pointer's parameter, where it lacks the tags."""
    # PutParameter takes no tags together with Overwrite.
    which = {"ResourceType": "Parameter", "ResourceId": pointer.path}
    tags = {IMAGE_TAG: pointer.image, CHANNEL_TAG: pointer.channel}
    there = tags_of(ssm.list_tags_for_resource(**which), "TagList")
    if missing := {key: value for key, value in tags.items() if there.get(key) != value}:
        ssm.add_tags_to_resource(**which, Tags=tag_list(missing))


def _value(ssm: Any, pointer: Pointer) -> str:
    try:
        return str(ssm.get_parameter(Name=pointer.path)["Parameter"]["Value"])
    except ssm.exceptions.ParameterNotFound:
        return ""


def current_user() -> str:
    """The name of the user who runs this."""
    try:
        return getpass.getuser()
    # A container's user often has no entry in /etc/passwd.
    except (KeyError, OSError):
        return "unknown"
