"""Attacks on a channel: what somebody can do who may tag images and write parameters, and has no key."""

import base64
import errno
import json
import os
from dataclasses import replace
from datetime import date

import pytest

from gpukiln.attest import newest_release
from gpukiln.attest.statements import CLUSTER_VERDICT_TYPE, RELEASE_TYPE, VERDICT_TYPE
from gpukiln.attest.trust import UNSIGNED, is_copy
from gpukiln.cli.main import command
from gpukiln.clouds import select
from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.channels import load_channels
from gpukiln.images.pointer import Pointer, PointerVersion, write
from gpukiln.instances.tags import tag_list, tags_of
from gpukiln.kubernetes.nodes.image_trust import require_trusted
from gpukiln.offers.image import choose_image, images_of
from gpukiln.pipeline.verdict_tags import find_verified, summarize_verdict
from gpukiln.verify.digest import suite_digest
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.plan import plan
from gpukiln.workspaces.spec import UpOptions, spec_of
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE
from tests.support.release_cloud import (
    HOME,
    REGIONS,
    ROOT,
    Cloud,
    fault,
    make_image,
    pointed,
    tags,
    tell,
    verdict,
)
from tests.support.signing import key_pair, put, sign, statements, trusting

AMI, SNAPSHOT = BAKE.image_id, BAKE.image_id.replace("ami-", "snap-")
TODAY = date(2026, 11, 23)
STABLE = Pointer("eks-gpu", "1.34", "stable")
EVERYWHERE = ",".join(REGIONS)
JUDGED = verdict()


@pytest.fixture
def typed(proven, monkeypatch, capsys, tmp_path):
    """Runs a command; the cloud has one image, of the one build, whose tags and record are true."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr(select, "make_cloud", lambda _name, region, **_: Cloud(region))
    monkeypatch.setattr("gpukiln.offers.image.DLAMIS", ())
    tell("reset")
    [build] = proven.all()
    build.write(replace(build.read(), verdicts=(JUDGED,)))
    tell("image", {"region": HOME, "image_id": AMI, "name": "gpu-image", "tags": tags(build.id, JUDGED)})

    def run(name, *arguments, **options):
        code = code_of(command(f"ami.{name}"), *arguments, **options)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    yield run
    tell("reset")


@pytest.fixture
def build(proven):
    return proven.all()[0]


@pytest.fixture
def key(tmp_path, monkeypatch):
    """The private key that both channels trust."""
    made = key_pair(tmp_path, "sign")
    trusting(monkeypatch, made)
    return made


def imitation(build_id, region=HOME, **more):
    """A snapshot that nobody booted, registered with the tags of the proven image."""
    ec2 = Cloud(region).client("ec2")
    volume = ec2.create_volume(AvailabilityZone=f"{region}a", Size=1)["VolumeId"]
    disk = {"SnapshotId": ec2.create_snapshot(VolumeId=volume)["SnapshotId"]}
    image_id = ec2.register_image(
        Name=f"imitation-{region}",
        RootDeviceName="/dev/xvda",
        BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": disk}],
    )["ImageId"]
    ec2.create_tags(Resources=[image_id], Tags=tag_list({**tags(build_id, JUDGED), **more}))
    return image_id


def point_by_hand(image_id, region=HOME):
    ssm = Cloud(region).client("ssm")
    write(ssm, STABLE, PointerVersion(image_id, "b", regions=(region,)), pause=lambda _: None)


def released(typed, key, **more):
    code, _, err = typed("release", "last", channel="stable", sign_key=str(key), **more)
    assert code == 0, err


def test_without_keys_copied_tags_are_refused_by_the_record_of_the_build(typed, build):
    plain = imitation(build.id)
    code, _, err = typed("release", plain, channel="stable", image_region=HOME)
    assert code == 6
    assert f"the tags of {plain} in {HOME} name build {build.id}, whose record names {AMI}" in err
    assert f"invoke ami.show {build.id}" in err
    assert pointed("stable")[HOME] is None


def test_without_keys_a_record_that_names_another_image_is_refused(typed, build):
    """As after an edit: the image that was proven is not the record's any more."""
    record = build.read()
    build.write(replace(record, bake=replace(BAKE, image_id=imitation("another"))))
    code, _, err = typed("release", AMI, channel="stable", image_region=HOME)
    assert code == 6
    assert f"the tags of {AMI}" in err


