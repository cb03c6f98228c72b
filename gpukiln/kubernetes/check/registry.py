"""All rules. `python -m gpukiln.kubernetes.check.registry > docs/k8s-rules.md` writes their documentation."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from gpukiln.findings import Severity
from gpukiln.kubernetes.check import (
    rules_charts,
    rules_devices,
    rules_form,
    rules_images,
    rules_kueue,
    rules_metrics,
    rules_nodes,
    rules_objects,
    rules_running,
    rules_scaling,
    rules_scripts,
    rules_server,
    rules_types,
    rules_volumes,
)
from gpukiln.kubernetes.check.rules import ManifestRule
from gpukiln.typed import strict

SCHEMA = "k8s.rules/1"

# A module is a concern; every ManifestRule in it counts.
MODULES: tuple[ModuleType, ...] = (
    rules_form,
    rules_server,
    rules_devices,
    rules_images,
    rules_running,
    rules_types,
    rules_nodes,
    rules_scaling,
    rules_objects,
    rules_volumes,
    rules_kueue,
    rules_charts,
    rules_scripts,
    rules_metrics,
)


@cache
def rules() -> tuple[ManifestRule, ...]:
    """All rules, in the order of the modules and of their definitions."""
    return tuple(
        member for module in MODULES for member in vars(module).values() if isinstance(member, ManifestRule)
    )


@strict
class ListedRule:
    """A `ManifestRule` without its function."""

    id: str
    severity: Severity
    subject: str
    title: str
    reason: str
    fix: str
    source: str


@strict
class RuleList:
    """The document of `k8s.check --rules --json`."""

    schema: str
    rules: tuple[ListedRule, ...]


def listing() -> RuleList:
    return RuleList(
        SCHEMA,
        tuple(
            ListedRule(
                listed.id,
                listed.severity,
                listed.subject.__name__.lower(),
                listed.title,
                listed.reason,
                listed.fix,
                listed.source,
            )
            for listed in rules()
        ),
    )


def markdown() -> str:
    """The text of docs/k8s-rules.md."""
    lines = [
        "# Rules of `k8s.check`",
        "",
        "<!-- Generated: python -m gpukiln.kubernetes.check.registry > docs/k8s-rules.md -->",
        "",
        f"{len(rules())} rules; [k8s-check.md](k8s-check.md) explains their use. An error can't "
        f"work, or does harm;",
        "a warning works, and costs or fails later. A test shows for each rule when it reports and when it "
        "does not.",
    ]
    for module in MODULES:
        lines += ["", f"## {_title(module)}", ""]
        for listed in (member for member in vars(module).values() if isinstance(member, ManifestRule)):
            lines += [
                f"### {listed.id}",
                "",
                f"{listed.severity.capitalize()}. {listed.title}: {listed.reason}.",
                "",
                f"- Fix: {listed.fix}.",
                f"- Source: {listed.source}.",
                "",
            ]
        lines.pop()
    return "\n".join(lines) + "\n"


def _title(module: ModuleType) -> str:
    """The first line of a module's docstring, without `Rules on`."""
    text = (module.__doc__ or "").partition("\n")[0].removeprefix("Rules on ").rstrip(".")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    print(markdown(), end="")
