"""What a workspace is asked to be: the contract as a file, options and single fields say it, read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from gpukiln.catalog.instance_types import instance_types
from gpukiln.catalog.load import read_yaml
from gpukiln.catalog.regions import check_region
from gpukiln.clouds.base import Cloud
from gpukiln.clouds.select import check_cidr
from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.offers.model import Request
from gpukiln.offers.request import parse_request
from gpukiln.parsing import parse_json, parse_yaml, read_text, refuse_credentials
from gpukiln.state import state_home
from gpukiln.typed import load, short
from gpukiln.units import Span
from gpukiln.workspaces import iam, network
from gpukiln.workspaces.contract import Workspace

# What contracts said before, and what they say now.
FORMER_FIELDS = {
    "subnet_id": "a list, one subnet a zone, so that another zone can be tried: subnet_ids: [{}]",
    "availability_zone": "nothing: a subnet says its zone, and a home pins it; leave it out",
    "availability_zones": "nothing: a subnet says its zone, and a home pins it; leave it out",
    "os_type": "nothing: the image says the system; leave it out, or name an image_id",
    "coder_agent_init_script": "the same under another name: agent_init_script",
}
# For the hint of a missing option.
EXAMPLES = {"workspace_name": "vision", "owner": "ann", "region": "us-west-2"}
OPTIONS = {"workspace_name": "--name", "owner": "--owner", "region": "--region"}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RANGE = re.compile(r"\d{1,9}|\d{0,9}\.\.\d{0,9}")  # a count; 1080Ti is a GPU, and 24GB a memory
COUNT = re.compile(r"(^|:)\s*[\d.]*\s*(:|$)")  # as a part of its own, which a memory is not: A100:80GB
COUNTS = ("cpu", "gpu_count")
ROLES = re.compile(r"https://\S+@[0-9a-f]{40}")


@dataclass(frozen=True)
class UpOptions:
    """What is typed with a contract and is no part of it.

    Args:
        image: An AMI or a build; empty: as the contract says.
        ssh_from: A network, `me`, or empty: as the contract says.
        roles: https://REPOSITORY@COMMIT, for an image that gpukiln did not build; empty: none.
        simulated: Whether the machine gets simulated GPUs.
        keep: Whether Ctrl-C leaves a machine that this call started and that is not usable yet.
        max_price: USD an hour of the machine; None: any.
        budget: USD a month of machine, home and public address; None: any.

    Raises:
        UsageError: `roles` holds credentials, or has another form.
    """

    image: str = ""
    ssh_from: str = ""
    roles: str = ""
    simulated: bool = False
    keep: bool = False
    max_price: Decimal | None = None
    budget: Decimal | None = None

    def __post_init__(self) -> None:
        """Refuse a password, which would reach messages and user data, and a branch, which may change."""
        # User data can be read by every process of the machine through IMDS, and by
        # DescribeInstanceAttribute.
        refuse_credentials(self.roles, "--roles", where="the machine's user data")
        if self.roles and not ROLES.fullmatch(self.roles):
            raise UsageError(
                f"--roles is {self.roles!r}, wanted https://REPOSITORY@COMMIT with a whole commit",
                hint="`git rev-parse HEAD` in the repository prints the commit",
            )


NO_OPTIONS = UpOptions()


@dataclass(frozen=True)
class WorkspaceSpec:
    """What a workspace is asked to be, before a region has been asked.

    Args:
        request: The machine of the contract; a count of 0: one without GPUs.
    """

    contract: Workspace
    request: Request
    options: UpOptions = NO_OPTIONS


def spec_of(contract: Workspace, options: UpOptions = NO_OPTIONS) -> WorkspaceSpec:
    """A contract with the machine that it asks for.

    Raises:
        UsageError: There is no such GPU.
    """
    profile = contract.compute_profile
    request = parse_request(
        profile.gpu_type,
        cpu=profile.cpu,
        memory=profile.memory or "",
        # A named type is meant, whatever its architecture; without one, x86_64 is what most images and wheels
        # are for.
        arch="any" if any(name in instance_types() for name in contract.instance_types) else "x86_64",
        spot="only" if contract.spot else "no",
    )
    # The count is exact: a workspace pays for each GPU, so that a larger machine is no match.
    count = profile.gpu_count if contract.wants_gpus else 0
    request = replace(request, count=Span(count, count), max_price=options.max_price)
    return WorkspaceSpec(contract, request, options)


def in_region(cloud: Cloud, spec: WorkspaceSpec) -> WorkspaceSpec:
    """The specification in a region, with the image and the network that were named.

    Raises:
        UsageError: The build has no image there, the network is none or everybody, or simulated GPUs are
            wanted of a cloud that has real ones.
    """
    options, contract = spec.options, spec.contract
    # `me` is resolved here, since only the cloud knows whether the caller is seen from the internet.
    ssh_from = cloud.ssh_cidr if options.ssh_from == "me" else options.ssh_from
    contract = replace(
        contract,
        region=cloud.region,
        ssh_from=ssh_from or contract.ssh_from,
        image_id=_image_id(cloud, options.image) if options.image else contract.image_id,
    )
    if ssh_from:
        check_cidr(ssh_from)
        network.ingress_rules(contract)  # everybody is refused before anything is made
    if options.simulated and cloud.has_gpus:
        raise UsageError("--simulated is for --cloud embedded", hint="leave it out")
    return replace(spec, contract=contract)


def _image_id(cloud: Cloud, name: str) -> str:
    """The id of an AMI, of it or of a build of this computer: its id or `last`."""
    if name.startswith("ami-"):
        return name
    record = Builds(state_home()).find(name).read()
    if record.bake is None:
        raise UsageError(
            f"build {record.build_id} has no image: it is {record.state}",
            hint="`invoke ami.list` shows others",
        )
    if (record.plan.cloud, record.plan.region) != (cloud.name, cloud.region):
        raise UsageError(
            f"the image of build {record.build_id} is on {record.plan.cloud} in {record.plan.region}, "
            f"wanted {cloud.name} in {cloud.region}",
            hint="--cloud and --region say where the workspace is to be",
        )
    return record.bake.image_id


def contract_document(path: Path) -> dict[str, Any]:
    """What a file in YAML or JSON says of a contract, not checked yet.

    Raises:
        UsageError: It can't be read.
    """
    return _json(path) if path.suffix == ".json" else read_yaml(path)


def typed_spec(
    document: Mapping[str, Any],
    fields: Mapping[str, Any],
    gpu: str,
    assignments: Iterable[str],
    options: UpOptions = NO_OPTIONS,
) -> WorkspaceSpec:
    """A specification as it is typed: the contract of a file, changed by options, changed by single fields.

    Args:
        document: Of the file; empty: there is none.
        fields: By their path with dots, for example compute_profile.cpu.
        gpu: As `offer.list --gpu` takes it; empty: as the file says.
        assignments: FIELD=YAML.

    Raises:
        UsageError: Something of it does not fit; says what, and what is wanted.
    """
    whole: dict[str, Any] = _copy(document)
    for path, value in (*fields.items(), *_gpu(gpu).items(), *map(_assignment, assignments)):
        _set_field(whole, path, value)
    if missing := next((name for name in OPTIONS if not whole.get(name)), ""):
        option = OPTIONS[missing]
        raise UsageError(f"{option} is missing", hint=f"for example {option} {EXAMPLES[missing]}")
    return read_spec(whole, where="the workspace", options=options)


def read_spec(
    document: Mapping[str, Any],
    *,
    where: str,
    options: UpOptions = NO_OPTIONS,
) -> WorkspaceSpec:
    """The specification that the document of a contract is.

    Args:
        where: File, for the message.

    Raises:
        UsageError: It is none; the details name every mistake.
    """
    former = [
        f"{name} was found, wanted {words.format(short(document[name], quote=False))}"
        for name, words in FORMER_FIELDS.items()
        if name in document
    ]
    if wrong := [*former, *_refused_fields(document.get("capabilities"))]:
        raise _mistakes(where, wrong)
    contract = load(Workspace, dict(document), where=where, hint="docs/schemas/workspace.json has its form")
    wrong = list(_invalid_values(contract))
    try:
        spec = spec_of(contract, options)
    except UsageError as error:
        wrong.append(_line("compute_profile.gpu_type", error))
    if wrong:
        raise _mistakes(where, wrong)
    return spec


def _gpu(text: str) -> dict[str, Any]:
    """GPU and count apart: a workspace has so many GPUs and no other number.

    >>> _gpu("T4:1")
    {'compute_profile.gpu_type': 'T4', 'compute_profile.gpu_count': 1}
    >>> _gpu("")
    {}
    """
    if not text:
        return {}
    # Both fields: a contract with gpu_support and a count of 0 would be contradictory to a reader.
    if text == "0":
        return {
            "compute_profile.gpu_type": "",
            "compute_profile.gpu_count": 0,
            "capabilities.gpu_support": False,
        }
    parts = [part.strip() for part in text.split(":") if part.strip()]
    counts = [part for part in parts if RANGE.fullmatch(part)]
    if len(counts) > 1:
        raise UsageError(f"--gpu {text} has {len(counts)} counts, wanted one", hint="for example T4:1")
    count = Span.parse(counts[0], "--gpu", least=1) if counts else Span(1, 1)
    if count.low != count.high:
        raise UsageError(f"--gpu {text}: {count} GPUs, wanted one number", hint="for example T4:1")
    return {
        "compute_profile.gpu_type": ":".join(part for part in parts if part not in counts),
        "compute_profile.gpu_count": count.low,
    }


def _assignment(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", path.strip()):
        raise UsageError(f"--set {text!r}, wanted FIELD=YAML", hint="capabilities.network_egress=none")
    try:
        return path.strip(), parse_yaml(value)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--set {path}: {value!r} is no YAML: {error}", hint="quote it") from None


def _set_field(whole: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = path.split(".")
    at = whole
    for name in folders:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise UsageError(f"--set {path}: {name} has no fields")
    at[last] = value


def _copy(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in document.items()}


def _refused_fields(capabilities: object) -> Iterator[str]:
    """Mistakes that need other words than the form's; what stands for a secret is never shown."""
    if not isinstance(capabilities, Mapping):
        return
    if capabilities.get("gui_rdp"):
        yield "capabilities.gui_rdp: it is for Windows, and no image of that is made; gui_vnc is for Linux"
    secrets = capabilities.get("secrets", {})
    if not isinstance(secrets, Mapping):
        yield "capabilities.secrets: wanted names of environment variables with references, NAME: REFERENCE"
    elif wrong := [str(name) for name, value in secrets.items() if not isinstance(value, str)]:
        yield f"capabilities.secrets: {', '.join(wrong)}: wanted a reference, which is a text"


