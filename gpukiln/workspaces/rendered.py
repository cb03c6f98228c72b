"""Everything that a workspace is made of, as files, without a cloud."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

from gpukiln.catalog.load import ROOT
from gpukiln.errors import UsageError
from gpukiln.workspaces import render, userdata
from gpukiln.workspaces.plan import offline
from gpukiln.workspaces.raise_up import Wish, prepared

MODULE = ROOT / "examples" / "coder"
BESIDE = "workspace"  # the folder of the module, beside the root module that calls it


def rendered(to: str, wish: Wish, say: Callable[[str], None]) -> dict[str, bytes]:
    """Files by their names; a root module of Terraform is whole, with the module that it calls.

    Args:
        to: compose, userdata, tfvars or terraform.
        say: Told what somebody has to know of the services.

    Raises:
        UsageError: No service or no image is named, and one is needed.
        IncompatibleError: No machine satisfies it, or no release of a service runs there.
    """
    made, extras = prepared(None, offline(wish.wanted, datetime.now(UTC).date()), wish, say)
    wanted = made.wanted
    if to == "compose":
        if not extras.compose:
            raise UsageError("no service is named", hint="--service ollama, for example")
        return {"compose.yaml": extras.compose.encode()}
    data = userdata.render(
        wanted,
        own_image=not extras.roles_url,
        gpus=made.gpus,
        home=wanted.capabilities.persistent_home,
        compose=extras.compose,
        roles_url=extras.roles_url,
        roles_commit=extras.roles_commit,
    )
    if to == "userdata":
        return {"user-data": data}
    if not wanted.image_id:
        raise UsageError("no image is named", hint="--image ami-..., as `offer.list --image auto` says it")
    variables = render.tfvars(
        wanted,
        made.offers,
        image_id=wanted.image_id,
        user_data=data,
    )
    if to == "tfvars":
        return {render.RENDERED: _json(variables)}
    root = render.terraform(wanted, variables, source=f"./{BESIDE}")
    module = {f"{BESIDE}/{file.name}": file.read_bytes() for file in sorted(MODULE.glob("*.tf"))}
    return {**{name: _json(text) for name, text in root.items()}, **module}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
