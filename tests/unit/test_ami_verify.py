"""ami.verify and ami.build on a stand-in for machine and suite: what the person sees, where the report is."""

import json
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest

from gpukiln.attest.signing import load_public_key
from gpukiln.attest.statements import AmiLocation, VerdictClaim, open_statement
from gpukiln.clouds import select
from gpukiln.clouds.tags import ATTESTED_TAGS
from gpukiln.commands import ami, ami_verify
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.images import orphans
from gpukiln.images.bake import image_tags
from gpukiln.images.subject import check_machines, subject_of
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.pipeline import steps
from gpukiln.verify.digest import suite_digest
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import CheckResult, Verdict
from tests.support import documents
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE
from tests.support.signing import key_pair, trusting

GOOD = CheckResult("hygiene.history", "No shell history", "hygiene", "passed", "3 files")
BAD = CheckResult("boot.state", "running", "boot", "failed", "found degraded", "look", ("a cause",))


@pytest.fixture
def judge(proven, monkeypatch, capsys):
    """Run ami.verify with these results; returns its exit code, standard error and the build."""
    there = {}

    def run(
        *results,
        is_gone=False,
        suite_version="",
        command=ami_verify.AmiVerify,
        cloud_name="embedded",
        **options,
    ):
        def suite(target, *, profile, out_dir, on_check, on_start, expect_gpus, simulated, instance_type):
            assert (target.name, expect_gpus) == ("i-1", 1 if simulated else None)
            on_start("gathering facts")
            for result in results:
                on_start(result.title)
                on_check(result)
            (out_dir / "report.html").write_text("the page")
            of = {"suite_version": suite_version, "instance_type": instance_type, "simulated": simulated}
            return Verdict("i-1", profile, "2026-01-01T00:00:00+00:00", 1.0, results, **of)

        @contextmanager
        def machine(*_args, instance_types, **machine_options):
            run.machine_options = machine_options
            yield (
                Target("i-1", "ssh://admin@192.0.2.1"),
                LaunchedMachine("i-1", instance_types[0], "us-west-2a", False),
            )

        def describe(**_):
            image = {
                "ImageId": BAKE.image_id,
                "CreationDate": "2026-01-01T00:00:00Z",
                "State": "available",
                "BlockDeviceMappings": [],
            }
            tags = [{"Key": key, "Value": value} for key, value in there.items()]
            return {"Images": [] if is_gone else [{**image, "Tags": tags}]}

        def tag(*, Resources, Tags):  # noqa: N803 - boto3's names
            assert Resources == [BAKE.image_id]
            there.update({one["Key"]: one["Value"] for one in Tags})

        pages = SimpleNamespace(paginate=lambda **_: [describe()])
        ec2 = SimpleNamespace(
            create_tags=tag,
            describe_images=describe,
            modify_image_attribute=lambda **_: None,
            get_paginator=lambda _: pages,
        )
        ssm = SimpleNamespace(
            put_parameter=lambda **asked: run.kept.update({asked["Name"]: asked["Value"]}),
            get_paginator=lambda _: SimpleNamespace(paginate=lambda **_: [{"Parameters": []}]),
        )
        monkeypatch.setattr(steps, "run_suite", suite)
        monkeypatch.setattr(steps, "machine_from_image", machine)
        monkeypatch.setattr(orphans, "clean_up_killed_builds", lambda *_: [])
        monkeypatch.setenv("GPUKILN_HOME", str(proven.folder.parent))
        cloud = SimpleNamespace(
            name=cloud_name,
            region="us-west-2",
            has_gpus=False,
            keeps_stages=False,
            ssh_cidr="192.0.2.1/32",
            client=lambda name: ssm if name == "ssm" else ec2,
        )
        cloud.in_region = lambda _: cloud
        monkeypatch.setattr(select, "make_cloud", lambda *_, **__: cloud)
        monkeypatch.setattr(ami.BuildOptions, "plan", lambda *_: (proven.find("last").read().plan, None))
        code = code_of(command, **(options or {"build": "last"}))
        shown = capsys.readouterr()
        run.out = shown.out
        return code, shown.err + shown.out, proven.find("last") if proven.all() else None

    run.tags, run.kept = there, {}
    return run


