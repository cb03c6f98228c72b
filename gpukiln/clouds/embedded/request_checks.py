"""Checks of requests that EC2 makes and moto does not, by botocore's model of the API.

Codes: AWS, "Error codes for the Amazon EC2 API" (docs.aws.amazon.com/AWSEC2/latest/APIReference,
errors-overview). Texts are EC2's where a public source shows them; the source is at each.
"""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import ParamValidationError
from botocore.model import OperationNotFoundError
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.core.utils import get_service_model
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.responses import EC2Response

from gpukiln.catalog.instance_types import every_instance_type, instance_types
from gpukiln.clouds.embedded.pointers import PREFIX, resolve_image

log = logging.getLogger(__name__)
IDS = {  # shape of botocore's model: prefix and error code, with EC2's different spellings
    "ImageId": ("ami", "InvalidAMIID.Malformed"),
    "InstanceId": ("i", "InvalidInstanceID.Malformed"),
    "SnapshotId": ("snap", "InvalidSnapshotID.Malformed"),
    "VolumeId": ("vol", "InvalidVolumeID.Malformed"),
    "SecurityGroupId": ("sg", "InvalidGroupId.Malformed"),
    "SubnetId": ("subnet", "InvalidSubnetID.Malformed"),
    "VpcId": ("vpc", "InvalidVpcID.Malformed"),
    "NetworkInterfaceId": ("eni", "InvalidNetworkInterfaceId.Malformed"),
    "LaunchTemplateId": ("lt", "InvalidLaunchTemplateId.Malformed"),
    "InternetGatewayId": ("igw", "InvalidInternetGatewayId.Malformed"),
    "RouteTableId": ("rtb", "InvalidRouteTableId.Malformed"),
}
NOT_FOUND = {  # prefix: attribute of moto's backend and error code, for kinds that moto does not check itself
    "eni": ("enis", "InvalidNetworkInterfaceID.NotFound"),
    "acl": ("network_acls", "InvalidNetworkAclID.NotFound"),
    "lt": ("launch_templates", "InvalidLaunchTemplateId.NotFound"),
}
# Pattern of the tokens that moto and this package return.
PAGED = {
    **dict.fromkeys(("DescribeImages", "DescribeSnapshots", "DescribeSpotPriceHistory"), r"\d+"),
    **dict.fromkeys(("DescribeCapacityReservations", "DescribeCapacityBlockOfferings"), r"\d+"),
    "DescribeInstances": r"r-[0-9a-f]+",
}
OWN_TOKENS = (
    "DescribeIamInstanceProfileAssociations",
    "DescribeVpcEndpointServices",
)  # moto checks these itself
NAMED_IMAGES = ("CreateImage", "CopyImage", "RegisterImage")
SHOWN_TAG = re.compile(r"[0-9a-zA-Z\-_+=,.@:]{1,255}")
IMAGE_NAME = re.compile(r"[A-Za-z0-9()\[\] ./\-'@_]{3,128}")  # botocore's model, CreateImageRequest$Name


def extend_requests() -> None:
    """Check each request before moto gets it, and answer an exception in moto as an error. Call once."""
    setup_class, call_action = EC2Response.setup_class, EC2Response.call_action
    serialize = EC2Response.serialized

    def dispatch(self: Any, request: Any, full_url: Any = None, headers: Any = None) -> Any:
        try:
            setup_class(self, request, full_url, headers)
            _check(self)
            return call_action(self)
        except ServiceException as error:
            refusal = error
        except OperationNotFoundError:
            refusal = EC2ClientError(
                "InvalidAction", f"The action {self._get_action()} is not valid for this web service."
            )
        except NotImplementedError as error:
            call = str(error).partition(" has not been implemented")[0]
            refusal = EC2ClientError("UnsupportedOperation", f"The embedded EC2 does not have {call}")
        except (ValueError, ParamValidationError) as error:
            log.exception("%s", self._get_action())
            refusal = EC2ClientError("InvalidParameterValue", str(error))
        except Exception as error:  # a crash would answer HTML, which SDKs retry five times
            log.exception("%s", self._get_action())
            refusal = EC2ClientError("InternalError", f"{type(error).__name__}: {error}")
        status, answered, body = self.serialized(ActionResult(refusal))
        return status, {**answered, "status": str(status)}, body

    def serialized(self: Any, result: ActionResult) -> Any:
        status, *answer = serialize(self, result)
        fault = isinstance(result.result, ServiceException)  # botocore's model has no status for EC2's errors
        return getattr(result.result, "status", status) if fault else status, *answer

    # Set on the class: moto creates a response object for each request.
    EC2Response.serialized = serialized  # type: ignore[method-assign,assignment]
    EC2Response._dispatch = dispatch  # type: ignore[method-assign]