def test_without_keys_every_command_says_what_it_trusts(typed):
    code, out, err = typed("release", "last", channel="stable", json=True)
    assert (code, json.loads(out)["trust"]) == (0, UNSIGNED)
    assert f"note: {UNSIGNED}" in err
    code, out, err = typed("channels", json=True)
    assert {row["trust"] for row in json.loads(out)["channels"]} == {UNSIGNED}
    assert f"note: stable: {UNSIGNED}" in err
    image = images_of(Cloud(), fresh=True)
    assert choose_image(image, Cloud(), "g4dn.xlarge", None, TODAY).trust == UNSIGNED
    assert require_trusted(STABLE.path, None) == UNSIGNED
    second = make_image("b2", judged=JUDGED)
    assert typed("release", second, channel="stable", image_region=HOME)[0] == 0
    code, out, err = typed("rollback", channel="stable", json=True)
    assert (code, json.loads(out)["trust"]) == (0, UNSIGNED)
    assert f"note: {UNSIGNED}" in err
    assert pointed("stable")[HOME] == AMI


def test_without_keys_what_the_record_contradicts_is_offered_to_nobody(typed, build):
    plain = imitation(build.id)
    found = images_of(Cloud(), fresh=True)
    assert [one.image_id for one in found.verified] == [AMI]
    assert any(f"the tags of {plain}" in note for note in found.notes)
    point_by_hand(plain)
    found = images_of(Cloud(), fresh=True)
    assert found.released[0].facts is None
    code, _, err = typed("channels", regions=HOME)
    assert code == 1
    assert f"the tags of {plain}" in err
    wants = Workspace("v", "ann", HOME, compute_profile=ComputeProfile(2, gpu_type="T4"), image_id=plain)
    with pytest.raises(RefusedError, match=f"the tags of {plain}"):
        plan(Cloud(), spec_of(wants, UpOptions(simulated=True)), TODAY)


@pytest.mark.parametrize("is_signed", [False, True])
def test_an_image_registered_under_the_tags_of_a_copy_is_no_copy(typed, build, request, is_signed, tmp_path):
    key = request.getfixturevalue("key") if is_signed else None
    if key:
        sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    more = {"gpukiln:source-image": AMI, "gpukiln:encryption": "none"}
    swapped = imitation(build.id, REGIONS[1], **more)
    options = {"channel": "stable", "regions": EVERYWHERE, "sign_key": str(key or "")}
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"{swapped} in {REGIONS[1]} is a copy of {AMI} only by its tag gpukiln:source-image" in err
    assert set(pointed("stable").values()) == {None}
    Cloud(REGIONS[1]).client("ec2").deregister_image(ImageId=swapped)  # as the message says
    assert typed("release", "last", **options)[0] == 0


def test_a_signed_release_is_trusted_wherever_it_is_used(typed, key, build, tmp_path):
    code, _, err = typed("release", "last", channel="stable", sign_key=str(key))
    assert code == 6
    assert "it has no verdict that a trusted key signed" in err
    assert f"ami.verify {build.id} --for stable --sign-key KEY" in err
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    code, _, err = typed("release", "last", channel="stable")
    assert code == 6
    assert "and --sign-key is missing" in err
    code, _, err = typed("release", "last", channel="stable", sign_key=str(key_pair(tmp_path, "other")))
    assert code == 6
    assert "--sign-key is another key" in err
    assert typed("release", "last", channel="stable", dry_run=True)[0] == 0
    released(typed, key, regions=EVERYWHERE)
    code, out, _ = typed("channels", json=True)
    assert code == 0
    assert all(row["trust"].startswith("signed: trusts the key") for row in json.loads(out)["channels"])
    for region in REGIONS:
        cloud = Cloud(region)
        assert require_trusted(STABLE.path, cloud).startswith("signed")
        [one] = images_of(cloud, fresh=True).released
        assert one.trust.startswith("signed")
        asked = Workspace("v", "ann", region, compute_profile=ComputeProfile(2, gpu_type="T4"))
        assert (
            plan(cloud, spec_of(asked, UpOptions(simulated=True)), TODAY).choice.image_id
            == pointed("stable")[region]
        )
    tell("calls")
    released(typed, key, regions=EVERYWHERE)
    assert [call for call in tell("calls") if call[1] == "PutParameter"] == []  # all of it is there


@pytest.mark.parametrize(
    ("region", "calls"),
    [(HOME, 2), (REGIONS[1], 3)],  # the release's statement, the copy's verdict, the pointer
)
@pytest.mark.parametrize("kind", ["denied", "lost"])
def test_a_signed_release_that_was_cut_off_is_completed(typed, key, build, tmp_path, region, calls, kind):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    tell("keep")
    everywhere = {"channel": "stable", "regions": EVERYWHERE, "sign_key": str(key)}
    for skip in range(calls):
        tell("restore")
        tell("faults", [fault("PutParameter", kind, region, skip=skip)])
        code, _, err = typed("release", "last", **everywhere)
        assert code == 5, err
        assert "PutParameter" in err
        tell("faults", [])
        released(typed, key, regions=EVERYWHERE)
        assert typed("channels")[0] == 0


