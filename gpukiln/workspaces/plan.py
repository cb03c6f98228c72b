"""Plans what `workspace.up` starts before anything is created: machines in order, image, services.

Where the workspace has a machine already, checks that it satisfies the request.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from gpukiln.attest import trust
from gpukiln.catalog.gpus import gpu
from gpukiln.catalog.instance_types import instance_types
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import DESKTOP_TAG, DIGEST_TAG, VERDICT_TAG, VERIFIED_TAG
from gpukiln.errors import IncompatibleError, RefusedError, UsageError
from gpukiln.images.subject import Subject, subject_from_tags
from gpukiln.instances.tags import tags_of
from gpukiln.offers import image as images
from gpukiln.offers.cost import HOURS_PER_MONTH, MachineUsage, month, within_budget
from gpukiln.offers.fit import fit
from gpukiln.offers.model import ImageChoice, Offer, Request
from gpukiln.offers.select import mismatches_of, no_match_error, select
from gpukiln.typed import dump
from gpukiln.units import Span
from gpukiln.workspaces import services, userdata
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.lifecycle import ExistingWorkspace, WorkspaceMachine, only_machine
from gpukiln.workspaces.spec import WorkspaceSpec
from gpukiln.workspaces.volumes import DEFAULT_GIB, Home

TAG_CHARACTERS = 256  # EC2's limit of a value
# 24 bits: enough to notice a changed option, too few to guess a value such as a script's token from the tag.
HASH_CHARACTERS = 4
TRUNCATED = "..."
SHOWN_CHARACTERS = 120  # of a value in a message
# What EC2 says of a machine itself, or what may differ: a home grows.
# A hash of these would refuse the same request after a change that is allowed.
NOT_HASHED = {
    "workspace_name",
    "owner",
    "region",
    "compute_profile",
    "image_id",
    "instance_types",
    "spot",
}
ImageLookup = Callable[[str], tuple[Subject | None, dict[str, Any]]]


@dataclass(frozen=True)
class WorkspacePlan:
    """The plan of a workspace in a region.

    Args:
        contract: In the region, with the image that was chosen.
        offers: The best first; all of them can be started from the image.
        choice: The image, and why that one.
        subject: What is in the image; None: gpukiln did not build it.
        image: As DescribeImages gives it.
        gpus: How many the machine has to show; 0: none.
        use: What counts in a month's price.
        compose: The services, as a Compose file; empty: none.
        roles: https://REPOSITORY@COMMIT, as it was typed; a foreign image runs them. Empty: none.
        simulated: Whether the embedded cloud gives the machine simulated GPUs.
    """

    contract: Workspace
    offers: tuple[Offer, ...]
    choice: ImageChoice
    subject: Subject | None
    image: dict[str, Any]
    gpus: int
    use: MachineUsage
    compose: str = ""
    roles: str = ""
    simulated: bool = False

    @property
    def digest(self) -> str:
        """Of the image's build; empty where gpukiln did not build it."""
        return tags_of(self.image).get(DIGEST_TAG, "") if self.subject else ""

    @property
    def verdict(self) -> str:
        """Of the image, in words; empty where it was not verified."""
        tags = tags_of(self.image)
        if not self.subject or VERDICT_TAG not in tags:
            return ""
        return f"{tags[VERDICT_TAG]} {tags.get(VERIFIED_TAG, '')}".strip()

    def user_data(self, endpoint: str = "") -> bytes:
        """What the machine reads at its first boot.

        Args:
            endpoint: Of an embedded cloud; empty: AWS's own.

        Raises:
            UsageError: It is too large.
        """
        roles = "" if self.subject else self.roles
        return userdata.render(
            self.contract, gpus=self.gpus, compose=self.compose, roles=roles, endpoint=endpoint
        )