def test_each_check_is_shown_once_and_the_report_is_named(judge):
    code, shown, build = judge(GOOD, replace_id(GOOD, "hygiene.other"))
    assert code == 0
    assert shown.count("hygiene.history") == shown.count("hygiene.other") == 1
    assert shown.index("gathering facts") < shown.index("hygiene.history") < shown.index("ok verify")
    assert "i-1 (image): passed - 2 passed, 0 failed, 0 not run" in shown
    page = build.folder / "verify" / "2" / "report.html"
    assert f"report: {page}" in shown.splitlines()
    assert page.read_text() == "the page"
    assert (build.folder / "sbom.cdx.json").exists()


def test_a_failure_ends_with_its_causes_and_fix(judge):
    code, shown, build = judge(GOOD, BAD)
    assert code == 1
    assert "failed verify" in shown
    for words in ("found: degraded", "cause? a cause", "fix:   look"):
        assert words in shown
    assert shown.count("degraded") == 2  # as it came, and at the end with what to do
    assert f"report: {build.folder}/verify/2/report.html" in shown.splitlines()
    assert build.read().verdict.counts["failed"] == 1


def test_without_sbom_the_verdict_stays_and_the_way_to_write_it_is_said(judge):
    code, shown, build = judge(GOOD, is_gone=True)
    assert code == 4
    assert f"`invoke ami.attest {build.id}` writes the missing files" in shown
    assert build.read().verdict.counts["passed"] == 1


def test_an_image_without_space_for_the_tag_is_refused(judge):
    judge.tags.update({f"team-{number}": "" for number in range(46)}, **{"aws:source": ""})
    judge.tags["gpukiln:verdict:g5.xlarge"] = (
        "passed profile=image at=1 suite=a digest=b gpu=yes not_run=none"
    )
    code, shown, build = judge(GOOD, build="last", instance_types="g4dn.xlarge")
    assert (code, f"{BAKE.image_id} has 47 tags, and the verdict is one more" in shown) == (6, True), shown
    assert len(build.read().verdicts) == 1
    # The verdict of a type that has one is replaced.
    assert judge(GOOD, build="last", instance_types="g5.xlarge")[0] == 0


def test_each_type_keeps_its_verdict_and_each_verdict_its_report(judge):
    assert judge(GOOD, build="last", instance_types="g5.xlarge")[0] == 0
    assert judge(GOOD, BAD, build="last", instance_types="g4dn.xlarge")[0] == 1
    code, _, build = judge(GOOD, build="last", instance_types="g5.2xlarge")
    record = build.read()
    assert code == 0
    assert [one.instance_type for one in record.verdicts] == [
        *("g4dn.xlarge", "g5.xlarge", "g4dn.xlarge", "g5.2xlarge")
    ]
    assert {name: one.passed for name, one in record.newest_verdicts.items()} == {
        "g5.xlarge": True,
        "g4dn.xlarge": False,
        "g5.2xlarge": True,
    }
    assert record.verdict == record.newest_verdicts["g4dn.xlarge"]  # what failed is shown, not what came last
    assert all((build.report_folder(n) / "report.html").exists() for n in (2, 3, 4))
    assert judge.tags["gpukiln:verdict"] == "failed"
    assert judge.tags["gpukiln:image"] == "not-proven"
    assert judge.tags["gpukiln:verdict:g5.xlarge"].startswith("passed ")
    assert judge.tags["gpukiln:verdict:g4dn.xlarge"].startswith("failed ")
    assert judge(GOOD, build="last", instance_types="g4dn.xlarge")[0] == 0
    assert judge.tags["gpukiln:image"] == "eks-gpu"


def test_a_machine_that_the_plan_refuses_is_refused_before_it_is_started(judge):
    code, shown, build = judge(GOOD, build="last", instance_types="p5.48xlarge")
    assert code == 3
    assert "Debian packages no fabric manager" in shown
    assert len(build.read().verdicts) == 1


