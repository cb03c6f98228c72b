"""Images given as a parameter, `resolve:ssm:NAME`, in RunInstances and in launch templates.

From: EC2 Auto Scaling user guide, "Use AWS Systems Manager parameters instead of AMI IDs in launch
templates".
"""

from typing import Any

from moto.ec2.exceptions import EC2ClientError

PREFIX = "resolve:ssm:"


def resolve_image(ec2: Any, image_id: str, launch_template: dict[str, Any] | None) -> str:
    """The image of a call of RunInstances.

    Args:
        ec2: moto's backend of the region.
        image_id: The call's ImageId; empty or None where the launch template has it.
        launch_template: The call's launch template, or None.

    Returns:
        The image's id; the argument itself where it is not a parameter.

    Raises:
        EC2ClientError: The parameter does not exist.
    """
    named = image_id
    # A call's ImageId takes precedence over that of its launch template (API reference, RunInstances).
    if not named and launch_template:
        named = ec2._get_template_from_args(launch_template).image_id
    if not named or not named.startswith(PREFIX):
        return image_id
    from moto.ssm.models import ssm_backends  # noqa: PLC0415 - it exists only after moto has loaded

    name = named.removeprefix(PREFIX)
    parameter = ssm_backends[ec2.account_id][ec2.region_name].get_parameter(name)
    if parameter is None:
        raise EC2ClientError(
            "InvalidParameterValue", f"the parameter {name} does not exist in {ec2.region_name}"
        )
    return str(parameter.value)
