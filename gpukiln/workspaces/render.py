"""What a workspace is made of, as files without a cloud: Compose, user data, and Terraform.

For Terraform: values of the module examples/coder/, and a root module that calls it. What `workspace.up` asks
of the cloud is translated here into Terraform's names; nothing is decided here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from gpukiln.catalog.load import ROOT
from gpukiln.clouds import tags
from gpukiln.clouds.iam import ROLE_PATH, boundary_arn, partition_of
from gpukiln.errors import UsageError
from gpukiln.instances.launch import SPOT
from gpukiln.instances.tags import tags_of
from gpukiln.offers.model import Offer
from gpukiln.typed import dump
from gpukiln.workspaces import iam, network, userdata, volumes
from gpukiln.workspaces.contract import VARIABLES, Outputs, Workspace, workspace_tags
from gpukiln.workspaces.plan import describe_offer, plan_offline
from gpukiln.workspaces.provision import HOME_DEVICE, machine_request
from gpukiln.workspaces.spec import WorkspaceSpec

TFVARS_SCHEMA = "workspace.tfvars/1"
RENDERED_FILE = "rendered.json"
MODULE = ROOT / "examples" / "coder"
MODULE_FOLDER = "workspace"  # of the module, in the folder of the root module that calls it
TERRAFORM = {"GroupName": "name"}  # where it is not the API's name
# Named by the contract: the module fails a test when it lacks an output.
OUTPUTS = tuple(field.name for field in fields(Outputs))  # of the module, too


def rendered_files(to: str, spec: WorkspaceSpec, say: Callable[[str], None]) -> dict[str, bytes]:
    """Files by their names; a root module of Terraform is whole, with the module that it calls.

    Args:
        to: compose, userdata, tfvars or terraform.
        say: Receives notes about the services.

    Raises:
        UsageError: No service or no image is named, and one is needed.
        IncompatibleError: No machine satisfies it, or no release of a service runs there.
    """
    plan = plan_offline(spec, datetime.now(UTC).date(), say)
    contract = plan.contract
    if to == "compose":
        if not plan.compose:
            raise UsageError("no service is named", hint="--service ollama, for example")
        return {"compose.yaml": plan.compose.encode()}
    data = plan.user_data()
    if to == "userdata":
        return {"user-data": data}
    if not contract.image_id:
        raise UsageError("no image is named", hint="--image ami-..., as `offer.list --image auto` prints it")
    variables = tfvars(contract, plan.offers, image_id=contract.image_id, user_data=data)
    if to == "tfvars":
        return {RENDERED_FILE: _json(variables)}
    root = terraform(contract, variables, source=f"./{MODULE_FOLDER}")
    module = {f"{MODULE_FOLDER}/{file.name}": file.read_bytes() for file in sorted(MODULE.glob("*.tf"))}
    return {**{name: _json(text) for name, text in root.items()}, **module}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def tfvars(
    workspace: Workspace,
    offers: Sequence[Offer],
    *,
    image_id: str,
    user_data: bytes,
    image_digest: str = "",
    image_verdict: str = "",
    more_tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the Terraform module makes of a workspace, for a JSON file that it reads.

    Args:
        workspace: As it was requested: the module refuses inputs that differ.
        offers: The best first.
        image_id: The image that was chosen.
        image_digest: Of the image's build; empty where gpukiln did not build it.
        image_verdict: Of the image, in words; empty where it was not verified.
        more_tags: Of the machine.

    Raises:
        UsageError: There is no offer, or a part of what is wanted makes no sense.
    """
    if not offers:
        raise UsageError("no machine to render", hint="`invoke offer.list` shows what satisfies a request")
    images = {tags.IMAGE_DIGEST_TAG: image_digest, tags.IMAGE_VERDICT_TAG: image_verdict}
    request = machine_request(
        workspace,
        image={"ImageId": image_id, "RootDeviceName": ""},  # Terraform looks the device up
        user_data=user_data,
        group_id="",
        profile="",
        tags={**images, **(more_tags or {})},
    )
    return {
        "schema": TFVARS_SCHEMA,
        "wanted": dump(workspace),
        "offers": [_offer(offer) for offer in offers],
        "machine": _machine(request),
        "security_group": {
            **_named(network.group_request(workspace)),
            "ingress": [_rule(rule) for rule in network.ingress_rules(workspace)],
            "egress": [_rule(rule) for rule in network.egress_rules(workspace)],
        },
        "role": {
            "name": iam.role_name(workspace),
            "path": ROLE_PATH,
            # Rendering asks no cloud: Terraform fills in the account.
            "permissions_boundary": boundary_arn(partition_of([workspace.region]), "%s"),
            "assume_role_policy": json.dumps(iam.trust(workspace)),
            "policy_name": iam.POLICY,
            "policy": json.dumps(iam.policy(workspace)),
            "tags": workspace_tags(workspace, iam.PART),
        },
        "home": {
            **_named(volumes.volume_request(workspace)),
            "device_name": HOME_DEVICE,
            "mount_path": f"/home/{userdata.user_of(workspace.owner)}",
        },
        "tag_names": {
            "home": tags.HOME_TAG,
            "plan": tags.PLAN_TAG,
            "driver": tags.DRIVER_TAG,
            "health": tags.HEALTH_TAG,
        },
        "variables": dict(VARIABLES),
        "runtime_env": userdata.runtime_env(workspace),
        "image": {"image_id": image_id, "image_digest": image_digest, "verdict": image_verdict},
    }