def test_a_build_takes_no_image_of_its_plan_by_tags_alone(typed, key, build, tmp_path, caplog):
    """Else a build with a key would verify and sign what somebody else put there."""
    assert typed
    planned = build.read().plan
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list({"gpukiln:digest": planned.digest}))
    assert find_verified(planned, Cloud(), suite_digest()) is None
    assert f"{AMI} is not used: no trusted key signed a passed verdict on {AMI}" in caplog.text
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    assert find_verified(planned, Cloud(), suite_digest()).image_id == AMI


def test_without_keys_a_build_takes_no_image_that_the_record_contradicts(typed, build):
    assert typed
    planned = build.read().plan
    plain = imitation(build.id, **{"gpukiln:digest": planned.digest})
    assert find_verified(planned, Cloud(), suite_digest()) is None
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list({"gpukiln:digest": planned.digest}))
    assert find_verified(planned, Cloud(), suite_digest()).image_id == AMI != plain


def test_what_is_signed_has_the_form_of_in_toto_and_names_what_it_is_about(typed, key, build, tmp_path):
    (build.folder / "provenance.intoto.json").write_text("{}")
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    envelope = json.loads(statements(AMI)["verdict/g4dn.xlarge"])
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        VERDICT_TYPE,
    )
    assert [one["name"] for one in statement["subject"]] == [AMI, SNAPSHOT]
    said = statement["predicate"]
    assert said["counts"] == {"passed": 1, "failed": 0, "not_run": 0, "not_reached": 0}
    assert (said["suite"], said["verdict"]) == (suite_digest(), JUDGED.digest)
    assert said["image"]["instance_types"] == list(build.read().plan.instance_types)
    # sha256sum of a file that holds {}
    assert said["provenance"] == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert json.loads((tmp_path / "verdict.dsse.json").read_text()) == envelope
    released(typed, key, regions=EVERYWHERE)
    copy = pointed("stable")[REGIONS[1]]
    envelope = json.loads(statements(copy, REGIONS[1])["release/stable"])
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert (statement["predicateType"], statement["subject"][0]["name"]) == (RELEASE_TYPE, copy)
    source = {"image_id": AMI, "region": HOME, "snapshots": [SNAPSHOT]}
    assert statement["predicate"]["source"] == source
    assert "nodes" not in statement["predicate"]  # the channel requires none


def refused(typed, image_id, key, *words):
    code, _, err = typed("release", image_id, channel="stable", image_region=HOME, sign_key=str(key))
    assert code == 6, err
    for word in words:
        assert word in err
    assert pointed("stable")[HOME] is None


def test_copied_tags_and_a_replayed_statement_are_refused(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    for record in tmp_path.glob("builds/*/record.json"):  # nothing here says which image the build made
        record.unlink()
    plain = imitation(build.id)
    refused(typed, plain, key, "no verdict that a trusted key signed")
    put(plain, "verdict/g4dn.xlarge", statements(AMI)["verdict/g4dn.xlarge"])
    refused(
        typed,
        plain,
        key,
        f"found a statement on arn:aws:ec2:us-west-2::image/{AMI}",
        f"wanted {plain} in {HOME}",
    )


def test_a_statement_that_was_edited_is_refused(typed, key, build, tmp_path):
    failed = verdict(failed=[("boot.state", "bad")])
    sign(AMI, key, tmp_path, judged=failed, build=build)
    envelope = json.loads(statements(AMI)["verdict/g4dn.xlarge"])
    text = base64.b64decode(envelope["payload"]).replace(b'"outcome":"failed"', b'"outcome":"passed"')
    put(AMI, "verdict/g4dn.xlarge", {**envelope, "payload": base64.b64encode(text).decode()})
    refused(typed, AMI, key, "the signature of the key", "is wrong")
    put(AMI, "verdict/g4dn.xlarge", "{}")
    refused(typed, AMI, key, "the text is not a DSSE envelope")


def test_another_key_is_refused(typed, key, build, tmp_path):
    other = key_pair(tmp_path, "other")
    sign(AMI, other, tmp_path, judged=JUDGED, build=build)
    refused(typed, AMI, key, "verdict g4dn.xlarge: signed by the key", f"signed by {key.with_suffix('.pub')}")


def test_a_key_is_replaced_while_both_are_trusted(typed, key, build, tmp_path, monkeypatch):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    newer = key_pair(tmp_path, "newer")
    trusting(monkeypatch, newer, key)
    released(typed, newer)
    trusting(monkeypatch, newer)
    code, _, err = typed("channels")
    assert code == 1
    assert "there is no signed verdict of g4dn.xlarge" in err


def test_what_a_machine_of_the_source_was_captured_as_is_no_copy():
    """DescribeImages of botocore's model: CreateImage names the source, too, and the machine."""
    copy = {"ImageId": "ami-2", "SourceImageId": AMI, "SourceImageRegion": HOME}
    assert is_copy(copy, AMI, HOME)
    assert not is_copy({**copy, "SourceInstanceId": "i-1"}, AMI, HOME)
    assert not is_copy({**copy, "SourceImageRegion": REGIONS[1]}, AMI, HOME)
    assert not is_copy({"ImageId": "ami-2"}, AMI, HOME)


def test_a_verdict_of_another_suite_is_refused(typed, key, build, tmp_path):
    old = verdict(suite="f" * 64)
    build.write(replace(build.read(), verdicts=(old,)))
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list(tags(build.id, old)))
    sign(AMI, key, tmp_path, judged=old, build=build)
    refused(typed, AMI, key, "verified by the suite ffffffffffffffff", "the current one is")


