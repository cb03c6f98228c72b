"""The embedded cloud: what runs, how to reach it, how to remove it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import Command, JsonOptions, PlaceOptions, RemovalOptions, print_document, say
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.clouds.embedded.layout import Layout

FORCE = option("even while machines run, which end with it", False)


def _layout() -> Layout:
    from gpukiln.clouds.embedded.layout import Layout
    from gpukiln.state import state_home

    return Layout(state_home())


@dataclass(frozen=True)
class CloudStatus(JsonOptions):
    """Show the server, its machines and what is kept on disk."""

    def run(self) -> None:
        from gpukiln.clouds.embedded.client import server_status
        from gpukiln.clouds.embedded.inventory import problems, stored_disks
        from gpukiln.clouds.embedded.volume_files import stored_volumes

        layout = _layout()
        server, disks, wrong = server_status(layout), stored_disks(layout), problems(layout)
        volumes = stored_volumes(layout)
        if self.json:
            print_document(
                "cloud.status/1",
                home=str(layout.home),
                server=server,
                disks=disks,
                volumes=volumes,
                problems=wrong,
            )
            return
        print(f"home    {layout.home}")
        print(f"server  {server['url'] if server else 'does not run (any command that needs it starts it)'}")
        for machine in server["machines"] if server else ():
            state = "running" if machine["running"] else "stopped"
            gpus = " simulated GPUs" if machine.get("simulated") else ""  # a server of before says nothing
            print(f"machine {machine['instance_id']} {machine['kind']} {state} {machine['address']}{gpus}")
        for disk in disks:
            print(f"disk    {disk['snapshot']} {disk['mib']:6} MiB  {disk['image'] or 'no image'}")
            if disk["problem"]:
                print(f"        {disk['problem']}")
        for volume in volumes:
            size = (
                "can't be read"
                if volume["size_gib"] is None
                else f"{volume['size_gib']} GiB, {volume['zone']}"
            )
            print(
                f"volume  {volume['volume']} {volume['mib']:6} MiB  {size}, {volume['attached_to'] or 'free'}"
            )
        for problem in wrong:
            print(f"wrong   {problem}")


@dataclass(frozen=True)
class CloudEnv(Command):
    """Start the server and print the settings that the AWS CLI needs: eval "$(invoke cloud.env)"."""

    region: str = option(
        "region that the printed settings name", "us-west-2", also="regions", setting="region"
    )

    def run(self) -> None:
        import shlex

        from gpukiln.clouds.select import make_cloud

        for name, value in make_cloud("embedded", self.region).environment().items():
            print(f"export {name}={shlex.quote(value)}" if value else f"unset {name}")


def _refuse_while_machines_run(layout: Layout, *, force: bool) -> None:
    """A build's machine would be lost with the others."""
    from gpukiln.clouds.embedded.client import server_status
    from gpukiln.errors import RefusedError

    running = [m["instance_id"] for m in (server_status(layout) or {}).get("machines", ()) if m["running"]]
    if running and not force:
        raise RefusedError(
            f"{len(running)} machine{'s run' if len(running) > 1 else ' runs'}: {', '.join(running[:5])}",
            hint="a build may need it; wait for its end, or --force",
        )


@dataclass(frozen=True)
class CloudStop(Command):
    """End the server and its machines; images stay."""

    force: bool = FORCE

    def run(self) -> None:
        from gpukiln.clouds.embedded.client import stop_server

        _refuse_while_machines_run(_layout(), force=self.force)
        print("stopped" if stop_server(_layout()) else "the server does not run")


@dataclass(frozen=True)
class CloudClean(RemovalOptions):
    """Show what can go: leftovers, on request images, bases, volumes; --yes removes it."""

    images: bool = option("also every image, snapshot and container image that was made here", False)
    base: bool = option("also the base images; the next build makes a new one from the mirror", False)
    released: bool = option(
        "also images that a channel or another parameter names, with the parameters", False
    )
    volumes: bool = option("also volumes, with what was written on them", False)
    force: bool = FORCE

    def run(self) -> None:
        import sys

        from gpukiln.clouds.embedded.clean import carry_out, plan_cleaning
        from gpukiln.clouds.embedded.client import stop_server
        from gpukiln.clouds.embedded.inventory import problems
        from gpukiln.errors import UsageError

        if self.released and not self.images and not self.base:
            raise UsageError("--released says which images go too", hint="together with --images or --base")
        layout = _layout()
        for problem in problems(layout):
            print(f"wrong   {problem}", file=sys.stderr)
        if self.removes:
            _refuse_while_machines_run(layout, force=self.force)
            stop_server(layout)
        cleaning = plan_cleaning(layout, **self.pick("images", "base", "released", "volumes"))
        for line in cleaning.kept:
            print(f"kept    {line}")
        if self.removes:
            carry_out(layout, cleaning)
        for line in cleaning.lines:
            print(f"{'removed' if self.removes else 'would remove'} {line}")
        if not self.removes:
            count = len(cleaning.lines)
            what = f"--yes removes these {count}" if count else "there is nothing to remove"
            print(f"nothing was removed: {what}", file=sys.stderr)


