"""The form of every document that a command prints with --json.

`python -m gpukiln.cli.schemas docs/schemas` writes a file for each noun. They are made of the types that
are printed: a field that a type gains or loses, its document does. Money is a text: a number of JSON loses
digits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpukiln.cli.json_schema import DIALECT, Form, Forms
from gpukiln.files import write_whole

WIDTH = 160  # of a line: what fits into one is in one
Documents = Mapping[str, Form]


def _ami() -> Documents:
    from gpukiln.attest.attestation import Attestation
    from gpukiln.exports.import_disk import DiskFile, Imported
    from gpukiln.exports.run import Exported, ExportPlan
    from gpukiln.findings import Examined
    from gpukiln.images.builds import Record
    from gpukiln.images.cost import Cost
    from gpukiln.images.plan import ImagePlan
    from gpukiln.release.diff import Diff
    from gpukiln.release.log import Release
    from gpukiln.release.overview import ChannelRow
    from gpukiln.release.prune import PruneItem
    from gpukiln.verify.verdict import Verdict

    base = Form(
        base=str,
        title=str,
        driver=str,
        why=str,
        any_branch=bool,
        kubernetes=list[str] | None,
        default_on=list[str],
    )
    timing = Form(
        build_id=str,
        image=str,
        cloud=str,
        state=str,
        modules=str,
        durations_s=dict[str, float],
        total_s=float,
    )
    pruned = Form(region=str, images=[PruneItem], leftovers=dict[str, str], error=str)
    return {
        "ami.attest/1": Form(Attestation),
        "ami.attest.plan/1": Form(None, "What would be attested.", build=str, image_id=str, signed=bool),
        "ami.attest.verify/1": Form(
            None, "What was verified of an attestation.", build=str, image_id=str, findings=[Examined]
        ),
        "ami.bases/1": Form(None, "Base images, and the driver of each.", bases=[base]),
        "ami.build/1": Form(Record, "The record of a build that has ended.", image_id=str | None, built=bool),
        "ami.build.found/1": Form(
            None,
            "A proven image of this plan is there: nothing was baked.",
            image_id=str,
            build_id=str,
            built=bool,
            digest=str,
            verdict=Verdict | None,
        ),
        "ami.build.plan/1": Form(ImagePlan, built=bool),
        "ami.channels/1": Form(
            None, "What every channel points at.", channels=[ChannelRow], errors=dict[str, str]
        ),
        "ami.diff/1": Form(Diff),
        "ami.export/1": Form(Exported),
        "ami.export.plan/1": Form(ExportPlan),
        "ami.import/1": Form(Imported),
        "ami.import.plan/1": Form(DiskFile, size_gib=int, name=str),
        "ami.list/1": Form(None, "The builds of this computer, newest first.", builds=[Record]),
        "ami.plan/1": Form(
            ImagePlan,
            proven_image=str | None,
            proven_by_another_suite=str | None,
            why_build=list[str],
            cost_estimate=(Form(Cost, usd=float | None), None),
        ),
        "ami.prune/1": Form(None, "Which images nobody needs.", removed=bool, regions=[pruned]),
        "ami.release/1": Form(Release),
        "ami.rollback/1": Form(Release),
        "ami.show/1": Form(Record),
        "ami.timings/1": Form(None, "How long builds took, newest first.", builds=[timing]),
        "ami.verify/1": Form(None, "A verdict for each machine that was started.", verdicts=[Verdict]),
    }


def _cloud() -> Documents:
    from gpukiln.instances.leftovers import Leftover

    machine = Form(instance_id=str, kind=str, address=str, ssh_port=int | None, running=bool, simulated=bool)
    home = Form(path=str, device=int, inode=int)
    server = Form(home=home, code=str, ssh_port=int | None, machines=[machine], url=str)
    disk = Form(snapshot=str, image=str | None, mib=int, problem=str)
    volume = Form(
        volume=str,
        region=str | None,
        zone=str | None,
        size_gib=int | None,
        attached_to=str | None,
        mib=int,
    )
    gpu = Form(
        index=int,
        name=str | None,
        uuid=str | None,
        bus_id=str | None,
        memory_total_mib=float | None,
        temperature_celsius=float | None,
        power_watts=float | None,
        mig_enabled=bool | None,
        error=float | None,
        hung=bool,
        processes=list[int],
    )
    simulated = Form(
        instance_id=str,
        instance_type=str,
        machine=str,
        simulated=bool,
        driver=str | None,
        error=float | None,
        reason=str | None,
        gpus=[gpu],
    )
    notice = Form(instance_id=str, action=str, recommended=str, noticed=str, ends=str)
    texts = dict[str, str]
    return {
        "cloud.gpus/1": Form(
            None,
            "Simulated GPUs, and what is scarce.",
            machines=[simulated],
            scarce=list[str],
            interruption=(notice, None),
        ),
        "cloud.gpus.list/1": Form(
            None, "What can be simulated.", settings=texts, scenarios=texts, boards=texts
        ),
        "cloud.status/1": Form(
            None,
            "The embedded cloud: its server, null where none runs, and what it keeps.",
            home=str,
            server=(server, None),
            disks=[disk],
            volumes=[volume],
            problems=list[str],
        ),
        "cloud.sweep/1": Form(None, "What ended builds left.", found=[Leftover], removed=list[str]),
    }


def _docker() -> Documents:
    from gpukiln.docker.builds import ContainerRecord
    from gpukiln.docker.check import ContainerCheck
    from gpukiln.docker.plan import ContainerPlan
    from gpukiln.docker.push import Pushed
    from gpukiln.verify.verdict import Verdict

    return {
        "docker.build/1": Form(ContainerRecord, built=bool),
        "docker.build.plan/1": Form(ContainerPlan, built=bool),
        "docker.check/1": Form(ContainerCheck),
        "docker.list/1": Form(
            None, "The container builds of this computer, newest first.", builds=[ContainerRecord]
        ),
        "docker.plan/1": Form(ContainerPlan, built=str | None),
        "docker.push/1": Form(Pushed, reference=str),
        "docker.push.plan/1": Form(
            None, "Where an image would be pushed to.", repository=str, manifest_digest=None
        ),
        "docker.show/1": Form(ContainerRecord),
        "docker.verify/1": Form(None, "The verdict on a container image.", verdict=Verdict),
    }


def _gpu() -> Documents:
    import typing

    from gpukiln.gpus.sampling import Tick
    from gpukiln.gpus.verb import Failure
    from gpukiln.gpus.verbs import verbs
    from gpukiln.gpus.verbs.watch import TICK

    answers = {verb: typing.get_type_hints(verb.answer)["return"] for verb in verbs().values()}
    return {
        **{
            verb.schema: Form(None, verb.help, nodes=[answer], failed=[Failure])
            for verb, answer in answers.items()
        },
        TICK: Form(None, "A line of gpu.watch without --json.", node=str, tick=Tick),
    }


def _k8s() -> Documents:
    from gpukiln.kubernetes import doctor
    from gpukiln.kubernetes.addons.listing import ADDONS, AddOns
    from gpukiln.kubernetes.check import evaluate, registry
    from gpukiln.kubernetes.jobs.document import JOB, JobDocument
    from gpukiln.kubernetes.nodes import rendered
    from gpukiln.verify.verdict import Verdict

    return {
        ADDONS: Form(AddOns),
        evaluate.SCHEMA: Form(evaluate.Report),
        registry.SCHEMA: Form(registry.RuleList),
        doctor.SCHEMA: Form(doctor.Diagnosis),
        JOB: Form(JobDocument),
        rendered.SCHEMA: Form(rendered.Nodes),
        "k8s.rbac/1": Form(None, "Roles and bindings to be applied.", manifests=list[dict[str, Any]]),
        "k8s.test/1": Form(None, "The verdict on a cluster.", verdict=Verdict),
    }


def _node() -> Documents:
    from gpukiln.nodes.passthrough.model import (
        CREATE,
        LOOK,
        UNDO,
        UNDONE,
        Created,
        Passthrough,
        Undo,
        Undone,
    )
    from gpukiln.nodes.results import RunResult
    from gpukiln.nodes.runs import OldRun
    from gpukiln.nodes.scenarios import ScenarioResult
    from gpukiln.verify.verdict import Verdict

    run = Form(RunResult, id=str, unfinished=list[str])
    host = Form(host=str, reason=str, diagnosis=str, verdict=Verdict | None)
    verdicts = Form(None, "One verdict a host, or why there is none.", hosts=[host])
    scenario = Form(name=str, title=str, image=str)
    return {
        "node.apply/1": run,
        "node.doctor/1": verdicts,
        "node.drift/1": run,
        LOOK: Form(Passthrough),
        CREATE: Form(Created),
        UNDO: Form(Undo),
        UNDONE: Form(Undone),
        "node.runs/1": Form(None, "What earlier runs left.", runs=[OldRun]),
        "node.test/1": Form(
            None, "What came of the scenarios.", id=str, scenarios=[ScenarioResult], not_run=list[str]
        ),
        "node.test.list/1": Form(None, "Molecule's scenarios.", scenarios=[scenario]),
        "node.verify/1": verdicts,
    }


def _offer() -> Documents:
    from gpukiln.offers.listing import CHECK, LIST, SHOW, Checked, OfferDetails, OfferListing
    from gpukiln.offers.refresh import REFRESH, RefreshDocument

    return {
        LIST: Form(OfferListing),
        SHOW: Form(OfferDetails),
        CHECK: Form(Checked),
        REFRESH: Form(RefreshDocument),
    }


def _project() -> Documents:
    from gpukiln.cli.settings import Value

    return {"project.config/1": Form(None, "Each setting of a project.", settings=[Value])}


def _workspace() -> Documents:
    from gpukiln.workspaces.usage import USAGE, OwnersUsage
    from gpukiln.workspaces.view import (
        LIST,
        PLAN,
        SHOW,
        STATUS,
        Preview,
        Status,
        WorkspaceDetails,
        WorkspaceListing,
    )
    from gpukiln.workspaces.volumes import Home

    return {
        "workspace.env/1": Form(
            None, "Variables by which programs find a workspace.", variables=dict[str, str]
        ),
        LIST: Form(WorkspaceListing),
        "workspace.move/1": Form(Home),
        PLAN: Form(Preview),
        SHOW: Form(WorkspaceDetails),
        STATUS: Form(Status),
        USAGE: Form(OwnersUsage),
    }


NOUNS: dict[str, Callable[[], Documents]] = {
    "ami": _ami,
    "cloud": _cloud,
    "docker": _docker,
    "gpu": _gpu,
    "k8s": _k8s,
    "node": _node,
    "offer": _offer,
    "project": _project,
    "workspace": _workspace,
}


@cache
def forms_of(noun: str) -> tuple[dict[str, dict[str, Any]], Forms]:
    """The schema of each document of a noun's commands, and what they refer to."""
    forms = _forms(noun)
    found = {name: forms.of(form) for name, form in NOUNS[noun]().items()}
    for name, form in found.items():
        said = {"schema": {"const": name}}
        form["properties"] = said | form["properties"] | said
        form["required"] = list(dict.fromkeys(["schema", *form["required"]]))
    return found, forms


