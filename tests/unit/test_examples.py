"""examples/ of nodes: they parse, refer only to what exists, and keep the rules of EKS and Karpenter.

Terraform itself is not run: it is in no package archive that this project takes from.
"""

import email
import re
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends

from gpukiln.catalog.bases import base
from gpukiln.catalog.components import load_components
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.embedded.pointers import resolve_image
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import read
from gpukiln.kubernetes.check.rules import Context
from gpukiln.kubernetes.pools import pools_in
from tests.support.hcl import dangling, module, unformatted

EXAMPLES = ROOT / "examples"
MANAGED = EXAMPLES / "managed-node-group/al2023"
MODULES = sorted(path.parent for path in EXAMPLES.glob("*-group/*/main.tf"))
POOLS = sorted((EXAMPLES / "karpenter").rglob("*.yaml"))
KUBERNETES = load_components()["kubernetes"].version
POINTER = re.compile(rf"/gpukiln/eks-gpu/{re.escape(KUBERNETES)}/(stable|candidate)/image_id")


def text_of(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.tf")))


def name_of(path):
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("folder", MODULES, ids=name_of)
def test_terraform_parses_and_refers_to_what_it_has(folder):
    text = text_of(folder)
    assert any(address.startswith("aws_launch_template.") for address in module(text))
    assert dangling(text) == set()
    used = set(re.findall(r"\bvar\.(\w+)", text))
    assert {f"var.{name}" for name in used} == {one for one in module(text) if one.startswith("var.")}
    assert [path.name for path in folder.glob("*.tf") if unformatted(path.read_text())] == []


def test_a_wrong_reference_is_found():
    text = text_of(MANAGED)
    assert dangling(text.replace("= local.image_id", "= local.image")) == {"local.image"}
    assert dangling(text.replace('"aws_eks_cluster" "this"', '"aws_eks_cluster" "that"')) == {
        "data.aws_eks_cluster.this"
    }


@pytest.mark.parametrize("folder", [one for one in MODULES if "managed" in str(one)], ids=name_of)
def test_the_pointer_is_read_and_the_launch_template_has_nothing_that_eks_refuses(folder):
    blocks = module(text_of(folder))
    assert blocks["data.aws_ssm_parameter.image_id"]["name"] == "${var.pointer}"
    assert POINTER.fullmatch(blocks["var.pointer"]["default"])
    template = blocks["aws_launch_template.gpu"]
    forbidden = {"iam_instance_profile", "instance_initiated_shutdown_behavior", "network_interfaces"}
    assert not forbidden & set(template)
    group = blocks["aws_eks_node_group.gpu"]
    assert not {"ami_type", "release_version", "version", "disk_size", "remote_access"} & set(group)
    [disk] = template["block_device_mappings"]
    assert (
        disk["device_name"]
        == base("eks-ubuntu-24.04" if "ubuntu" in str(folder) else "eks-al2023").root_device
    )


def rendered(folder):
    """User data as Terraform fills it, from exactly the variables that the module gives it."""
    given = re.search(r"userdata\.tftpl\", \{(.*?)\}\)", text_of(folder), re.DOTALL)[1]
    names = set(re.findall(r"(\w+) +=", given))
    template = (folder / "userdata.tftpl").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", template)) == names
    message = email.message_from_string(re.sub(r"\$\{(\w+)\}", r"value-of-\1", template))
    return {part.get_content_type(): part.get_payload() for part in message.get_payload()}


@pytest.mark.parametrize("folder", [one for one in MODULES if one.name == "al2023"], ids=name_of)
def test_user_data_for_nodeadm_is_a_node_config(folder):
    parts = rendered(folder)
    assert set(parts) == {"text/x-shellscript", "application/node.eks.aws"}
    config = yaml.safe_load(parts["application/node.eks.aws"])
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert set(config["spec"]["cluster"]) == {"name", "apiServerEndpoint", "certificateAuthority", "cidr"}
    assert set(config["spec"]["kubelet"]) <= {"config", "flags", "maxPodsExpression"}
    assert config["spec"]["instance"]["localStorage"] == {"strategy": "RAID0"}


def scripts():
    """Every script of every user data."""
    for folder in MODULES:
        yield rendered(folder)["text/x-shellscript"]
    for path in POOLS:
        text = yaml.safe_load_all(path.read_text()).__next__()["spec"]["userData"]
        yield email.message_from_string(text).get_payload()[0].get_payload() if "MIME" in text else text


@pytest.mark.parametrize("script", list(scripts()))
def test_shellcheck_is_content_with_user_data(script, tmp_path):
    file = tmp_path / "userdata.sh"
    file.write_text(script.lstrip())
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", POOLS, ids=name_of)
def test_karpenter_takes_them(path):
    report = apply_rules(read([str(path)]), Context())
    assert [f"{one.id}: {one.message}" for one in report.findings] == []
    node_class, *others = yaml.safe_load_all(path.read_text())
    family = "Custom" if "ubuntu" in str(path) else "AL2023"
    assert (node_class["kind"], node_class["spec"]["amiFamily"]) == ("EC2NodeClass", family)
    [term] = node_class["spec"]["amiSelectorTerms"]
    assert POINTER.fullmatch(term["ssmParameter"])
    for pool in others:
        if pool["kind"] == "NodePool":
            assert pool["spec"]["template"]["spec"]["nodeClassRef"]["name"] == node_class["metadata"]["name"]
            for budget in pool["spec"]["disruption"]["budgets"]:
                assert ("schedule" in budget) == ("duration" in budget)
                assert "Empty" not in budget["reasons"] or budget["nodes"] != "0", (
                    "nothing would scale to zero"
                )
    assert len(pools_in([node_class, *others])) == sum(pool["kind"] == "NodePool" for pool in others)


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
    blocks = module(text_of(EXAMPLES / "auto-scaling-group/al2023"))
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
