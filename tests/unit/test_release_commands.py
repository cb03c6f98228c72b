"""ami.release, rollback, channels and prune as they are typed: exit codes, JSON, refusals, what is asked."""

import io
import json
from dataclasses import replace

import pytest

from gpukiln.catalog.bases import NO_KUBERNETES
from gpukiln.cli.main import command
from gpukiln.clouds import select
from gpukiln.errors import BusyError, UsageError
from gpukiln.release.log import ReleaseLog
from gpukiln.release.options import key_by_region, region_names, sharing_with
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE
from tests.support.release_cloud import HOME, REGIONS, Cloud, pointed, tags, tell, verdict

AMI = BAKE.image_id
NO_GPU = verdict(not_run=[("gpu.xid", "no GPU"), ("runtime.cdi", "no GPU")])
NO_TOOLKIT = verdict(not_run=[("runtime.docker-nvidia", "left out")])


@pytest.fixture
def typed(proven, monkeypatch, capsys, tmp_path):
    """Run a command on an empty cloud with one proven build; returns its exit code, output and errors."""
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr(select, "make_cloud", lambda _name, region, **_: Cloud(region))
    tell("reset")

    def run(name, *arguments, judged=None, **options):
        if judged is not None:
            [build] = proven.all()
            build.write(replace(build.read(), verdicts=(judged,)))
            about = {"region": HOME, "image_id": AMI, "name": "gpu-image"}
            tell("image", {"tags": tags(build.id, judged), **about})
        code = code_of(command(f"ami.{name}"), *arguments, **options)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_an_image_without_kubernetes_has_no_version_in_its_pointer(typed, proven):
    """Its base is Debian: whatever version components.yaml has, there is no kubelet in it."""
    [build] = proven.all()
    build.write(replace(build.read(), plan=replace(build.read().plan, kubernetes=NO_KUBERNETES)))
    code, out, _ = typed("release", "last", judged=NO_GPU, json=True, channel="candidate", regions=HOME)
    assert (code, json.loads(out)["parameter"]) == (0, "/gpukiln/eks-gpu/none/candidate/image_id")
    code, out, err = typed("rollback", channel="candidate", regions=HOME)
    assert (code, "/gpukiln/eks-gpu/none/candidate" in out + err) == (6, True), "found without --kubernetes"


def test_the_whole_way_by_hand(typed):
    everywhere = {"channel": "candidate", "regions": ",".join(REGIONS)}
    code, out, err = typed("release", "last", judged=NO_GPU, dry_run=True, **everywhere)
    assert code == 0
    assert "dry run" not in err
    assert "would be moved" in out
    assert "dry run: nothing was changed" in out
    assert set(pointed().values()) == {None}

    code, out, err = typed("release", "last", json=True, **everywhere)
    document = json.loads(out)
    assert (code, document["state"], document["not_run"]) == (0, "done", "runtime=1 gpu=1")
    assert document["parameter"] == "/gpukiln/eks-gpu/1.34/candidate/image_id"
    assert {one["region"]: one["image_id"] for one in document["regions"]} == pointed()
    assert "checks not run: runtime=1 gpu=1" in err

    code, out, _ = typed("channels")
    assert code == 0
    assert all(image_id in out for image_id in pointed().values())
    code, _, err = typed("rollback", channel="candidate")
    assert code == 6
    assert "no release before this one" in err
    code, out, _ = typed("prune", json=True, yes=True, dry_run=True)
    found = json.loads(out)
    assert (code, found["removed"], len(found["regions"])) == (0, False, 2)
    assert {image["action"] for region in found["regions"] for image in region["images"]} == {"keep"}

    Cloud(HOME).client("ec2").disable_image_deregistration_protection(ImageId=AMI)
    code, out, err = typed("channels", json=True)
    assert (code, len(json.loads(out)["channels"])) == (1, 2)
    assert "the image can be deregistered" in err


def test_stable_takes_only_what_was_proven(typed):
    code, _, err = typed("release", "last", channel="stable", judged=NO_TOOLKIT)
    assert code == 6
    assert "runtime.docker-nvidia: left out" in err
    code, out, _ = typed("release", "last", channel="stable", judged=NO_GPU)
    assert code == 0
    assert "not verified gpu.xid: no GPU" in out  # this cloud has no GPU: excused, and said
    assert "not verified a machine with A10G: no machine of this cloud has a GPU" in out
    code, _, err = typed("release", "last", channel="stable", judged=verdict(failed=[("boot.state", "bad")]))
    assert code == 6
    assert "its verdict is not `passed` on g4dn.xlarge" in err
    code, _, err = typed("release", "last", channel="stabel")
    assert code == 2
    assert "did you mean stable?" in err


