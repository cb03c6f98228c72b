"""Temporary keys of an instance's role: its metadata service returns them, the API accepts them.

Format of the documents: AWS, "Retrieve security credentials from instance metadata". The session is named
after the instance, as EC2 names it.
"""

import hmac
import json
import threading
from datetime import timedelta
from typing import Any

from moto.core.utils import utcnow
from moto.sts.models import sts_backends

LIFE_S = 6 * 3600
RENEWED_S = 3600  # seconds before the end; SDKs refresh in the last 15 minutes
_lock = threading.Lock()
_given: dict[str, tuple[Any, Any]] = {}  # by instance id: the instance and moto's AssumedRole


def metadata_of(instance: Any) -> dict[str, Any]:
    """The folder `iam` of an instance's metadata; empty where it has no instance profile."""
    association = instance.ec2_backend.iam_instance_profile_associations.get(instance.id)
    if association is None:
        return {}
    profile = association.iam_instance_profile
    info = {"InstanceProfileArn": profile.arn, "InstanceProfileId": profile.id}
    folder: dict[str, Any] = {"info": _document(info)}
    if profile.roles:
        role, given = profile.roles[0], _role_of(instance, profile.roles[0])
        keys = {
            "Type": "AWS-HMAC",
            "AccessKeyId": given.access_key_id,
            "SecretAccessKey": given.secret_access_key,
            "Token": given.session_token,
            "Expiration": f"{given.expiration:%Y-%m-%dT%H:%M:%SZ}",
        }
        since = given.expiration - timedelta(seconds=LIFE_S)
        keys["LastUpdated"] = f"{since:%Y-%m-%dT%H:%M:%SZ}"
        folder["security-credentials"] = {role.name: _document(keys)}
    return {"iam": folder}


def holder(access_key: str, token: str) -> tuple[Any, Any] | None:
    """The instance and moto's AssumedRole of temporary keys, while the keys are valid."""
    with _lock:
        given = list(_given.values())
    for instance, role in given:
        if (
            role.access_key_id == access_key
            # Constant time: the token is a secret.
            and hmac.compare_digest(role.session_token.encode(), token.encode())
            and role.expiration > utcnow()
            and instance.state != "terminated"
        ):
            return instance, role
    return None


def _role_of(instance: Any, role: Any) -> Any:
    with _lock:
        _, given = _given.get(instance.id, (None, None))
        left = timedelta(seconds=RENEWED_S)
        if given is None or given.role_arn != role.arn or given.expiration < utcnow() + left:
            backend = instance.ec2_backend
            given = sts_backends[backend.account_id][backend.partition].assume_role(
                region_name=backend.region_name,
                role_session_name=instance.id,
                role_arn=role.arn,
                policy="",
                duration=LIFE_S,
                external_id="",
            )
            _given[instance.id] = instance, given
        return given


def _document(fields: dict[str, str]) -> str:
    since = fields.get("LastUpdated", f"{utcnow():%Y-%m-%dT%H:%M:%SZ}")
    return json.dumps({"Code": "Success", "LastUpdated": since, **fields}, indent=2)
