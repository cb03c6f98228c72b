"""EKS's Amazon Linux on a machine that is in no cluster: what is judged there, and what is told instead."""

import email

import pytest
import yaml

from gpukiln.catalog.bases import load_bases
from gpukiln.instances.deadline import deadline_of, shutdown_user_data
from gpukiln.instances.rehearsal import CLUSTER, node_config
from gpukiln.verify.catalog import load_checks
from gpukiln.verify.facts import Facts

CHECKS = load_checks()
UNIT = "nodeadm-config.service"
SAID = "could not find NodeConfig within UserData"


def judge(check, *, profile="image", failed=(UNIT,), config="none", configured=False, runtimes=("runc",)):
    """What comes of one check, and its reason."""
    node = {"installed": True, "config": config, "configured": configured, "error": SAID}
    state = "degraded" if failed else "running"
    facts = Facts(
        {
            "boot": {"state": state, "failed": list(failed)},
            "nodeadm": node,
            "containerd": {"runtimes": list(runtimes), "joined": {}},
        },
        profile,
    )
    try:
        CHECKS[check][1](facts)
    except AssertionError as error:
        return "failed", str(error)
    except pytest.skip.Exception as reason:
        return "not_run", str(reason)
    return "passed", ""


@pytest.mark.parametrize("check", ["boot.state", "boot.failed-units"])
def test_units_that_need_a_cluster_are_told_and_not_judged(check):
    outcome, reason = judge(check)
    assert outcome == "not_run"
    assert reason == f"the machine is in no cluster and has no NodeConfig: {UNIT} failed, and no other unit"
    outcome, reason = judge(check, config="rehearsed", configured=True, failed=["kubelet.service"])
    assert (outcome, "rehearsed NodeConfig: kubelet.service failed" in reason) == ("not_run", True)
    assert judge(check, config="rehearsed", configured=True, failed=())[0] == "passed"


@pytest.mark.parametrize("check", ["boot.state", "boot.failed-units"])
@pytest.mark.parametrize(
    "broken",
    [
        {"failed": (UNIT, "docker.service")},
        {"config": "given"},
        {"profile": "eks-node"},
        {"profile": "eks-node", "config": "rehearsed"},
    ],
    ids=["another unit", "a node's own configuration", "a node", "a node with the rehearsal's"],
)
def test_everything_else_fails(check, broken):
    assert judge(check, **broken)[0] == "failed"


def test_containerd_is_judged_as_nodeadm_configured_it():
    check = "runtime.containerd-nvidia"
    both = ("nvidia", "runc")
    # What is there now is not what a node gets, whether it looks right or not.
    for runtimes in (both, ("runc",)):
        outcome, reason = judge(check, runtimes=runtimes)
        assert outcome == "not_run"
        assert reason == f"nodeadm writes containerd's configuration, and had no NodeConfig: {SAID}"
    assert "a rehearsed NodeConfig" in judge(check, config="rehearsed")[1]
    for config in ("rehearsed", "given"):
        assert judge(check, config=config, configured=True, runtimes=both)[0] == "passed"
        assert judge(check, config=config, configured=True)[0] == "failed"
    assert judge(check, config="given", configured=False)[0] == "failed"


def test_the_rehearsed_node_config_is_what_nodeadm_looks_for():
    message = email.message_from_string(shutdown_user_data(deadline_of("verify"), node_config()))
    kinds = {part.get_content_type(): part for part in message.walk()}
    assert "text/cloud-boothook" in kinds
    payload = kinds["application/node.eks.aws"].get_payload()
    config = yaml.safe_load(payload)
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert set(config["spec"]["cluster"]) == {"name", "apiServerEndpoint", "certificateAuthority", "cidr"}
    assert config["spec"]["featureGates"] == {"InstanceIdNodeName": True}
    assert f"name: {CLUSTER}" in payload
    bases = load_bases()
    assert {name for name in bases if bases[name].has_nodeadm} == {"eks-al2023", "eks-al2023-nvidia"}
