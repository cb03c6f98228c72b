"""What a channel asks for and what verdicts show: who must have judged, by which suite, with which checks."""

from dataclasses import replace

import pytest

from gpukiln.clouds.tags import ATTESTED_TAGS, SIGNING_KEY_TAG
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.channels import load_channel, load_channels
from gpukiln.pipeline.verdict_tags import (
    DIGEST_CHARS,
    VerdictSummary,
    cluster_summaries_from_tags,
    summaries_from_tags,
    summarize_verdict,
    verdict_tags,
)
from gpukiln.release.needs import (
    MachineNeed,
    cluster_machines_to_try,
    evaluate,
    machine_needs,
    require_verified,
    types_for,
)
from gpukiln.release.verification import (
    require_same_verdict,
    verification_from_record,
    verification_from_tags,
    with_tag_verdicts,
)
from gpukiln.verify.catalog import load_checks
from tests.support.release_cloud import HOME, ROOT, tags, verdict

AMI = "ami-0123456789abcdef0"
CANDIDATE, STABLE = load_channel("candidate"), load_channel("stable")
T4 = verdict(on="g4dn.xlarge", saw_gpu=True)
A10G = verdict(on="g5.xlarge", saw_gpu=True)
L4 = verdict(on="g6.xlarge", saw_gpu=True)


def proof(*verdicts, known=True, **more):
    """What is known of an image; `known`: with the reasons of what was not run."""
    found = verification_from_tags(AMI, HOME, tags("b1"))
    judged = {one.instance_type: summarize_verdict(one) for one in verdicts}
    if not known:
        judged = {name: replace(one, checks=None) for name, one in judged.items()}
    return replace(found, **{"verdicts": judged, **more})


def test_what_no_gpu_judged_is_not_released():
    """The image that a second run finds where the first had no capacity for the other GPU."""
    with pytest.raises(RefusedError, match="not verified on a machine with A10G") as caught:
        require_verified("candidate", CANDIDATE, proof(T4), has_gpus=True)
    assert caught.value.details == ("a machine with A10G: it was not verified there",)
    assert f"ami.verify {AMI} --region {HOME} --for candidate" in caught.value.hint
    assert require_verified("candidate", CANDIDATE, proof(T4, A10G), has_gpus=True) == {}
    assert require_verified("candidate", CANDIDATE, proof(T4, A10G, known=False), has_gpus=True) == {}


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([], "it was never verified"),
        ([verdict(on="g4dn.xlarge"), A10G], "a machine with T4: g4dn.xlarge: no check of a GPU ran"),
        ([T4, verdict(on="g5.xlarge", failed=[("gpu.ecc", "bad")])], "not `passed` on g5.xlarge"),
        ([T4, A10G, verdict(on="g6.xlarge", failed=[("gpu.ecc", "bad")])], "not `passed` on g6.xlarge"),
        ([T4, L4], "a machine with A10G: it was not verified there"),
        ([T4, replace(A10G, profile="node")], "a machine with A10G: it was not verified there"),
        (
            [T4, replace(A10G, suite_version="f" * 64)],
            "verified by the suite ffffffffffffffff, the current one is ",
        ),
    ],
)
def test_what_is_missing_is_named(verdicts, said):
    with pytest.raises(RefusedError) as caught:
        require_verified("candidate", CANDIDATE, proof(*verdicts), has_gpus=True)
    assert said in " ".join((caught.value.message, *caught.value.details))


def test_a_channel_takes_verdicts_of_any_suite_where_it_says_so():
    old = replace(A10G, suite_version="f" * 64)
    assert require_verified("x", replace(CANDIDATE, suite="any"), proof(T4, old), has_gpus=True) == {}


def test_another_type_with_the_same_gpu_is_as_good():
    same = verdict(on="g5.2xlarge", saw_gpu=True)
    assert require_verified("candidate", CANDIDATE, proof(T4, same), has_gpus=True) == {}
    poor = verdict(on="g5.4xlarge", saw_gpu=True, not_run=[("container.cuda", "left out")])
    assert require_verified("stable", STABLE, proof(T4, poor, same), has_gpus=True) == {}


def test_layers_must_have_run_on_every_gpu():
    poor = verdict(on="g5.xlarge", saw_gpu=True, not_run=[("container.cuda", "left out")])
    [missing] = evaluate(STABLE, proof(T4, poor), has_gpus=True)
    assert (missing.id, missing.severity, missing.object) == ("not-shown", "error", "a machine with A10G")
    assert missing.message == "g5.xlarge: container.cuda: left out"
    assert not missing.evidence["reverify"]  # another verification would find the same
    [by_tags] = evaluate(STABLE, proof(T4, poor, known=False), has_gpus=True)
    assert by_tags.message == "g5.xlarge: 1 checks of container were not run"