def test_a_verdict_on_simulated_gpus_is_refused(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=replace(JUDGED, simulated=True), build=build)
    assert statements(AMI) == {}  # it is in its report alone
    put(AMI, "verdict/g4dn.xlarge", (tmp_path / "verdict.dsse.json").read_text().strip())
    refused(typed, AMI, key, "verified on simulated GPUs, wanted real ones")


def test_edited_tags_are_refused(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    for record in tmp_path.glob("builds/*/record.json"):
        record.unlink()
    fewer = {"gpukiln:instance-types": "g4dn.xlarge"}  # then nobody asks for a verdict on an A10G
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list(fewer))
    refused(typed, AMI, key, "described otherwise than in the signed verdict", "'g5.xlarge'")


def test_an_edited_record_is_refused(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    plain = imitation(build.id)
    build.write(replace(build.read(), bake=replace(BAKE, image_id=plain)))
    refused(typed, "last", key, "no verdict that a trusted key signed")


def test_a_failure_that_was_not_signed_counts_too(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    failed = verdict(on="g5.xlarge", failed=[("gpu.ecc", "bad")])
    build.write(replace(build.read(), verdicts=(JUDGED, failed)))
    both = {**tags(build.id, failed), **tags(build.id, JUDGED)}
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list(both))
    refused(typed, AMI, key, "its verdict is not `passed` on g5.xlarge")


def test_a_pointer_that_was_written_by_hand_is_refused_wherever_it_is_used(typed, key, build, tmp_path):
    """Also one at an image with signed verdicts that nobody released."""
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    for image_id, why in (
        (AMI, "there is no signed release of it to stable"),
        (imitation("another"), "there is no signed release of it to stable"),
    ):
        point_by_hand(image_id)
        code, _, err = typed("channels", regions=HOME)
        assert code == 1
        assert why in err
        with pytest.raises(RefusedError, match=why) as caught:
            require_trusted(STABLE.path, Cloud())
        assert "ami.release BUILD --channel stable --sign-key KEY" in caught.value.hint
        assert images_of(Cloud(), fresh=True).released[0].facts is None
    assert [one.image_id for one in images_of(Cloud(), fresh=True).verified] == [AMI]


def test_an_image_for_another_kubernetes_is_no_release_of_this_one(typed, key, build, tmp_path):
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    released(typed, key)
    newer = Pointer("eks-gpu", "1.35", "stable")
    write(Cloud().client("ssm"), newer, PointerVersion(AMI, build.id, regions=(HOME,)), pause=lambda _: None)
    with pytest.raises(RefusedError, match=r"released as eks-gpu for Kubernetes 1\.34"):
        require_trusted(newer.path, Cloud())


def test_a_copy_whose_snapshots_are_others_is_refused(typed, key, build, tmp_path):
    """With the statements of the true copy, and the pointer at the one that was registered in its place."""
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    released(typed, key, regions=EVERYWHERE)
    there = REGIONS[1]
    true = pointed("stable")[there]
    swapped = imitation(build.id, there, **{"gpukiln:source-image": AMI, "gpukiln:encryption": "none"})
    for name, text in statements(true, there).items():
        put(swapped, name, text, there)
    point_by_hand(swapped, there)
    for record in tmp_path.glob("builds/*/record.json"):
        record.unlink()
    code, _, err = typed("channels", regions=EVERYWHERE)
    assert code == 1
    assert f"found a statement on arn:aws:ec2:{there}::image/{true}" in err
    with pytest.raises(RefusedError, match="no trusted key signed that release"):
        require_trusted(STABLE.path, Cloud(there))


def test_a_rollback_to_what_nobody_signed_is_refused(typed, key, build, tmp_path, monkeypatch):
    first = make_image("b0", judged=JUDGED)
    trusting(monkeypatch)
    assert typed("release", first, channel="stable", image_region=HOME)[0] == 0
    trusting(monkeypatch, key)
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    released(typed, key)
    code, _, err = typed("rollback", channel="stable", sign_key=str(key))
    assert code == 6
    assert "there is no signed release of it to stable" in err
    assert pointed("stable")[HOME] == AMI


def test_a_rollback_is_signed_as_a_release_is(typed, key, two, tmp_path):
    code, _, err = typed("rollback", channel="stable")
    assert code == 6
    assert "and --sign-key is missing" in err
    code, _, err = typed("rollback", channel="stable", sign_key=str(key_pair(tmp_path, "other")))
    assert code == 6
    assert "--sign-key is another key" in err
    assert typed("rollback", channel="stable", dry_run=True)[0] == 0
    assert (pointed("stable")[HOME], number(two)) == (two, 2)
    assert typed("rollback", channel="stable", sign_key=str(key))[0] == 0
    assert (pointed("stable")[HOME], number(AMI)) == (AMI, 3)
    assert typed("channels")[0] == 0
    released(typed, key)  # it is what the channel points at
    assert number(AMI) == 3
    assert typed("release", two, channel="stable", image_region=HOME, sign_key=str(key))[0] == 0
    assert number(two) == 4


@pytest.mark.parametrize("kind", ["denied", "lost"])
@pytest.mark.parametrize("skip", [0, 1])  # the statement, the pointer
def test_a_signed_rollback_that_was_cut_off_is_completed(typed, key, two, skip, kind):
    tell("faults", [fault("PutParameter", kind, HOME, skip=skip)])
    code, _, err = typed("rollback", channel="stable", sign_key=str(key))
    assert code == 4, err
    tell("faults", [])
    assert typed("channels")[0] == 0
    if pointed("stable")[HOME] == two:
        assert typed("rollback", channel="stable", sign_key=str(key))[0] == 0
    assert typed("channels")[0] == 0
    assert (pointed("stable")[HOME], number(AMI)) == (AMI, 3)


def number(image_id, region=HOME, channel="stable"):
    """The number that an image's release to a channel has, whoever signed it."""
    envelope = json.loads(statements(image_id, region)[f"release/{channel}"])
    return json.loads(base64.b64decode(envelope["payload"]))["predicate"]["number"]


@pytest.fixture
def two(typed, key, build, tmp_path):
    """The channel has had AMI and points at a second image, whose id this is; the reader has seen it."""
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    released(typed, key)
    second = make_image("b2", judged=JUDGED)
    sign(second, key, tmp_path, judged=JUDGED)
    assert typed("release", second, channel="stable", image_region=HOME, sign_key=str(key))[0] == 0
    assert (number(AMI), number(second)) == (1, 2)
    assert typed("channels")[0] == 0
    return second


def remove(image_id):
    Cloud().client("ssm").delete_parameter(Name=f"/gpukiln-attestations/{image_id}/release/stable")


def put_back(typed, *words):
    """What the pointer shows is refused by everything that reads it."""
    code, _, err = typed("channels", regions=HOME)
    assert code == 1
    for word in (STABLE.path, *words):
        assert word in err
    with pytest.raises(RefusedError, match=words[0]) as caught:
        require_trusted(STABLE.path, Cloud())
    assert images_of(Cloud(), fresh=True).released[0].facts is None
    return caught.value


@pytest.mark.parametrize("seen_by", ["release", "channels"])
def test_a_pointer_that_was_put_back_is_refused(typed, two, seen_by, monkeypatch, tmp_path):
    """Whoever may write parameters needs no more for it: the earlier release is signed, too."""
    if seen_by == "channels":  # on another computer
        monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "other"))
        assert typed("channels", regions=HOME)[0] == 0
    point_by_hand(AMI)
    error = put_back(
        typed, "which is not the newest release: it has the number 1", f"verified number 2, {two}"
    )
    assert "ami.release BUILD --channel stable --sign-key KEY" in error.hint
    assert str(tmp_path) in error.details[0]
    point_by_hand(two)
    assert typed("channels", regions=HOME)[0] == 0