def plan(
    cloud: Cloud,
    spec: WorkspaceSpec,
    today: date,
    *,
    homes: Sequence[Home] = (),
    without: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> WorkspacePlan:
    """What a workspace gets in a region. Nothing is made.

    Args:
        spec: In the region, see `spec.in_region`.
        homes: Those that are there.
        without: A type that is left out, for one of it was unhealthy.
        say: Receives what to know of the services.

    Raises:
        OverBudgetError: Every fitting machine costs more a month.
        RefusedError: The named image has no trusted signature.
        UsageError: The image does not exist, or gpukiln did not build it and --roles is missing, or a type is
            unknown, or the cloud has no GPUs.
        IncompatibleError: No machine satisfies it, or none of them fits the image; no release of a service
            runs there, or the image lacks the desktop.
        UnavailableError: The cloud can't be asked.
    """
    contract, options = spec.contract, spec.options
    # Before anything else: without this check a rehearsal ended well with a machine without GPUs.
    if spec.contract.wants_gpus and not (cloud.has_gpus or options.simulated):
        gpus = f"{spec.request.count} {contract.compute_profile.gpu_type}".rstrip()
        raise UsageError(
            f"machines of --cloud {cloud.name} have no GPUs, wanted {gpus}",
            hint="--simulated gives them simulated ones, for a rehearsal; --cloud aws has real ones; --gpu 0 "
            "wants none",
        )
    use = _machine_usage(contract, homes)
    offers = tuple(offer for offer in _offers(cloud, spec, today) if offer.instance_type != without)
    if not offers:
        raise IncompatibleError(f"no machine but {without} satisfies the request", hint="ask for less")
    looked = cache(lambda image_id: _subject(cloud, image_id))  # asked once, for however many machines
    choices = _choices(cloud, contract, offers, today, looked)
    # An image is chosen for each type: g5g is arm64, and a vGPU needs another driver than a whole GPU.
    fitting = [offer for offer, choice in choices if not _first_error(choice)]
    if not fitting:
        rows = tuple(f"{offer.instance_type}: {_first_error(choice)}" for offer, choice in choices[:6])
        raise IncompatibleError(
            f"{len(choices)} machines satisfy the request, and none of them can run its image",
            details=rows,
            hint="another --image, or another --gpu; `invoke offer.list --image auto` says more",
        )
    if options.budget is not None:
        costs = [(offer, month(offer, use, today, cloud=cloud.name)) for offer in fitting]
        fitting = [offer for offer, _ in within_budget(options.budget, costs)]
    # All offers that are tried in turn start from one image, since the launch request is made once.
    best = next(choice for offer, choice in choices if offer in fitting)
    # A plain distribution image is a choice for `ami.build`, which installs the driver; a workspace can't
    # wait for that.
    if best.kind == "base":
        raise IncompatibleError(
            f"{cloud.region} has no image that a workspace can be started from",
            details=best.why,
            hint=f"`invoke ami.build --region {cloud.region} --cloud {cloud.name}` bakes and verifies one",
        )
    same = {offer.instance_type for offer, choice in choices if choice.image_id == best.image_id}
    subject, image = looked(best.image_id)
    if subject is None and not options.roles:
        raise UsageError(
            f"gpukiln did not build {best.image_id}, so that its machine must run the roles first: "
            "wanted --roles https://REPOSITORY@COMMIT",
            hint=f"`invoke ami.build --region {cloud.region} --cloud {cloud.name}` bakes and verifies one",
        )
    return _complete(
        spec,
        replace(contract, image_id=best.image_id),
        tuple(offer for offer in fitting if offer.instance_type in same),
        best,
        subject,
        image,
        use,
        today,
        say,
    )


def plan_offline(
    spec: WorkspaceSpec, today: date, say: Callable[[str], None] = lambda _: None
) -> WorkspacePlan:
    """The plan of a workspace from the catalogue alone: no cloud is asked for zones or the image.

    Raises:
        IncompatibleError: No machine satisfies it, or no release of a service runs there.
    """
    contract = spec.contract
    image_id = contract.image_id or ""
    choice = ImageChoice(image_id, "given", image_id, ("it was named",), "", ())
    image = {"ImageId": image_id, "RootDeviceName": ""}
    offers = _matching_offers(spec, contract.region, "aws", today)
    return _complete(spec, contract, offers, choice, None, image, MachineUsage(), today, say)


def _complete(
    spec: WorkspaceSpec,
    contract: Workspace,
    offers: tuple[Offer, ...],
    choice: ImageChoice,
    subject: Subject | None,
    image: dict[str, Any],
    use: MachineUsage,
    today: date,
    say: Callable[[str], None],
) -> WorkspacePlan:
    """The plan; only the offers stay on which its services run."""
    options = spec.options
    gpus = offers[0].gpus if spec.contract.wants_gpus else 0
    if contract.capabilities.gui_vnc:
        require_desktop(image)
    compose = ""
    if contract.services:
        # A simulated GPU is a double of NVML's answers: no container can be given one.
        has_gpus = gpus > 0 and not options.simulated
        named = services.load(contract.services)
        if has_gpus:
            # The release is chosen for the first offer; offers that would run only another release are
            # dropped.
            named, notes = services.require_fit(named, offers[0].instance_type, subject, today)
            offers = tuple(offer for offer in offers if _fits_services(named, offer, subject, today))
            for note in notes:
                say(note)
        rendered = services.compose(
            named,
            ("all",) if has_gpus else (),
            user=userdata.user_of(contract.owner),
            secrets=bool(contract.capabilities.secrets),
        )
        compose = rendered.text
        for note in rendered.notes:
            say(note)
    return WorkspacePlan(
        contract,
        offers,
        choice,
        subject,
        image,
        gpus,
        use,
        compose,
        options.roles,
        options.simulated,
    )


def require_desktop(image: dict[str, Any]) -> str:
    """The version of KasmVNC that an image has: the role kasmvnc puts it there when the image is baked.

    Args:
        image: As DescribeImages gives it.

    Raises:
        IncompatibleError: It has none.
    """
    if version := tags_of(image).get(DESKTOP_TAG, ""):
        return version
    raise IncompatibleError(
        f"{image['ImageId']} has no desktop for the browser, which capabilities.gui_vnc asks for",
        hint="`invoke ami.build --also kasmvnc` bakes an image that has one; or leave gui_vnc out",
    )


def describe_offer(offer: Offer, zone: str) -> str:
    """The offer that was taken, in words."""
    price = "no price known"
    if figure := offer.price or offer.estimate:
        price = f"{figure.value} USD/hour" if offer.price else f"about {figure.value} USD/hour (estimated)"
    return f"{offer.instance_type} {offer.market} in {zone}, {price}"


def _fits_services(
    named: Sequence[services.Service], offer: Offer, subject: Subject | None, today: date
) -> bool:
    try:
        services.require_fit(named, offer.instance_type, subject, today)
    except IncompatibleError:
        return False
    return True


def _machine_usage(contract: Workspace, homes: Sequence[Home]) -> MachineUsage:
    """How a workspace uses a machine: all hours of a month, with its home and a public address."""
    if not contract.capabilities.persistent_home:
        return MachineUsage()
    # An existing home keeps its size where the contract names none, and may be larger than the default.
    size = contract.compute_profile.storage_gib or (0 if homes else DEFAULT_GIB)
    return MachineUsage(volume_gb=max(size, *(home.size_gib for home in homes), 0))


def _offers(cloud: Cloud, spec: WorkspaceSpec, today: date) -> tuple[Offer, ...]:
    if spec.contract.wants_gpus:
        return _matching_offers(spec, cloud.region, cloud.name, today)
    offers = _without_gpus(cloud, spec)
    if spec.request.max_price is not None:
        raise IncompatibleError(
            f"the price of {offers[0].instance_type} is not known, wanted at most {spec.request.max_price} "
            "USD/hour",
            hint="the catalogue has prices of machines with GPUs; leave out --max-price",
        )
    return offers


def _matching_offers(spec: WorkspaceSpec, region: str, source: str, today: date) -> tuple[Offer, ...]:
    """Machines of the catalogue that satisfy it, with the prices of a source."""
    request, types = spec.request, spec.contract.instance_types
    answer = select(request, [region], today, cloud=source)
    if not answer.offers:
        raise no_match_error(request, answer, [region])
    if not types:
        return answer.offers
    named = tuple(offer for offer in answer.offers if offer.instance_type in types)
    if not named:
        near = {miss.instance_type: "; ".join(lack.message for lack in miss.lacks) for miss in answer.near}
        rows = [f"{name}: {near.get(name, 'not in the catalogue')}" for name in types]
        raise IncompatibleError(
            f"{' and '.join(types)} does not satisfy the request",
            details=tuple(rows),
            hint=f"{answer.offers[0].instance_type} does; or ask for less",
        )
    return named


def _without_gpus(cloud: Cloud, spec: WorkspaceSpec) -> tuple[Offer, ...]:
    """Machines that EC2 describes; the catalogue has those with GPUs alone, so that no price is known."""
    types = spec.contract.instance_types
    if not types:
        raise IncompatibleError(
            "machines without a GPU are not in the catalogue, so that none can be chosen",
            hint="name one: --instance-types m7i.2xlarge",
        )
    with explain_aws_errors("look up the instance types"):
        rows = cloud.client("ec2").describe_instance_types(InstanceTypes=list(types))
    offers = []
    for row in rows["InstanceTypes"]:
        vcpu, memory = _require_large(row, spec.request)
        offers.append(
            Offer(
                instance_type=row["InstanceType"],
                region=cloud.region,
                gpu="",
                gpus=0,
                gpu_fraction=0,
                gpu_memory_mib=0,
                vcpu=vcpu,
                memory_mib=memory,
                local_gb=row.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
                # Older x86_64 types list i386 first.
                arch=row["ProcessorInfo"]["SupportedArchitectures"][-1],
                efa=0,
                market="spot" if spec.contract.spot else "on-demand",
                price=None,
                on_demand=None,
                spot=(),
                zones=None,
            )
        )
    return tuple(sorted(offers, key=lambda offer: types.index(offer.instance_type)))


def require_size(cloud: Cloud, request: Request, name: str) -> None:
    """Refuse a machine without a GPU that has fewer vCPUs or less memory than is wanted.

    Raises:
        IncompatibleError: It has.
        UnavailableError: The cloud can't be asked.
    """
    with explain_aws_errors("look up the instance types"):
        rows = cloud.client("ec2").describe_instance_types(InstanceTypes=[name])
    _require_large(rows["InstanceTypes"][0], request)


def _require_large(row: dict[str, Any], request: Request) -> tuple[int, int]:
    """The vCPUs and the memory of a type, which are as large as is wanted."""
    vcpu, memory = row["VCpuInfo"]["DefaultVCpus"], row["MemoryInfo"]["SizeInMiB"]
    if vcpu < request.vcpu or memory < request.memory_mib:
        raise IncompatibleError(
            f"{row['InstanceType']} has {vcpu} vCPU and {memory} MiB, "
            f"wanted {request.vcpu} and {request.memory_mib}",
            hint="name a larger one",
        )
    return vcpu, memory


def _choices(
    cloud: Cloud, contract: Workspace, offers: Sequence[Offer], today: date, looked: ImageLookup
) -> list[tuple[Offer, ImageChoice]]:
    if contract.image_id:
        return _named_image_choices(cloud, contract.image_id, offers, today, looked)
    known = images.images_of(cloud, fresh=True)
    return [(offer, _choose_for_offer(known, cloud, offer, today)) for offer in offers]


def _choose_for_offer(known: images.Images, cloud: Cloud, offer: Offer, today: date) -> ImageChoice:
    if offer.gpus:
        return images.choose_image(known, cloud, offer.instance_type, None, today)
    raise UsageError(
        f"an image is chosen by the GPU, and {offer.instance_type} has none", hint="name one: --image"
    )


def _named_image_choices(
    cloud: Cloud, image_id: str, offers: Sequence[Offer], today: date, looked: ImageLookup
) -> list[tuple[Offer, ImageChoice]]:
    subject, image = looked(image_id)
    words = trust.require_verified(cloud, image) if subject else ""
    choices = []
    for offer in offers:
        findings = fit(offer.instance_type, image=subject, workload=None, today=today) if offer.gpus else ()
        choice = ImageChoice(image_id, "given", image_id, ("it was named",), "", findings, words)
        choices.append((offer, choice))
    return choices


def _subject(cloud: Cloud, image_id: str) -> tuple[Subject | None, dict[str, Any]]:
    image = calls.require_image(cloud, image_id, hint="--region says where to look")
    try:
        return subject_from_tags(image_id, tags_of(image)), image
    except UsageError:  # it has no tags of gpukiln
        return None, image


def _first_error(choice: ImageChoice) -> str:
    return next((row.message for row in choice.findings if row.severity == "error"), "")


def option_hashes(workspace: Workspace, roles: str) -> str:
    """The machine's tag that says by which options it was started: the name and a hash of each, no values.

    A field at its default has no entry. What does not fit is left out, and the end says so.
    """
    entries = [f"{name}={_hash(value)}" for name, value in _changed_fields(workspace, roles).items()]
    if len(" ".join(entries)) <= TAG_CHARACTERS:
        return " ".join(entries)
    # Options that are cut are not compared later; the end of the tag says that some are missing.
    while len(" ".join([*entries, TRUNCATED])) > TAG_CHARACTERS:
        entries.pop()
    return " ".join([*entries, TRUNCATED])


def require_same(cloud: Cloud, spec: WorkspaceSpec, existing: ExistingWorkspace) -> None:
    """Refuse where the workspace's machine differs from the request.

    A field at its default is not a request: every machine satisfies it.

    Raises:
        RefusedError: Something differs; the details name all of it.
    """
    machine = only_machine(existing)
    rows = [
        *_machine_rows(cloud, spec, machine),
        *_market_rows(spec, machine),
        *_option_rows(spec.contract, spec.options.roles, machine),
    ]
    if spec.options.simulated and not machine.simulated:
        rows.append("it has no simulated GPUs, wanted --simulated")
    if rows:
        raise RefusedError(
            f"{existing.name} has a machine already, {machine.instance_id} ({machine.instance_type}), and it "
            "differs from the request",
            details=tuple(rows),
            hint=f"`invoke workspace.down {existing.name} --keep-home` ends it, and the same command starts "
            "another with its home; or leave out the options that differ",
        )


def _machine_rows(cloud: Cloud, spec: WorkspaceSpec, machine: WorkspaceMachine) -> Iterator[str]:
    contract, name = spec.contract, machine.instance_type
    profile, type_ = contract.compute_profile, instance_types().get(machine.instance_type)
    if contract.instance_types and name not in contract.instance_types:
        yield f"it is a {name}, wanted {' or '.join(contract.instance_types)}"
    if type_ and spec.contract.wants_gpus:
        # `--gpu 1` is the default and asks for nothing: a machine with four GPUs satisfies it.
        any_gpu = not profile.gpu_type and profile.gpu_count == ComputeProfile().gpu_count
        count = Span(1) if any_gpu else spec.request.count
        yield from mismatches_of(
            replace(spec.request, arch="any", spot="no", count=count, fractions=any_gpu), name
        )
    elif type_ and not machine.lacks_gpus:
        yield f"it has {type_.gpus} {gpu(type_.gpu).name}, wanted none"
    elif spec.contract.wants_gpus and (profile.gpu_type or profile.gpu_count != ComputeProfile().gpu_count):
        yield f"it has no GPU, wanted {profile.gpu_count} {profile.gpu_type}".rstrip()
    if not type_ and (profile.cpu or profile.memory):
        try:
            require_size(cloud, spec.request, name)
        except IncompatibleError as error:
            yield error.message
    if contract.image_id and contract.image_id != machine.image_id:
        yield f"its image is {machine.image_id}, wanted {contract.image_id}"


def _market_rows(spec: WorkspaceSpec, machine: WorkspaceMachine) -> Iterator[str]:
    if spec.contract.spot and not machine.spot:
        yield "it is on demand, wanted spot"
    most, budget = spec.options.max_price, spec.options.budget
    if most is None and budget is None:
        return
    if not machine.usd_hour:
        yield "its price is not known, wanted at most what --max-price and --budget say"
        return
    hour = Decimal(machine.usd_hour)
    if most is not None and hour > most:
        yield f"it costs {hour} USD/hour, wanted at most {most}"
    if budget is not None and hour * HOURS_PER_MONTH > budget:
        yield f"its machine alone costs {hour * HOURS_PER_MONTH:.2f} USD a month, wanted at most {budget}"


def _option_rows(workspace: Workspace, roles: str, machine: WorkspaceMachine) -> Iterator[str]:
    if machine.asked is None:  # an earlier version started it, or Terraform
        return
    entries = dict(entry.split("=", 1) for entry in machine.asked.split() if "=" in entry)
    cut = machine.asked.endswith(TRUNCATED)
    for name, value in _changed_fields(workspace, roles).items():
        # gpu_support is compared with the machine's type in `_machine_rows`.
        if (name not in entries and cut) or name == "gpu_support":
            continue
        if entries.get(name) != _hash(value):
            how = "with another one" if name in entries else "without"
            yield f"{name}: it was started {how}, wanted {_shown_value(value)}"


def _changed_fields(workspace: Workspace, roles: str) -> dict[str, Any]:
    """What was asked for and is no default, by the field's name."""
    plain = Workspace(workspace.workspace_name, workspace.owner, workspace.region)
    fields, defaults = _flat_fields(workspace), _flat_fields(plain)
    changed = {name: value for name, value in fields.items() if value != defaults[name]}
    return {**changed, **({"roles": roles} if roles else {})}


def _flat_fields(workspace: Workspace) -> dict[str, Any]:
    # As JSON has it: the hash must not depend on Python's types, which a later version may change.
    document = dump(workspace)
    fields = {**document, **document.pop("capabilities"), "gpu_support": workspace.wants_gpus}
    return {name: value for name, value in fields.items() if name not in {*NOT_HASHED, "capabilities"}}


def _hash(value: Any) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return base64.urlsafe_b64encode(digest).decode()[:HASH_CHARACTERS]


def _shown_value(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= SHOWN_CHARACTERS and value.isprintable() else "another text"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value)
