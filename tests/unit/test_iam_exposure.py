"""No policy that `cloud.policy` prints lets its holder become administrator or take what is not gpukiln's."""

import json
from itertools import product

import pytest

from gpukiln.catalog import permissions
from gpukiln.clouds.iam import Scope, policy
from gpukiln.clouds.tags import BAKED_STAGE_TAG, BUILD_ID_TAG, IMPORT_TAG, OWNER_TAG
from gpukiln.commands import cloud_policy
from gpukiln.errors import UsageError
from gpukiln.exports import import_disk
from gpukiln.pipeline.verdict_tags import summarize_verdict, verdict_tags
from gpukiln.workspaces import iam
from gpukiln.workspaces.contract import Capabilities, Workspace
from tests.support.exit_codes import code_of
from tests.support.iam_exposure import findings
from tests.support.plans import VERDICT
from tests.support.recorder import Call, Touched, denied

ACCOUNT, KEY = "111122223333", "arn:aws:kms:us-west-2:111122223333:key/1"
REFERENCE = "arn:aws:secretsmanager:us-west-2:111122223333:secret:hf-AbCdEf"
SCOPES = [
    Scope(*parts)
    for parts in product(
        ["", ACCOUNT],
        [[], ["us-west-2"], ["us-west-2", "eu-west-1"], ["cn-north-1"], ["us-gov-west-1"]],
        [[], ["candidate"]],
        ["", "gpukiln/runner-gpu"],
        [[], [KEY]],
        ["", "s3://modules/x", "s3://modules"],
        ["", KEY],
    )
]
# What IAM can't narrow further: it tags what has no tag of ours yet (permissions.yaml says why).
KNOWN = {"import": {("TagNewSnapshots", "ec2:CreateTags")}}


def allow(actions, resource, **condition):
    statement = {"Sid": "x", "Effect": "Allow", "Action": actions, "Resource": resource}
    return {
        "Version": "2012-10-17",
        "Statement": [statement | ({"Condition": condition} if condition else {})],
    }


def touching(action, *, given=(), had=(), within=""):
    touched = Touched("arn:aws:ec2:us-west-2::image/ami-1", frozenset(given), frozenset(had))
    return Call("", "", action, "us-west-2", (touched,), within)


def snapshot(action, *, given=(), had=()):
    touched = Touched("arn:aws:ec2:us-west-2::snapshot/snap-1", frozenset(given), frozenset(had))
    return Call("", "", action, "us-west-2", (touched,))


def tagging(within="", **tags):
    return touching("ec2:CreateTags", within=within, **tags)


ROLES = "arn:aws:iam::111122223333:role/gpukiln/workspace/*"
IMAGES = "arn:aws:ec2:*::image/*"


@pytest.mark.parametrize(
    "document",
    [
        allow("iam:CreateRole", ROLES),
        allow(
            "iam:PutRolePolicy", ROLES, StringEquals={"iam:PermissionsBoundary": "arn:aws:iam::aws:policy/x"}
        ),
        allow("iam:AttachRolePolicy", "*"),
        allow("iam:UpdateAssumeRolePolicy", ROLES),
        allow("iam:DeleteRolePermissionsBoundary", ROLES),
        allow("iam:CreatePolicyVersion", "arn:aws:iam::111122223333:policy/gpukiln/*"),
        allow("iam:PassRole", ROLES),
        allow("iam:PassRole", ROLES, StringEquals={"iam:PassedToService": "lambda.amazonaws.com"}),
        allow("iam:PassRole", "*", StringEquals={"iam:PassedToService": "ec2.amazonaws.com"}),
        allow("iam:AddRoleToInstanceProfile", "arn:aws:iam::111122223333:instance-profile/*"),
        allow("iam:DeleteRole", "arn:aws:iam::111122223333:role/*"),
        allow("sts:AssumeRole", "*"),
        allow("lambda:UpdateFunctionCode", "arn:aws:lambda:*:*:function:x"),
        allow("ec2:ModifyImageAttribute", IMAGES),
        allow("ec2:ModifySnapshotAttribute", "arn:aws:ec2:*::snapshot/*"),
        allow("ec2:ModifyImageAttribute", IMAGES, StringEquals={"aws:RequestedRegion": ["us-west-2"]}),
        allow("ec2:CreateTags", IMAGES, Null={"aws:RequestTag/gpukiln:recipe": "false"}),
        allow("ec2:DeregisterImage", IMAGES),
        allow("ecr:PutImage", "arn:aws:ecr:*:*:repository/*"),
        allow("kms:CreateGrant", KEY),
        allow("ec2:*", "*"),
        {"Statement": [{"Sid": "x", "Effect": "Allow", "NotAction": "iam:*", "Resource": "*"}]},
    ],
    ids=lambda one: str(one["Statement"][0].get("Action", "NotAction")),
)
def test_an_exposure_is_found(document):
    assert findings(document)