def test_without_gpus_only_that_is_excused():
    blind = verdict(not_run=[("gpu.xid", "no GPU"), ("runtime.cdi", "no GPU")])
    excused = require_verified("stable", STABLE, proof(blind), has_gpus=False)
    assert excused == {
        "a machine with T4": "no machine of this cloud has a GPU",
        "a machine with A10G": "no machine of this cloud has a GPU",
        "gpu.xid": "no GPU",
        "runtime.cdi": "no GPU",
    }
    with pytest.raises(RefusedError, match="a machine with T4, a machine with A10G"):
        require_verified("stable", STABLE, proof(blind), has_gpus=True)
    # nothing is excused by itself
    with pytest.raises(RefusedError, match="not verified on a machine with T4"):
        require_verified("x", replace(STABLE, excused_without_gpus=()), proof(blind), has_gpus=False)
    lacking = verdict(not_run=[("runtime.docker-nvidia", "left out")])
    with pytest.raises(RefusedError, match="not verified on a machine"):
        require_verified("stable", STABLE, proof(lacking), has_gpus=False)


def test_a_channel_names_gpus_architectures_or_what_was_declared():
    image = proof(T4)
    assert [need.title for need in machine_needs(CANDIDATE, image)] == [
        "a machine with T4",
        "a machine with A10G",
    ]
    wider = replace(CANDIDATE, gpus=("declared", "l4", "Hopper"))
    assert [need.title for need in machine_needs(wider, image)][2:] == [
        "a machine with L4",
        "a machine with a GPU of Hopper",
    ]
    assert machine_needs(replace(CANDIDATE, gpus=()), image) == [MachineNeed("a machine")]
    hopper = machine_needs(wider, image)[-1]
    assert hopper.met_by("p5.48xlarge")
    assert not hopper.met_by("g5.xlarge")
    assert not hopper.met_by("m5.large")
    assert types_for(hopper, image, ["g5.xlarge", "p5.48xlarge"]) == ["p5.48xlarge"]
    assert types_for(machine_needs(CANDIDATE, image)[1], image, ["g6.xlarge"]) == ["g5.xlarge"]
    assert types_for(hopper, image, []) == []


def test_a_gpu_that_nobody_makes_is_a_usage_error(tmp_path):
    (tmp_path / "ami").mkdir()
    text = (ROOT / "ami/channels.yaml").read_text()
    (tmp_path / "ami/channels.yaml").write_text(text.replace("gpus: [declared]", "gpus: [A10Q]", 1))
    with pytest.raises(UsageError, match="unknown GPU of channel candidate 'A10Q'"):
        load_channels(tmp_path)


def test_attestation_is_asked_for():
    whole = proof(T4, A10G)
    for tag in ATTESTED_TAGS[:2]:
        without = replace(whole, attested={k: v for k, v in whole.attested.items() if k != tag})
        with pytest.raises(RefusedError, match=tag):
            require_verified("candidate", CANDIDATE, without, has_gpus=True)
    signed = replace(CANDIDATE, attestation="signed")
    for key in ("", "none", "ab"):  # a tag that names a key is no signature
        keyed = replace(whole, attested={**whole.attested, SIGNING_KEY_TAG: key})
        with pytest.raises(RefusedError, match="no trusted key signed its provenance"):
            require_verified("x", signed, keyed, has_gpus=True)
    with pytest.raises(RefusedError, match="it has no verdict that a trusted key signed"):
        require_verified("x", replace(CANDIDATE, trust=("a.pub",)), whole, has_gpus=True)
    none = replace(CANDIDATE, attestation="none")
    assert require_verified("x", none, replace(whole, attested={}), has_gpus=True) == {}
    wrong = replace(whole, findings=("sbom.content: 0 packages, the record has 400",))
    with pytest.raises(RefusedError, match="0 packages, the record has 400"):
        require_verified("candidate", CANDIDATE, wrong, has_gpus=True)


def test_a_verdict_survives_its_tag():
    checks = [check for check, _ in load_checks().values()]
    every = {check.layer: 88 for check in checks if "eks-node" in check.profiles}
    assert len(every) > 5
    long = VerdictSummary(
        "p4de.24xlarge", False, "eks-node", T4.started_at, "f" * DIGEST_CHARS, "f" * DIGEST_CHARS, True, every
    )
    for one in (replace(summarize_verdict(T4), checks=None), long):
        name, value = one.tag
        assert len(value) <= 256  # EC2 user guide, "Tag restrictions"
        assert summaries_from_tags(AMI, {name: value, "Name": "x"}) == {one.instance_type: one}
    with pytest.raises(UsageError, match=r"tag gpukiln:verdict:g5.xlarge of ami-0123456789abcdef0"):
        summaries_from_tags(AMI, {"gpukiln:verdict:g5.xlarge": "passed"})