def _check(response: Any) -> None:
    action, request = response._get_action(), response.params
    shape = get_service_model("ec2").operation_model(action).input_shape
    if shape is None:
        return
    for name in shape.required_members:
        if request.get(name) in (None, "", []):
            raise EC2ClientError("MissingParameter", f"The request must contain the parameter {name}")
    for name, value in _values(shape, request):
        _check_value(action, name, value)
    _check_filters(action, shape, request)
    _check_token(response, action, request.get("NextToken"))
    ec2 = response.ec2_backend
    if action == "RunInstances":
        _check_launch(ec2, request)
    if action in NAMED_IMAGES:
        _check_image_name(ec2, request)
    if action == "CreateTags":
        _check_tagged(ec2, request["Resources"])
    _check_shown_tags(ec2, action, request)


def _values(shape: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """All values of a request with the names of their shapes, outer values first."""
    yield shape.name, value
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name, member in shape.members.items():
            if value.get(name) is not None:
                yield from _values(member, value[name])
    elif shape.type_name == "list" and isinstance(value, list):
        for item in value:
            yield from _values(shape.member, item)


def _check_value(action: str, shape: str, value: Any) -> None:
    if (
        shape in IDS and isinstance(value, str) and value
    ):  # an empty id counts as missing: Packer sends SubnetId=""
        prefix, code = IDS[shape]
        if shape == "ImageId" and value.startswith(PREFIX):
            return
        if not re.fullmatch(rf"{prefix}-([0-9a-f]{{8}}|[0-9a-f]{{17}})", value):
            # getmoto/moto, MalformedAMIIdError; SUSE and others show the same for the other kinds
            raise EC2ClientError(code, f'Invalid id: "{value}" (expecting "{prefix}-...")')
    if shape == "Tag" and action != "DeleteTags":
        key, text = value.get("Key") or "", value.get("Value") or ""
        # EC2 user guide, "Tag restrictions".
        if key.lower().startswith("aws:"):
            message = "Tag keys starting with 'aws:' are reserved for internal use"
            raise EC2ClientError("InvalidParameterValue", message)
        for what, given, most in (("key", key, 128), ("value", text, 256)):  # user guide, Tag restrictions
            if len(given) > most:
                message = f"Tag {what} exceeds the maximum length of {most} characters"
                raise EC2ClientError("InvalidParameterValue", message)


def _check_filters(action: str, shape: Any, request: Mapping[str, Any]) -> None:
    for member in ("Filters", "Filter"):
        known = _filter_names(action, member) if member in shape.members else frozenset()
        for filter_ in request.get(member) or [] if known else []:
            name = filter_.get("Name") or "null"
            if name not in known and not (name.startswith("tag:") and "tag" in known):
                raise EC2ClientError("InvalidParameterValue", f"The filter '{name}' is invalid")


@functools.cache
def _filter_names(action: str, member: str) -> frozenset[str]:
    """The filters in botocore's documentation of a call; empty where it has none."""
    shape: Any = get_service_model("ec2").operation_model(action).input_shape
    text = shape.members[member].documentation
    names = set(re.findall(r"<li>\s*<p>\s*<code>([^<]+)</code>", text))
    return frozenset({*names, *(["tag"] if any(name.startswith("tag") for name in names) else [])})


def _check_token(response: Any, action: str, token: str | None) -> None:
    """Refuse a NextToken that no answer had: only the calls in `PAGED` return any.

    EC2's code is the same for all calls, its texts differ (karpenter-provider-aws issue 6061, boto3 issue
    2673).
    """
    if token is None or action in OWN_TOKENS:
        return
    known = bool(re.fullmatch(PAGED.get(action, r"(?!)"), token))
    if known and action == "DescribeInstances":
        known = token in response.ec2_backend.reservations
    if not known:
        message = f"Value ( {token} ) for parameter NextToken is invalid. The token is invalid."
        raise EC2ClientError("InvalidParameterValue", message)


def _check_launch(ec2: Any, request: Mapping[str, Any]) -> None:
    fewest, most = int(request["MinCount"]), int(request["MaxCount"])
    for name, number in (("minCount", fewest), ("maxCount", most)):
        if number < 1:
            message = f"Value ({number}) for parameter {name} is invalid. Expected a positive integer."
            raise EC2ClientError("InvalidParameterValue", message)
    if most < fewest:
        message = f"The parameter minCount ({fewest}) must not be greater than maxCount ({most})"
        raise EC2ClientError("InvalidParameterCombination", message)
    template = request.get("LaunchTemplate")
    given = ec2._get_template_from_args(template).data if template else {}
    image_id = resolve_image(ec2, request.get("ImageId") or given.get("ImageId") or "", None)
    if not image_id:
        raise EC2ClientError("MissingParameter", "The request must contain the parameter ImageId")
    type_name = request.get("InstanceType") or given.get("InstanceType") or "m1.small"
    if type_name not in every_instance_type():
        raise EC2ClientError("InvalidParameterValue", f"Invalid value '{type_name}' for InstanceType.")
    [image] = ec2.describe_images(ami_ids=[image_id])
    runs = _architectures(type_name)
    if runs and image.architecture and image.architecture not in runs:
        raise EC2ClientError(  # skypilot issue 6315
            "InvalidParameterValue",
            f"The architecture '{runs[0]}' of the specified instance type does not match the architecture "
            f"'{image.architecture}' of the specified AMI. Specify an instance type and an AMI that have "
            "matching architectures, and try again. You can use 'describe-instance-types' or "
            "'describe-images' to discover the architecture of the instance type or AMI.",
        )


def _architectures(type_name: str) -> list[str]:
    """The architectures of an instance type, from moto or the catalogue."""
    if type_name in INSTANCE_TYPES:
        runs: list[str] = INSTANCE_TYPES[type_name]["ProcessorInfo"]["SupportedArchitectures"]
        return runs
    known = instance_types().get(type_name)
    return [known.arch] if known else []


def _check_image_name(ec2: Any, request: Mapping[str, Any]) -> None:
    name, token = request["Name"], request.get("ClientToken")
    if not IMAGE_NAME.fullmatch(name):
        raise EC2ClientError(
            "InvalidAMIName.Malformed",
            "AMI names must be between 3 and 128 characters long, and may contain letters, numbers, "
            "'(', ')', '.', '-', '/' and '_'",
        )
    for image in ec2.amis.values():
        # Names are unique within an account.
        mine = image.owner_id == ec2.account_id
        if image.name == name and mine and not (token and image.client_token == token):
            message = f"AMI name {name} is already in use by AMI {image.id}"
            raise EC2ClientError("InvalidAMIName.Duplicate", message)


def _check_shown_tags(ec2: Any, action: str, request: Mapping[str, Any]) -> None:
    """Refuse tag keys that can't be paths of instance metadata (seek-oss/aec pull 411 shows the text)."""
    enabled, tags = False, request.get("Tags") or []
    if action == "RunInstances":
        enabled = (request.get("MetadataOptions") or {}).get("InstanceMetadataTags") == "enabled"
        specifications = request.get("TagSpecifications") or []
        of_it = [
            specification.get("Tags") or []
            for specification in specifications
            if specification.get("ResourceType") == "instance"
        ]
        tags = [tag for some in of_it for tag in some]
    elif action == "ModifyInstanceMetadataOptions":
        enabled = request.get("InstanceMetadataTags") == "enabled"
        tags = [{"Key": key} for key in ec2.tags.get(request["InstanceId"], {})]
    elif action == "CreateTags":
        instances = filter(
            None, (ec2.get_instance_by_id(resource_id) for resource_id in request["Resources"])
        )
        enabled = any(instance.metadata_options.instance_metadata_tags == "enabled" for instance in instances)
    for key in [tag.get("Key") or "" for tag in tags] if enabled else []:
        if not SHOWN_TAG.fullmatch(key) or key in (".", "..", "_index"):
            raise EC2ClientError(
                "InvalidParameterValue",
                f"'{key}' is not a valid tag key. Tag keys must match pattern "
                "([0-9a-zA-Z\\-_+=,.@:]{1,255}), and must not be a reserved name ('.', '..', '_index')",
            )


def _check_tagged(ec2: Any, resources: list[str]) -> None:
    for resource in resources:
        prefix = resource.rpartition("-")[0]
        for known, code in IDS.values():
            if prefix == known and not re.fullmatch(r".*-([0-9a-f]{8}|[0-9a-f]{17})", resource):
                raise EC2ClientError(code, f'Invalid id: "{resource}" (expecting "{prefix}-...")')
        if prefix == "i" and ec2.get_instance_by_id(resource) is None:
            message = f"The instance ID '{resource}' does not exist"
            raise EC2ClientError("InvalidInstanceID.NotFound", message)
        if prefix in NOT_FOUND:
            attribute, code = NOT_FOUND[prefix]
            if resource not in getattr(ec2, attribute):
                raise EC2ClientError(code, f"The ID '{resource}' does not exist")
