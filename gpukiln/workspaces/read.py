"""Reads a workspace's contract from a file; each mistake is told, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpukiln.catalog.load import read_yaml
from gpukiln.catalog.regions import check_region
from gpukiln.errors import UsageError
from gpukiln.offers.request import parse as parse_request
from gpukiln.parsing import parse_json, read_text
from gpukiln.typed import load, short
from gpukiln.workspaces import network, rights
from gpukiln.workspaces.contract import Workspace

# What contracts said before, and what they say now.
FORMER = {
    "subnet_id": "a list, one subnet a zone, so that another zone can be tried: subnet_ids: [{}]",
    "availability_zone": "nothing: a subnet says its zone, and a home pins it; leave it out",
    "availability_zones": "nothing: a subnet says its zone, and a home pins it; leave it out",
    "os_type": "nothing: the image says the system; leave it out, or name an image_id",
    "coder_agent_init_script": "the same under another name: agent_init_script",
}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
COUNT = re.compile(r"(^|:)\s*[\d.]*\s*(:|$)")  # as a part of its own, which a memory is not: A100:80GB
COUNTS = ("cpu", "gpu_count")


def contract_document(path: Path) -> dict[str, Any]:
    """What a file in YAML or JSON says of a contract, not looked at yet.

    Raises:
        UsageError: It can't be read.
    """
    return _json(path) if path.suffix == ".json" else read_yaml(path)


def parse(document: Mapping[str, Any], *, where: str) -> Workspace:
    """A workspace's contract.

    Args:
        where: File, for the message.

    Raises:
        UsageError: It is none.
    """
    former = [
        f"{name} was found, wanted {words.format(short(document[name], quote=False))}"
        for name, words in FORMER.items()
        if name in document
    ]
    if wrong := [*former, *_refused(document.get("capabilities"))]:
        raise _mistakes(where, wrong)
    wanted = load(Workspace, dict(document), where=where, hint="docs/schemas/workspace.json has its form")
    if wrong := list(_senseless(wanted)):
        raise _mistakes(where, wrong)
    return wanted


def _refused(capabilities: object) -> Iterator[str]:
    """What is told in other words than those of the form; what stands for a secret is never shown."""
    if not isinstance(capabilities, Mapping):
        return
    if capabilities.get("gui_rdp"):
        yield "capabilities.gui_rdp: it is for Windows, and no image of that is made; gui_vnc is for Linux"
    secrets = capabilities.get("secrets", {})
    if not isinstance(secrets, Mapping):
        yield "capabilities.secrets: wanted names of environment variables with references, NAME: REFERENCE"
    elif wrong := [str(name) for name, value in secrets.items() if not isinstance(value, str)]:
        yield f"capabilities.secrets: {', '.join(wrong)}: wanted a reference, which is a text"


def _senseless(wanted: Workspace) -> Iterator[str]:
    """What has the right form, and can't be meant."""
    asked = wanted.compute_profile
    for name in COUNTS:
        if getattr(asked, name) < 0:
            yield f"compute_profile.{name}: found {getattr(asked, name)}, wanted 0 or more"
    if wanted.idle_minutes < 0:
        yield f"idle_minutes: found {wanted.idle_minutes}, wanted 0 or more"
    if asked.gpu_type and COUNT.search(asked.gpu_type):
        yield f"compute_profile.gpu_type: found {asked.gpu_type!r}, wanted a name; gpu_count says how many"
    elif asked.gpu_type:
        yield from _told("compute_profile.gpu_type", lambda: parse_request(asked.gpu_type))
    for name in wanted.capabilities.secrets:
        if not VARIABLE.fullmatch(name):
            yield f"capabilities.secrets: found {name!r}, wanted the name of an environment variable"
    unknown = list(_told("region", lambda: check_region(wanted.region)))
    yield from unknown or _told("capabilities", lambda: rights.policy(wanted))
    yield from _told("ssh_from", lambda: network.ingress_rules(wanted))


def _told(where: str, look: Callable[[], object]) -> Iterator[str]:
    """The mistake that another part finds, where it uses the value."""
    try:
        look()
    except UsageError as error:
        yield f"{where}: {error.message}" + (f"; {error.hint}" if error.hint else "")


def _mistakes(where: str, found: list[str]) -> UsageError:
    if len(found) == 1:
        return UsageError(f"{where}: {found[0]}")
    return UsageError(f"{where}: {len(found)} mistakes", details=tuple(found))


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