def test_an_image_without_fabric_manager_meets_no_nvswitch(proven):
    [build] = proven.all()
    subject = replace(subject_of(build.read().plan, "ami-1", build.id), base="eks-ubuntu-22.04")
    with pytest.raises(IncompatibleError, match="ami-1 has no fabric manager"):
        check_machines(subject, ["p4d.24xlarge"])
    fitting = replace(subject, instance_types=("p4d.24xlarge",))
    assert check_machines(fitting, ["p4d.24xlarge"]) == ("p4d.24xlarge",)
    with pytest.raises(IncompatibleError, match="does not know the H200"):
        check_machines(fitting, ["p5en.48xlarge"])
    newer = replace(fitting, base="eks-al2023", driver="580.178.04", modules="open")
    with pytest.raises(IncompatibleError, match="needs NVLink's subnet manager, and ami-1 has none"):
        check_machines(newer, ["p6-b200.48xlarge"])
    meant = replace(newer, instance_types=("p6-b200.48xlarge",))
    assert check_machines(meant, ["p6-b200.48xlarge"]) == ("p6-b200.48xlarge",)


def test_an_image_is_judged_by_its_tags_where_nobody_has_its_record(judge):
    _, _, build = judge(GOOD)
    plan = build.read().plan
    judge.tags.update(image_tags(plan, build))
    build.record_file.rename(build.folder / "away.json")
    here = {"build": BAKE.image_id, "region": "us-west-2", "instance_types": "g5.xlarge"}
    assert judge(GOOD, **here)[0] == 0
    assert judge.tags["gpukiln:verdict:g5.xlarge"].startswith("passed ")
    report = build.folder.parents[1] / "verify" / BAKE.image_id / "1" / "report.html"
    assert report.read_text() == "the page"
    del judge.tags["gpukiln:instance-types"]
    code, shown, _ = judge(GOOD, **here)
    assert code == 2
    assert "has no tag gpukiln:instance-types" in shown
    assert not report.parents[1].joinpath("2").exists()


def test_a_verdict_is_signed_where_a_key_is_given(judge, tmp_path):
    key = key_pair(tmp_path, "sign")
    trusted = [load_public_key(key.with_suffix(".pub"))]
    code, _, build = judge(GOOD, suite_version="a" * 64, build="last", sign_key=str(key))
    assert code == 0
    [(name, text)] = judge.kept.items()
    verdict = build.read().verdicts[-1]
    assert name == f"/gpukiln-attestations/{BAKE.image_id}/verdict/{verdict.instance_type}"
    place = AmiLocation(BAKE.image_id, "us-west-2", ())
    claim = open_statement(VerdictClaim, text, trusted, [place]).claim
    assert (claim.suite, claim.verdict, claim.outcome) == ("a" * 64, verdict.digest, "passed")
    assert claim.provenance == sha256((build.folder / "provenance.intoto.json").read_bytes()).hexdigest()
    assert (build.folder / "provenance.dsse.json").exists()
    judge.tags.update(image_tags(build.read().plan, build))
    build.record_file.rename(build.folder / "away.json")  # known by its tags
    here = {"build": BAKE.image_id, "region": "us-west-2", "instance_types": "g5.xlarge"}
    assert judge(GOOD, BAD, **here, sign_key=str(key))[0] == 1
    claim = open_statement(
        VerdictClaim, judge.kept[f"{name.rpartition('/')[0]}/g5.xlarge"], trusted, [place]
    ).claim
    assert (claim.outcome, claim.counts["failed"], claim.provenance) == ("failed", 1, "")


def test_no_machine_is_started_for_a_verdict_that_the_channel_would_not_take(judge, tmp_path, monkeypatch):
    _, _, build = judge(GOOD, suite_version=suite_digest())
    judge.tags.update(image_tags(build.read().plan, build))
    trusting(monkeypatch, key_pair(tmp_path, "sign"))
    for key in ("", str(key_pair(tmp_path, "other"))):
        code, shown, build = judge(GOOD, build="last", for_="candidate", sign_key=key)
        assert code == 6
        assert "channel candidate trusts" in shown
        assert len(build.read().verdicts) == 2