def schema_of(noun: str) -> dict[str, Any]:
    """One schema of all documents of a noun's commands; `schema` in a document says which it is."""
    found, forms = forms_of(noun)
    documents, title = [*found.values()], f"What invoke {noun}.* prints with --json"
    if noun == "workspace":
        from gpukiln.workspaces.contract import Outputs, Workspace

        title = f"What a workspace is asked for, and what invoke {noun}.* prints with --json"
        # Workspace is what people write, Outputs what Terraform's module answers.
        documents = [forms.of(Workspace), forms.of(Outputs), *documents]
    if noun == "gpu":
        title = f"What gpukiln-gpu and invoke {noun}.* print with --json"
    return {"$schema": DIALECT, "title": title, "oneOf": documents, "$defs": forms.used_by(documents)}


def verdict_schema() -> dict[str, Any]:
    """The schema of results.json: a document of its own, which others hold."""
    from gpukiln.verify.verdict import Verdict

    forms = _forms()
    forms.of(Verdict)
    form = forms.defs[Verdict.__name__]
    return {"$schema": DIALECT, "title": "A verdict: results.json", **form, "$defs": forms.used_by([form])}


def _forms(noun: str = "") -> Forms:
    from pydantic import NonNegativeInt

    from gpukiln.findings import OUTCOMES
    from gpukiln.release.log import Release
    from gpukiln.release.overview import ChannelRow
    from gpukiln.verify.verdict import Verdict

    written: type | None = None
    if noun == "workspace":
        from gpukiln.workspaces.contract import Workspace

        written = Workspace
    counts = Form(**dict.fromkeys(OUTCOMES, NonNegativeInt))
    return Forms(
        {
            Verdict: {"passed": bool, "counts": counts},
            Release: {"schema": int, "parameter": str},
            ChannelRow: {"parameter": str},
        },
        written,
    )


