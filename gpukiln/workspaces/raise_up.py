"""The way of `workspace.up`: planned region by region, started, waited for, looked at, tried elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

from gpukiln.clouds.base import Cloud
from gpukiln.clouds.select import check_cidr
from gpukiln.errors import (
    BusyError,
    CheckFailedError,
    GpukilnError,
    IncompatibleError,
    UnavailableError,
    UsageError,
)
from gpukiln.offers.cost import OverBudgetError
from gpukiln.offers.model import Offer
from gpukiln.parsing import refuse_credentials
from gpukiln.workspaces import health, known, lifecycle, network, services, userdata
from gpukiln.workspaces.contract import Workspace
from gpukiln.workspaces.desktop import require_desktop
from gpukiln.workspaces.differs import require_same
from gpukiln.workspaces.images import image_id_of
from gpukiln.workspaces.lifecycle import Found
from gpukiln.workspaces.plan import NO_LIMITS, Limits, Plan, plan, wants_gpus
from gpukiln.workspaces.preview import Preview, preview, running, use_of
from gpukiln.workspaces.up import DONE, Extras, alone, resume, start, there, wait_until_done

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Wish:
    """What somebody wants, before a region is known.

    Args:
        image: An AMI or a build; empty: chosen.
        ssh_from: A network, `me`, or empty.
        roles: https://REPOSITORY@COMMIT, for an image that is not ours; empty: none.
        simulated: Whether the machine gets simulated GPUs.
        keep: Whether Ctrl-C leaves a machine that this call started and that is not usable yet.
        limits: What the machine may cost.
    """

    wanted: Workspace
    image: str = ""
    ssh_from: str = ""
    roles: str = ""
    simulated: bool = False
    keep: bool = False
    limits: Limits = NO_LIMITS


Consent = Callable[[Cloud, Plan], None]
"""Asked before money is spent: it returns, or raises RefusedError."""


def consented(_: Cloud, __: Plan) -> None:
    """Nobody is asked."""


def raise_up(
    clouds: Sequence[Cloud],
    wish: Wish,
    say: Callable[[str], None],
    *,
    consent: Consent = consented,
    wait: bool = True,
    replace_unhealthy: bool = False,
) -> tuple[Cloud, Found]:
    """A workspace in the first region that has a machine for it.

    Args:
        clouds: The same cloud in each region, the best first.
        consent: Asked in each region before a machine is started there.
        wait: Whether it is waited for until its stages are done.
        replace_unhealthy: Whether a machine that is unhealthy is removed, and the next offer is taken.

    Raises:
        BusyError: No region has capacity now; the details are the whole walk.
        IncompatibleError: No region can have it.
        CheckFailedError: It does not come up, or every machine was unhealthy.
    """
    refusals: list[GpukilnError] = []
    for cloud in _where_it_is(clouds, wish.wanted):
        try:
            return cloud, _in_region(
                cloud, wish, say, consent, wait=wait, replace_unhealthy=replace_unhealthy
            )
        except (BusyError, IncompatibleError, OverBudgetError) as error:
            if len(clouds) == 1:
                raise
            say(f"{cloud.region}: {error.message}")
            refusals.append(error)
    raise _nowhere(clouds, refusals)


def look_ahead(clouds: Sequence[Cloud], wish: Wish, say: Callable[[str], None]) -> Preview:
    """What `raise_up` would start, in the first region that has a machine for it. Nothing is made.

    Raises:
        IncompatibleError: No region can have it.
        RefusedError: See `raise_up`.
    """
    refusals: list[GpukilnError] = []
    for cloud in _where_it_is(clouds, wish.wanted):
        wanted = _placed(cloud, wish)
        found = there(cloud, wanted)
        if found and found.machines:
            _require_same(cloud, wanted, wish, found)
            return running(cloud, found)
        try:
            made, _ = prepared(cloud, _planned(cloud, wanted, wish, found), wish, say)
            return preview(cloud, made, datetime.now(UTC).date())
        except (IncompatibleError, OverBudgetError) as error:
            if len(clouds) == 1:
                raise
            say(f"{cloud.region}: {error.message}")
            refusals.append(error)
    raise _nowhere(clouds, refusals)


def _nowhere(clouds: Sequence[Cloud], refusals: Sequence[GpukilnError]) -> GpukilnError:
    kinds = (BusyError, OverBudgetError, IncompatibleError)
    kind = next(kind for kind in kinds if any(isinstance(one, kind) for one in refusals))
    details = tuple(line for one in refusals for line in (one.message, *one.details))
    return kind(
        f"none of {', '.join(one.region for one in clouds)} has a machine for it",
        details=details,
        hint="try later, ask for less, or name another region",
    )


def _where_it_is(clouds: Sequence[Cloud], wanted: Workspace) -> Sequence[Cloud]:
    """The region that has the workspace or its home already; else all."""
    if len(clouds) == 1:
        return clouds
    return [one for one in clouds if there(one, replace(wanted, region=one.region))] or clouds


def _in_region(
    cloud: Cloud,
    wish: Wish,
    say: Callable[[str], None],
    consent: Consent,
    *,
    wait: bool,
    replace_unhealthy: bool,
) -> Found:
    wanted = _placed(cloud, wish)
    with alone(cloud, wanted.workspace_name):
        made: Plan | None = None
        found = there(cloud, wanted)
        started = False
        try:
            if found and found.machines:
                _require_same(cloud, wanted, wish, found)
                resume(cloud, wanted, found, say=say)
            else:
                made, extras = prepared(cloud, _planned(cloud, wanted, wish, found), wish, say)
                consent(cloud, made)
                start(cloud, made, extras, say=say)
                started = True
            known.refresh(cloud)  # it is there now, however its boot goes on
            while wait:
                try:
                    return _good(cloud, wanted, say, deep=replace_unhealthy)
                except CheckFailedError as error:
                    if not replace_unhealthy:
                        raise
                    rest, extras = prepared(
                        cloud, _rest(cloud, made or _planned(cloud, wanted, wish, found), error), wish, say
                    )
                    if made is None:  # it ran already, so that nobody was asked yet
                        consent(cloud, rest)
                    _put_away(cloud, wanted, error, say, started=started)
                made = rest
                start(cloud, made, extras, say=say)
                started = True
            return _again(cloud, wanted)
        except KeyboardInterrupt as interrupt:
            mine = started and not wish.keep
            _interrupted(cloud, wanted, interrupt, mine=mine, keep_home=bool(found and found.homes))
            raise


def _interrupted(
    cloud: Cloud, wanted: Workspace, interrupt: KeyboardInterrupt, *, mine: bool, keep_home: bool
) -> None:
    """Remove what this call started and nobody can use yet; note what runs, what it costs, and what to type.

    Args:
        mine: Whether the machine goes where it is not usable yet.
        keep_home: Whether the home was there before.
    """
    name = wanted.workspace_name
    try:
        for found in lifecycle.find(cloud, name):
            usable = any(one.stage.startswith(DONE) for one in found.machines)
            if not found.machines or usable or not mine:
                note_what_runs(cloud, found, interrupt)
                continue
            lifecycle.down(cloud, wanted, found, keep_home=keep_home, force=True)
            ids = ", ".join(one.instance_id for one in found.machines)
            interrupt.add_note(
                f"{ids} was not usable yet and is removed; the home stays"
                if keep_home
                else f"{ids} was not usable yet and is removed, and all that was made with it"
            )
        known.refresh(cloud)
    except (GpukilnError, KeyboardInterrupt) as error:
        what = error.message if isinstance(error, GpukilnError) else "interrupted again"
        interrupt.add_note(
            f"{name} may still run and cost money ({what}); `invoke workspace.down {name}` removes it"
        )


def note_what_runs(cloud: Cloud, found: Found, interrupt: KeyboardInterrupt) -> None:
    """Note what goes on running after Ctrl-C, what it costs, and the commands that go on or remove it."""
    place = f"--region {cloud.region} --cloud {cloud.name}"
    for machine in found.machines:
        price = f"{machine.usd_hour} USD/hour" if machine.usd_hour else "at a price that is not known"
        interrupt.add_note(
            f"{found.name} runs: {machine.instance_id}, {machine.instance_type} in {machine.zone}, {price}, "
            f"stage {machine.stage or 'none yet'}"
        )
        interrupt.add_note(
            f"`invoke workspace.up --name {found.name} --owner {found.owner} {place}` goes on, "
            f"`invoke workspace.down {found.name} {place}` removes it"
        )


def _require_same(cloud: Cloud, wanted: Workspace, wish: Wish, found: Found) -> None:
    simulated, roles, limits = wish.simulated, wish.roles, wish.limits
    refuse_credentials(roles, "--roles", where="a message")
    require_same(cloud, wanted, found, simulated=simulated, roles=roles, limits=limits)


def _planned(cloud: Cloud, wanted: Workspace, wish: Wish, found: Found | None) -> Plan:
    if wants_gpus(wanted) and not (cloud.has_gpus or wish.simulated):
        gpus = f"{wanted.compute_profile.gpu_count} {wanted.compute_profile.gpu_type}".rstrip()
        raise UsageError(
            f"machines of --cloud {cloud.name} have no GPUs, wanted {gpus}",
            hint="--simulated gives them simulated ones, for a rehearsal; --cloud aws has real ones; --gpu 0 "
            "wants none",
        )
    use = use_of(wanted, found.homes if found else ())
    return plan(cloud, wanted, datetime.now(UTC).date(), limits=wish.limits, use=use)


def _good(cloud: Cloud, wanted: Workspace, say: Callable[[str], None], *, deep: bool) -> Found:
    """The workspace once its stages are done, and where that was asked for, once it was found healthy.

    Raises:
        CheckFailedError: A stage failed, or it is unhealthy.
    """
    if wanted.capabilities.identity_mode == "iam":
        wait_until_done(cloud, wanted, say=say)
    else:
        say("it has no rights to tell how its boot goes: `workspace.status --deep` looks")
    if deep:
        looked = health.look(cloud, _again(cloud, wanted))
        if not looked.good:
            raise CheckFailedError(
                f"{wanted.workspace_name} is {looked.words}", hint=f"the report is in {looked.folder}"
            )
    return _again(cloud, wanted)


def _again(cloud: Cloud, wanted: Workspace) -> Found:
    found = there(cloud, wanted)
    if found is None or not found.machines:
        raise UnavailableError(f"{wanted.workspace_name} is gone: somebody put it away meanwhile")
    return found


def _rest(cloud: Cloud, made: Plan, reason: CheckFailedError) -> Plan:
    """What is left to try instead of the unhealthy machine.

    Raises:
        CheckFailedError: Nothing.
    """
    machine = lifecycle.only(_again(cloud, made.wanted))
    rest = tuple(one for one in made.offers if one.instance_type != machine.instance_type)
    if not rest:
        reason.add_note("no other machine satisfies the request; this one is left, to be looked at")
        raise reason
    return replace(made, offers=rest)


def _put_away(
    cloud: Cloud, wanted: Workspace, reason: CheckFailedError, say: Callable[[str], None], *, started: bool
) -> None:
    """End the unhealthy machine; its home stays.

    Args:
        started: Whether this call started it, so that nobody has worked on it.

    Raises:
        CheckFailedError: It has no home volume, and files of its user may be on it.
    """
    found = _again(cloud, wanted)
    machine = lifecycle.only(found)
    if not started and not machine.home_id:
        reason.add_note(
            f"it has no home volume, so that its user's files are on it: it is left; "
            f"`invoke workspace.down {found.name}` removes it"
        )
        raise reason
    say(f"{machine.instance_id} ({machine.instance_type}) is removed: {reason.message}")
    lifecycle.down(cloud, wanted, found, keep_home=True, force=True)


def _placed(cloud: Cloud, wish: Wish) -> Workspace:
    """The contract in a region, with the image and the network that were named."""
    wanted = replace(wish.wanted, region=cloud.region)
    if wish.ssh_from:
        wanted = replace(wanted, ssh_from=cloud.ssh_cidr if wish.ssh_from == "me" else wish.ssh_from)
        check_cidr(wanted.ssh_from)
        network.ingress_rules(wanted)  # everybody is refused before anything is made
    if wish.simulated and cloud.has_gpus:
        raise UsageError("--simulated is for --cloud embedded", hint="leave it out")
    return replace(wanted, image_id=image_id_of(cloud, wish.image)) if wish.image else wanted


def prepared(cloud: Cloud | None, made: Plan, wish: Wish, say: Callable[[str], None]) -> tuple[Plan, Extras]:
    """What the machine is told beside the contract; only the offers stay on which its services run.

    Args:
        cloud: For the hint; None: nothing is going to be started.

    Raises:
        IncompatibleError: No release of a service runs there, or the image lacks the desktop.
        UsageError: The image is none of ours, and the roles that it needs are not named.
    """
    refuse_credentials(wish.roles, "--roles", where="the machine's user data")
    repository, _, commit = wish.roles.rpartition("@")
    if (
        made.subject is None
        and cloud
        and not (repository.startswith("https://") and COMMIT.fullmatch(commit))
    ):
        raise UsageError(
            f"{made.choice.image_id} is none of ours, so that its machine has to run the roles first: "
            f"--roles is {wish.roles!r}, wanted https://REPOSITORY@COMMIT with a whole commit",
            hint=f"`invoke ami.build --region {cloud.region} --cloud {cloud.name}` bakes and proves an image",
        )
    if made.wanted.capabilities.gui_vnc:
        require_desktop(made.image)
    compose = ""
    if made.wanted.services:
        # A simulated GPU is a double of NVML's answers: no container can be given one.
        made, compose = _with_services(made, say, has_gpus=made.gpus > 0 and not wish.simulated)
    return made, Extras(compose, repository, commit, wish.simulated, wish.roles)


def _with_services(made: Plan, say: Callable[[str], None], *, has_gpus: bool) -> tuple[Plan, str]:
    wanted, today = made.wanted, datetime.now(UTC).date()
    named = services.load(wanted.services)
    if has_gpus:
        named, notes = services.require_fit(named, made.offers[0].instance_type, made.subject, today)
        for note in notes:
            say(note)
        made = replace(made, offers=tuple(one for one in made.offers if _runs(named, one, made, today)))
    rendered = services.compose(
        named,
        ("all",) if has_gpus else (),
        user=userdata.user_of(wanted.owner),
        secrets=bool(wanted.capabilities.secrets),
    )
    for note in rendered.notes:
        say(note)
    return made, rendered.text


def _runs(named: Sequence[services.Service], offer: Offer, made: Plan, today: date) -> bool:
    try:
        services.require_fit(named, offer.instance_type, made.subject, today)
    except IncompatibleError:
        return False
    return True
