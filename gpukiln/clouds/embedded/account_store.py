"""Stores roles, instance profiles and secrets, which outlive the server as images do (`store.py`).

IAM belongs to no region; its document is that of us-east-1, where AWS has IAM's control plane.
"""

from datetime import datetime
from typing import Any

from moto.iam.models import InstanceProfile, Role
from moto.secretsmanager.models import FakeSecret

IAM_REGION, IAM_PARTITION = "us-east-1", "aws"


def dump_iam(iam: Any) -> dict[str, Any]:
    """The stored part of IAM, as a JSON document."""
    return {
        "roles": {
            role.name: {
                **{name: value for name, value in vars(role).items() if name not in _STORED_SEPARATELY},
                "create_date": role.create_date.isoformat(),
                "managed_policies": sorted(role.managed_policies),
            }
            for role in iam.roles.values()
        },
        "instance_profiles": {
            profile.name: {
                **vars(profile),
                "create_date": profile.create_date.isoformat(),
                "roles": [role.name for role in profile.roles],
            }
            for profile in iam.instance_profiles.values()
        },
    }


# Values that are no JSON (dates), need moto's objects (policies), or are of no use later (last use).
_STORED_SEPARATELY = ("create_date", "managed_policies", "last_used", "last_used_region")


def load_iam(iam: Any, document: dict[str, Any]) -> None:
    """Create moto's objects from what `dump_iam` returned."""
    kept = document.get("iam", {})
    for name, fields in kept.get("roles", {}).items():
        role = Role(iam.account_id, iam.partition, fields["id"], name, "", "/", None, "", [], None)  # type: ignore[abstract]  # moto makes them likewise
        policies = fields.pop("managed_policies")
        _set_fields(role, fields)
        iam.roles[role.id] = role
        for arn in policies:
            if (
                arn in iam.managed_policies
            ):  # the account's own policies end with the server; AWS's exist again
                iam.attach_role_policy(arn, name)
    for name, fields in kept.get("instance_profiles", {}).items():
        roles = [iam.get_role(role) for role in fields["roles"]]
        profile = InstanceProfile(iam.account_id, iam.region_name, fields["id"], name, "/", roles)  # type: ignore[abstract]  # moto makes them likewise
        _set_fields(profile, {**fields, "roles": roles})
        iam.instance_profiles[profile.name] = profile


def dump_secrets(secrets: Any) -> dict[str, Any]:
    """The stored part of a region's Secrets Manager, as a JSON document; replicas are left out."""
    return {
        secret.name: {name: value for name, value in vars(secret).items() if name != "replicas"}
        for secret in secrets.secrets.values()
        if isinstance(secret, FakeSecret)
    }


def load_secrets(secrets: Any, document: dict[str, Any]) -> None:
    """Create moto's objects from what `dump_secrets` returned."""
    for name, fields in document.get("secrets", {}).items():
        secret = FakeSecret(secrets.account_id, secrets.region_name, name, {}, "")
        vars(secret).update(fields)
        secrets.secrets[name] = secret


def _set_fields(resource: Any, fields: dict[str, Any]) -> None:
    # moto's constructors take only some of the attributes.
    vars(resource).update({**fields, "create_date": datetime.fromisoformat(fields["create_date"])})
