"""services/*.yaml: the services that can run on a workspace, and the Compose file that runs them.

A service has releases, the newest first: on a machine the first one runs that fits its driver and its GPU.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, model_validator

from gpukiln import typed
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.catalog.workloads import workload
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.gpus import engines
from gpukiln.images.subject import Subject
from gpukiln.offers.fit import fit
from gpukiln.typed import strict
from gpukiln.workspaces.agent import RUN_FOLDER

# A tag alone can be moved to another image after its review.
PINNED = re.compile(r"[a-z0-9.-]+(/[a-z0-9._-]+)+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")
UUID = re.compile(r"(GPU|MIG)-[0-9a-f-]+")
SECRETS = f"{RUN_FOLDER}/env"  # the agent writes it at boot
# Ports below 1024 need privileges that a container's user lacks.
LEAST_PORT, MOST_PORT = 1024, 65535


def _pinned(image: str) -> str:
    if not PINNED.fullmatch(image):
        raise ValueError("wanted NAME:TAG@sha256:DIGEST: the tag is for readers, the digest pins the image")
    return image


def _port(port: int) -> int:
    if not LEAST_PORT <= port <= MOST_PORT:
        raise ValueError(f"wanted {LEAST_PORT} to {MOST_PORT}")
    return port


def _known_workload(name: str) -> str:
    try:
        workload(name)
    except UsageError as error:
        raise ValueError(error.message) from error
    return name


@strict
class ServiceRelease:
    """One release of a service.

    Args:
        image: With tag and digest; the digest is that of all its architectures.
        workload: Its row of the catalogue, which has the driver and the GPU that it needs.
        source: Who pins this digest.
    """

    image: Annotated[str, AfterValidator(_pinned)]
    workload: Annotated[str, AfterValidator(_known_workload)]
    source: str


@strict
class Service:
    """What runs in a container on a workspace.

    Args:
        name: That of its file.
        port: On the machine's loopback address, and in the container.
        folder: In the container; what is in it is below the home, so that it outlives the machine.
        answers: The path that answers 200 where it works.
        computes: How it is shown that it computes on the GPU, see gpukiln/probe/services.py; empty: not.
        needs_gpu: Whether it does nothing without one.
        healthcheck: What the engine runs in the container, as Compose takes it.
        start_s: For which it may be unhealthy at first.
        releases: The newest first.
        settings: The environment variables that the program reads; no others can be set.
        model: The one that is served, or that shows that it computes; empty: it has none.
        shared_memory: Of the container, for example 8gb; empty: the engine's own size.
        user: As whom the container starts; empty: as its image says.
    """

    name: str
    title: str
    port: Annotated[int, AfterValidator(_port)]
    folder: str
    answers: str
    computes: Literal["ollama", "vllm", ""]
    needs_gpu: bool
    healthcheck: tuple[str, ...]
    start_s: int
    releases: tuple[ServiceRelease, ...]
    environment: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    model: str = ""
    command: tuple[str, ...] = ()
    shared_memory: str = ""
    user: str = ""

    @model_validator(mode="after")
    def _check_fields(self) -> Service:
        for name in self.environment:
            if name not in self.settings:
                error = typed.unknown("environment variable", name, self.settings)
                raise ValueError("; ".join(filter(None, (error.message, error.hint))))
        if not self.releases:
            raise ValueError("it has no release")
        return self


@dataclass(frozen=True)
class ComposeFile:
    """A Compose file.

    Args:
        notes: For the user who requested the services.
    """

    text: str
    notes: tuple[str, ...]


def names(root: Path = ROOT) -> list[str]:
    """The services that there are."""
    return sorted(path.stem for path in (root / "services").glob("*.yaml"))


def load(service_names: Iterable[str], root: Path = ROOT) -> tuple[Service, ...]:
    """Definitions of services, each once.

    Raises:
        UsageError: There is no such service, a file does not fit, or two want the same port.
    """
    services: dict[str, Service] = {}
    for name in service_names:
        if name not in names(root):
            raise typed.unknown("service", name, names(root))
        where = f"services/{name}.yaml"
        data = read_yaml(root / where)
        service = services[name] = typed.load(Service, {"name": name, **data}, where=where)
        # A file is found by its name; a second one inside could only disagree.
        if service.name != name:
            raise UsageError(f"{where} calls itself {service.name}", hint="leave `name` out")
    for service in services.values():
        if same := [
            other.name for other in services.values() if other.port == service.port and other != service
        ]:
            raise UsageError(
                f"{service.name} and {' and '.join(same)} use port {service.port}", hint="take one of them"
            )
    return tuple(services.values())


def require_fit(
    services: Sequence[Service], machine: str, image: Subject | None, today: date
) -> tuple[tuple[Service, ...], tuple[str, ...]]:
    """The services, each with the newest of its releases that fits a machine alone; and why, where it is old.

    Args:
        machine: The instance type, one with a GPU.
        image: What is booted; None: its driver is not known, so that only the GPU is checked.

    Raises:
        IncompatibleError: No release of one fits; the details say why of each.
    """
    chosen, notes = [], []
    for service in services:
        fitting, wrong = _fitting(service, machine, image, today)
        chosen.append(fitting)
        notes += [f"{fitting.name}: {_tag(fitting.releases[0])} is taken, for {line}" for line in wrong]
    return tuple(chosen), tuple(notes)


def _fitting(service: Service, machine: str, image: Subject | None, today: date) -> tuple[Service, list[str]]:
    # Findings about machine and image were reported when the plan was made; only those of the workload count
    # here.
    alone = fit(machine, image=image, workload=None, today=today)
    details: list[str] = []
    hint = ""
    for release in service.releases:
        findings = fit(machine, image=image, workload=workload(release.workload), today=today)
        wrong = [finding for finding in findings if finding.severity == "error" and finding not in alone]
        if not wrong:
            return replace(service, releases=(release,)), details
        details += [f"{_tag(release)}: {finding.message}" for finding in wrong]
        hint = wrong[0].remedy
    raise IncompatibleError(
        f"no release of {service.title} runs on {machine}" + (f" from {image.image_id}" if image else ""),
        details=tuple(details),
        hint=hint,
    )


def _tag(release: ServiceRelease) -> str:
    return release.image.partition("@")[0]


def compose(
    services: Sequence[Service],
    gpus: Sequence[str] | Literal["all"],
    *,
    user: str,
    secrets: bool = False,
) -> ComposeFile:
    """The Compose file of services, of the first release of each (see `require_fit`).

    It is read by docker compose and by docker-compose 1.29 of Debian 12 (no `name`, short forms alone).

    Args:
        gpus: UUIDs, for example of a lease; or all; none: the machine has no GPU.
        user: Whose home keeps what they write.
        secrets: Whether the workspace has secrets, which the services get as their environment.

    Raises:
        UsageError: A UUID has another form, or UUIDs are combined with `all`.
        IncompatibleError: One does nothing without a GPU, and there is none.
    """
    given = _reservation(gpus)
    notes = []
    for service in services:
        if given:
            continue
        if service.needs_gpu:
            raise IncompatibleError(
                f"{service.title} needs a GPU, and this machine has none that a container can have",
                hint="a machine with one: --gpu; or leave the service out",
            )
        notes.append(f"{service.name}: there is no GPU to give it, so that it computes on the processor")
    document = {
        "services": {service.name: _service(service, given, user, secrets=secrets) for service in services}
    }
    # One line of JSON: the machine reads it without a parser of YAML (gpukiln/probe/services.py).
    probe_facts = {service.name: _probe_facts(service, bool(given)) for service in services}
    text = f"x-gpukiln: {json.dumps(probe_facts)}\n{yaml.safe_dump(document, sort_keys=False, width=1000)}"
    return ComposeFile(text, tuple(notes))


def _reservation(gpus: Sequence[str] | Literal["all"]) -> dict[str, Any]:
    """Compose's `deploy` with the devices; empty without any. Count and device_ids exclude each other."""
    # `all` is a text and would otherwise be read as three letters.
    uuids = [gpus] if isinstance(gpus, str) else list(gpus)
    if not uuids:
        return {}
    # `all` is a count in Compose, and UUIDs are device_ids: one excludes the other.
    if uuids != [engines.ALL]:
        if engines.ALL in uuids:
            raise UsageError(
                f"found {', '.join(uuids)}: Compose refuses a count of GPUs together with names of GPUs",
                hint=f"either {engines.ALL}, or UUIDs",
            )
        if bad := [uuid for uuid in uuids if not UUID.fullmatch(uuid)]:
            raise UsageError(
                f"{bad[0]!r} is no UUID of a GPU, and numbers change between boots",
                hint="`gpukiln-gpu list` shows UUIDs, for example GPU-8f6d...",
            )
    deploy: dict[str, Any] = yaml.safe_load("\n".join(engines.arguments(uuids, "compose")))
    return deploy


