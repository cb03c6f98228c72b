"""Which image a machine is started from: a release that fits, else AWS's, else a plain one; and why."""

from datetime import UTC, date, datetime, timedelta

import boto3
import pytest
from botocore.stub import Stubber

from gpukiln.catalog.workloads import workload
from gpukiln.images.subject import Subject, subject_tags
from gpukiln.instances.tags import tag_list
from gpukiln.offers.image import (
    DLAMIS,
    ChannelImage,
    DeepLearningAmi,
    Images,
    VerifiedImage,
    choose_image,
    images_of,
    supported_families,
)

TODAY = date(2026, 11, 23)
SESSION = boto3.Session("x", "x", region_name="us-west-2")
X86 = DLAMIS[0].format(arch="x86_64")
STABLE = "/gpukiln/eks-gpu/1.34/stable/image_id"


class Cloud:
    """AWS, which answers each service's calls as it is told to."""

    name, region = "aws", "us-west-2"

    def __init__(self, **answers: list[tuple[str, object]]) -> None:
        self.clients = {}
        for service, calls in answers.items():
            self.clients[service] = client = SESSION.client(service)
            stub = Stubber(client)
            for call, answer in calls:
                if isinstance(answer, str):
                    stub.add_client_error(call, answer)
                else:
                    stub.add_response(call, answer)
            stub.activate()

    def client(self, service: str) -> object:
        return self.clients[service]


def subject(driver: str, image_id: str = "ami-1", modules: str = "proprietary") -> Subject:
    return Subject(
        image_id=image_id,
        build_id="b",
        recipe="eks-gpu",
        profile="image",
        instance_types=("g4dn.xlarge",),
        base="eks-ubuntu-22.04",
        ssh_user="ubuntu",
        architecture="x86_64",
        driver=driver,
        modules=modules,
        cuda="",
    )


OLD = ChannelImage(
    "/gpukiln/eks-gpu/1.33/stable/image_id", "ami-old", "2026-10-01", subject("535.309.01", "ami-old")
)
NEW = ChannelImage(STABLE, "ami-new", "2026-11-01", subject("580.178.04", "ami-new", "open"))
GONE = ChannelImage(STABLE, "ami-gone", "2026-11-20", None, "aws has no AMI ami-gone in us-west-2")
AWS = DeepLearningAmi(X86, "ami-dl", "x86_64", ("g4dn", "g5", "g6", "p4d"))


def there(
    *released: ChannelImage,
    dlamis: tuple[DeepLearningAmi, ...] = (AWS,),
    verified: tuple[VerifiedImage, ...] = (),
) -> Images:
    return Images("2026-11-23T00:00:00+00:00", released, verified, dlamis, ())


def test_the_newest_release_that_fits_is_taken() -> None:
    cloud = Cloud()
    assert choose_image(there(OLD, NEW), cloud, "g6.xlarge", None, TODAY).image_id == "ami-new"
    found = choose_image(there(OLD, GONE), cloud, "g6.xlarge", None, TODAY)
    assert (found.kind, found.image_id) == ("channel", "ami-old")
    assert any("has no AMI ami-gone" in text for text in found.why)
    # the open modules do not know a V100
    found = choose_image(there(OLD, NEW), cloud, "p3dn.24xlarge", None, TODAY)
    assert found.image_id == "ami-old"
    assert any("open kernel modules" in text for text in found.why)
    found = choose_image(there(OLD), cloud, "g6.xlarge", workload("ollama"), TODAY)
    assert found.kind == "dlami"
    assert any("needs driver 550 or later" in text for text in found.why)


def test_without_a_release_it_is_awss_own_then_a_plain_one() -> None:
    cloud = Cloud()
    found = choose_image(there(), cloud, "g6.xlarge", None, TODAY)
    assert (found.kind, found.image_id, found.name) == ("dlami", "ami-dl", X86)
    for machine, why in (
        ("g6e.xlarge", "does not name g6e"),
        ("p3dn.24xlarge", "open kernel modules"),
        ("g6f.large", "GRID driver"),
        ("g5g.xlarge", "it is x86_64"),
    ):
        found = choose_image(there(), cloud, machine, None, TODAY)
        assert found.kind == "base", machine
        assert any(why in text for text in found.why), machine
    assert choose_image(there(dlamis=()), cloud, "g6.xlarge", None, TODAY).kind == "base"
    wrong = choose_image(
        there(dlamis=()), cloud, "g7e.2xlarge", None, TODAY
    )  # its driver does not know Blackwell
    assert any(one.severity == "error" for one in wrong.findings)


