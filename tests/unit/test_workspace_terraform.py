"""examples/coder: its inputs and outputs are the contract's, and what it makes is what `workspace.up` makes.

Terraform is in no package archive that this project takes from: where it is not there, its own tests are not
run, and the rules of `terraform fmt` that matter are checked by tests.support.hcl.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.clouds.tags import OWN_TAGS
from gpukiln.instances.launch import LaunchCandidate, launch_in_order
from gpukiln.instances.tags import tags_of
from gpukiln.offers.request import parse_request
from gpukiln.offers.select import select
from gpukiln.typed import dump
from gpukiln.workspaces import iam as rights
from gpukiln.workspaces import network, volumes
from gpukiln.workspaces.contract import VARIABLES, Outputs, Provenance, Toolchain, VolumeMount, Workspace
from gpukiln.workspaces.provision import machine_request
from gpukiln.workspaces.render import terraform, tfvars
from tests.support.hcl import dangling, module, unformatted
from tests.support.release_cloud import Cloud

FOLDER = ROOT / "examples/coder"
MAIN = (FOLDER / "main.tf").read_text()
MACHINE = MAIN[MAIN.index('resource "aws_instance"') : MAIN.index('resource "aws_volume_attachment"')]
TEXT = "\n".join((FOLDER / f"{name}.tf").read_text() for name in ("versions", "variables", "main", "outputs"))
TERRAFORM = shutil.which("terraform")
needs_terraform = pytest.mark.skipif(not TERRAFORM, reason="terraform is not on this machine")
OWN_INPUTS = {"rendered", "running", "offer", "subnet"}
ARGUMENTS = {  # of RunInstances, and what they are in aws_instance
    "ImageId": "ami",
    "InstanceType": "instance_type",
    "SubnetId": "subnet_id",
    "SecurityGroupIds": "vpc_security_group_ids",
    "IamInstanceProfile": "iam_instance_profile",
    "UserData": "user_data_base64",
    "InstanceInitiatedShutdownBehavior": "instance_initiated_shutdown_behavior",
    "MetadataOptions": "metadata_options",
    "BlockDeviceMappings": "root_block_device",
    "InstanceMarketOptions": "instance_market_options",
    "TagSpecifications": "tags",
}
NOT_IN_TERRAFORM = {"KeyName", "MinCount", "MaxCount", "ClientToken"}  # no key; the rest is the provider's
NOT_IN_UP = {"count", "user_data_replace_on_change", "lifecycle", "depends_on"}
WANTED = Workspace(
    "vision",
    "ann",
    "us-west-2",
    toolchain_template=Toolchain("datasci", "1.1.0"),
    ssh_from="203.0.113.7/32",
    agent_init_script='echo ${HOME} %{x} "it\'s"\n',
    spot=True,
)
KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJpNG3eyKJvBIMCXKd3JvKvbSC/DI2RZmpQ5v5NSBEKd people"
USER_DATA = b"\x1f\x8bnot text"


parsed = cache(module)  # it takes a second


def rendered(wanted=WANTED, image_id="ami-1"):
    request = parse_request("T4:1", cpu=4, spot="only" if wanted.spot else "no")
    offers = select(request, ["us-west-2"], date(2026, 11, 23)).offers[:2]
    return tfvars(wanted, offers, image_id=image_id, user_data=USER_DATA)


def clean(block):
    """A block without what the parser adds; a block that is there once as itself."""
    if isinstance(block, list) and block and isinstance(block[0], dict):
        return clean(block[0])
    if isinstance(block, dict):
        return {key: clean(value) for key, value in block.items() if not key.startswith("__")}
    return block


def resource(address, text=MAIN):
    """A resource's arguments and blocks; a dynamic block is one of them."""
    block = clean(parsed(text)[address])
    for one in parsed(text)[address].get("dynamic", []):
        block |= {name: body["content"] for name, body in clean(one).items()}
    return {name: value for name, value in block.items() if name != "dynamic"}


def expression(text):
    return text.removeprefix("${").removesuffix("}")


