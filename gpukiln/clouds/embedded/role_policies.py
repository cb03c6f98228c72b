"""Authorizes calls with the keys of an instance's role: checks the signature and the role's policies.

For CreateTags, GetParameter and GetSecretValue resources and conditions are evaluated; for other calls,
whether any statement allows the action. A permissions boundary that exists in the account has to allow it
too. IAM user guide, "Policy evaluation logic", "IAM JSON policy elements" and "Troubleshoot access denied
error messages". moto's own evaluation ignores conditions that it does not know (moto.iam.access_control).
"""

import hmac
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import parse_qs

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.ec2.models import ec2_backends
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE
from moto.iam.exceptions import NotFoundException
from moto.iam.models import iam_backends
from moto.secretsmanager.models import secretsmanager_backends
from werkzeug.datastructures import EnvironHeaders

from gpukiln.clouds.embedded.refusals import SCOPE, Refusal, refusal_of
from gpukiln.parsing import parse_json

ALWAYS = "sts:GetCallerIdentity"  # needs no permission
NO_ACCOUNT = (
    "image",
    "snapshot",
)  # kinds without an account id in their ARNs (Service Authorization Reference, Amazon EC2, resource types)
Context = Mapping[str, list[str]]  # condition keys in lower case, with their values
ResourceContext = tuple[str | None, Context]  # an ARN, and the values for conditions


def refusal(environ: dict[str, Any], instance: Any, role: Any) -> Refusal | None:
    """The refusal of a request with the keys of an instance's role, or None; the body can be read again.

    Args:
        environ: WSGI's environ.
        instance: moto's instance.
        role: moto's assumed role.
    """
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    scope = SCOPE.search(authorization)
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    if scope is None or not _is_signed(environ, body, role, scope["region"], scope["service"]):
        if scope and scope["service"] == "ec2":
            message = "AWS was not able to validate the provided access credentials"
            return refusal_of(authorization, 401, "AuthFailure", message)
        message = "The request signature we calculated does not match the signature you provided."
        return refusal_of(authorization, 403, "InvalidSignatureException", message)
    service, region = scope["service"], scope["region"]
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    fields = _json_fields(body) if target else _form_fields(environ, body)
    action = f"{service}:{target.rpartition('.')[2] if target else fields.get('Action', '')}"
    if action == ALWAYS:
        return None
    policies = _policies(instance.ec2_backend, role)
    resources = _requested_resources(instance.ec2_backend.account_id, role.partition, region, action, fields)
    for (resource, context), (kind, statements) in product(resources, policies.items()):
        effects = {
            statement["Effect"]
            for statement in statements
            if _statement_covers(statement, action, resource, context)
        }
        # No matching statement is an implicit deny, and one Deny outweighs any Allow.
        if effects != {"Allow"}:
            why = f"because no {kind} allows the {action} action"
            if "Deny" in effects:
                article = "an" if kind.startswith("i") else "a"
                why = f"with an explicit deny in {article} {kind}"
            place = f" on resource: {resource}" if resource else ""
            message = f"User: {role.arn} is not authorized to perform: {action}{place} {why}"
            if service == "ec2":  # karpenter issue 1713 shows EC2's whole text
                message = f"You are not authorized to perform this operation. {message}"
                return refusal_of(authorization, 403, "UnauthorizedOperation", message)
            return refusal_of(authorization, 400, "AccessDeniedException", message)
    return None


def _is_signed(environ: dict[str, Any], body: bytes, role: Any, region: str, service: str) -> bool:
    authorization = environ["HTTP_AUTHORIZATION"]
    # Only the headers that the caller signed are part of its signature.
    names = re.search(r"SignedHeaders=([^, ]+)", authorization)
    given = re.search(r"Signature=([0-9a-f]{64})", authorization)
    if not names or not given:
        return False
    signed = names[1].split(";")
    headers = {name: value for name, value in EnvironHeaders(environ).items() if name.lower() in signed}
    url = f"http://{environ['HTTP_HOST']}{environ.get('REQUEST_URI') or environ['PATH_INFO']}"
    request = AWSRequest(environ["REQUEST_METHOD"], url, headers, data=body)
    request.context["timestamp"] = headers.get("X-Amz-Date", "")
    keys = Credentials(role.access_key_id, role.secret_access_key, role.session_token)
    auth = SigV4Auth(keys, service, region)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    return hmac.compare_digest(auth.signature(text, request), given[1])


def _form_fields(environ: dict[str, Any], body: bytes) -> dict[str, Any]:
    text = f"{environ.get('QUERY_STRING', '')}&{body.decode(errors='replace')}"
    return {name: values[0] for name, values in parse_qs(text).items()}


