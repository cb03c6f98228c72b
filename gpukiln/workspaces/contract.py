"""The contract of a workspace: what is requested, and what it reports, as a validated model.

Its names are those of the contract that Coder templates use; `docs/schemas/workspace.json` is made of it. So
are the tags and variables by which a workspace and what belongs to it are known.
"""

from __future__ import annotations

import re
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gpukiln.clouds.tags import MANAGED, MANAGED_TAG, OWNER_TAG, PART_TAG, WORKSPACE_TAG
from gpukiln.typed import strict, validated
from gpukiln.units import Memory

# At most 32 characters: the name becomes a host name, part of a role name (64 at most) and of tags.
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}[a-z0-9]|[a-z]")


def _name(text: str) -> str:
    """It becomes part of tags, host names and file names."""
    if not NAME.fullmatch(text):
        raise ValueError("wanted small letters, digits and `-`, at most 32, for example vision-2")
    return text


def _size(text: str) -> str:
    """A workspace that is compared with its machine keeps what was written."""
    # Only checked, not converted: a contract that is compared with its machine shows what its author wrote.
    Memory.parse(text, "")
    return text


Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^({NAME.pattern})$"})]
Size = Annotated[str, validated(_size), Field(json_schema_extra={"pattern": f"^({Memory.PATTERN})$"})]


@strict
class ComputeProfile:
    """What the machine has to have.

    Args:
        memory: Main memory, for example 32Gi.
        storage: Of the home volume, for example 100Gi; None: as large as it is, and a new one has 50Gi.
        gpu_type: As `offer.list --gpu` takes names: T4, or nvidia-t4; empty: any.
    """

    cpu: int = 0
    memory: Size | None = None
    storage: Size | None = None
    # One GPU is the default, because a workspace without any must name its instance type.
    gpu_count: int = 1
    gpu_type: str = ""

    @cached_property
    def storage_gib(self) -> int:
        """Of the home volume; 0: not given."""
        return Memory.parse(self.storage, "storage").gib if self.storage else 0


@strict
class Capabilities:
    """What the workspace can do.

    Args:
        persistent_home: Whether the home is a volume of its own, which outlives the machine.
        network_egress: none: only what AWS's own endpoints of the VPC give; https-only: port 443 and DNS.
        identity_mode: iam: an instance profile; none: the machine has no rights.
        artifact_cache: s3://BUCKET/PREFIX or an EFS file system's id; empty: none.
        secrets: Environment variable and the reference that it is fetched from at boot, an ARN of Secrets
            Manager or the name of an SSM parameter; never the secret itself.
        gui_vnc: Needs an image with the role kasmvnc.
        gui_rdp: Always refused: it is for Windows.
    """

    # The default keeps files: a home that goes with its machine must be asked for.
    persistent_home: bool = True
    network_egress: Literal["none", "https-only", "open"] = "https-only"
    identity_mode: Literal["iam", "none"] = "iam"
    gpu_support: bool = True
    artifact_cache: str = ""
    secrets: dict[str, str] = field(default_factory=dict)
    gui_vnc: bool = False
    # A field all the same: contracts of Coder templates name it, and the error then says why it is refused.
    gui_rdp: Literal[False] = False


@strict
class Toolchain:
    """The toolchain template that a Coder workspace names; written down, and given to the agent."""

    name: str
    version: str


@strict
class Workspace:
    """What is asked for.

    Args:
        owner: Who works on it: tags, limits and costs are by owner.
        image_id: None: as `offer.list --image auto` chooses.
        instance_types: Only these, of what the profile allows; one without a GPU has to be named. Empty:
            any.
        subnet_ids: One a zone; empty: the default VPC's.
        instance_profile_name: None: one of its own, by the least-policy table.
        agent_init_script: Run at the end of the boot, as the workspace's user.
        ssh_from: CIDR that reaches port 22; empty: none, SSH goes through Session Manager only.
        services: Names of services/*.yaml.
        idle_minutes: The machine stops itself after so many minutes without use; 0: never.
    """

    workspace_name: Name
    owner: Name
    region: str
    compute_profile: ComputeProfile = field(default_factory=ComputeProfile)
    capabilities: Capabilities = field(default_factory=Capabilities)
    toolchain_template: Toolchain | None = None
    image_id: str | None = None
    instance_types: tuple[str, ...] = ()
    vpc_id: str | None = None
    subnet_ids: tuple[str, ...] = ()
    instance_profile_name: str | None = None
    agent_init_script: str = ""
    ssh_from: str = ""
    services: tuple[str, ...] = ()
    spot: bool = False
    # Off by default: a machine that stops by itself surprises who has not asked for it.
    idle_minutes: int = 0

    @property
    def wants_gpus(self) -> bool:
        """Whether the machine has to have GPUs."""
        return self.capabilities.gpu_support and self.compute_profile.gpu_count > 0


@strict
class VolumeMount:
    """A volume of the workspace."""

    volume_id: str
    mount_path: str
    size_gib: int
    persistent: bool


@strict
class Provenance:
    """Where the workspace is from.

    Args:
        image_digest: Of the image's build; empty where gpukiln did not build it.
        verdict: Of the image: its profile, suite and outcome in words; empty where it was not verified.
        plan: The offer that was taken, in words.
        usd_hour: The price at launch; None: not known.
        launched_at: ISO 8601.
    """

    image_id: str
    image_digest: str
    verdict: str
    plan: str
    usd_hour: str | None
    launched_at: str


@strict
class Outputs:
    """What a workspace answers.

    Args:
        agent_endpoint: The private address.
        health: healthy, unhealthy or unknown, with the reason behind a colon.
    """

    agent_endpoint: str
    runtime_env: dict[str, str]
    volume_mounts: tuple[VolumeMount, ...]
    metadata: Provenance
    instance_id: str
    instance_type: str
    gpu_type: str
    gpu_count: int
    zone: str
    driver_version: str
    health: str


# Those of the machine among the variables of a workspace; the others are known before there is one.
# Terraform's module sets these two as well, so that their names stand here once.
VARIABLES = {"instance": "GPUKILN_WORKSPACE_INSTANCE", "host": "GPUKILN_WORKSPACE_HOST"}


def lasting_variables(name: str, owner: str, region: str, user: str) -> dict[str, str]:
    """The variables of a workspace that are known before there is a machine."""
    return {
        "GPUKILN_WORKSPACE": name,
        "GPUKILN_WORKSPACE_OWNER": owner,
        "GPUKILN_WORKSPACE_REGION": region,
        "GPUKILN_WORKSPACE_USER": user,
        "GPUKILN_WORKSPACE_HOME": f"/home/{user}",
    }


def workspace_tags(workspace: Workspace, part: str) -> dict[str, str]:
    """Tags of one thing of a workspace.

    Args:
        part: machine, home, network, rights or key.
    """
    return {
        WORKSPACE_TAG: workspace.workspace_name,
        OWNER_TAG: workspace.owner,
        PART_TAG: part,
        MANAGED_TAG: MANAGED,
        # The console shows `Name`; nothing in gpukiln reads it.
        "Name": f"{workspace.workspace_name} ({part})",
    }


def filters(part: str, name: str = "") -> list[dict[str, Any]]:
    """EC2's filters for parts of workspaces that gpukiln created, or of the one with this name.

    >>> filters("home")[1]
    {'Name': 'tag:gpukiln:part', 'Values': ['home']}
    >>> filters("home", "vision")[2]
    {'Name': 'tag:gpukiln:workspace', 'Values': ['vision']}
    """
    tags = {MANAGED_TAG: MANAGED, PART_TAG: part} | ({WORKSPACE_TAG: name} if name else {})
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
