"""Images, instances and pages of EC2, and the one wait loop for changes that EC2 makes later."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import GpukilnError, UsageError

T = TypeVar("T")
# In the form of DescribeInstances, so that callers need no second case.
PENDING = {"State": {"Name": "pending"}}


def filters(values_by_name: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Filters in EC2's form.

    Args:
        values_by_name: Names of filters, each with the values of which a resource must have one.

    >>> filters({"image-id": ["ami-1", "ami-2"]})
    [{'Name': 'image-id', 'Values': ['ami-1', 'ami-2']}]
    >>> filters({})
    []
    """
    return [{"Name": name, "Values": list(values)} for name, values in values_by_name.items()]


def pages(client: Any, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """The items of every page of an answer.

    Args:
        client: Of any service.
        operation: In boto3's form, for example "describe_volumes".
        key: The list in each page, for example "Volumes".
        arguments: Arguments of the operation, and PaginationConfig.
    """
    for page in client.get_paginator(operation).paginate(**arguments):
        yield from page.get(key) or ()  # as botocore/paginate.py, build_full_result: a missing list is empty


def images(
    ec2: Any, values_by_name: Mapping[str, Sequence[str]], *, page_size: int = 0, **arguments: Any
) -> list[dict[str, Any]]:
    """The images that filters select, as DescribeImages gives them.

    For an id that no longer exists a filter by `image-id` returns nothing; the argument ImageIds raises.

    Args:
        ec2: A client.
        values_by_name: See `filters`.
        page_size: Images a page; 0: all at once, in one call.
        arguments: Other arguments, for example Owners.
    """
    arguments |= {"Filters": filters(values_by_name)} if values_by_name else {}
    # Without MaxResults DescribeImages answers everything in one call; AWS recommends pages for many images.
    if page_size:
        return list(
            pages(ec2, "describe_images", "Images", **arguments, PaginationConfig={"PageSize": page_size})
        )
    described: list[dict[str, Any]] = ec2.describe_images(**arguments)["Images"]
    return described


def image(cloud: Cloud, image_id: str) -> dict[str, Any] | None:
    """An image as DescribeImages gives it; None where the region has none of that id.

    Raises:
        UnavailableError: The call failed.
    """
    with explain_aws_errors(f"look up {image_id}"):
        matches = images(cloud.client("ec2"), {"image-id": [image_id]})
    return matches[0] if matches else None


def require_image(cloud: Cloud, image_id: str, *, hint: str) -> dict[str, Any]:
    """An image that the user named.

    Args:
        hint: The options that select another cloud or region.

    Raises:
        UsageError: The region has no such image.
        UnavailableError: The call failed.
    """
    if (described := image(cloud, image_id)) is None:
        raise UsageError(f"{cloud.name} has no AMI {image_id} in {cloud.region}", hint=hint)
    return described


def instances(ec2: Any, values_by_name: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """The instances that filters select; for about an hour EC2 also lists terminated ones.

    Args:
        ec2: A client.
        values_by_name: See `filters`; empty: every instance of the region.
    """
    arguments = {"Filters": filters(values_by_name)} if values_by_name else {}
    for reservation in pages(ec2, "describe_instances", "Reservations", **arguments):
        yield from reservation["Instances"]


def instance(cloud: Cloud, instance_id: str) -> dict[str, Any]:
    """An instance; one that EC2 does not list yet is reported as pending (EC2 is eventually consistent).

    Raises:
        UnavailableError: The call failed.
    """
    with explain_aws_errors("ask for the machine's state"):
        return next(instances(cloud.client("ec2"), {"instance-id": [instance_id]}), PENDING)


def wait_until(
    condition: Callable[[], T | None],
    late: Callable[[], GpukilnError],
    *,
    timeout_s: float,
    pause_s: float,
    longest_pause_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call a condition until it returns a value; it is called once more when the time is over.

    Args:
        condition: Returns the result, or None for not yet. An exception ends the wait.
        late: Makes the error for a wait that timed out.
        timeout_s: Seconds, of the clock or the sum of the pauses, whichever is more: a test with a `sleep`
            that does not wait needs no clock.
        pause_s: Seconds between two calls.
        longest_pause_s: Pauses double up to it; None: every pause is `pause_s`.

    Raises:
        GpukilnError: As `late` gives it.
    """
    began, slept = clock(), 0.0
    while (result := condition()) is None:
        left = timeout_s - max(clock() - began, slept)
        if left <= 0:
            raise late()
        sleep(min(pause_s, left))
        slept += min(pause_s, left)
        pause_s = min(pause_s * 2, longest_pause_s) if longest_pause_s else pause_s
    return result