@pytest.mark.parametrize(
    "document",
    [
        allow("ec2:ModifyImageAttribute", IMAGES, Null={"aws:ResourceTag/gpukiln:recipe": "false"}),
        allow("ec2:CreateTags", IMAGES, StringEquals={"ec2:CreateAction": ["CopyImage"]}),
        allow("ec2:DescribeImages", "*"),
        allow("s3:PutObject", "arn:aws:s3:::modules/*"),
    ],
)
def test_what_is_narrow_is_no_exposure(document):
    assert findings(document) == []


@pytest.mark.parametrize("job", [*permissions.jobs(), ",".join(permissions.jobs())])
def test_no_policy_exposes_more_than_is_known(job):
    jobs = job.split(",")
    known = {one for name in jobs for one in KNOWN.get(name, ())}
    for scope in SCOPES:
        found = findings(policy(jobs, scope))
        assert {(sid, action) for sid, action, _ in found} == known, (scope, found)


@pytest.mark.parametrize("regions", [(), ("us-west-2",), ("us-west-2", "eu-west-1")])
@pytest.mark.parametrize("secrets", [(), (REFERENCE, "/team/*", "token")])
@pytest.mark.parametrize("cache", ["", "s3://bucket/vision"])
def test_the_boundary_exposes_nothing_but_the_agents_own_channel(regions, secrets, cache):
    document = iam.boundary(Scope(ACCOUNT, regions), secrets, cache)
    assert {(sid, action) for sid, action, _ in findings(document)} == {
        ("SessionManager", action) for action in iam.SESSION_MANAGER
    }  # they take no resource
    assert len(json.dumps(document, separators=(",", ":"))) < 6144


def test_the_boundary_has_every_right_of_a_workspace():
    """Else IAM would take from a machine what its own policy gives."""
    wanted = Workspace(
        "vision",
        "ann",
        "us-west-2",
        capabilities=Capabilities(
            secrets={"HF_TOKEN": REFERENCE, "KEY": "/team/key"}, artifact_cache="s3://bucket/vision"
        ),
    )
    own = {one["Sid"]: one for one in iam.policy(wanted)["Statement"]}
    scope = Scope(ACCOUNT, ["us-west-2"])
    most = {
        one["Sid"]: one for one in iam.boundary(scope, [REFERENCE, "/team/*"], "s3://bucket")["Statement"]
    }
    assert {sid: one["Action"] for sid, one in own.items()} == {
        sid: one["Action"] for sid, one in most.items()
    }
    assert most["TagItself"]["Condition"] == {
        "StringEquals": {
            "aws:ResourceTag/gpukiln:managed-by": "gpukiln",
            "aws:RequestedRegion": ["us-west-2"],
        },
        "ForAllValues:StringEquals": own["TagItself"]["Condition"]["ForAllValues:StringEquals"],
    }
    assert most["ReadParameters"]["Resource"] == ["arn:aws:ssm:us-west-2:111122223333:parameter/team/*"]
    assert most["UseCache"]["Resource"] == "arn:aws:s3:::bucket/*"
    assert set(iam.boundary(scope)["Statement"][0]) == {"Sid", "Effect", "Action", "Resource", "Condition"}
    assert {one["Sid"] for one in iam.boundary(scope)["Statement"]} == {"TagItself", "SessionManager"}


def test_roles_are_made_with_the_boundary_that_the_policy_asks_for():
    [narrow] = bounds(policy(["workspace"], Scope(ACCOUNT)))
    assert narrow == "arn:aws:iam::111122223333:policy/gpukiln/gpukiln-workspace-boundary"
    [wide] = bounds(policy(["workspace"], Scope()))  # IAM user guide, "Policy variables"
    assert wide == "arn:aws:iam::${aws:PrincipalAccount}:policy/gpukiln/gpukiln-workspace-boundary"
    [china] = bounds(policy(["workspace"], Scope(regions=["cn-north-1"])))
    assert china.startswith("arn:aws-cn:iam::")


