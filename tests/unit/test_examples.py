"""examples/: they parse, refer only to what exists, and keep the rules of EKS and Karpenter.

Terraform itself is not run: it is in no package archive that this project takes from.
"""

import email
import re
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import jsonschema
import pytest
import yaml
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends

from gpukiln.catalog.components import load_components
from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.embedded.pointers import resolve_image
from tests.support.hcl import dangling, module

EXAMPLES = ROOT / "examples"
MODULES = ("terraform", "auto-scaling-group")
KUBERNETES = load_components()["kubernetes"].version
POINTER = re.compile(rf"/gpukiln/eks-gpu/{re.escape(KUBERNETES)}/(stable|candidate)/image_id")


def text_of(folder):
    return "\n".join(path.read_text() for path in sorted((EXAMPLES / folder).glob("*.tf")))


@pytest.mark.parametrize("folder", MODULES)
def test_terraform_parses_and_refers_to_what_it_has(folder):
    text = text_of(folder)
    assert any(address.startswith("aws_launch_template.") for address in module(text))
    assert dangling(text) == set()
    used = set(re.findall(r"\bvar\.(\w+)", text))
    assert {f"var.{name}" for name in used} == {one for one in module(text) if one.startswith("var.")}


def test_a_wrong_reference_is_found():
    text = text_of("terraform")
    assert dangling(text.replace("local.taint", "local.taints")) == {"local.taints"}
    assert dangling(text.replace('"aws_eks_cluster" "this"', '"aws_eks_cluster" "that"')) == {
        "data.aws_eks_cluster.this"
    }


def test_the_pointer_is_read_and_the_launch_template_has_nothing_that_eks_refuses():
    blocks = module(text_of("terraform"))
    pointer = blocks["data.aws_ssm_parameter.image_id"]["name"]
    assert re.sub(r"\$\{[^}]*\}", "X", pointer) == "/gpukiln/X/X/X/image_id"
    template = blocks["aws_launch_template.gpu"]
    forbidden = {"iam_instance_profile", "instance_initiated_shutdown_behavior", "network_interfaces"}
    assert not forbidden & set(template)
    group = blocks["aws_eks_node_group.gpu"]
    assert not {"ami_type", "release_version", "version", "disk_size", "remote_access"} & set(group)
    assert blocks["locals"]["root_device"] == _bases()


def _bases():
    bases = yaml.safe_load((ROOT / "ami/bases.yaml").read_text())["bases"]
    return {
        "al2023": bases["eks-al2023"]["root_device"],
        "ubuntu": bases["eks-ubuntu-22.04"]["root_device"],
    }


def rendered(family):
    """A template as Terraform fills it, from exactly the variables that the module gives it."""
    path = EXAMPLES / "terraform" / f"userdata-{family}.tftpl"
    given = re.search(rf"userdata-{family}\.tftpl\", \{{(.*?)\}}\)", text_of("terraform"), re.DOTALL)[1]
    names = set(re.findall(r"(\w+)\s*=", given))
    template = path.read_text()
    assert set(re.findall(r"\$\{(\w+)\}", template)) == names
    [part] = email.message_from_string(re.sub(r"\$\{(\w+)\}", r"value-of-\1", template)).get_payload()
    return part.get_content_type(), part.get_payload()


def test_user_data_for_nodeadm_is_a_node_config():
    kind, text = rendered("al2023")
    assert kind == "application/node.eks.aws"
    config = yaml.safe_load(text)
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert set(config["spec"]["cluster"]) == {"name", "apiServerEndpoint", "certificateAuthority", "cidr"}
    assert set(config["spec"]["kubelet"]) <= {"config", "flags", "maxPodsExpression"}


def _nodeclass_script():
    [node_class] = [one for one in karpenter("ubuntu") if one["kind"] == "EC2NodeClass"]
    return node_class["spec"]["userData"]


@pytest.mark.parametrize(
    "script", [lambda: rendered("ubuntu")[1], _nodeclass_script], ids=["terraform", "karpenter"]
)
def test_user_data_for_ubuntu_joins_with_the_labels_of_the_image(script, tmp_path):
    file = tmp_path / "user-data.sh"
    file.write_text(script().lstrip())
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "root"
    for name, body in {"systemctl": "exit 0", "cat": "echo a=b,c=d"}.items():
        tool = folder / name
        folder.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
    text = file.read_text().replace("/etc/eks/bootstrap.sh", "printf '%s\\n'")
    run = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{folder}:/bin"}, capture_output=True, text=True, check=True
    )
    *_, option, arguments = run.stdout.splitlines()
    assert option == "--kubelet-extra-args"
    assert arguments.startswith("--node-labels=a=b,c=d --register-with-taints=")


def karpenter(family):
    return list(yaml.safe_load_all((EXAMPLES / "karpenter" / f"{family}.yaml").read_text()))