def test_a_dry_run_waits_for_nobody(typed, tmp_path):
    typed("release", "last", channel="candidate", judged=NO_GPU)
    release, rollback = ("release", "last"), ("rollback",)
    with ReleaseLog(tmp_path).locked():
        assert typed(*release, channel="candidate", dry_run=True)[0] == 0
        assert typed(*release, channel="candidate")[0] == BusyError.exit_code
        assert typed(*rollback, channel="candidate", dry_run=True)[0] == 6  # there is no release before
        assert typed(*rollback, channel="candidate")[0] == BusyError.exit_code
        assert typed("prune")[0] == 0
        assert typed("prune", yes=True, dry_run=True)[0] == 0
        assert typed("prune", yes=True)[0] == BusyError.exit_code


def test_a_region_that_is_not_typed_is_named_with_its_source(typed):
    code, out, err = typed("channels", judged=NO_GPU)
    assert (code, out) == (0, "")
    assert f"--regions {HOME}: of this machine's last build, 2" in err
    assert typed("prune", without_channels=True)[0] == 0
    typed("release", "last", channel="candidate", regions=",".join(REGIONS))
    code, out, err = typed("channels")
    assert code == 0
    assert f"--regions {','.join(REGIONS)}: where this machine has released\n" in err
    assert "where this machine" not in out
    assert typed("channels", cloud="aws")[0] == UsageError.exit_code


def test_a_channel_after_another_one(typed):
    """What is approved is what the earlier channel still points at."""
    code, _, err = typed("release", "last", channel="stable", after="candidate", judged=NO_GPU)
    assert code == 6
    assert f"{HOME}: nothing" in err
    assert set(pointed("stable").values()) == {None}
    assert typed("release", "last", channel="candidate", regions=HOME)[0] == 0
    code, _, err = typed("release", "last", channel="stable", after="candidate", regions=",".join(REGIONS))
    assert code == 6
    assert f"in {REGIONS[1]}" in err
    assert typed("release", "last", channel="stable", after="candidate")[0] == 0
    assert pointed("stable")[HOME] == AMI
    assert typed("release", "last", channel="stable", after="canditate")[0] == 2


def test_an_image_of_another_machine_is_known_by_its_tags(typed, tmp_path):
    typed("channels", judged=NO_GPU)
    for record in tmp_path.glob("builds/*/record.json"):
        record.unlink()
    assert typed("release", AMI, channel="candidate")[0] == 2  # nobody said where it is
    assert typed("release", AMI, channel="candidate", image_region=HOME)[0] == 0
    code, _, err = typed("release", AMI, channel="stable", image_region=HOME)
    assert code == 6
    assert "g4dn.xlarge: 1 checks of gpu were not run, and its tags don't say why" in err
    assert typed("release", "ami-00000000", channel="stable", image_region=HOME)[0] == 2


def test_nothing_becomes_public_without_its_name(typed, monkeypatch):
    public = {"channel": "candidate", "public": True}
    code, _, err = typed("release", "last", judged=NO_GPU, **public)
    assert code == 6
    assert "its name was not typed" in err
    assert "--yes-public gpu-image" in err
    assert typed("release", "last", yes_public="gpu", **public)[0] == 6

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for answer, expected in (("yes\n", 6), ("gpu-image\n", 0)):
        Cloud(HOME).client("ec2").disable_image_block_public_access()
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert typed("release", "last", **public)[0] == expected
        assert Cloud(HOME).client("ec2").describe_images(ImageIds=[AMI])["Images"][0]["Public"] is (
            expected == 0
        )


def test_options_are_checked_before_anything_is_asked():
    assert key_by_region("us-west-2=a,us-east-1=b", ("us-west-2", "us-east-1"), encrypt=False) == {
        "us-west-2": "a",
        "us-east-1": "b",
    }
    assert key_by_region("", ("us-west-2",), encrypt=True) == {"us-west-2": "default"}
    for text, encrypt, message in (
        ("us-west-2=a", False, "no key for us-east-1"),
        ("us-west-2=a,us-east-1=b,eu-west-1=c", False, "eu-west-1"),
        ("us-west-2=a,us-east-1=b", True, "exclude each other"),
    ):
        with pytest.raises(UsageError, match=message):
            key_by_region(text, ("us-west-2", "us-east-1"), encrypt=encrypt)
    with pytest.raises(UsageError, match="no account id"):
        sharing_with("1234", "", public=False)
    with pytest.raises(UsageError, match="no ARN of an organization"):
        sharing_with("", "o-abc", public=False)
    with pytest.raises(UsageError, match="us-wst-2"):
        region_names("us-east-1,us-wst-2")
    unit = "arn:aws:organizations::111122223333:ou/o-abcde12345/ou-ab12-11111111"
    assert sharing_with("", unit, public=False).permissions == [{"OrganizationalUnitArn": unit}]
