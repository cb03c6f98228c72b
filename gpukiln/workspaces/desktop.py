"""Whether an image has a desktop for the browser: the role kasmvnc puts it there when the image is baked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpukiln.clouds.tags import DESKTOP_TAG
from gpukiln.errors import IncompatibleError
from gpukiln.instances.tags import tags_of


def require_desktop(image: Mapping[str, Any]) -> str:
    """The version of KasmVNC that an image has.

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