def test_without_a_release_an_image_of_ours_that_passed_comes_before_awss() -> None:
    first = VerifiedImage("ami-a", "2026-11-01T00:00:00+00:00", subject("535.309.01", "ami-a"))
    last = VerifiedImage("ami-b", "2026-11-20T00:00:00+00:00", subject("580.178.04", "ami-b", "open"))
    found = choose_image(there(verified=(first, last)), Cloud(), "g6.xlarge", None, TODAY)
    assert (found.kind, found.image_id) == ("verified", "ami-b")
    assert "on 2026-11-20" in found.why[0]
    found = choose_image(there(verified=(first, last)), Cloud(), "p3dn.24xlarge", None, TODAY)
    assert found.image_id == "ami-a"  # the open modules do not know a V100
    assert choose_image(there(NEW, verified=(first,)), Cloud(), "g6.xlarge", None, TODAY).kind == "channel"


ACCOUNT = {"sts": [("get_caller_identity", {"Account": "111122223333"})]}


def answers(pointed: dict[str, object]) -> dict[str, list[tuple[str, object]]]:
    found = {"Parameters": [{"Name": X86, "Value": "ami-dl"}]}
    text = "Supported EC2 instances: G4dn, P6-B200. More"
    described = {"Images": [{"ImageId": "ami-dl", "Description": text}]}
    tags = {**subject_tags(subject("535.309.01")), "gpukiln:base": "eks-ubuntu-22.04 ami-0"}
    tags["gpukiln:verified-at"] = "2026-11-20T00:00:00+00:00"
    mine = [
        {"ImageId": "ami-1", "State": "available", "Tags": tag_list(tags)},
        {"ImageId": "ami-2", "State": "available", "Tags": tag_list({**tags, "gpukiln:recipe": "gone"})},
        {"ImageId": "ami-3", "State": "pending", "Tags": tag_list(tags)},
    ]
    return {
        "ssm": [("get_parameters_by_path", pointed), ("get_parameters", found)],
        "ec2": [("describe_images", {"Images": mine}), ("describe_images", described)],
        **ACCOUNT,
    }


def test_a_region_is_asked_once_and_its_answer_kept_with_its_age(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    first = images_of(Cloud(**answers({"Parameters": []})))
    assert first.dlamis == (DeepLearningAmi(X86, "ami-dl", "x86_64", ("g4dn", "p6-b200")),)
    assert [one.image_id for one in first.verified] == ["ami-1"]
    assert images_of(Cloud(**ACCOUNT)) == first  # nothing else is asked
    assert images_of(Cloud(**answers({"Parameters": []})), fresh=True).dlamis == first.dlamis
    file = tmp_path / "offers/images-aws-111122223333-us-west-2.json"
    old = (datetime.now(UTC) - timedelta(days=2)).isoformat(timespec="seconds")
    file.write_text(file.read_text().replace(first.at, old))
    assert images_of(Cloud(**answers({"Parameters": []}))).at > old
    file.write_text("{")  # damaged: asked again
    kept = images_of(Cloud(**answers({"Parameters": []})))
    assert kept.dlamis == first.dlamis
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds")
    for at in ("", "yesterday", "2026-11-23T00:00:00", tomorrow):  # no time, none of a zone, none that was
        file.write_text(file.read_text().replace(kept.at, at))
        kept = images_of(Cloud(**answers({"Parameters": []})))
        assert kept.at not in ("", at)


def test_what_can_not_be_asked_is_noted_and_not_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    asked = answers({"Parameters": []})
    asked["ssm"][0] = ("get_parameters_by_path", "AccessDeniedException")
    found = images_of(Cloud(**asked))
    assert found.released == ()
    assert "AccessDeniedException" in found.notes[0]
    assert list(tmp_path.glob("offers/*")) == []


def test_what_can_not_be_kept_is_an_answer_all_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    (tmp_path / "offers").touch()  # where a folder would be
    found = images_of(Cloud(**answers({"Parameters": []})))
    assert found.dlamis
    assert "can't be kept" in found.notes[0]


def test_families_are_read_from_a_description() -> None:
    text = "Supported EC2 instances: G4dn, G5, Gr6, G6e, P4de, P5en, P6-B200, P6-B300. Release notes"
    assert supported_families(text) == ("g4dn", "g5", "gr6", "g6e", "p4de", "p5en", "p6-b200", "p6-b300")
    assert supported_families("something else") == ()