def _invalid_values(contract: Workspace) -> Iterator[str]:
    """What has the right form, and can't be meant."""
    profile = contract.compute_profile
    for name in COUNTS:
        if getattr(profile, name) < 0:
            yield f"compute_profile.{name}: found {getattr(profile, name)}, wanted 0 or more"
    if contract.idle_minutes < 0:
        yield f"idle_minutes: found {contract.idle_minutes}, wanted 0 or more"
    if profile.gpu_type and COUNT.search(profile.gpu_type):
        yield f"compute_profile.gpu_type: found {profile.gpu_type!r}, wanted a name; gpu_count says how many"
    for name in contract.capabilities.secrets:
        if not VARIABLE.fullmatch(name):
            yield f"capabilities.secrets: found {name!r}, wanted the name of an environment variable"
    if contract.capabilities.secrets and contract.capabilities.identity_mode == "none":
        yield "capabilities.secrets: they are fetched with the machine's rights, and identity_mode is none"
    # An unknown region would make the policy check fail, too, with a message about partitions.
    unknown = list(_refusal("region", lambda: check_region(contract.region)))
    yield from unknown or _refusal("capabilities", lambda: iam.policy(contract))
    yield from _refusal("ssh_from", lambda: network.ingress_rules(contract))


def _refusal(where: str, check: Callable[[], object]) -> Iterator[str]:
    """The mistake that another part finds, where it uses the value."""
    try:
        check()
    except UsageError as error:
        yield _line(where, error)


def _line(where: str, error: UsageError) -> str:
    return f"{where}: {error.message}" + (f"; {error.hint}" if error.hint else "")


def _mistakes(where: str, lines: list[str]) -> UsageError:
    if len(lines) == 1:
        return UsageError(f"{where}: {lines[0]}")
    return UsageError(f"{where}: {len(lines)} mistakes", details=tuple(lines))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(read_text(path))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds {short(document)}; wanted: keys with values")
    return document