@dataclass(frozen=True)
class CloudSweep(RemovalOptions, PlaceOptions):
    """Find what ended builds left in one region: of this machine at once, of others past their deadline."""

    region: str = option("AWS region to look at", "us-west-2", also="regions", setting="region")

    def run(self) -> None:
        import sys

        from gpukiln.images import orphans
        from gpukiln.images.builds import Builds
        from gpukiln.instances.orphans import remove_orphans
        from gpukiln.state import state_home

        where, builds = self.where(), Builds(state_home())
        leftovers = orphans.find_local_orphans(where, builds)
        for leftover in leftovers:
            print(leftover, file=sys.stderr if self.json else sys.stdout)
        removed = []
        if not leftovers:
            print(f"nothing is left in {self.region}", file=sys.stderr)
        elif self.removes:
            gone = orphans.remove_orphans(where, builds, say)
            removed = [one for one in leftovers if one.id in gone]
            removed += remove_orphans(where, [one for one in leftovers if one.id not in gone], say)
        else:
            print(f"nothing was removed: --yes removes these {len(leftovers)}", file=sys.stderr)
        if self.json:
            print_document(
                "cloud.sweep/1",
                found=[vars(one) for one in leftovers],
                removed=[one.id for one in removed],
            )


@dataclass(frozen=True)
class CloudConsole(Command):
    """Print what a machine wrote on its console; those of machines that are gone are kept."""

    instance: str = option("instance id, or `last`", first=True, required=True)

    def run(self) -> None:
        from gpukiln.clouds.embedded.inventory import console_file

        print(console_file(_layout(), self.instance).read_text(errors="replace"), end="")


@dataclass(frozen=True)
class CloudSsh(Command):
    """Log in to a machine of the embedded cloud."""

    instance: str = option("instance id, or `last`", first=True, required=True)
    key: str = option(
        "private key of the key pair that the machine was launched with", first=True, required=True
    )
    user: str = option("who logs in", "admin")

    def run(self) -> None:
        import os
        from pathlib import Path

        from gpukiln.clouds.embedded.client import server_status
        from gpukiln.errors import UsageError
        from gpukiln.ssh import HostKeys, Ssh

        running = server_status(_layout())
        machines = [machine for machine in (running or {}).get("machines", ()) if machine["running"]]
        chosen = [machine for machine in machines if self.instance in ("last", machine["instance_id"])]
        if not chosen:
            raise UsageError(
                f"no running machine {self.instance!r}" if machines else "no machine runs",
                hint="`invoke cloud.status` lists them",
                details=tuple(machine["instance_id"] for machine in machines),
            )
        target = chosen[-1]
        machine = Ssh(
            target["address"],
            target["ssh_port"],
            self.user,
            private_key=Path(self.key),
            host_keys=HostKeys.NEW_MACHINE,
        )
        os.execvp("ssh", machine.command(batch=False))  # noqa: S606 - ssh takes over this terminal


@dataclass(frozen=True)
class CloudRefresh(Command):
    """Build a new base image from what the mirror has now; images made from the old one stay."""

    force: bool = FORCE

    def run(self) -> None:
        from gpukiln.clouds.embedded import base
        from gpukiln.clouds.embedded.client import check_host, stop_server
        from gpukiln.progress import Progress

        check_host()
        layout, progress = _layout(), Progress()
        _refuse_while_machines_run(layout, force=self.force)
        stop_server(layout)
        new = base.refresh(layout)
        with progress.step("base image"):
            base.build_base(layout, new, say=progress.say)
        print(new.image_id)
