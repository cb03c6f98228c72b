"""Workspaces: from an offer to a machine on which somebody works, with a home that is kept; and away."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.commands.workspace_place import HERE, JSON, PLACE, cloud_of, find, find_or_gone, show_parts, tell
from gpukiln.typed import dump

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpukiln.clouds.base import Cloud
    from gpukiln.workspaces.contract import Workspace
    from gpukiln.workspaces.lifecycle import ExistingWorkspace
    from gpukiln.workspaces.spec import WorkspaceSpec

ASKED = {
    "name": "of the workspace: small letters, digits and `-`",
    "owner": "who works on it: tags and costs are by owner",
    "gpu": "GPU and count, as offer.list takes them: T4:1",
    "cpu": "vCPUs, at least",
    "memory": "main memory, at least, for example 32GiB",
    "storage": "of the home, for example 100GiB; a home that is there grows to it",
    "region": "regions to try, separated by commas, the best first; a home that is there pins its own",
    "image": "an AMI, a build (id or `last`); default: as `offer.list --image auto` chooses",
    "instance_types": "only these of what satisfies the request, separated by commas",
    "spot": "a spot instance: cheaper, and EC2 may take it away; the home stays",
    "service": "of services/, separated by commas: ollama, vllm, jupyter",
    "ssh_from": "who reaches its port 22: a network, or `me`; default: nobody, by session manager alone",
    "idle_minutes": "nobody there for so long: it stops itself; 0: never",
    "set": "any field of the contract (docs/workspaces.md), FIELD=YAML, for example "
    "capabilities.network_egress=none; as often as needed",
    "from": "a file with the contract, YAML or JSON, which the other options change",
    "simulated": "simulated GPUs (embedded cloud): a rehearsal",
    "roles": "for an image that is not ours: the https:// repository and the commit whose roles it runs, "
    "with @ between them",
    "cloud": "embedded (this machine, the default) or aws (your account)",
    "profile": "AWS profile (aws only)",
    "json": JSON,
}


@command(
    help={
        **ASKED,
        "no_wait": "do not wait until its stages are done",
        "keep": "Ctrl-C keeps a machine that is not usable yet, too; without it, that is removed",
        "replace_unhealthy": "look deep when it is up, and try the next machine where this one is unhealthy",
        "max_price": "USD an hour that the machine costs at most",
        "budget": "USD a month that machine, home and address cost at most; exit 6 where all cost more",
        "yes": "start it without a question; needed where there is no terminal",
        "dry_run": "only show which machines and which image it would be, and what they cost",
    },
    iterable=["set"],
)
def up(
    _: Any,
    name: str = "",
    owner: str = "",
    gpu: str = "",
    cpu: int = 0,
    memory: str = "",
    storage: str = "",
    region: str = "",
    image: str = "",
    instance_types: str = "",
    spot: bool = False,
    service: str = "",
    ssh_from: str = "",
    idle_minutes: int = 0,
    set: Any = None,
    from_: str = "",
    simulated: bool = False,
    roles: str = "",
    no_wait: bool = False,
    keep: bool = False,
    replace_unhealthy: bool = False,
    max_price: str = "",
    budget: str = "",
    yes: bool = False,
    dry_run: bool = False,
    cloud: str = "embedded",
    profile: str = "",
    json: bool = False,
) -> None:
    """Start a workspace on the best machine that can be had, with its home; again: complete or show it."""
    typed = dict(locals())
    from gpukiln.commands.consent import require_consent
    from gpukiln.workspaces import view
    from gpukiln.workspaces.lifecycle import ExistingWorkspace
    from gpukiln.workspaces.plan import WorkspacePlan
    from gpukiln.workspaces.provision import look_ahead, raise_up, today

    spec = _spec(typed)
    clouds = [cloud_of(cloud, one, profile) for one in words(region) or [spec.contract.region]]
    if dry_run:
        where, ahead = look_ahead(clouds, spec, say)
        preview = (
            view.running(where, ahead)
            if isinstance(ahead, ExistingWorkspace)
            else view.preview(where, ahead, today())
        )
        if json:
            print_document(preview.schema, dump(preview))
        else:
            show_parts(view.preview_parts(preview))
        say("dry run: nothing was started")
        return

    def consent(where: Cloud, plan: WorkspacePlan) -> None:
        """Show what it costs, and ask."""
        show_parts(view.preview_parts(view.preview(where, plan, today())), notices=True)
        require_consent(f"starting {plan.contract.workspace_name}", (), yes=yes)

    where, found = raise_up(
        clouds, spec, say, consent=consent, wait=not no_wait, replace_unhealthy=replace_unhealthy
    )
    tell(where, found, json=json)


@command(help={"name": "of the workspace", **PLACE})
def stop(
    _: Any, name: str = "", region: str = "", cloud: str = "", profile: str = "", json: bool = False
) -> None:
    """Stop the machine of a workspace; its disks and its home stay, and cost what volumes cost."""
    from gpukiln.workspaces import lifecycle, local_state
    from gpukiln.workspaces.provision import alone

    where, found = find(name, cloud, region, profile)
    with alone(where, found.name):
        local_state.refresh(where)
        if not lifecycle.stop(where, found):
            say(f"{found.name} was stopped")
    tell(where, _again(where, found), json=json)


stop.first = "name"


@command(help={"name": "of the workspace", "no_wait": "do not wait until its stages are done", **PLACE})
def start(
    _: Any,
    name: str = "",
    no_wait: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """Start the machine of a workspace again: another address, the same home; and look whether it is well."""
    from gpukiln.errors import CheckFailedError
    from gpukiln.workspaces import lifecycle, reach
    from gpukiln.workspaces.network import key_file
    from gpukiln.workspaces.provision import alone, note_what_runs, wait_until_done

    where, found = find(name, cloud, region, profile)
    looked = None
    with alone(where, found.name):
        try:
            if not lifecycle.start(where, found):
                say(f"{found.name} ran")
            elif not no_wait:
                wait_until_done(where, _named(found), say=say)
                if key_file(where, found.name).exists():  # else nobody here can look
                    looked = reach.look(where, _again(where, found))
        except KeyboardInterrupt as interrupt:
            note_what_runs(where, _again(where, found), interrupt)
            raise
    tell(where, _again(where, found), json=json)
    if looked and not looked.good:
        raise CheckFailedError(f"{found.name} is {looked.words}", hint=f"the report is in {looked.folder}")


start.first = "name"


@command(
    help={
        "name": "of the workspace",
        "keep_home": "its home stays: `workspace.up` of that name finds it again",
        "owner": "whose it is, where this computer did not start it",
        "force": "although somebody works there",
        "yes": "remove what is in the home without a question; needed where there is no terminal",
        "dry_run": "only show what would be removed",
        **{key: PLACE[key] for key in ("region", "cloud", "profile")},
    }
)
def down(
    _: Any,
    name: str = "",
    keep_home: bool = False,
    owner: str = "",
    force: bool = False,
    yes: bool = False,
    dry_run: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
) -> None:
    """Put a workspace away: machine, network, rights, key, and the home unless it is kept."""
    from dataclasses import replace
    from datetime import UTC, datetime

    from gpukiln.commands.consent import require_consent
    from gpukiln.errors import RefusedError
    from gpukiln.workspaces import lifecycle, local_state, reach, view
    from gpukiln.workspaces.network import owner_file, started_here
    from gpukiln.workspaces.provision import alone

    where, found = find_or_gone(name, cloud, region, profile)
    if found is None:  # a `down` that was killed had removed all of it
        owner_file(where, name).unlink(missing_ok=True)
        say(f"{name} is removed")
        return
    removes = found.machines or (found.homes and not keep_home)
    if removes and not owner and not started_here(where, found.name, found.owner):
        raise RefusedError(
            f"{found.name} is {found.owner}'s, and this computer did not start it",
            hint=f"--owner {found.owner} says that you know",
        )
    removed = view.removed_lines(found, datetime.now(UTC), keep_home=keep_home)
    if dry_run:
        for line in removed:
            results().tell(f"would remove {line}")
        say("dry run: nothing was removed")
        return
    if view.loses_work(found, keep_home=keep_home):
        require_consent(
            f"removing {found.name} for good",
            removed,
            yes=yes,
            answer=found.name,
            keeps="--keep-home keeps the home" if found.homes else "",
        )
    with alone(where, found.name):
        local_state.refresh(where)
        wanted = replace(_named(found), owner=owner or found.owner)
        work = None if force else reach.busy(where, found)
        lifecycle.down(where, wanted, found, keep_home=keep_home, force=force, busy=work)
        if not keep_home:
            owner_file(where, found.name).unlink(missing_ok=True)
        local_state.refresh(where)
    for home in found.homes:
        what = "is kept" if keep_home else "is removed"
        say(f"its home {home.volume_id} of {home.size_gib} GiB in {home.zone} {what}")
    say(f"{found.name} is removed")


down.first = "name"


@command(help={"name": "of the workspace", "zone": "where the home is to be", **PLACE})
def move(
    _: Any,
    name: str = "",
    zone: str = "",
    region: str = "",
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """Copy a home into another zone by a snapshot, where its own has no machine; the old one goes then."""
    from gpukiln.errors import UnavailableError, UsageError
    from gpukiln.workspaces import local_state, volumes
    from gpukiln.workspaces.provision import alone

    if not zone:
        raise UsageError("--zone is missing", hint="for example --zone us-west-2b")
    where, found = find(name, cloud, region, profile)
    if not found.homes:
        raise UnavailableError(f"{found.name} has no home", hint="there is nothing to move")
    with alone(where, found.name):
        moved = volumes.move(where, found.homes[0], zone, say=say)
        local_state.refresh(where)
    if json:
        print_document("workspace.move/1", dump(moved))
    else:
        results().tell(f"the home of {found.name} is {moved.volume_id} in {moved.zone}")


move.first = "name"


RENDERED = ("compose", "userdata", "tfvars", "terraform")


@command(
    help={
        **{key: text for key, text in ASKED.items() if key not in ("simulated", "cloud", "profile", "json")},
        "region": "where it is to be",
        "image": "the AMI, which tfvars and terraform need",
        "to": f"what is written: {', '.join(RENDERED)}",
        "out": "a file; for terraform a folder. Without it standard output",
    },
    iterable=["set"],
)
def render(
    _: Any,
    to: str = "",
    out: str = "",
    name: str = "",
    owner: str = "",
    gpu: str = "",
    cpu: int = 0,
    memory: str = "",
    storage: str = "",
    region: str = "",
    image: str = "",
    instance_types: str = "",
    spot: bool = False,
    service: str = "",
    ssh_from: str = "",
    idle_minutes: int = 0,
    set: Any = None,
    from_: str = "",
    roles: str = "",
) -> None:
    """Write what a workspace is made of, without a cloud: Compose file, user data, Terraform."""
    typed = dict(locals())
    from dataclasses import replace

    from gpukiln.errors import UsageError
    from gpukiln.files import write_whole
    from gpukiln.typed import unknown
    from gpukiln.workspaces.render import rendered_files

    spec = _spec(typed)
    if to not in RENDERED:
        raise unknown("--to", to, RENDERED)
    contract = spec.contract
    contract = replace(contract, image_id=image or contract.image_id, ssh_from=ssh_from or contract.ssh_from)
    files = rendered_files(to, replace(spec, contract=contract), say)
    if to == "terraform" and not out:
        raise UsageError("--out is missing", hint="a folder: Terraform reads several files")
    folder = Path(out) if to == "terraform" else Path(out).parent
    for file, content in files.items():
        if out:
            path = folder / file if to == "terraform" else Path(out)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content, mode=0o644)
            say(f"{path}: {len(content)} bytes")
        else:
            sys.stdout.buffer.write(content)


def _spec(typed: Mapping[str, Any]) -> WorkspaceSpec:
    """The contract and its options: a file, changed by options, changed by --set.

    Args:
        typed: The options that `up` and `render` have, by their names.
    """
    from gpukiln.units import Money
    from gpukiln.workspaces.spec import UpOptions, contract_document, typed_spec

    fields = {
        "workspace_name": typed["name"],
        "owner": typed["owner"],
        "region": (words(typed["region"]) or [""])[0],
        "compute_profile.cpu": typed["cpu"],
        "compute_profile.memory": typed["memory"],
        "compute_profile.storage": typed["storage"],
        "instance_types": words(typed["instance_types"]),
        "services": words(typed["service"]),
        "spot": typed["spot"],
        "idle_minutes": typed["idle_minutes"],
    }
    max_price, budget = typed.get("max_price"), typed.get("budget")
    options = UpOptions(
        image=typed["image"],
        ssh_from=typed["ssh_from"],
        roles=typed["roles"],
        simulated=typed.get("simulated", False),
        keep=typed.get("keep", False),
        max_price=Money.parse(max_price, "--max-price") if max_price else None,
        budget=Money.parse(budget, "--budget") if budget else None,
    )
    document = contract_document(Path(typed["from_"])) if typed["from_"] else {}
    given = {key: value for key, value in fields.items() if value}
    return typed_spec({"region": HERE, **document}, given, typed["gpu"], typed["set"] or (), options)


def _again(where: Cloud, found: ExistingWorkspace) -> ExistingWorkspace:
    from gpukiln.workspaces import local_state

    return next((one for one in local_state.refresh(where).workspaces if one.name == found.name), found)


def _named(found: ExistingWorkspace) -> Workspace:
    """What is known of a workspace by its tags, as far as it can be removed."""
    from gpukiln.workspaces.contract import Workspace

    return Workspace(found.name, found.owner, found.region)
