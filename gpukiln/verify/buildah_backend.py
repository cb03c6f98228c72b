"""testinfra's backend for a working container of Buildah, `buildah://NAME`."""

from typing import Any

from testinfra.backend import base


class BuildahBackend(base.BaseBackend):  # type: ignore[misc]  # testinfra has no types
    """Runs each command in the container, as the image's own user.

    Args:
        name: The container's name or id.
    """

    NAME = "buildah"

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name = name
        super().__init__(name, *args, **kwargs)

    def run(self, command: str, *args: str, **_: Any) -> base.CommandResult:
        """Run a command.

        Args:
            command: Shell text with %s for each argument.
            args: What is quoted into it.
        """
        text = self.get_command(command, *args)
        return self.run_local(
            # The default isolation needs an OCI runtime and can't run in containers without
            # privileges; chroot works there (--isolation in buildah-run(1)).
            "buildah run --isolation=chroot --network=host %s -- /bin/sh -c %s",
            self.name,
            text,
        )