def _json_fields(body: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(body or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _requested_resources(
    account: str, partition: str, region: str, action: str, fields: Mapping[str, Any]
) -> Iterator[ResourceContext]:
    """The resources of a call; each has to be allowed. None: only the action is evaluated."""
    of_request = {"aws:requestedregion": [region]}
    if action == "ec2:CreateTags":
        keys = {name: fields[name] for name in fields if re.fullmatch(r"Tag\.\d+\.Key", name)}
        values = {key: fields.get(name.replace("Key", "Value"), "") for name, key in keys.items()}
        context = {**of_request, "aws:tagkeys": list(values)}
        context |= {f"aws:requesttag/{key.lower()}": [value] for key, value in values.items()}
        every = ec2_backends[account][region].tags
        for name, resource in fields.items():
            if re.fullmatch(r"ResourceId\.\d+", name):
                kind = EC2_PREFIX_TO_RESOURCE.get(resource.rpartition("-")[0], "unknown")
                owner = "" if kind in NO_ACCOUNT else account
                tags = dict(every.get(resource, {}))
                of = {
                    f"{space}:resourcetag/{key.lower()}": [value]
                    for key, value in tags.items()
                    for space in ("aws", "ec2")
                }
                yield f"arn:{partition}:ec2:{region}:{owner}:{kind}/{resource}", {**context, **of}
    elif action == "ssm:GetParameter":
        name = str(fields.get("Name", "")).rpartition(":parameter/")[2].partition(":")[0].lstrip("/")
        yield f"arn:{partition}:ssm:{region}:{account}:parameter/{name}", of_request
    elif action == "secretsmanager:GetSecretValue":
        name = str(fields.get("SecretId", ""))
        secret = secretsmanager_backends[account][region].secrets.get(name)
        by_name = f"arn:{partition}:secretsmanager:{region}:{account}:secret:{name}"
        yield secret.arn if secret else name if name.startswith("arn:") else by_name, of_request
    else:
        yield None, of_request


def _policies(ec2: Any, role: Any) -> dict[str, list[dict[str, Any]]]:
    """The statements of a role's policies and of its boundary; a removed role has none."""
    iam = iam_backends[ec2.account_id][ec2.partition]
    try:
        known = iam.get_role_by_arn(role.role_arn)
    except NotFoundException:
        return {"identity-based policy": []}
    managed = [text for policy in known.managed_policies.values() for text in _default_version(policy)]
    statements = {"identity-based policy": _statements([*known.policies.values(), *managed])}
    if bound := iam.managed_policies.get(known.permissions_boundary_arn or ""):
        statements["permissions boundary"] = _statements(_default_version(bound))
    return statements


def _default_version(policy: Any) -> list[str]:
    return [version.document for version in policy.versions if version.is_default]


def _statements(texts: Iterable[str]) -> list[dict[str, Any]]:
    statements: list[dict[str, Any]] = []
    for text in texts:
        value = parse_json(text)["Statement"]
        statements += value if isinstance(value, list) else [value]
    return statements


def _statement_covers(
    statement: Mapping[str, Any], action: str, resource: str | None, context: Context
) -> bool:
    """Whether a statement applies; an unknown element never extends what a role may do."""
    denies: bool = statement["Effect"] == "Deny"
    # NotAction and NotResource are not evaluated: as a Deny they apply, as an Allow they do not.
    if "Action" not in statement or "Resource" not in statement:
        return denies
    if not _matches_pattern(_as_list(statement["Action"]), action, flags=re.IGNORECASE):
        return False
    resources, conditions = _as_list(statement["Resource"]), statement.get("Condition", {})
    if resource is None:
        return not denies or ("*" in resources and not conditions)
    if not _matches_pattern(resources, resource):
        return False
    for operator, keys in conditions.items():
        for key, expected in keys.items():
            held = _condition_holds(operator, _as_list(expected), context.get(key.lower()))
            if not (denies if held is None else held):
                return False
    return True


def _condition_holds(operator: str, expected: list[str], values: list[str] | None) -> bool | None:
    """Whether a condition holds; None for an unknown operator.

    >>> _condition_holds("StringEquals", ["us-west-2"], ["us-west-2"])
    True
    >>> _condition_holds("ForAllValues:StringEquals", ["Name"], None)
    True
    >>> _condition_holds("IpAddress", ["10.0.0.0/8"], ["10.0.0.1"]) is None
    True
    """
    of_all, _, name = operator.rpartition(":")
    if name not in ("StringEquals", "StringLike") or of_all not in ("", "ForAllValues"):
        return None
    if values is None:
        return of_all == "ForAllValues"
    held = [
        value in expected if name == "StringEquals" else _matches_pattern(expected, value) for value in values
    ]
    return all(held) if of_all else any(held)


def _matches_pattern(patterns: list[str], text: str, flags: int = 0) -> bool:
    """Whether a text matches one of IAM's patterns: * is any text, ? any character.

    >>> _matches_pattern(["ec2:Describe*"], "ec2:DescribeImages")
    True
    >>> _matches_pattern(["i-?"], "i-12")
    False
    """
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text, flags)
        for pattern in patterns
    )


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
