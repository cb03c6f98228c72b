"""What a workspace gets before anything is made; and what was typed becomes the contract."""

from dataclasses import replace
from datetime import date

import pytest

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.offers import request
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Workspace
from gpukiln.workspaces.plan import plan as plan_
from gpukiln.workspaces.spec import UpOptions, spec_of, typed_spec
from tests.support.release_cloud import Cloud, make_image, tell, verdict

TODAY = date(2026, 11, 23)
ROLES = "https://git.example/gpukiln@" + "a" * 40
ASKED = Workspace("vision", "ann", "us-west-2", compute_profile=ComputeProfile(8, "32Gi", gpu_type="T4"))


def plan(contract, without="", **options):
    return plan_(Cloud(), spec_of(contract, UpOptions(simulated=True, **options)), TODAY, without=without)


@pytest.fixture
def proven(layout, tmp_path, monkeypatch):
    assert layout
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    tell("reset")
    yield make_image("b1")
    tell("reset")


def test_the_best_machine_and_the_image_of_ours_that_was_proven_last(proven):
    found = plan(ASKED)
    assert found.offers[0].instance_type == "g4dn.2xlarge"
    assert (found.choice.kind, found.choice.image_id) == ("verified", proven)
    assert found.contract.image_id == proven
    assert found.subject
    assert found.subject.driver == "535.309.01"
    assert found.verdict.startswith("passed 2026-11-21")
    assert found.gpus == 1  # on every cloud: the machine has to show what was asked for


def test_an_image_that_failed_is_none(proven, monkeypatch):
    assert proven
    tell("reset")
    make_image("b2", judged=verdict(failed=[("boot.up", "no")]))
    assert plan(ASKED, roles=ROLES).choice.kind == "dlami"
    monkeypatch.setattr("gpukiln.offers.image.DLAMIS", ())
    with pytest.raises(IncompatibleError, match="no image that a workspace can be started from") as told:
        plan(ASKED)
    assert told.value.hint == "`invoke ami.build --region us-west-2 --cloud embedded` bakes and verifies one"


def test_what_no_machine_has_names_what_comes_near(proven):
    assert proven
    wants = replace(ASKED, compute_profile=ComputeProfile(gpu_count=1, gpu_type="A100"))
    with pytest.raises(IncompatibleError, match="no machine in us-west-2 has 1 A100") as told:
        plan(wants)
    assert any("p4d.24xlarge" in row for row in told.value.details)


def test_a_type_that_was_named_has_to_satisfy_the_rest(proven):
    assert proven
    found = plan(replace(ASKED, instance_types=("g4dn.4xlarge",)))
    assert [one.instance_type for one in found.offers] == ["g4dn.4xlarge"]
    with pytest.raises(IncompatibleError, match=r"g4dn\.xlarge does not satisfy") as told:
        plan(replace(ASKED, instance_types=("g4dn.xlarge",)))
    assert "4 vCPU" in told.value.details[0]


def test_a_type_is_left_out_where_one_of_it_was_unhealthy(proven):
    assert proven
    assert [one.instance_type for one in plan(ASKED).offers][:2] == ["g4dn.2xlarge", "g4dn.4xlarge"]
    assert plan(ASKED, without="g4dn.2xlarge").offers[0].instance_type == "g4dn.4xlarge"
    with pytest.raises(IncompatibleError, match=r"no machine but g4dn\.2xlarge satisfies the request"):
        plan(replace(ASKED, instance_types=("g4dn.2xlarge",)), without="g4dn.2xlarge")


def test_an_image_that_does_not_fit_is_refused(proven):
    # driver 535 does not know Blackwell
    wants = replace(ASKED, image_id=proven, compute_profile=ComputeProfile(gpu_type="RTX PRO 6000"))
    with pytest.raises(IncompatibleError, match="none of them can run its image"):
        plan(wants)
    with pytest.raises(UsageError, match="has no AMI ami-none"):
        plan(replace(ASKED, image_id="ami-none"))