def test_only_what_passed_everywhere_can_be_selected():
    bad = summarize_verdict(verdict(on="g5.xlarge", failed=[("gpu.ecc", "bad")]))
    assert verdict_tags("eks-gpu", [summarize_verdict(T4)])["gpukiln:image"] == "eks-gpu"
    found = verdict_tags("eks-gpu", [summarize_verdict(T4), bad])
    assert (found["gpukiln:image"], found["gpukiln:verdict"]) == ("not-proven", "failed")


def test_verdicts_of_other_machines_count_beside_the_records():
    own, there = proof(T4), {**tags("b1", T4), **dict([summarize_verdict(A10G).tag])}
    both = with_tag_verdicts(own, there)
    assert set(both.verdicts) == {"g4dn.xlarge", "g5.xlarge"}
    assert both.verdicts["g4dn.xlarge"].checks is not None
    forged = verdict(on="g4dn.xlarge", saw_gpu=True, not_run=[("boot.x", "y")])
    with pytest.raises(RefusedError, match="another verdict"):
        with_tag_verdicts(own, tags("b1", forged))


def test_what_one_machine_ran_is_not_counted_as_not_run():
    blind = verdict(on="g4dn.xlarge", not_run=[("gpu.xid", "no GPU"), ("runtime.cdi", "left out")])
    assert proof(blind).not_run == "runtime=1 gpu=1"
    seeing = verdict(on="g5.xlarge", saw_gpu=True, not_run=[("runtime.cdi", "left out")])
    assert proof(blind, seeing).not_run == "runtime=1"
    assert proof(T4).not_run == "none"


IN_CLUSTERS = replace(CANDIDATE, layers=("cluster",), kubernetes=("1.33", "1.34"))
NODE = {on: replace(summarize_verdict(verdict(on=on)), profile="pod") for on in ("g4dn.xlarge", "g5.xlarge")}


def in_cluster(*keys, **more):
    found = {key: replace(NODE[key[0]], **more) for key in keys}
    return proof(T4, A10G, cluster_verdicts=found)


def to_try(channel, image, kubernetes, *given):
    return cluster_machines_to_try("x", channel, image, list(given), kubernetes, has_gpus=True)


def test_a_channel_requires_each_gpu_in_each_version_of_kubernetes():
    every = [(on, version) for on in NODE for version in ("1.33", "1.34")]
    assert require_verified("x", IN_CLUSTERS, in_cluster(*every), has_gpus=True) == {}
    missing = in_cluster(*every[:3])
    with pytest.raises(
        RefusedError, match=r"not verified on a machine with A10G in Kubernetes 1.34$"
    ) as caught:
        require_verified("x", IN_CLUSTERS, missing, has_gpus=True)
    assert f"ami.verify {AMI} --region {HOME} --cluster CONTEXT --for x" in caught.value.hint
    assert to_try(IN_CLUSTERS, missing, "1.34") == [("g5.xlarge",)]
    assert to_try(IN_CLUSTERS, missing, "1.34", "g5.2xlarge") == [("g5.2xlarge",)]
    assert to_try(IN_CLUSTERS, missing, "1.33") == []
    # Verdicts in a version that the channel does not name neither count nor refuse.
    other = in_cluster(*every, ("g5.xlarge", "1.32"))
    other.cluster_verdicts["g5.xlarge", "1.32"] = replace(NODE["g5.xlarge"], passed=False)
    assert require_verified("x", IN_CLUSTERS, other, has_gpus=True) == {}
    assert require_verified("candidate", CANDIDATE, missing, has_gpus=True) == {}


def test_a_failure_as_a_node_is_tried_again_on_the_type_that_failed():
    image = in_cluster(("g4dn.xlarge", "1.33"), ("g5.xlarge", "1.33"), ("g4dn.xlarge", "1.34"))
    image.cluster_verdicts["g5.2xlarge", "1.34"] = replace(NODE["g5.xlarge"], passed=False)
    image.cluster_verdicts["g5.xlarge", "1.34"] = NODE["g5.xlarge"]
    with pytest.raises(RefusedError, match=r"not verified on g5.2xlarge in Kubernetes 1.34"):
        require_verified("x", IN_CLUSTERS, image, has_gpus=True)
    assert to_try(IN_CLUSTERS, image, "1.34") == [("g5.2xlarge",)]


