"""EC2 calls on images that moto lacks or simplifies: idempotent copies, deprecation, protection, pages.

Parameters are parsed and answers are serialized by botocore's model of EC2, as for moto's own calls.
"""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.responses import EC2Response

BLOCKED, UNBLOCKED = "block-new-sharing", "unblocked"  # botocore, ImageBlockPublicAccess…State
# Two requests with one token at the same time would make two images.
_copying = threading.Lock()


def extend_image_calls() -> None:
    """Extend moto. Call once."""
    for name, value in {
        "deprecation_time": None,
        "deregistration_protection": "disabled",
        "imds_support": None,
        "source_image_id": None,
        "source_image_region": None,
        "client_token": None,
        "client_request": None,
    }.items():
        # On the class, because moto's own code creates images and knows none of these fields.
        setattr(Ami, name, value)
    vars_of_region: Any = EC2Backend
    vars_of_region.image_block_public_access = BLOCKED  # the default of a new account
    for call in (
        *(copy_image, enable_image_deprecation, disable_image_deprecation),
        *(enable_image_deregistration_protection, disable_image_deregistration_protection),
        *(get_image_block_public_access_state, enable_image_block_public_access),
        disable_image_block_public_access,
    ):
        setattr(EC2Response, call.__name__, call)
    for name, wrap in {
        "modify_image_attribute": _with_public_access_rules,
        "deregister_image": _with_protection,
        "describe_images": _paginated("Images"),
        "describe_snapshots": _paginated("Snapshots"),
    }.items():
        setattr(EC2Response, name, wrap(getattr(EC2Response, name)))


def copy_image(self: Any) -> ActionResult:
    """CopyImage where the same client token returns the same image."""
    names = ("SourceImageId", "SourceRegion", "Name", "Description", "Encrypted", "KmsKeyId")
    request = {name: self._get_param(name) for name in names}
    token = self._get_param("ClientToken")
    tags = self._parse_tag_specification()
    # After the parameters were read: a malformed request fails in a dry run, too.
    self.error_on_dryrun()
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - it exists only after moto has loaded

    with _copying:
        for image in self.ec2_backend.amis.values():
            if token and image.client_token == token:
                if image.client_request != request:
                    raise EC2ClientError(
                        "IdempotentParameterMismatch", "the client token was used with other parameters"
                    )
                return ActionResult({"ImageId": image.id})
        image = self.ec2_backend.copy_image(
            request["SourceImageId"], request["SourceRegion"], request["Name"], request["Description"]
        )
        image.client_token, image.client_request = token, request
        snapshot = image.ebs_snapshot
        source = ec2_backends[self.current_account][request["SourceRegion"]].amis[request["SourceImageId"]]
        # A copy of an encrypted snapshot is always encrypted (EC2's API reference, CopyImage).
        if request["Encrypted"] or request["KmsKeyId"] or source.ebs_snapshot.encrypted:
            snapshot.encrypted, snapshot.kms_key_id = True, request["KmsKeyId"] or "alias/aws/ebs"
    image.add_tags(tags.get("image", {}))
    snapshot.add_tags(tags.get("snapshot", {}))
    return ActionResult({"ImageId": image.id})


def enable_image_deprecation(self: Any) -> ActionResult:
    """EnableImageDeprecation: rounded down to the minute, and not in the past."""
    image, at = _image(self), self._get_param("DeprecateAt")
    # botocore's parser gives a naive time where the request has no zone; EC2 reads it as UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    self.error_on_dryrun()
    if at < datetime.now(UTC):
        raise EC2ClientError("InvalidParameterValue", f"DeprecateAt {at.isoformat()} is in the past")
    # EC2 keeps whole minutes (its API reference, EnableImageDeprecation).
    image.deprecation_time = f"{at.astimezone(UTC):%Y-%m-%dT%H:%M}:00.000Z"
    return ActionResult({"Return": True})


def disable_image_deprecation(self: Any) -> ActionResult:
    """DisableImageDeprecation."""
    image = _image(self)
    self.error_on_dryrun()
    image.deprecation_time = None
    return ActionResult({"Return": True})


def enable_image_deregistration_protection(self: Any) -> ActionResult:
    """EnableImageDeregistrationProtection."""
    image = _image(self)
    self.error_on_dryrun()
    cooldown = self._get_param("WithCooldown")
    image.deregistration_protection = "enabled-with-cooldown" if cooldown else "enabled-without-cooldown"
    return ActionResult({"Return": image.deregistration_protection})


def disable_image_deregistration_protection(self: Any) -> ActionResult:
    """DisableImageDeregistrationProtection; the cooldown has no effect here."""
    image = _image(self)
    self.error_on_dryrun()
    image.deregistration_protection = "disabled"
    return ActionResult({"Return": "disabled"})


def get_image_block_public_access_state(self: Any) -> ActionResult:
    """GetImageBlockPublicAccessState."""
    state = self.ec2_backend.image_block_public_access
    return ActionResult({"ImageBlockPublicAccessState": state, "ManagedBy": "account"})


def enable_image_block_public_access(self: Any) -> ActionResult:
    """EnableImageBlockPublicAccess."""
    self.error_on_dryrun()
    self.ec2_backend.image_block_public_access = BLOCKED
    return ActionResult({"ImageBlockPublicAccessState": BLOCKED})


def disable_image_block_public_access(self: Any) -> ActionResult:
    """DisableImageBlockPublicAccess."""
    self.error_on_dryrun()
    self.ec2_backend.image_block_public_access = UNBLOCKED
    return ActionResult({"ImageBlockPublicAccessState": UNBLOCKED})


def _image(response: Any) -> Any:
    return response.ec2_backend.describe_images(ami_ids=[response._get_param("ImageId")])[0]


def _with_public_access_rules(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """ModifyImageAttribute with IMDS support and description; blocked and encrypted images stay private."""

    def modify_image_attribute(self: Any) -> Any:
        added = self._get_param("LaunchPermission", {}).get("Add", [])
        groups = [entry.get("Group") for entry in added] + self._get_param("UserGroups", [])
        if "all" in groups and self._get_param("OperationType") != "remove":
            if self.ec2_backend.image_block_public_access == BLOCKED:
                raise EC2ClientError(
                    "OperationNotPermitted", "block public access for AMIs is enabled in this region"
                )
            if _image(self).ebs_snapshot.encrypted:
                raise EC2ClientError("InvalidParameter", "an image with encrypted snapshots can't be public")
        answer = original(self)
        if imds := self._get_param("ImdsSupport"):
            _image(self).imds_support = imds["Value"]
        if described := self._get_param("Description"):
            _image(self).description = described["Value"]
        return answer

    return modify_image_attribute


def _with_protection(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def deregister_image(self: Any) -> Any:
        image = self.ec2_backend.amis.get(self._get_param("ImageId"))
        if image is not None and image.deregistration_protection != "disabled":
            raise EC2ClientError("OperationNotPermitted", f"{image.id} has deregistration protection")
        return original(self)

    return deregister_image


def _paginated(key: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def describe(self: Any) -> Any:
            items = list(original(self).result[key])
            # A client must not look into a token, so the number of the first item will do.
            start, size = int(self._get_param("NextToken") or 0), self._get_param("MaxResults")
            end = start + int(size) if size else len(items)
            more = {"NextToken": str(end)} if end < len(items) else {}
            return ActionResult({key: items[start:end], **more})

        return describe

    return wrap
