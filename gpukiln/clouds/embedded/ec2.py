"""Puts real machines and disks behind moto's EC2, so that the API reports what runs.

Members of moto's model classes are replaced, so every caller (Packer, boto3, the AWS CLI) still gets moto's
parsing, checks and answers. A call that changes a machine returns at once with EC2's transitional state
(pending, stopping, shutting-down); a thread does the work and sets the final state.
"""

import base64
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from moto import backends
from moto.core import responses
from moto.core.types import Base64EncodedString
from moto.core.utils import method_names_from_class, utcnow
from moto.ec2.exceptions import EC2ClientError, MissingParameterError, UnvailableAMIIdError
from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.instances import Instance
from moto.ec2.responses.general import General
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix
from moto.iam.models import IAMBackend
from moto.secretsmanager.models import SecretsManagerBackend
from moto.ssm.models import SimpleSystemManagerBackend

from gpukiln.clouds.embedded import (
    account_store,
    capacity,
    dlami,
    launch_devices,
    market,
    spot,
    store,
    volumes,
)
from gpukiln.clouds.embedded import base as base_image
from gpukiln.clouds.embedded.image_calls import extend_image_calls
from gpukiln.clouds.embedded.images import extend_images
from gpukiln.clouds.embedded.instance_types import extend_instance_types
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.lifecycle import Lifecycle
from gpukiln.clouds.embedded.machines import Machines, requested_kind
from gpukiln.clouds.embedded.pointers import resolve_image
from gpukiln.clouds.embedded.regions import read_region
from gpukiln.clouds.embedded.request_checks import extend_requests
from gpukiln.clouds.embedded.signing_calls import extend_signing


def install(machines: Machines) -> None:
    """Extend moto. Call once, before the first request.

    Args:
        machines: The machines behind the instances.
    """
    layout = machines.layout
    _publish_base(layout)
    _keep_accounts(layout)
    _extend_instances(layout, Lifecycle(machines, terminate=spot.keep_reason(Instance.terminate)))
    # After run_instances was wrapped above: spot wraps it once more.
    spot.extend_launches()
    extend_instance_types()
    market.extend_market(layout)
    volumes.extend_volumes(machines)
    extend_images(machines)
    extend_image_calls()
    extend_requests()
    extend_signing()
    # moto lists its own folder, and the methods of a class, with each request.
    services = [*backends.list_of_moto_modules()]
    _replace(backends, list_of_moto_modules=lambda: services)
    _replace(responses, method_names_from_class=functools.cache(method_names_from_class))

    def create_default_vpc(self: Any) -> Any:
        vpc = self.create_vpc(cidr_block=machines.layout.vpc_cidr(self.region_name), is_default=True)
        for zone in self.describe_availability_zones():
            self.create_default_subnet(zone.name)
        return vpc

    def get_console_output(self: Any) -> Any:
        from moto.core.responses import ActionResult  # noqa: PLC0415 - next to its one use

        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        text = base64.b64encode(machines.console(instance.id)).decode()
        result = {"InstanceId": instance.id, "Timestamp": utcnow(), "Output": Base64EncodedString(text)}
        return ActionResult(result)

    _replace(EC2Backend, create_default_vpc=create_default_vpc)
    _replace(General, get_console_output=get_console_output)
    _replace(TaggedEC2Resource, get_tags=_tags_of)


def _publish_base(layout: Layout) -> None:
    """Each region has the stored images and parameters, and the public ones: the base image and AWS's."""
    # moto creates a region's backend at the first request for the region.
    ec2_init, ssm_init = EC2Backend.__init__, SimpleSystemManagerBackend.__init__

    def init_ec2(self: Any, region_name: str, account_id: str) -> None:
        ec2_init(self, region_name, account_id)
        store.load_ec2(self, read_region(layout, region_name))
        volumes.load(layout, self)
        dlami.publish_images(self)
        base = base_image.current_base(layout)
        if base.image_id not in self.amis:
            snapshot = store.add_snapshot(
                self,
                base.snapshot_id,
                size_gib=base_image.SIZE_GIB,
                owner_id=base_image.OWNER,
                from_ami=base.image_id,
            )
            store.add_image(
                self,
                base.image_id,
                snapshot,
                {
                    "name": base.name,
                    "description": "Debian 12, built from this machine's mirror",
                    "owner_id": base_image.OWNER,
                    "architecture": "x86_64",
                    "virtualization_type": "hvm",
                    "hypervisor": "xen",
                    "root_device_type": "ebs",
                    "root_device_name": base_image.ROOT_DEVICE,
                    "boot_mode": "legacy-bios",
                },
            )

    def init_ssm(self: Any, region_name: str, account_id: str) -> None:
        ssm_init(self, region_name, account_id)
        store.load_ssm(self, read_region(layout, region_name))
        image_id = base_image.current_base(layout).image_id
        store.add_parameter(self, {"name": base_image.SSM_PARAMETER, "value": image_id})
        dlami.publish_parameters(self)

    _replace(EC2Backend, __init__=init_ec2)
    _replace(SimpleSystemManagerBackend, __init__=init_ssm)


def _keep_accounts(layout: Layout) -> None:
    iam_init, secrets_init = IAMBackend.__init__, SecretsManagerBackend.__init__

    def init_iam(self: Any, region_name: str, account_id: str) -> None:
        iam_init(self, region_name, account_id)
        if region_name == account_store.IAM_PARTITION:
            account_store.load_iam(self, read_region(layout, account_store.IAM_REGION))

    def init_secrets(self: Any, region_name: str, account_id: str) -> None:
        secrets_init(self, region_name, account_id)
        account_store.load_secrets(self, read_region(layout, region_name))

    _replace(IAMBackend, __init__=init_iam)
    _replace(SecretsManagerBackend, __init__=init_secrets)