def test_a_pointer_that_was_put_back_with_its_statement_is_refused(typed, key, two):
    early = statements(AMI)["release/stable"]
    assert typed("rollback", channel="stable", sign_key=str(key))[0] == 0
    assert typed("channels")[0] == 0
    put(AMI, "release/stable", early)  # of the same image, which the channel points at
    put_back(typed, "it has the number 1", f"verified number 3, {AMI}")
    assert typed("release", two, channel="stable", image_region=HOME, sign_key=str(key))[0] == 0
    assert number(two) == 4
    point_by_hand(AMI)
    put_back(typed, "it has the number 1", f"verified number 4, {two}")


def test_a_removed_statement_hides_no_release(typed, two):
    remove(two)
    put_back(typed, "there is no signed release of it to stable")
    point_by_hand(AMI)
    put_back(typed, "it has the number 1", f"verified number 2, {two}")


def test_two_releases_of_the_same_number_are_noticed(typed, key, two, tmp_path, monkeypatch):
    """Who removes a statement lets a computer that remembers nothing give its number again."""
    remove(two)
    third = make_image("b3", judged=JUDGED)
    sign(third, key, tmp_path, judged=JUDGED)
    options = {"channel": "stable", "image_region": HOME, "sign_key": str(key)}
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("GPUKILN_HOME", str(tmp_path / "other"))
        assert typed("release", third, **options)[0] == 0
    assert number(third) == 2
    error = put_back(typed, "it has the number 2", f"verified number 2, {two}")
    assert "on this computer creates a newer one" in error.hint
    assert typed("release", third, **options)[0] == 0  # as the message says
    assert number(third) == 3
    assert typed("channels")[0] == 0