def value_of(expression, values):
    """What a path such as ${local.machine.ami} leads to."""
    way = re.fullmatch(r"\$\{local\.([\w.]+)\}", expression)[1].split(".")
    found = {
        "machine": values["machine"],
        "group": values["security_group"],
        "role": values["role"],
        "home": values["home"],
        "offer": values["offers"][0],
    }
    for step in way:
        found = found[step]
    return found


def test_it_parses_and_refers_to_what_it_has():
    assert dangling(TEXT) == set()
    declared = {one.removeprefix("var.") for one in parsed(TEXT) if one.startswith("var.")}
    assert set(re.findall(r"\bvar\.(\w+)", TEXT)) == declared
    assert dangling(TEXT.replace("aws_iam_role.this", "aws_iam_role.that")) == {"aws_iam_role.that"}


# Inputs and outputs


def form(kind):
    """A type of the contract as Terraform writes it."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return form(next(one for one in get_args(kind) if one is not NoneType))
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return f"object({{{', '.join(f'{one.name} = {_field(one, hints)}' for one in fields(kind))}}})"
    if get_origin(kind) is Literal:
        kind = type(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"list({form(get_args(kind)[0])})"
    if get_origin(kind) is dict:
        return f"map({form(get_args(kind)[1])})"
    return {str: "string", int: "number", bool: "bool"}[kind]


def _field(one, hints):
    kind = form(hints[one.name])
    if one.default is None:
        return f"optional({kind})"
    if one.default is not MISSING:
        return f"optional({kind}, {json.dumps(one.default)})"
    if one.default_factory is not MISSING:
        return f"optional({kind}, {{}})"
    return kind


def input_mistakes(text):
    """Where the module's inputs are not the contract's."""
    blocks = parsed(text)
    found = {one.removeprefix("var."): clean(body) for one, body in blocks.items() if one.startswith("var.")}
    hints = get_type_hints(Workspace, include_extras=True)
    wrong = {*found} ^ {*hints, *OWN_INPUTS}
    for one in fields(Workspace):
        if one.name not in found:
            continue
        default = {} if is_dataclass(hints[one.name]) else one.default
        default = [] if default == () else default
        told = found[one.name].get("default", MISSING)
        if expression(found[one.name]["type"]) != form(hints[one.name]):
            wrong.add(f"{one.name}: type")
        if (None if told == "null" else told) != default:
            wrong.add(f"{one.name}: default")
    asked = clean(blocks["locals"]["asked"])
    return wrong | ({name for name, value in asked.items() if value == f"${{var.{name}}}"} ^ {*hints})


def test_its_inputs_are_the_contracts():
    assert input_mistakes(TEXT) == set()
    for old, new, wrong in (
        ('variable "ssh_from"', 'variable "ssh_to"', {"ssh_from", "ssh_to"}),
        ("optional(number, 1)", "optional(number, 2)", {"compute_profile: type"}),
        ("map(string)", "map(number)", {"capabilities: type"}),
        ("  default     = 0\n}\n\n# What", "  default     = 1\n}\n\n# What", {"idle_minutes: default"}),
        ("    spot                  = var.spot\n", "", {"spot"}),
    ):
        assert input_mistakes(TEXT.replace(old, new)) == wrong


def test_its_outputs_are_the_contracts():
    found = {one.removeprefix("output.") for one in parsed(TEXT) if one.startswith("output.")}
    assert found == {one.name for one in fields(Outputs)}
    assert set(parsed(TEXT)["output.metadata"]["value"]) == {one.name for one in fields(Provenance)}
    mounts = parsed(TEXT)["output.volume_mounts"]["value"]
    assert set(re.findall(r"(\w+) = ", str(mounts))) == {one.name for one in fields(VolumeMount)}
    told = parsed(TEXT)["output.runtime_env"]["value"]
    assert all(f"local.rendered.variables.{name}" in told for name in VARIABLES)


# What it makes


@pytest.fixture
def launched(layout, image_id):
    """What RunInstances was told by the walk of `workspace.up`, and what the Terraform module is told."""
    assert layout
    ec2 = Cloud().client("ec2")
    [image] = ec2.describe_images(ImageIds=[image_id])["Images"]
    [vpc] = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    subnet = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc["VpcId"]]}])["Subnets"][0]

    def launch(wanted):
        group = network.security_group(Cloud(), wanted, vpc["VpcId"])
        request = machine_request(
            wanted,
            image=image,
            user_data=USER_DATA,
            group_id=group,
            profile=rights.instance_profile(Cloud(), wanted),
            key_name="people",
        )
        told = []
        ec2.meta.events.register_first(
            "before-parameter-build.ec2.RunInstances", lambda params, **_: told.append(dict(params)), "told"
        )
        here = LaunchCandidate("g4dn.xlarge", subnet["AvailabilityZone"], subnet["SubnetId"], wanted.spot)
        ec2.import_key_pair(KeyName="people", PublicKeyMaterial=KEY)
        try:
            started, refused = launch_in_order(
                AlwaysThe(ec2), request, [here], say=print, token=lambda _: uuid4().hex
            )
        finally:
            ec2.meta.events.unregister("before-parameter-build.ec2.RunInstances", unique_id="told")
            ec2.delete_key_pair(KeyName="people")
        assert not refused
        return told[0], started.instance_id, group

    yield launch
    for wanted in (WANTED, replace(WANTED, spot=False)):
        rights.remove_profile(Cloud(), wanted)


class AlwaysThe(Cloud):
    """The cloud with one client, which is listened to."""

    def __init__(self, ec2):
        super().__init__()
        self.ec2 = ec2

    def client(self, *_, **__):
        return self.ec2


def argument_mistakes(request, text):
    """Arguments of RunInstances that aws_instance does not have, and the other way round."""
    machine = resource("aws_instance.machine", text)
    has = {ARGUMENTS.get(name, name) for name in {*request} - NOT_IN_TERRAFORM}
    wrong = has ^ ({*machine} - NOT_IN_UP)
    for name in ("metadata_options", "instance_market_options"):
        api = next(key for key, value in ARGUMENTS.items() if value == name)
        wrong |= {f"{name}.{one}" for one in snakes(request.get(api, {})) ^ snakes(machine.get(name, {}))}
    [mapping] = request["BlockDeviceMappings"]
    root = {*machine.get("root_block_device", {})} - {"tags"}
    return wrong | {f"root_block_device.{one}" for one in snakes(mapping["Ebs"]) ^ root}


def snakes(block):
    """The names in a block and those in it, HttpTokens as http_tokens."""
    names = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower(): value for key, value in block.items()}
    return {*names} | {one for value in names.values() if isinstance(value, dict) for one in snakes(value)}


def test_each_argument_of_a_launch_is_in_the_module_and_no_other(launched):
    request, _, _ = launched(WANTED)
    assert argument_mistakes(request, MACHINE) == set()
    assert argument_mistakes({**request, "Monitoring": {"Enabled": True}}, MACHINE) == {"Monitoring"}
    more = {**request["MetadataOptions"], "HttpProtocolIpv6": "enabled"}
    assert argument_mistakes({**request, "MetadataOptions": more}, MACHINE) == {
        "metadata_options.http_protocol_ipv6"
    }
    for old, new, wrong in (
        ("  user_data_base64 ", "  ebs_optimized = true\n  user_data_base64 ", {"ebs_optimized"}),
        ("    http_tokens  ", "    # http_tokens  ", {"metadata_options.http_tokens"}),
        (
            "    encrypted             = ",
            "    iops = 3000 #",
            {"root_block_device.iops", "root_block_device.encrypted"},
        ),
        ("  subnet_id       ", "  # subnet_id  ", {"subnet_id"}),
    ):
        assert old in MACHINE
        assert argument_mistakes(request, MACHINE.replace(old, new)) == wrong


@pytest.mark.parametrize("spot", [True, False])
def test_the_machine_is_the_one_that_up_starts(launched, spot):
    wanted = replace(WANTED, spot=spot)
    request, instance_id, _ = launched(wanted)
    values = rendered(wanted, request["ImageId"])
    machine = resource("aws_instance.machine")
    for name in ("ImageId", "InstanceInitiatedShutdownBehavior", "InstanceType"):
        assert value_of(machine[ARGUMENTS[name]], values) == request[name]
    assert base64.b64decode(value_of(machine["user_data_base64"], values)) == USER_DATA
    options = {key: value_of(one, values) for key, one in machine["metadata_options"].items()}
    assert [*options.values()] == [*request["MetadataOptions"].values()]
    ec2 = Cloud().client("ec2")
    [row] = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
    [made] = row["Instances"]
    assert options.items() <= {snake(key): value for key, value in made["MetadataOptions"].items()}.items()
    assert tags_of(made).items() <= values["machine"]["tags"].items()
    root_id = made["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    [volume] = ec2.describe_volumes(VolumeIds=[root_id])["Volumes"]
    root = {key: value_of(one, values) for key, one in machine["root_block_device"].items()}
    assert root == {
        "volume_type": volume["VolumeType"],
        "encrypted": volume["Encrypted"],
        "delete_on_termination": volume["Attachments"][0]["DeleteOnTermination"],
        "tags": tags_of(volume),
    }
    market = values["offers"][0]["instance_market_options"]
    assert market == (
        {
            "market_type": "spot",
            "spot_options": {
                "spot_instance_type": "one-time",
                "instance_interruption_behavior": "terminate",
            },
        }
        if spot
        else None
    )
    assert ("InstanceMarketOptions" in request) == spot


def snake(name):
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("egress", ["none", "https-only", "open"])
def test_the_group_is_the_one_that_up_makes(layout, egress):
    assert layout
    capabilities = replace(WANTED.capabilities, network_egress=egress)
    wanted = replace(WANTED, workspace_name=f"vision-{egress}", capabilities=capabilities)
    ec2 = Cloud().client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group_id = network.security_group(Cloud(), wanted, vpc)
    [made] = ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"]
    values, block = rendered(wanted), resource("aws_security_group.this")
    for name, found in (("name", made["GroupName"]), ("description", made["Description"])):
        assert value_of(block[name], values) == found
    assert value_of(block["tags"], values) == tags_of(made)
    for name, key in (("ingress", "IpPermissions"), ("egress", "IpPermissionsEgress")):
        rules = {
            (one["IpProtocol"], one.get("FromPort", 0) if one["IpProtocol"] != "-1" else 0, network_)
            for one in made[key]
            for network_ in (
                *(each["CidrIp"] for each in one["IpRanges"]),
                *(each["CidrIpv6"] for each in one["Ipv6Ranges"]),
            )
        }
        told = values["security_group"][name]
        assert {
            (one["protocol"], one["from_port"], each)
            for one in told
            for each in (*one["cidr_blocks"], *one["ipv6_cidr_blocks"])
        } == rules
        assert all({*one} == {*block[name]} for one in told)


def test_the_role_is_the_one_that_up_makes(layout):
    assert layout
    name = rights.instance_profile(Cloud(), WANTED)
    iam, values = Cloud().client("iam"), rendered()
    role, inline, profile = (
        resource(f"aws_iam_{kind}.this") for kind in ("role", "role_policy", "instance_profile")
    )
    made = iam.get_role(RoleName=name)["Role"]
    assert value_of(role["name"], values) == value_of(profile["name"], values) == name
    assert json.loads(value_of(role["assume_role_policy"], values)) == made["AssumeRolePolicyDocument"]
    assert value_of(role["path"], values) == value_of(profile["path"], values) == made["Path"]
    assert role["permissions_boundary"] == (
        "${format(local.role.permissions_boundary, data.aws_caller_identity.this.account_id)}"
    )
    account = made["Arn"].split(":")[4]
    boundary = made["PermissionsBoundary"]["PermissionsBoundaryArn"]
    assert values["role"]["permissions_boundary"] % account == boundary
    assert value_of(role["tags"], values) == value_of(profile["tags"], values) == tags_of(made)
    [policy] = iam.list_role_policies(RoleName=name)["PolicyNames"]
    assert value_of(inline["name"], values) == policy
    document = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
    assert json.loads(value_of(inline["policy"], values)) == document
    assert rights.remove_profile(Cloud(), WANTED)


def test_the_home_is_the_one_that_up_makes():
    request, values = volumes.volume_request(WANTED), rendered()
    block = resource("aws_ebs_volume.home")
    names = {"Size": "size", "VolumeType": "type", "Encrypted": "encrypted", "TagSpecifications": "tags"}
    assert {*names} == {*request}
    own = {"count", "availability_zone", "lifecycle"}
    assert {*block} == {*names.values(), *own}
    [tagged] = request["TagSpecifications"]
    for name, found in {**request, "TagSpecifications": tags_of(tagged)}.items():
        assert value_of(block[names[name]], values) == found


def test_what_the_machine_writes_of_itself_stays():
    ignored = parsed(TEXT)["aws_instance.machine"]["lifecycle"][0]["ignore_changes"]
    assert ignored == [f'${{tags["{name}"]}}' for name in OWN_TAGS]


# The files


def every_file():
    return sorted((ROOT / "examples").rglob("*.tf"))


def test_the_files_are_formatted():
    assert {
        str(one): unformatted(one.read_text()) for one in every_file() if unformatted(one.read_text())
    } == {}


BADLY = {
    "a = 1\nbcd = 2\n": [1],
    "x {\n   a = 1\n}\n": [2],
    "a = [\n  1,\n  ]\n": [3],
    "a = 1 \n": [1],
    "a = 1\n\n\nb = 2\n": [3],
    "a = 1": [1],
}


@pytest.mark.parametrize("text", BADLY)
def test_a_badly_formatted_file_is_found(text):
    assert unformatted(text) == BADLY[text]


@needs_terraform
def test_terraform_thinks_the_same_of_the_format(tmp_path):
    done = terraform_("fmt", "-check", "-diff", "-recursive", str(ROOT / "examples"))
    assert done.returncode == 0, done.stdout
    for number, text in enumerate(BADLY):
        file = tmp_path / f"{number}.tf"
        file.write_text(text)
        # Terraform leaves empty lines and the file's end as they are.
        leaves = "\n\n" in text or not text.endswith("\n")
        assert bool(terraform_("fmt", "-check", str(file)).returncode) != leaves, text


def terraform_(*words, cwd=None):
    env = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    return subprocess.run(
        [TERRAFORM, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120
    )


def evaluated(folder, wanted, told, **more):
    """What Terraform makes of the module, with texts in place of what only a cloud can tell.

    Its provider can't be had here: resources are left out, and what refers to them is given.
    """
    given = {
        "one(aws_iam_instance_profile.this[*].name)": '"own-profile"',
        "data.aws_subnets.all.ids": '["subnet-b", "subnet-a"]',
        "data.aws_subnet.this.availability_zone": '"us-west-2a"',
        "aws_ebs_volume.home": '[{ id = "vol-1", size = 50, availability_zone = "us-west-2a" }]',
        "aws_instance.machine[0]": 'tomap({ id = "i-1", private_ip = "10.0.0.1" })',
        "terraform_data.launched[0]": '{ output = "2026-11-23T00:00:00Z" }',
    }
    block = MAIN[MAIN.index("locals {") : MAIN.index('data "aws_subnets"')]
    machine = MAIN[MAIN.index('resource "aws_instance"') :]
    tags = machine[machine.index("  tags = merge(") : machine.index("  metadata_options")]
    market = re.search(r"for_each = (local\.offer\.\S+)", machine)[1]
    asked = re.search(r"condition     = (jsonencode.*)", MAIN)[1]
    text = (
        block
        + (FOLDER / "outputs.tf").read_text()
        + f'output "tags" {{\n{tags.replace("tags =", "value =")}}}\n'
        + f'output "market" {{\n  value = {market}\n}}\n'
        + f'output "same" {{\n  value = {asked}\n}}\n'
        + 'output "profile" {\n  value = local.has_rights ? local.profile : null\n}\n'
        + 'output "subnet_ids" {\n  value = local.subnet_ids\n}\n'
    )
    for old, new in given.items():
        text = text.replace(old, new)
    inner = folder / "module"
    inner.mkdir(parents=True)
    (inner / "main.tf").write_text(text)
    shutil.copy(FOLDER / "variables.tf", inner)
    files = terraform(wanted, told, source="./module")
    root = files["main.tf.json"]
    del root["provider"], root["terraform"]
    root["module"]["workspace"] |= more
    names = (*root["output"], "tags", "market", "same", "profile", "subnet_ids")
    root["output"] = {name: {"value": f"${{module.workspace.{name}}}"} for name in names}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for words in (("init",), ("apply", "-auto-approve")):
        done = terraform_(*words, "-no-color", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(terraform_("output", "-json", cwd=folder).stdout)
    return {name: one["value"] for name, one in shown.items()}


@needs_terraform
def test_terraform_makes_of_it_what_the_contract_says(tmp_path):
    values = rendered()
    found = evaluated(tmp_path / "one", WANTED, values)
    assert found["same"] is True
    assert found["profile"] == "own-profile"
    assert found["subnet_ids"] == ["subnet-a", "subnet-b"]
    assert found["market"] == [values["offers"][0]["instance_market_options"]]
    offer = values["offers"][0]
    plan = f"g4dn.xlarge spot in us-west-2a, {offer['usd_hour']} USD/hour"
    home = {"gpukiln:home": "vol-1", "gpukiln:plan": plan, "gpukiln:usd-hour": offer["usd_hour"]}
    assert found["tags"] == {**values["machine"]["tags"], **home}
    assert {name: found[name] for name in ("gpu_type", "gpu_count", "zone", "health")} == {
        "gpu_type": "T4",
        "gpu_count": 1,
        "zone": "us-west-2a",
        "health": "unknown: not checked",
    }
    assert found["metadata"]["plan"] == plan
    assert found["volume_mounts"] == [
        {"volume_id": "vol-1", "mount_path": "/home/ann", "size_gib": 50, "persistent": True}
    ]
    assert found["runtime_env"]["GPUKILN_WORKSPACE_INSTANCE"] == "i-1"
    other = evaluated(tmp_path / "two", WANTED, values, idle_minutes=5, offer=1, subnet_ids=["subnet-9"])
    assert other["same"] is False  # which the module refuses
    assert other["instance_type"] == values["offers"][1]["instance_type"]
    assert other["subnet_ids"] == ["subnet-9"]


@needs_terraform
def test_a_workspace_without_rights_has_no_profile(tmp_path):
    capabilities = replace(WANTED.capabilities, identity_mode="none")
    wanted = replace(WANTED, capabilities=capabilities, instance_profile_name="people", spot=False)
    found = evaluated(tmp_path / "one", wanted, rendered(wanted))
    assert (found["same"], found.get("profile"), found["market"]) == (True, None, [])  # null is not shown
    named = replace(wanted, capabilities=WANTED.capabilities)
    assert evaluated(tmp_path / "two", named, rendered(named))["profile"] == "people"


# The Coder template


def test_the_template_parses_and_gives_the_module_what_the_contract_takes():
    text = (FOLDER / "template/main.tf").read_text()
    assert dangling(text) == set()
    [called] = re.findall(r'module "workspace" \{(.*?)\n\}', text, re.DOTALL)
    given = {*re.findall(r"(?m)^  (\w+) +=", called)}
    names = {one.name for one in fields(Workspace)}
    assert given <= {*names, *OWN_INPUTS, "source"}
    contract = parsed(text)["locals"]["contract"]
    assert {key for key in contract if not key.startswith("__")} == given & names
    assert {f"local.contract.{name}" for name in given & names} == {
        *re.findall(r"local\.contract\.\w+", called)
    }


@pytest.mark.parametrize("image_id", ["ami-1", None])
def test_its_program_renders_the_contract_or_says_why_not(tmp_path, image_id):
    run = tmp_path / "scripts/run"
    run.parent.mkdir()
    run.write_text(f'#!/bin/sh\nshift\ncd "{ROOT}"\nexec "{Path(sys.executable).parent}/invoke" "$@"\n')
    run.chmod(0o755)
    contract = dump(replace(WANTED, image_id=image_id))
    query = {"gpukiln": str(tmp_path), "folder": str(tmp_path), "contract": json.dumps(contract)}
    program = [sys.executable, str(FOLDER / "template/render.py")]
    done = subprocess.run(program, input=json.dumps(query), capture_output=True, text=True, check=False)
    if image_id is None:
        assert done.returncode, done.stdout
        assert "no image is named" in done.stderr
        assert "workspace.render" in done.stderr
        return
    assert json.loads(done.stdout) == {"rendered": str(tmp_path / "rendered.json")}
    assert json.loads((tmp_path / "rendered.json").read_text())["wanted"] == contract