# As far as used, of Karpenter 1.14: pkg/apis/crds/karpenter.k8s.aws_ec2nodeclasses.yaml
TERM = {
    "type": "object",
    "additionalProperties": False,
    "minProperties": 1,
    "properties": {"tags": {"type": "object"}, "id": {"type": "string"}, "name": {"type": "string"}},
}
NODE_CLASS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["amiSelectorTerms", "subnetSelectorTerms", "securityGroupSelectorTerms", "amiFamily"],
    "oneOf": [{"required": ["role"]}, {"required": ["instanceProfile"]}],
    "properties": {
        "amiFamily": {"enum": ["AL2023", "Bottlerocket", "Custom", "AL2"]},
        "amiSelectorTerms": {
            "minItems": 1,
            "items": {
                "additionalProperties": False,
                "required": ["ssmParameter"],
                "properties": {"ssmParameter": {"pattern": POINTER.pattern}},
            },
        },
        "role": {"type": "string", "minLength": 1},
        "instanceProfile": {"type": "string", "minLength": 1},
        "subnetSelectorTerms": {"minItems": 1, "items": TERM},
        "securityGroupSelectorTerms": {"minItems": 1, "items": TERM},
        "userData": {"type": "string"},
        "instanceStorePolicy": {"enum": ["RAID0"]},
        "metadataOptions": {
            "additionalProperties": False,
            "properties": {
                "httpTokens": {"const": "required"},
                "httpPutResponseHopLimit": {"type": "integer", "minimum": 1, "maximum": 64},
            },
        },
        "blockDeviceMappings": {
            "items": {
                "additionalProperties": False,
                "required": ["deviceName", "ebs"],
                "properties": {
                    "deviceName": {"type": "string"},
                    "ebs": {
                        "additionalProperties": False,
                        "properties": {
                            "volumeSize": {"type": "string", "pattern": "^[0-9]+Gi$"},
                            "volumeType": {"enum": ["gp3", "io2"]},
                            "encrypted": {"const": True},
                            "deleteOnTermination": {"const": True},
                        },
                    },
                },
            }
        },
    },
}


@pytest.mark.parametrize("family", ["al2023", "ubuntu"])
def test_karpenter(family):
    node_class, pool = karpenter(family)
    assert (node_class["apiVersion"], node_class["kind"]) == ("karpenter.k8s.aws/v1", "EC2NodeClass")
    jsonschema.validate(node_class["spec"], NODE_CLASS)
    assert node_class["spec"]["blockDeviceMappings"][0]["deviceName"] == _bases()[family]
    assert ("userData" in node_class["spec"]) == (node_class["spec"]["amiFamily"] == "Custom")
    assert (pool["apiVersion"], pool["kind"]) == ("karpenter.sh/v1", "NodePool")
    spec = pool["spec"]["template"]["spec"]
    assert spec["nodeClassRef"] == {
        "group": "karpenter.k8s.aws",
        "kind": "EC2NodeClass",
        "name": node_class["metadata"]["name"],
    }
    for budget in pool["spec"]["disruption"]["budgets"]:
        assert ("schedule" in budget) == ("duration" in budget)
        assert "Empty" not in budget["reasons"] or budget["nodes"] != "0", "nothing would ever scale to zero"
    [types] = [one["values"] for one in spec["requirements"] if one["key"].endswith("/instance-type")]
    assert set(types) <= set(instance_types())


def test_a_node_class_that_karpenter_refuses_is_found():
    node_class, _ = karpenter("al2023")
    for change in ({"amiFamily": "Ubuntu"}, {"instanceProfile": "too"}, {"amiSelectorTerm": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**node_class["spec"], **change}, NODE_CLASS)
    assert "karpenter.sh/unregistered:NoExecute" in _nodeclass_script()


def test_what_people_copy_names_the_kubernetes_version_that_is_built():
    """A pointer of another version has no value: nothing of it is ever released."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES.rglob("*.*")]
    named = {
        f"{page.relative_to(ROOT)}: {found[0]}"
        for page in pages
        if page.suffix in (".md", ".tf", ".yaml", ".yml")
        for found in re.finditer(r"/gpukiln/eks-gpu/[\d.]+/\w+/image_id", page.read_text())
    }
    assert len(named) > 4
    assert [one for one in sorted(named) if not POINTER.fullmatch(one.split(": ")[1])] == []


def test_a_launch_template_with_the_pointer_leads_to_the_image(monkeypatch):
    """Moto keeps such a template; the embedded cloud resolves it when a machine is started."""
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    blocks = module(text_of("auto-scaling-group"))
    pointer = blocks["var.pointer"]["default"]
    assert POINTER.fullmatch(pointer)
    named = blocks["aws_launch_template.gpu"]["image_id"].replace("${var.pointer}", pointer)
    with mock_aws():
        ec2, ssm = (boto3.client(service, region_name="us-west-2") for service in ("ec2", "ssm"))
        made = ec2.create_launch_template(
            LaunchTemplateName="gpu", LaunchTemplateData={"ImageId": named, "InstanceType": "g4dn.xlarge"}
        )["LaunchTemplate"]
        ssm.put_parameter(
            Name=pointer, Type="String", DataType="aws:ec2:image", Value="ami-0123456789abcdef0"
        )
        backend = ec2_backends[DEFAULT_ACCOUNT_ID]["us-west-2"]
        template = {"LaunchTemplateId": made["LaunchTemplateId"]}
        assert resolve_image(backend, "", template) == "ami-0123456789abcdef0"
        assert resolve_image(backend, named, None) == "ami-0123456789abcdef0"
        assert resolve_image(backend, "ami-1", template) == "ami-1"
        with pytest.raises(EC2ClientError, match="/gpukiln/none does not exist in us-west-2"):
            resolve_image(backend, "resolve:ssm:/gpukiln/none", None)