def test_a_computer_that_has_seen_nothing_trusts_what_it_finds_first(typed, two, tmp_path, monkeypatch):
    """The limit that SECURITY.md names: nothing in the account says which release is the newest."""
    assert typed
    point_by_hand(AMI)
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "new"))
    assert require_trusted(STABLE.path, Cloud()).startswith("signed")
    point_by_hand(two)
    assert require_trusted(STABLE.path, Cloud()).startswith("signed")
    point_by_hand(AMI)
    put_back(typed, "it has the number 1")


def test_a_release_that_did_not_move_the_pointer_does_not_count_as_seen(typed, key, two, tmp_path):
    third = make_image("b3", judged=JUDGED)
    sign(third, key, tmp_path, judged=JUDGED)
    tell("faults", [fault("PutParameter", "denied", HOME, skip=1)])
    assert typed("release", third, channel="stable", image_region=HOME, sign_key=str(key))[0] == 4
    tell("faults", [])
    assert (number(third), pointed("stable")[HOME]) == (3, two)
    assert typed("channels")[0] == 0
    assert typed("rollback", channel="stable", sign_key=str(key))[0] == 0
    assert number(AMI) == 4  # no number is given twice
    assert typed("channels")[0] == 0


def test_numbers_are_of_a_channel_and_a_region(typed, key, two):
    released(typed, key, regions=EVERYWHERE)
    there = REGIONS[1]
    assert (number(AMI), number(pointed("stable")[there], there)) == (3, 1)
    assert typed("release", two, channel="candidate", image_region=HOME, sign_key=str(key))[0] == 0
    assert number(two, channel="candidate") == 1
    put(two, "release/stable", statements(two)["release/candidate"])  # of another channel
    assert typed("channels")[0] == 0


def test_what_a_key_signed_that_is_trusted_no_more_says_nothing(typed, key, two, tmp_path, monkeypatch):
    """Else whoever has a stolen key could sign a number that no release ever reaches."""
    newer = key_pair(tmp_path, "newer")
    trusting(monkeypatch, newer)
    sign(two, newer, tmp_path, judged=JUDGED)
    assert typed("release", two, channel="stable", image_region=HOME, sign_key=str(newer))[0] == 0
    assert number(two) == 1
    assert typed("channels")[0] == 0
    trusting(monkeypatch, newer, key)
    assert typed("release", two, channel="stable", image_region=HOME, sign_key=str(newer))[0] == 0
    assert number(two) == 2  # of the old key there is number 1 of another image
    assert typed("channels")[0] == 0


def memory(tmp_path):
    [file] = (tmp_path / "trust").glob("embedded-*-us-west-2.json")
    return file


@pytest.mark.usefixtures("two")
def test_what_is_remembered_is_read_or_refused(typed, tmp_path):
    file = memory(tmp_path)
    before = file.read_text()
    assert json.loads(before)[STABLE.path]["number"] == 2
    assert file.stat().st_mode & 0o777 == 0o600
    point_by_hand(AMI)
    assert typed("channels")[0] == 1
    assert file.read_text() == before  # it moves up alone
    for damage in ("", "{", '{"x": 1}'):
        file.write_text(damage)
        with pytest.raises(UsageError, match=str(file)) as caught:
            require_trusted(STABLE.path, Cloud())
        assert "the next release is trusted" in caught.value.hint