def test_what_is_asked_for_is_read_once(proven, monkeypatch):
    texts, read = [], request._gpu
    monkeypatch.setattr(request, "_gpu", lambda text: texts.append(text) or read(text))
    options = {"workspace_name": "vision", "owner": "ann", "region": "us-west-2", "image_id": proven}
    spec = typed_spec({}, options, "T4:1", [], UpOptions(simulated=True))
    assert plan_(Cloud(), spec, TODAY).offers[0].gpu == "T4"
    assert texts == ["T4"]


@pytest.mark.parametrize("gpu", ["", "T4"])
def test_an_image_that_was_named_is_looked_up_once(proven, gpu):
    tell("calls")
    found = plan(replace(ASKED, image_id=proven, compute_profile=ComputeProfile(gpu_type=gpu)))
    assert len(found.offers) > 3
    assert [action for _, action, _ in tell("calls")] == ["DescribeImages"]


def test_a_machine_without_a_gpu_has_to_be_named(proven):
    without = replace(
        ASKED,
        image_id=proven,
        compute_profile=ComputeProfile(2, "4Gi", gpu_count=0),
        capabilities=Capabilities(gpu_support=False),
    )
    with pytest.raises(IncompatibleError, match="without a GPU are not in the catalogue"):
        plan(without)
    [offer] = plan(replace(without, instance_types=("m5.large",))).offers
    assert (offer.instance_type, offer.vcpu, offer.gpus, offer.price) == ("m5.large", 2, 0, None)
    large = replace(without, instance_types=("m5.large",), compute_profile=ComputeProfile(4, gpu_count=0))
    with pytest.raises(IncompatibleError, match=r"m5\.large has 2 vCPU"):
        plan(large)


def test_what_was_typed_wins_over_the_file():
    document = {"workspace_name": "vision", "owner": "ann", "compute_profile": {"cpu": 4, "storage": "5Gi"}}
    options = {"owner": "bob", "region": "us-west-2", "compute_profile.cpu": 8}
    assignments = ["capabilities.network_egress=none", "subnet_ids=[a, b]"]
    spec = typed_spec(document, options, "T4:2", assignments)
    found = spec.contract
    assert (str(spec.request.count), spec.request.gpus, spec.request.vcpu) == ("2", ("t4",), 8)
    assert (found.owner, found.compute_profile.cpu, found.compute_profile.storage) == ("bob", 8, "5Gi")
    assert (found.compute_profile.gpu_type, found.compute_profile.gpu_count) == ("T4", 2)
    assert found.capabilities.network_egress == "none"
    assert found.subnet_ids == ("a", "b")
    assert document["compute_profile"] == {"cpu": 4, "storage": "5Gi"}  # as it was


@pytest.mark.parametrize(
    ("gpu", "fields", "says"),
    [
        ("T4:1..4", [], "1 to 4 GPUs, wanted one number"),
        ("T4:1:2", [], "has 2 counts, wanted one"),
        ("T4:0", [], "is less than 1"),
        ("T5:1", [], "T5"),
        ("", ["spot"], "wanted FIELD=YAML"),
        ("", ["spot=[1"], "is no YAML"),
        ("", ["owner.name=x"], "owner has no fields"),
        ("", ["spots=true"], "spots"),
        ("", ["capabilities.gui_rdp=true"], "gui_rdp"),
        ("", ["workspace_name=Vision 1"], "small letters"),
    ],
)
def test_what_does_not_fit_is_told(gpu, fields, says):
    options = {"workspace_name": "vision", "owner": "ann", "region": "us-west-2"}
    with pytest.raises(UsageError) as told:
        typed_spec({}, options, gpu, fields)
    assert says in " ".join((told.value.message, *told.value.details))


def test_a_name_that_is_missing_is_asked_for():
    with pytest.raises(UsageError, match="--owner is missing"):
        typed_spec({}, {"workspace_name": "vision"}, "", [])
