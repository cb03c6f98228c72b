"""The embedded cloud: what runs, how to reach it, how to remove it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from gpukiln.cli.command import (
    DEFAULT_REGION,
    REGION_DEFAULT,
    Command,
    JsonOptions,
    PlaceOptions,
    RemovalOptions,
    results,
    say,
)
from gpukiln.errors import UsageError
from gpukiln.options import option

# Machines end with the server, and with one that a build uses the build fails.
FORCE = option("even while machines run, which end with it", False)
INSTANCE = option("instance id, or `last`", first=True, required=True)


@dataclass(frozen=True)
class CloudStatus(JsonOptions):
    """Show the server, its machines and what is kept on disk."""

    def run(self) -> None:
        from gpukiln.clouds.embedded import view
        from gpukiln.clouds.embedded.layout import Layout

        status = view.status(Layout())
        self.report(status, view.status_lines(status), schema="cloud.status/1")


@dataclass(frozen=True)
class CloudEnv(Command):
    """Start the server and print the settings that the AWS CLI needs: eval "$(invoke cloud.env)"."""

    region: str = option(
        "region that the printed settings name", DEFAULT_REGION, also="regions", setting="region"
    )

    def run(self) -> None:
        import shlex

        from gpukiln.clouds.select import make_cloud

        for name, value in make_cloud("embedded", self.region).environment().items():
            # unset, because a variable of the shell, such as AWS_PROFILE, would take precedence over these.
            print(f"export {name}={shlex.quote(value)}" if value else f"unset {name}")


@dataclass(frozen=True)
class CloudStop(Command):
    """End the server and its machines; images stay."""

    force: bool = FORCE

    def run(self) -> None:
        from gpukiln.clouds.embedded.client import refuse_while_machines_run, stop_server
        from gpukiln.clouds.embedded.layout import Layout

        refuse_while_machines_run(Layout(), force=self.force)
        print("stopped" if stop_server(Layout()) else "the server does not run")


@dataclass(frozen=True)
class CloudClean(RemovalOptions):
    """Show what can be removed: orphans, and on request images, bases and volumes; --yes removes it."""

    images: bool = option("also every image, snapshot and container image that was made here", False)
    base: bool = option("also the base images; the next build makes a new one from the mirror", False)
    released: bool = option(
        "also images that a channel or another parameter names, with the parameters", False
    )
    volumes: bool = option("also volumes, with what was written on them", False)
    force: bool = FORCE

    def run(self) -> None:
        from gpukiln.clouds.embedded.clean import carry_out, plan_cleaning
        from gpukiln.clouds.embedded.client import refuse_while_machines_run, stop_server
        from gpukiln.clouds.embedded.inventory import problems
        from gpukiln.clouds.embedded.layout import Layout

        if self.released and not self.images and not self.base:
            raise UsageError("--released says which images go too", hint="together with --images or --base")
        layout = Layout()
        # First and on standard error: whoever removes something should know that a file is damaged.
        for problem in problems(layout):
            say(f"wrong   {problem}")
        if self.removes:
            refuse_while_machines_run(layout, force=self.force)
            stop_server(layout)
        # After the server has ended: while it runs, it can still create images and volumes.
        cleaning = plan_cleaning(layout, **self.pick("images", "base", "released", "volumes"))
        results().show(*(f"kept    {line}" for line in cleaning.kept))
        if self.removes:
            carry_out(layout, cleaning)
        # Printed after the removal: no line says that something is gone that is still there.
        verb = "removed" if self.removes else "would remove"
        results().show(*(f"{verb} {line}" for line in cleaning.lines))
        if not self.removes:
            count = len(cleaning.lines)
            reason = f"--yes removes these {count}" if count else "there is nothing to remove"
            say(f"nothing was removed: {reason}")


@dataclass(frozen=True)
class CloudSweep(RemovalOptions, PlaceOptions):
    """Find what ended builds left in one region: of this machine at once, of others past their deadline."""

    region: str = option(f"AWS region to look at; {REGION_DEFAULT}", also="regions", setting="region")

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import find_local_orphans, remove_local_orphans

        cloud, builds = self.connect_to(self.cloud, self.region or DEFAULT_REGION), Builds()
        orphans = find_local_orphans(cloud, builds)
        self.show(*map(str, orphans))
        removed = []
        if not orphans:
            say(f"nothing is left in {cloud.region}")
        elif self.removes:
            removed = remove_local_orphans(cloud, builds, orphans, say)
        else:
            say(f"nothing was removed: --yes removes these {len(orphans)}")
        ids = [orphan.id for orphan in removed]
        self.report(None, schema="cloud.sweep/1", found=orphans, removed=ids)


@dataclass(frozen=True)
class CloudConsole(Command):
    """Print what a machine wrote on its console; those of machines that are gone are kept."""

    instance: str = INSTANCE

    def run(self) -> None:
        from gpukiln.clouds.embedded.inventory import console_file
        from gpukiln.clouds.embedded.layout import Layout

        # Firmware and kernel write any byte, so that not all of it is UTF-8; and it is printed as it is,
        # without Rich's markup.
        sys.stdout.write(console_file(Layout(), self.instance).read_text(errors="replace"))


@dataclass(frozen=True)
class CloudSsh(Command):
    """Log in to a machine of the embedded cloud."""

    instance: str = INSTANCE
    key: str = option(
        "private key of the key pair that the machine was launched with", first=True, required=True
    )
    user: str = option("the user of the machine", "admin")

    def run(self) -> None:
        import os
        from pathlib import Path

        from gpukiln.clouds.embedded.client import ssh_to
        from gpukiln.clouds.embedded.layout import Layout

        # The exit code is ssh's, and so are terminal and signals: this process becomes ssh.
        ssh = ssh_to(Layout(), self.instance, self.user, Path(self.key))
        os.execvp("ssh", ssh.command(batch=False))  # noqa: S606 - ssh takes over this terminal


@dataclass(frozen=True)
class CloudRefresh(Command):
    """Build a new base image from what the mirror has now; images made from the old one stay."""

    force: bool = FORCE

    def run(self) -> None:
        from gpukiln.clouds.embedded import base, client
        from gpukiln.clouds.embedded.layout import Layout
        from gpukiln.progress import Progress

        # Before the server is stopped: a computer that can't build a base keeps its running machines.
        client.check_host()
        layout, progress = Layout(), Progress()
        client.refuse_while_machines_run(layout, force=self.force)
        client.stop_server(layout)
        new = base.refresh(layout)
        with progress.step("base image"):
            base.build_base(layout, new, say=progress.say)
        print(new.image_id)