def _extend_instances(layout: Layout, lifecycle: Lifecycle) -> None:
    run_instances = EC2Backend.run_instances

    def run_and_boot(self: Any, image_id: str, *args: Any, **kwargs: Any) -> Any:
        image_id = resolve_image(self, image_id, kwargs.get("launch_template"))
        named = kwargs.get("launch_template")
        template = self._get_template_from_args(named).data if named else {}
        ami_id = image_id or template.get("ImageId")
        if not ami_id:
            raise MissingParameterError("ImageId")
        self.describe_images(ami_ids=[ami_id])  # raises moto's error for an unknown image
        image = self.amis.get(ami_id)
        if image is None:  # describe_images also returns deregistered images
            raise UnvailableAMIIdError(ami_id)
        mapped = (template.get("BlockDeviceMappings"), kwargs.get("block_device_mappings"))
        devices = launch_devices.merge_mappings(image, *(mappings or [] for mappings in mapped))
        for device in devices:  # create each volume once, so that an error comes before the instance exists
            self.volumes.pop(launch_devices.create_volume(self, "", device["Ebs"]).id)
        kwargs["block_device_mappings"] = []  # moto would ignore the image's own mappings
        tags = (kwargs.get("tags") or {}).get("volume", {})
        try:
            requested_kind((kwargs.get("tags") or {}).get("instance", {}))
        except ValueError as error:
            raise EC2ClientError("InvalidParameterValue", str(error)) from None
        if template.get("InstanceMarketOptions") and not kwargs.get("instance_market_options"):
            kwargs["instance_market_options"] = template["InstanceMarketOptions"].get("MarketType")
        arguments = {"count": args[0] if args else kwargs["count"], **kwargs}
        with capacity.take_capacity(layout, self, arguments, template, devices) as zone:
            if not kwargs.get("subnet_id") and not kwargs.get("nics") and self.subnets.get(zone):
                # EC2 uses the zone's default subnet; moto would give an address outside of every VPC
                kwargs["subnet_id"] = next(iter(self.subnets[zone]))
            reservation = run_instances(self, image_id, *args, **kwargs)
        for instance in reservation.instances:
            for device in devices:
                volume = launch_devices.create_volume(self, instance.availability_zone, device["Ebs"])
                volume.add_tags(tags)
                ends = bool(device["Ebs"].get("DeleteOnTermination", True))
                self.attach_volume(volume.id, instance.id, device["DeviceName"], ends)
            lifecycle.launch(instance)
        return reservation

    _replace(EC2Backend, run_instances=run_and_boot)
    _replace(
        Instance,
        start=_method(lifecycle.start),
        stop=_method(lifecycle.stop),
        terminate=_method(lifecycle.terminate),
        reboot=_method(lifecycle.reboot),
    )
    _replace(InstanceResponse, run_instances=_idempotent(InstanceResponse.run_instances))
    _replace(EC2Backend, modify_instance_metadata_options=_modify_metadata_options)
    # moto refuses changes of the image's mappings and lacks the defaults
    _replace(InstanceResponse, _parse_block_device_mapping=_block_device_mappings)


def _idempotent(run_instances: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """RunInstances where the same client token returns the same instances (AWS, "Ensuring idempotency")."""
    # Two requests with one token at the same time would both find no instance.
    launching = threading.Lock()

    def run(self: Any) -> Any:
        from moto.core.responses import ActionResult  # noqa: PLC0415 - next to its one use

        token = self._get_param("ClientToken")
        if not token:
            return run_instances(self)
        with launching:
            for reservation in self.ec2_backend.reservations.values():
                first = reservation.instances[0]
                if first.client_token != token:
                    continue
                if first.client_request != self.params:
                    message = "The client token was used with other parameters"
                    raise EC2ClientError("IdempotentParameterMismatch", message)
                self.error_on_dryrun()
                return ActionResult(reservation)
            answer = run_instances(self)
            for reservation in self.ec2_backend.reservations.values():
                for instance in reservation.instances:
                    if instance.client_token == token:
                        instance.client_request = self.params
            return answer

    return run


def _modify_metadata_options(self: Any, instance_id: str, **changes: Any) -> Any:
    """Options that a request does not have keep their values, as in EC2's reference; moto resets them."""
    options = self.get_instance(instance_id).metadata_options
    names = {"hop_limit": "http_put_response_hop_limit", "http_protocol": "http_protocol_ipv6"}
    names["metadata_tags"] = "instance_metadata_tags"
    for name, value in changes.items():
        if value is not None and name != "dry_run":
            setattr(options, names.get(name, name), value)
    return options


def _tags_of(self: Any) -> list[dict[str, str]]:
    """A resource's tags by its id; moto matches each tag of the region with a pattern of the id."""
    if not self.id:
        return []
    kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "")
    return [
        {"resource_id": self.id, "key": key, "value": value, "resource_type": kind}
        for key, value in self.ec2_backend.tags.get(self.id, {}).copy().items()
    ]


def _block_device_mappings(self: Any) -> Any:
    return self._get_param("BlockDeviceMappings", [])


def _method(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of an instance as a method of its class; a bound method would not get the instance."""

    def method(self: Any) -> Any:
        return function(self)

    return method


def _replace(owner: type | ModuleType, **members: Any) -> None:
    for name, member in members.items():
        setattr(owner, name, member)