def test_a_gpu_that_no_type_of_the_image_has_is_named():
    channel = replace(IN_CLUSTERS, gpus=("l4",))
    with pytest.raises(UsageError, match=r"channel x requires a machine with L4 in Kubernetes 1.33, and no"):
        to_try(channel, in_cluster(), "1.33")


def test_a_cloud_without_gpus_excuses_a_node():
    excused = require_verified("x", IN_CLUSTERS, proof(verdict()), has_gpus=False)
    assert excused["a node of a cluster"] == "no machine of this cloud has a GPU"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"passed": False}, "g4dn.xlarge in Kubernetes 1.34: its verdict as a node is not `passed`"),
        ({"profile": "image"}, "a machine with T4: it was not verified as a node"),
        ({"suite": "f" * 16}, "a machine with T4: it was not verified as a node by the current suite"),
    ],
)
def test_what_does_not_count_as_a_node(more, said):
    every = [(on, "1.34") for on in NODE]
    channel = replace(IN_CLUSTERS, kubernetes=())
    assert require_verified("x", channel, in_cluster(*every), has_gpus=True) == {}
    with pytest.raises(RefusedError) as caught:
        require_verified("x", channel, in_cluster(*every, **more), has_gpus=True)
    assert said in caught.value.details[0]


def test_a_node_of_another_suite_counts_where_any_does():
    image = in_cluster(*((on, "1.34") for on in NODE), suite="f" * 16)
    channel = replace(IN_CLUSTERS, kubernetes=(), suite="any")
    assert require_verified("x", channel, image, has_gpus=True) == {}


def test_a_verdict_on_a_node_is_read_back_from_its_tag():
    name, value = NODE["g5.xlarge"].cluster_tag("1.34")
    assert name == "gpukiln:cluster-verdict:g5.xlarge:1.34"
    assert cluster_summaries_from_tags(AMI, {name: value, "gpukiln:verdict:g4dn.xlarge": value}) == {
        ("g5.xlarge", "1.34"): replace(NODE["g5.xlarge"], checks=None)
    }
    # The tag of a node is none of a machine.
    assert summaries_from_tags(AMI, {name: value}) == {}
    with pytest.raises(UsageError, match=f"the tag {name} of {AMI} can't be read"):
        cluster_summaries_from_tags(AMI, {name: "passed"})


def test_the_newest_verdict_on_a_node_counts_and_none_on_simulated_gpus(proven):
    node = replace(verdict(on="g5.xlarge"), profile="pod", environment={"Kubernetes": "1.34"})
    newer = replace(node, started_at="2026-11-27T00:00:00+00:00")
    elsewhere = replace(node, environment={"Kubernetes": "1.33"}, simulated=True)
    simulated = replace(newer, simulated=True)
    record = replace(proven.find("last").read(), cluster_verdicts=(node, newer, elsewhere, simulated))
    found = verification_from_record(record).cluster_verdicts
    assert found == {("g5.xlarge", "1.34"): summarize_verdict(newer)}


def test_tags_and_record_with_other_verdicts_on_a_node_are_refused():
    image = in_cluster(("g5.xlarge", "1.34"))
    names = dict(summarize_verdict(one).tag for one in (T4, A10G))
    name, value = NODE["g5.xlarge"].cluster_tag("1.34")
    require_same_verdict(image, {**names, name: value})
    with pytest.raises(RefusedError, match=f"the tags of {AMI} have another verdict") as caught:
        require_same_verdict(image, {**names, name: value.replace("passed", "failed")})
    assert "--cluster CONTEXT --instance-types g5.xlarge" in caught.value.hint


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("layers: []\n    kubernetes: ['1.34']", "which layers does not have"),
        ("layers: [cluster]\n    kubernetes: ['134']", "kubernetes: '134'"),
    ],
)
def test_a_channel_that_can_not_require_nodes(tmp_path, lines, said):
    (tmp_path / "ami").mkdir()
    text = (ROOT / "ami/channels.yaml").read_text()
    (tmp_path / "ami/channels.yaml").write_text(text.replace("layers: []", lines))
    with pytest.raises(UsageError, match=said):
        load_channels(tmp_path)
    good = text.replace("layers: []", "layers: [cluster]\n    kubernetes: ['1.34']")
    (tmp_path / "ami/channels.yaml").write_text(good)
    assert load_channels(tmp_path)["candidate"].kubernetes == ("1.34",)