def files() -> dict[str, str]:
    """Every published schema, by the name of its file."""
    schemas = {**{noun: schema_of(noun) for noun in NOUNS}, "verdict": verdict_schema()}
    comment = {"$comment": "Generated: python -m gpukiln.cli.schemas docs/schemas"}
    return {f"{name}.json": _text(comment | schema) + "\n" for name, schema in schemas.items()}


def _text(value: Any, indent: str = "", taken: int = 0) -> str:
    """JSON in which what fits into a line is one, and plain values fill lines.

    Args:
        indent: What the line begins with.
        taken: Characters of the line that are used, before and behind the value.
    """
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or len(indent) + taken + len(line) <= WIDTH:
        return line
    inner, lines, room = f"{indent} ", list[str](), 0
    for key, one in value.items() if isinstance(value, dict) else (("", one) for one in value):
        name = f"{json.dumps(key)}: " if key else ""
        text, plain = name + _text(one, inner, len(name) + 1), not isinstance(one, dict | list)
        if plain and lines and len(text) < room:
            lines[-1] += f", {text}"
        else:
            lines.append(inner + text)
        room = WIDTH - len(lines[-1]) - 2 if plain else 0
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(lines) + f"\n{indent}{end}"


def main(folder: str) -> None:
    """Write every schema into a folder."""
    for name, text in files().items():
        write_whole(Path(folder) / name, text, mode=0o644)


if __name__ == "__main__":
    main(*sys.argv[1:])