def test_an_image_that_another_suite_judged_is_judged_again_and_not_baked(judge):
    _, _, build = judge(GOOD, suite_version="a" * 64)
    judge.tags.update(image_tags(build.read().plan, build))
    region = {"region": "us-west-2"}
    code, _, _ = judge(GOOD, command=ami.AmiPlan, exit_code=True, **region)
    assert code == 10
    assert f"by the suite aaaaaaaaaaaa, today's is {suite_digest()[:12]}" in judge.out
    code, _, _ = judge(GOOD, command=ami.AmiPlan, json=True, **region)
    document = json.loads(judge.out)
    assert (document["verified_image"], document["verified_by_another_suite"]) == (None, BAKE.image_id)
    assert judge(GOOD, command=ami.AmiBuild, dry_run=True, **region)[0] == 0
    assert len(build.read().verdicts) == 2

    code, shown, build = judge(GOOD, suite_version=suite_digest(), command=ami.AmiBuild, json=True, **region)
    assert code == 0
    assert "it is verified again" in shown
    assert json.loads(judge.out)["built"] is False
    assert [one.suite_version for one in build.read().verdicts[1:]] == ["a" * 64, suite_digest()]
    code, _, build = judge(command=ami.AmiBuild, **region)  # and now there is nothing to do
    assert code == 0
    assert "judged again" not in judge.out
    assert len(build.read().verdicts) == 3
    assert judge(command=ami.AmiPlan, exit_code=True, **region)[0] == 0


def test_a_channel_says_what_it_lacks(judge):
    _, _, build = judge(GOOD, suite_version="a" * 64)
    judge.tags.update({**image_tags(build.read().plan, build), **dict.fromkeys(ATTESTED_TAGS, "0")})
    code, shown, build = judge(GOOD, suite_version=suite_digest(), build="last", for_="candidate")
    assert len(build.read().verdicts) == 3
    assert code == 6  # the SBOM is not the one of the tags
    assert "sbom.tag" in shown


def replace_id(check, name):
    return CheckResult(name, check.title, check.layer, check.outcome, check.reason)


def test_a_rehearsal_on_simulated_gpus_is_kept_and_proves_nothing(judge):
    _, _, build = judge(GOOD, build="last", instance_types="g5.xlarge")
    proven = dict(judge.tags)
    (build.folder / "sbom.cdx.json").unlink()
    (build.folder / "provenance.intoto.json").unlink()
    code, shown, build = judge(GOOD, build="last", instance_types="g5.xlarge", simulated=True)
    assert code == 0
    assert judge.machine_options["simulated"] is True
    assert "SIMULATED GPUS, NOT VALID FOR A RELEASE" in shown
    assert judge.tags == proven, "no tag of an image tells of a rehearsal"
    assert not (build.folder / "sbom.cdx.json").exists(), "nothing is attested by it"
    record = build.read()
    assert [one.simulated for one in record.verdicts[-2:]] == [False, True]
    assert record.newest_verdicts["g5.xlarge"] == record.verdicts[-2]
    code, _, _ = judge(GOOD, build="last", instance_types="g5.xlarge", simulated=True, json=True)
    [verdict] = documents.read(judge.out)["verdicts"]
    assert verdict["simulated"] is True


@pytest.mark.parametrize(
    ("options", "cloud", "said"),
    [
        ({"for_": "candidate"}, "embedded", "is a rehearsal, and channel candidate requires a verdict"),
        (
            {"for_": "candidate", "cluster": "prod"},
            "embedded",
            "is a rehearsal, and channel candidate requires a verdict",
        ),
        ({}, "aws", "the cloud aws has no simulated GPUs"),
    ],
)
def test_a_rehearsal_is_refused_where_it_makes_no_sense(judge, options, cloud, said):
    code, shown, build = judge(GOOD, build="last", simulated=True, cloud_name=cloud, **options)
    assert (code, said in shown) == (2, True)
    assert len(build.read().verdicts) == 1


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"node_profile": "eks-node"}, "--node-profile has no effect without --cluster"),
        ({"user_data": "join.sh"}, "--user-data has no effect without --cluster"),
    ],
)
def test_an_option_without_effect_is_refused(options, refusal):
    with pytest.raises(UsageError, match=refusal):
        ami_verify.AmiVerify(build="last", **options).run()