def test_who_can_remember_nothing_is_warned(typed, two, tmp_path, monkeypatch, caplog):
    assert typed
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "new"))

    def write(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(newest_release, "write_atomic", write)
    assert require_trusted(STABLE.path, Cloud()).startswith("signed")
    assert f"this computer can't detect that {STABLE.path} is set back" in caplog.text
    assert pointed("stable")[HOME] == two


@pytest.mark.usefixtures("typed")
def test_a_named_image_of_a_workspace_has_to_be_signed(key, build, tmp_path):
    wants = Workspace("v", "ann", HOME, compute_profile=ComputeProfile(2, gpu_type="T4"), image_id=AMI)
    with pytest.raises(RefusedError, match="there is no signed verdict on it") as caught:
        plan(Cloud(), spec_of(wants, UpOptions(simulated=True)), TODAY)
    assert f"ami.verify {AMI} --region {HOME}" in caught.value.hint
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    assert plan(Cloud(), spec_of(wants, UpOptions(simulated=True)), TODAY).choice.trust.startswith("signed")


@pytest.mark.usefixtures("typed", "key")
def test_nodes_of_a_channel_with_keys_need_a_cloud_to_look_it_up():
    for image in (STABLE.path, AMI):
        with pytest.raises(RefusedError, match="no cloud is given to look it up in"):
            require_trusted(image, None)
    with pytest.raises(UsageError, match="does not exist in us-west-2"):
        require_trusted(STABLE.path, Cloud())


def test_signed_provenance_is_the_one_that_the_verdict_names(typed, key, build, tmp_path, monkeypatch):
    trusting(monkeypatch, key, attestation="signed")
    sign(AMI, key, tmp_path, judged=JUDGED, build=build)
    refused(typed, AMI, key, "no trusted key signed its provenance", "signed none")


# --- as a node of a cluster -------------------------------------------------------------------------------

NODE = replace(JUDGED, profile="pod", environment={"Kubernetes": "1.34"})
NODE_TAG, NODE_STATEMENT = "gpukiln:cluster-verdict:g4dn.xlarge:1.34", "cluster-verdict/g4dn.xlarge_1.34"


@pytest.fixture
def node_key(tmp_path, monkeypatch, typed, build):
    """As `key`, of channels that require a node in Kubernetes 1.34; a machine has a signed verdict."""
    assert typed
    made = key_pair(tmp_path, "sign")
    required = {"gpus": [], "layers": ["cluster"], "kubernetes": ["1.34"], "excused_without_gpus": []}
    trusting(monkeypatch, made, **required)
    sign(AMI, made, tmp_path, judged=JUDGED, build=build)
    return made


def write_tag(judged=NODE):
    """The tag of a verdict on a node, which everybody can write who may tag images."""
    name, value = summarize_verdict(judged).cluster_tag("1.34")
    assert name == NODE_TAG
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list({name: value}))


def test_a_tag_is_no_verdict_on_a_node_and_a_statement_is(typed, node_key, build, tmp_path):
    why = "a machine in Kubernetes 1.34: it was not verified as a node"
    refused(typed, AMI, node_key, why)
    write_tag()
    refused(typed, AMI, node_key, why, f"ami.verify {build.id} --cluster CONTEXT --for stable --sign-key KEY")
    build.write(replace(build.read(), cluster_verdicts=(NODE,)))  # nor is a record
    refused(typed, AMI, node_key, why)
    sign(AMI, node_key, tmp_path, judged=NODE, build=build, in_cluster=True)
    released(typed, node_key, regions=EVERYWHERE)
    assert typed("channels")[0] == 0
    copy, region = pointed("stable")[REGIONS[1]], REGIONS[1]
    assert statements(copy, region)[NODE_STATEMENT] == statements(AMI)[NODE_STATEMENT]
    [image] = Cloud(region).client("ec2").describe_images(ImageIds=[copy])["Images"]
    assert tags_of(image)[NODE_TAG] == summarize_verdict(NODE).tag_value
    tell("calls")
    released(typed, node_key, regions=EVERYWHERE)
    assert [call for call in tell("calls") if call[1] == "PutParameter"] == []


