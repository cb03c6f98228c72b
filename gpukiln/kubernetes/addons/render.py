"""The files of the chosen add-ons as one folder, with the script that installs them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpukiln.errors import UsageError
from gpukiln.kubernetes.addons import helm, monitoring, node_health, plugin, queue, runners
from gpukiln.kubernetes.addons.monitoring import records
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.manifest import dump
from gpukiln.typed import unknown

NAMESPACE, SCRIPT = "namespace.yaml", "install.sh"


@dataclass(frozen=True)
class AddOnKind:
    """One add-on.

    Args:
        title: What it is, in a line.
        files: Its files by their path.
        install: The shell commands that install it, in the folder of the files.
    """

    title: str
    files: Callable[[Settings], dict[str, str]]
    install: Callable[[Settings], tuple[str, ...]]


# In the order of installation.
ADD_ONS: Mapping[str, AddOnKind] = {
    "plugin": AddOnKind("NVIDIA's device plugin with feature discovery", plugin.files, plugin.install),
    "health": AddOnKind("the nodes' health as condition and taint", node_health.files, node_health.install),
    "monitoring": AddOnKind("metrics, rules and alerts of the GPUs", monitoring.files, monitoring.install),
    "queue": AddOnKind("Kueue with a queue for each team", queue.files, queue.install),
    "runners": AddOnKind("GitHub Actions runners", runners.files, runners.install),
}


def select_add_ons(only: Iterable[str], settings: Settings) -> tuple[str, ...]:
    """The add-ons to render: those that are named, else all that need no further settings or have them.

    Raises:
        UsageError: One is unknown.
    """
    named = list(only)
    for name in named:
        if name not in ADD_ONS:
            raise unknown("add-on", name, ADD_ONS)
    if named:
        return tuple(name for name in ADD_ONS if name in named)
    # These two are useless without their settings, which have no defaults.
    said = {"queue": bool(settings.teams), "runners": settings.runners is not None}
    return tuple(name for name in ADD_ONS if said.get(name, True))


def render_files(settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """The files of some add-ons by their path.

    Raises:
        UsageError: An add-on lacks a setting.
        IncompatibleError: The settings exclude each other.
    """
    # The chart of the device plugin refuses it without allowDefaultNamespace.
    if settings.namespace == "default":
        raise UsageError(
            "--namespace default: the charts refuse this namespace", hint="--namespace gpu-system"
        )
    # In the order of ADD_ONS, whatever the order of the names.
    parts = [(name, ADD_ONS[name]) for name in ADD_ONS if name in set(names)]
    files = {NAMESPACE: _namespace(settings)}
    for name, part in parts:
        for path, text in part.files(settings).items():
            # Two add-ons would overwrite each other's file.
            if path in files:
                raise UsageError(f"{name}: {path} is rendered twice")
            files[path] = text
    steps = [(part.title, part.install(settings)) for _, part in parts]
    return {**files, SCRIPT: _script(steps)}


def _namespace(settings: Settings) -> str:
    return dump(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": settings.namespace,
                # The device plugin and the exporter need privileges and host paths.
                "labels": {"pod-security.kubernetes.io/enforce": "privileged"},
            },
        }
    )


def _script(steps: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    head = (
        "#!/usr/bin/env bash",
        "# Installs or upgrades these add-ons in the cluster of kubectl's current context.",
        "# Helm 4 uses server-side apply: on a conflict, add --force-conflicts to its command.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "",
        helm.APPLY,
        "",
        helm.apply_command(NAMESPACE),
    )
    body = [line for title, commands in steps for line in ("", f"# {title}", *commands)]
    return "\n".join((*head, *body)) + "\n"


def next_steps(settings: Settings, names: Sequence[str], output: str, *, only: bool) -> Iterator[str]:
    """What the user of some rendered add-ons has to know, a line each.

    Args:
        output: The folder of the files; empty: they were printed.
        only: Whether the add-ons were named.
    """
    if "plugin" in names:
        yield "pods reach others' GPUs without these lines of the nodes' user data, which k8s.nodes renders:"
        yield from (f"  {line}" for line in plugin.ISOLATION)
    if "monitoring" in names and not records.prices(settings):
        yield (
            f"no prices of GPU machines in {settings.region} are known, so no metric has costs: "
            f"invoke offer.refresh --cloud aws --region {settings.region}"
        )
    if not (only or settings.teams or settings.runners):
        yield "no queue and no runners: --team and --runners have them rendered"
    if output:
        yield f"next: bash {output.rstrip('/')}/install.sh"
