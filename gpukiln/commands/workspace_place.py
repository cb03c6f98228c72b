"""What the commands of an existing workspace share: where it is, and that `ssh NAME` reaches it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.cli.command import ProfileOptions, say
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.workspaces.lifecycle import ExistingWorkspace


@dataclass(frozen=True)
class ExistingOptions(ProfileOptions):
    """A command that works on an existing workspace."""

    name: str = option("name of the workspace", first=True)
    region: str = option("where it is; default: as this computer remembers", also="regions")
    cloud: str = option("embedded (this machine) or aws (your account); default: as this computer remembers")

    def find(self) -> tuple[Cloud, ExistingWorkspace]:
        """The workspace in the region that is named, or where this computer remembers it.

        Raises:
            UsageError: There is no such workspace.
        """
        from gpukiln.workspaces.locate import missing

        cloud, workspace = self.find_or_gone()
        if workspace is None:
            raise missing(cloud, self.name)
        return cloud, workspace

    def find_or_gone(self) -> tuple[Cloud, ExistingWorkspace | None]:
        """As `find`; None: this computer remembered the workspace, and it is gone."""
        from gpukiln.workspaces.locate import locate

        return locate(self.name, self.cloud, self.region, self.connect_to)


def reach_by_name(cloud: Cloud, workspace: ExistingWorkspace) -> None:
    """Have `ssh NAME` reach a workspace; a terminal is asked once for a line in ~/.ssh/config."""
    from gpukiln.cli.consent import require_consent
    from gpukiln.errors import RefusedError
    from gpukiln.workspaces import operations

    def ask(line: str) -> bool:
        try:
            require_consent("adding a line at the top of ~/.ssh/config", (line,), yes=False)
        # Only this line is declined: the workspace runs, and `ssh -F` reaches it.
        except RefusedError:
            return False
        return True

    # sys.stdin is None where it was closed at the start; a script is not asked, and its ~/.ssh/config stays.
    has_terminal = sys.stdin and sys.stdin.isatty()
    operations.reach_by_name(cloud, workspace, say, ask if has_terminal else None)