def _service(service: Service, given: dict[str, Any], user: str, *, secrets: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"image": service.releases[0].image, "restart": "unless-stopped"}
    if service.command:
        row["command"] = list(service.command)
    if service.user:
        row["user"] = service.user
    if service.environment:
        row["environment"] = dict(service.environment)
    if secrets:
        row["env_file"] = [SECRETS]
    # Loopback only: the services have no login; users reach them through SSH.
    row["ports"] = [f"127.0.0.1:{service.port}:{service.port}"]
    # Below the home, so that downloaded models survive the machine.
    row["volumes"] = [f"/home/{user}/services/{service.name}:{service.folder}"]
    if service.shared_memory:
        row["shm_size"] = service.shared_memory
    row["healthcheck"] = {
        "test": list(service.healthcheck),
        "interval": "30s",
        "timeout": "10s",
        "retries": 3,
        "start_period": f"{service.start_s}s",
    }
    return row | copy.deepcopy(given)  # YAML would refer to one from the others


def _probe_facts(service: Service, has_gpu: bool) -> dict[str, Any]:
    """The facts that the checks on the machine need."""
    return {
        "port": service.port,
        "answers": service.answers,
        "computes": service.computes if has_gpu else "",
        "model": service.model,
        "start_s": service.start_s,
    }