def test_what_is_signed_of_a_node_names_version_and_profile(node_key, build, tmp_path):
    sign(AMI, node_key, tmp_path, judged=NODE, build=build, in_cluster=True)
    statement = json.loads(base64.b64decode(json.loads(statements(AMI)[NODE_STATEMENT])["payload"]))
    assert statement["predicateType"] == CLUSTER_VERDICT_TYPE != VERDICT_TYPE
    assert [one["name"] for one in statement["subject"]] == [AMI, SNAPSHOT]
    said = statement["predicate"]
    assert (said["cluster_kubernetes"], said["profile"], said["instance_type"]) == (
        "1.34",
        "pod",
        "g4dn.xlarge",
    )
    assert (said["suite"], said["verdict"]) == (suite_digest(), NODE.digest)


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (replace(NODE, suite_version="f" * 64), "by the current suite"),
        (replace(NODE, environment={"Kubernetes": "1.33"}), "it was not verified as a node"),
        (replace(NODE, profile="image"), "it was not verified as a node"),
        (replace(NODE, simulated=True), "verified on simulated GPUs, wanted real ones"),
        (replace(NODE, checks=verdict(failed=[("cluster.rejoins", "no")]).checks), "is not `passed`"),
    ],
)
def test_another_verdict_on_a_node_is_refused(typed, node_key, build, tmp_path, judged, said):
    # In the place of the one that is required, and with the tag that it would have.
    sign(AMI, node_key, tmp_path, judged=judged, build=build, in_cluster=True)
    put(AMI, NODE_STATEMENT, (tmp_path / "verdict.dsse.json").read_text().strip())
    write_tag(judged if judged.passed else NODE)
    refused(typed, AMI, node_key, "not verified on", "in Kubernetes 1.34", said)


def test_a_statement_on_a_machine_is_none_on_a_node_and_the_reverse(typed, node_key, build, tmp_path):
    write_tag()
    on_machine = statements(AMI)["verdict/g4dn.xlarge"]
    put(AMI, NODE_STATEMENT, on_machine)
    wanted = f"{VERDICT_TYPE}, wanted https://in-toto.io/Statement/v1 {CLUSTER_VERDICT_TYPE}"
    refused(typed, AMI, node_key, "it was not verified as a node", wanted)
    sign(AMI, node_key, tmp_path, judged=NODE, build=build, in_cluster=True)
    put(AMI, "verdict/g4dn.xlarge", statements(AMI)[NODE_STATEMENT])
    wanted = f"{CLUSTER_VERDICT_TYPE}, wanted https://in-toto.io/Statement/v1 {VERDICT_TYPE}"
    refused(typed, AMI, node_key, "it has no verdict that a trusted key signed", wanted)


def test_a_node_of_another_image_or_of_another_key_is_refused(typed, node_key, build, tmp_path):
    write_tag()
    sign(AMI, key_pair(tmp_path, "other"), tmp_path, judged=NODE, build=build, in_cluster=True)
    refused(typed, AMI, node_key, "it was not verified as a node", f"{NODE_STATEMENT.replace('/', ' ')}: ")
    plain = imitation(build.id)
    sign(plain, node_key, tmp_path, judged=NODE, in_cluster=True)
    put(AMI, NODE_STATEMENT, statements(plain)[NODE_STATEMENT])
    refused(typed, AMI, node_key, f"found a statement on arn:aws:ec2:us-west-2::image/{plain}")


def test_a_release_stands_and_falls_with_its_nodes(typed, node_key, build, tmp_path):
    sign(AMI, node_key, tmp_path, judged=NODE, build=build, in_cluster=True)
    write_tag()
    other = replace(NODE, environment={"Kubernetes": "1.35"})  # which the channel does not require
    name, value = summarize_verdict(other).cluster_tag("1.35")
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list({name: value}))
    sign(AMI, node_key, tmp_path, judged=other, build=build, in_cluster=True)
    released(typed, node_key)
    Cloud().client("ssm").delete_parameter(
        Name=f"/gpukiln-attestations/{AMI}/cluster-verdict/g4dn.xlarge_1.35"
    )
    assert typed("channels")[0] == 0
    failed = replace(NODE, checks=verdict(failed=[("cluster.rejoins", "no")]).checks)
    sign(AMI, node_key, tmp_path, judged=failed, build=build, in_cluster=True)
    code, out, err = typed("channels")
    assert (code, "it failed as a node on g4dn.xlarge_1.34" in out + err) == (1, True), out + err
    Cloud().client("ssm").delete_parameter(Name=f"/gpukiln-attestations/{AMI}/{NODE_STATEMENT}")
    code, out, err = typed("channels")
    assert (code, "there is no signed verdict of g4dn.xlarge_1.34" in out + err) == (1, True), out + err


def test_a_channel_names_whom_it_trusts(tmp_path):
    (tmp_path / "ami").mkdir()
    text = (ROOT / "ami/channels.yaml").read_text()
    file = tmp_path / "ami/channels.yaml"
    file.write_text(text.replace("attestation: written", "attestation: signed", 1))
    with pytest.raises(UsageError, match="trust names no key: any signature would be accepted") as caught:
        load_channels(tmp_path)
    assert "trust: [ami/keys/release.pub]" in caught.value.hint
    file.write_text(text.replace("trust: []", "trust: [ami/keys/none.pub]", 1))
    with pytest.raises(UsageError, match=r"'ami/keys/none\.pub' is no file of"):
        load_channels(tmp_path)