def bounds(document):
    return [
        one["Condition"]["StringEquals"]["iam:PermissionsBoundary"]
        for one in document["Statement"]
        if "iam:CreateRole" in one["Action"]
    ]


@pytest.mark.parametrize("job", permissions.jobs())
def test_global_services_are_allowed_whatever_the_regions(job):
    """Requests to them carry us-east-1 (IAM user guide, aws:RequestedRegion)."""
    for statement in policy([job], Scope(ACCOUNT, ["us-west-2"]))["Statement"]:
        services = {action.partition(":")[0] for action in statement["Action"]}
        asked = statement.get("Condition", {}).get("StringEquals", {}).get("aws:RequestedRegion")
        if services & {"iam", "sts"}:
            assert services <= {"iam", "sts"}, "a region's condition would be missing"
            assert asked is None
        elif "pricing" not in services:
            assert asked == ["us-west-2"]


def test_who_imports_gives_a_snapshot_no_tag_of_a_proof():
    """So a snapshot that has no tag of ours can't get those of a proof in one call."""
    [new] = [one for one in permissions.statements() if one.sid == "TagNewSnapshots"]
    assert set(new.tag_keys) == {*import_disk.IMPORTED_TAGS, IMPORT_TAG, BUILD_ID_TAG, OWNER_TAG, "Name"}
    for statement in permissions.statements():
        if statement.tag_keys:
            assert not {*verdict_tags("eks-gpu", [summarize_verdict(VERDICT)])} & {*statement.tag_keys}


@pytest.mark.parametrize(
    ("step", "job", "allowed"),
    [
        (tagging("CreateImage", given={"gpukiln:recipe", BAKED_STAGE_TAG}), "build", True),
        (tagging(given={"gpukiln:recipe", "gpukiln:digest"}), "build", False),
        (tagging(given={"gpukiln:image"}), "build", False),
        (tagging(given={"gpukiln:image"}, had={"gpukiln:recipe"}), "verify", True),
        (touching("ec2:CreateImage"), "build", False),
        (touching("ec2:CreateImage", given={"gpukiln:recipe"}), "build", True),
        (tagging(given={"gpukiln:recipe", "gpukiln:build"}), "sweep", False),
        (tagging(given={"gpukiln:image"}, had={"gpukiln:recipe"}), "prune", False),
        (snapshot("ec2:CreateTags", given={"gpukiln:recipe", "gpukiln:import"}), "import", True),
        (snapshot("ec2:CreateTags", given={"gpukiln:import", "gpukiln:image"}), "import", False),
        (snapshot("ec2:CreateTags", given={"gpukiln:recipe"}), "import", False),
        (tagging(given={"gpukiln:recipe", "gpukiln:import"}), "import", False),
        (snapshot("ec2:DeleteSnapshot", had={"gpukiln:recipe"}), "import", False),
        (snapshot("ec2:DeleteSnapshot", had={"gpukiln:import"}), "import", True),
        (touching("ec2:ModifyImageAttribute"), "build", False),
        (touching("ec2:ModifyImageAttribute", had={"gpukiln:recipe"}), "build", True),
        (touching("ec2:DeregisterImage"), "prune", False),
    ],
)
def test_what_has_no_tag_of_ours_is_left_alone(step, job, allowed):
    assert (denied([step], policy([job], Scope())) == []) == allowed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"for_": "workspace-boundary"}, "no account id"),
        ({"for_": "workspace-boundary,build", "account": ACCOUNT}, "a policy of its own"),
        ({"for_": "workspace-boundary", "account": ACCOUNT, "secrets": "*"}, "neither a secret nor"),
        ({"for_": "workspace-boundary", "account": ACCOUNT, "artifact_cache": "x"}, "artifact_cache"),
        ({"for_": "workspace", "account": ACCOUNT, "secrets": "/team/*"}, "are for"),
    ],
)
def test_what_no_boundary_is_made_of_is_refused(capsys, options, message):
    assert code_of(cloud_policy.CloudPolicy, **options) == UsageError.exit_code
    assert message in capsys.readouterr().err


def test_the_command_prints_the_boundary(capsys):
    options = {"regions": "us-west-2", "secrets": "/team/*", "artifact_cache": "s3://bucket/vision"}
    cloud_policy.CloudPolicy(for_="workspace-boundary", account=ACCOUNT, **options).run()
    document = json.loads(capsys.readouterr().out)
    assert document == iam.boundary(Scope(ACCOUNT, ["us-west-2"]), ["/team/*"], "s3://bucket/vision")