def terraform(workspace: Workspace, rendered: Mapping[str, Any], *, source: str) -> dict[str, dict[str, Any]]:
    """A root module, ready for `terraform init`: the files of its folder, by name.

    Args:
        rendered: Of `tfvars`.
        source: Of the module: a folder, or any address that Terraform takes.
    """
    inputs = {name: _literal(value) for name, value in dump(workspace).items() if value is not None}
    main = {
        "terraform": {
            "required_version": ">= 1.5",
            "required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 6.0"}},
        },
        "provider": {"aws": {"region": workspace.region}},
        "module": {
            "workspace": {"source": source, "rendered": "${path.module}/" + RENDERED_FILE, **inputs},
        },
        "output": {name: {"value": f"${{module.workspace.{name}}}"} for name in OUTPUTS},
    }
    return {"main.tf.json": main, RENDERED_FILE: dict(rendered)}


def _offer(offer: Offer) -> dict[str, Any]:
    price = str(offer.price.value) if offer.price else None
    return {
        "instance_type": offer.instance_type,
        "market": offer.market,
        "instance_market_options": _named(SPOT) if offer.market == "spot" else None,
        "zones": offer.zones,
        "gpu_type": offer.gpu,
        "gpu_count": offer.gpus,
        "usd_hour": price,
        "plan": describe_offer(offer, "%s"),  # of Terraform's format(), which puts the zone in
        "tags": {tags.PRICE_TAG: price or ""},
    }


def _machine(request: dict[str, Any]) -> dict[str, Any]:
    """Arguments of RunInstances as attributes of aws_instance, but those that name other resources."""
    [root] = request["BlockDeviceMappings"]
    instance, volume = (tags_of(tag_set) for tag_set in request["TagSpecifications"])
    # These are attributes with another form in Terraform, or references to resources of the module.
    special = (
        "ImageId",
        "UserData",
        "SecurityGroupIds",
        "BlockDeviceMappings",
        "TagSpecifications",
    )
    return {
        "ami": request["ImageId"],
        "user_data_base64": base64.b64encode(request["UserData"]).decode(),
        "root_block_device": {**_named(root["Ebs"]), "tags": volume},
        "tags": instance,
        **_named({key: value for key, value in request.items() if key not in special}),
    }


def _named(request: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the EC2 API as Terraform writes them, HttpTokens as http_tokens; the one resource's tags.

    >>> _named({"HttpTokens": "required"})
    {'http_tokens': 'required'}
    >>> _named({"GroupName": "gpukiln-workspace-vision"})
    {'name': 'gpukiln-workspace-vision'}
    """
    named: dict[str, Any] = {}
    for key, value in request.items():
        if key == "TagSpecifications":
            [tag_set] = value
            named["tags"] = tags_of(tag_set)
        else:
            name = TERRAFORM.get(key) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
            named[name] = _named(value) if isinstance(value, Mapping) else value
    return named


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of one network as a block of aws_security_group, which wants ports 0 for every protocol."""
    return {
        "protocol": rule["IpProtocol"],
        # EC2 has no ports for protocol -1; aws_security_group requires 0 for both.
        "from_port": rule.get("FromPort", 0),
        "to_port": rule.get("ToPort", 0),
        "cidr_blocks": [ip_range["CidrIp"] for ip_range in rule.get("IpRanges", ())],
        "ipv6_cidr_blocks": [ip_range["CidrIpv6"] for ip_range in rule.get("Ipv6Ranges", ())],
    }


def _literal(value: Any) -> Any:
    """A value in Terraform's JSON, where a text is a template: `${` and `%{` are doubled.

    >>> _literal("${HOME}")
    '$${HOME}'
    >>> _literal(["%{if}", 1])
    ['%%{if}', 1]
    """
    if isinstance(value, str):
        return value.replace("${", "$${").replace("%{", "%%{")
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    return value
