"""The key of a workspace's machine: EC2 has the public half, and one computer alone the private one."""

from __future__ import annotations

import os
from pathlib import Path

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.instances.tags import tag_specifications
from gpukiln.state import state_home
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.tags import filters, workspace_tags

PART = "key"


def key_file(cloud: Cloud, name: str) -> Path:
    """Where the private key of a workspace is on this computer, if it was started from here."""
    return state_home() / "workspaces" / "keys" / f"{cloud.name}-{cloud.region}-{name}"


def owner_file(cloud: Cloud, name: str) -> Path:
    """Where the owner of a workspace that this computer started is written; it outlives the key."""
    return state_home() / "workspaces" / "started" / f"{cloud.name}-{cloud.region}-{name}"


def started_here(cloud: Cloud, name: str, owner: str) -> bool:
    """Whether this computer started a workspace of that owner, or has its key."""
    try:
        return owner_file(cloud, name).read_text() == owner or key_file(cloud, name).exists()
    except OSError:
        return key_file(cloud, name).exists()


def key_pair(cloud: Cloud, wanted: Workspace) -> str:
    """The key pair of a workspace: EC2 has the public half, and this computer alone the private one.

    One that another computer made is taken as it is: it is the workspace that has one key.

    Returns:
        Its name.

    Raises:
        UnavailableError: The cloud refused.
    """
    from cryptography.hazmat.primitives import serialization as form  # noqa: PLC0415 - slow to import
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - likewise

    name, file = f"gpukiln-workspace-{wanted.workspace_name}", key_file(cloud, wanted.workspace_name)
    ec2 = cloud.client("ec2")
    with explain_aws_errors("make the workspace's key pair"):
        if ec2.describe_key_pairs(Filters=filters(PART, wanted.workspace_name))["KeyPairs"]:
            return name
        key = Ed25519PrivateKey.generate()
        text = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # of a workspace that is gone
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(text)
        started = owner_file(cloud, wanted.workspace_name)
        started.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        started.write_text(wanted.owner)  # half of a name is nobody's, and the key says the same
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        try:
            ec2.import_key_pair(
                KeyName=name,
                PublicKeyMaterial=public,
                TagSpecifications=tag_specifications(workspace_tags(wanted, PART), "key-pair"),
            )
        except BaseException:
            file.unlink()  # the public half is not there, or is another one's
            raise
    return name


def remove_key_pair(cloud: Cloud, name: str) -> None:
    """Remove the public half of a workspace's key; none is fine.

    Raises:
        UnavailableError: The cloud refused.
    """
    ec2 = cloud.client("ec2")
    with explain_aws_errors("remove the workspace's key pair"):
        for one in ec2.describe_key_pairs(Filters=filters(PART, name))["KeyPairs"]:
            ec2.delete_key_pair(KeyName=one["KeyName"])


def remove_key_file(cloud: Cloud, name: str) -> None:
    """Remove the private half, where it is on this computer."""
    key_file(cloud, name).unlink(missing_ok=True)
