"""The images of a region that are in use, and their users.

Auto Scaling groups, managed node groups and fleets launch from launch templates or launch configurations. All
versions of both are read, so the image that such a group would launch next is among them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from gpukiln.clouds import ec2 as calls
from gpukiln.errors import UsageError
from gpukiln.instances.tags import ENDED_STATES
from gpukiln.release.regions import Site

_RESOLVE = "resolve:ssm:"  # an image id that a launch template takes from a parameter (EC2 user guide)
# old images have 8 digits, newer ones 17 (EC2 user guide, "Resource IDs")
_IMAGE_ID = re.compile(r"ami-[0-9a-f]{8,17}")


def images_in_use(site: Site) -> dict[str, list[str]]:
    """The images that resources of the region use.

    Returns:
        By image id, its users.
    """
    users: defaultdict[str, list[str]] = defaultdict(list)
    for instance in calls.instances(site.ec2, {}):
        # Stopped instances count: they start from their volumes, but replacing them needs the image.
        if instance["State"]["Name"] not in ENDED_STATES:
            users[instance["ImageId"]].append(f"instance {instance['InstanceId']}")
    for template in calls.pages(site.ec2, "describe_launch_templates", "LaunchTemplates"):
        # All versions: a group may be pinned to an old one.
        where = {"LaunchTemplateId": template["LaunchTemplateId"]}
        for version in calls.pages(
            site.ec2, "describe_launch_template_versions", "LaunchTemplateVersions", **where
        ):
            if image := version["LaunchTemplateData"].get("ImageId"):
                who = f"launch template {template['LaunchTemplateName']} version {version['VersionNumber']}"
                users[_resolved(site, image)].append(who)
    autoscaling = site.client("autoscaling")
    # Accounts created since 2024-10 have no launch configurations; older ones may still launch from them.
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for group in calls.pages(autoscaling, "describe_auto_scaling_groups", "AutoScalingGroups"):
        groups[group.get("LaunchConfigurationName", "")].append(group["AutoScalingGroupName"])
    for configuration in calls.pages(autoscaling, "describe_launch_configurations", "LaunchConfigurations"):
        name = configuration["LaunchConfigurationName"]
        who = f"launch configuration {name}"
        if name in groups:
            who += f" of Auto Scaling group {', '.join(groups[name])}"
        users[_resolved(site, configuration["ImageId"])].append(who)
    return dict(users)


def _resolved(site: Site, image: str) -> str:
    """The image id behind `resolve:ssm:NAME`, `...:VERSION` or `...:LABEL`, else the text itself."""
    if not image.startswith(_RESOLVE):
        return image
    try:
        # GetParameter takes NAME:VERSION and NAME:LABEL as launch templates write them.
        answer = site.ssm.get_parameter(Name=image.removeprefix(_RESOLVE))
    # A template whose parameter is gone launches nothing: it keeps no image.
    except (site.ssm.exceptions.ParameterNotFound, site.ssm.exceptions.ParameterVersionNotFound):
        return image
    return str(answer["Parameter"]["Value"])


def images_in_files(files: list[str]) -> dict[str, list[str]]:
    """Image ids in files of the user, for example those of Karpenter's node classes.

    Args:
        files: Paths of text, YAML or JSON files; every image id in them counts.

    Returns:
        By image id, the files.

    Raises:
        UsageError: A file can't be read or has no image id: an empty list would protect nothing.
    """
    users: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        try:
            image_ids = set(_IMAGE_ID.findall(Path(name).read_text()))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--in-use {name} can't be read: {error}") from error
        if not image_ids:
            raise UsageError(
                f"--in-use {name} has no image id in it",
                hint="kubectl get ec2nodeclasses -o jsonpath='{.items[*].status.amis[*].id}' > FILE",
            )
        for image_id in image_ids:
            users[image_id].append(f"the list {name}")
    return dict(users)
