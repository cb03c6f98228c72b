"""The JSON Schema of every document that a command prints with --json.

`python -m gpukiln.cli.schemas docs/schemas` writes a file for each noun. The schemas are derived from the
printed types, so that a document has exactly the fields of its type.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpukiln.cli.json_schema import DIALECT, ObjectSchema, SchemaBuilder
from gpukiln.files import write_atomic

WIDTH = 160  # characters of a line of the files; schemas nest deep, and one key a line makes them unreadable
Documents = Mapping[str, ObjectSchema]


# Each function imports the types of its noun: those of all nouns are most of gpukiln, and slow to import.
def _ami() -> Documents:
    from gpukiln.attest.attestation import Attestation
    from gpukiln.exports.import_disk import DiskFile, ImportResult
    from gpukiln.exports.run import ExportPlan, ExportResult
    from gpukiln.findings import CheckedItem
    from gpukiln.images.builds import Record
    from gpukiln.images.cost import Cost
    from gpukiln.images.plan import ImagePlan
    from gpukiln.release.diff import Diff
    from gpukiln.release.log import Release
    from gpukiln.release.overview import ChannelRow
    from gpukiln.release.prune import PrunedImage
    from gpukiln.verify.verdict import Verdict

    base = ObjectSchema(
        base=str,
        title=str,
        driver=str,
        why=str,
        any_branch=bool,
        kubernetes=list[str] | None,
        default_on=list[str],
    )
    timing = ObjectSchema(
        build_id=str,
        image=str,
        cloud=str,
        state=str,
        modules=str,
        durations_s=dict[str, float],
        total_s=float,
    )
    pruned = ObjectSchema(region=str, images=[PrunedImage], orphaned_snapshots=dict[str, str], error=str)
    return {
        "ami.attest/1": ObjectSchema(Attestation),
        "ami.attest.plan/1": ObjectSchema(
            None, "What would be attested.", build=str, image_id=str, signed=bool
        ),
        "ami.attest.verify/1": ObjectSchema(
            None, "What was verified of an attestation.", build=str, image_id=str, findings=[CheckedItem]
        ),
        "ami.bases/1": ObjectSchema(None, "Base images, and the driver of each.", bases=[base]),
        "ami.build/1": ObjectSchema(
            Record, "The record of a build that has ended.", image_id=str | None, built=bool
        ),
        # The documents of one command differ in `schema`, by which a program knows which of them it has read.
        "ami.build.found/1": ObjectSchema(
            None,
            "A verified image of this plan exists: nothing was baked.",
            image_id=str,
            build_id=str,
            built=bool,
            digest=str,
            verdict=Verdict | None,
        ),
        "ami.build.plan/1": ObjectSchema(ImagePlan, built=bool),
        "ami.channels/1": ObjectSchema(
            None, "What every channel points at.", channels=[ChannelRow], errors=dict[str, str]
        ),
        "ami.diff/1": ObjectSchema(Diff),
        "ami.export/1": ObjectSchema(ExportResult),
        "ami.export.plan/1": ObjectSchema(ExportPlan),
        "ami.import/1": ObjectSchema(ImportResult),
        "ami.import.plan/1": ObjectSchema(DiskFile, size_gib=int, name=str),
        "ami.list/1": ObjectSchema(None, "The builds of this computer, newest first.", builds=[Record]),
        "ami.plan/1": ObjectSchema(
            ImagePlan,
            # Of both at most one is set. .github/workflows/rebuild.yml reads the first.
            verified_image=str | None,
            verified_by_another_suite=str | None,
            why_build=list[str],
            cost_estimate=(ObjectSchema(Cost, usd=float | None), None),
        ),
        "ami.prune/1": ObjectSchema(None, "Which images can be removed.", removed=bool, regions=[pruned]),
        "ami.release/1": ObjectSchema(Release),
        "ami.rollback/1": ObjectSchema(Release),
        "ami.show/1": ObjectSchema(Record),
        "ami.timings/1": ObjectSchema(None, "How long builds took, newest first.", builds=[timing]),
        "ami.verify/1": ObjectSchema(
            None, "A verdict for each machine that was started.", verdicts=[Verdict]
        ),
    }


def _cloud() -> Documents:
    from gpukiln.instances.orphans import Orphan

    machine = ObjectSchema(
        instance_id=str, kind=str, address=str, ssh_port=int | None, running=bool, simulated=bool
    )
    home = ObjectSchema(path=str, device=int, inode=int)
    cluster = ObjectSchema(
        context=str, url=str, kubeconfig=str, user_data=str, programs=dict[str, bool], device_plugin=bool
    )
    server = ObjectSchema(
        home=home,
        code=str,
        ssh_port=int | None,
        cluster=(cluster, None),
        machines=[machine],
        url=str,
    )
    disk = ObjectSchema(snapshot=str, image=str | None, mib=int, problem=str)
    volume = ObjectSchema(
        volume=str,
        region=str | None,
        zone=str | None,
        size_gib=int | None,
        attached_to=str | None,
        mib=int,
    )
    gpu = ObjectSchema(
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
    simulated = ObjectSchema(
        instance_id=str,
        instance_type=str,
        machine=str,
        simulated=bool,
        driver=str | None,
        error=float | None,
        reason=str | None,
        gpus=[gpu],
    )
    notice = ObjectSchema(instance_id=str, action=str, recommended=str, noticed=str, ends=str)
    texts = dict[str, str]
    return {
        "cloud.cluster/1": ObjectSchema(
            None, "The cluster of this computer, null where none runs.", cluster=(cluster, None)
        ),
        "cloud.gpus/1": ObjectSchema(
            None,
            "Simulated GPUs, and what is scarce.",
            machines=[simulated],
            scarce=list[str],
            interruption=(notice, None),
        ),
        "cloud.gpus.list/1": ObjectSchema(
            None, "What can be simulated.", settings=texts, scenarios=texts, boards=texts
        ),
        "cloud.status/1": ObjectSchema(
            None,
            "The embedded cloud: its server, null where none runs, and its files.",
            home=str,
            server=(server, None),
            disks=[disk],
            volumes=[volume],
            problems=list[str],
        ),
        "cloud.sweep/1": ObjectSchema(
            None, "What ended builds left running or stored.", found=[Orphan], removed=list[str]
        ),
    }


def _docker() -> Documents:
    from gpukiln.docker.builds import ContainerRecord
    from gpukiln.docker.check import ContainerCheck
    from gpukiln.docker.plan import ContainerPlan
    from gpukiln.docker.push import PushedImage
    from gpukiln.verify.verdict import Verdict

    return {
        "docker.build/1": ObjectSchema(ContainerRecord, built=bool),
        "docker.build.plan/1": ObjectSchema(ContainerPlan, built=bool),
        "docker.check/1": ObjectSchema(ContainerCheck),
        "docker.list/1": ObjectSchema(
            None, "The container builds of this computer, newest first.", builds=[ContainerRecord]
        ),
        "docker.plan/1": ObjectSchema(ContainerPlan, built=str | None),
        "docker.push/1": ObjectSchema(PushedImage, reference=str),
        "docker.push.plan/1": ObjectSchema(
            None, "The repository that an image would be pushed to.", repository=str, manifest_digest=None
        ),
        "docker.show/1": ObjectSchema(ContainerRecord),
        "docker.verify/1": ObjectSchema(None, "The verdict on a container image.", verdict=Verdict),
    }


def _gpu() -> Documents:
    import typing

    from gpukiln.gpus.sampling import Tick
    from gpukiln.gpus.verb import Failure
    from gpukiln.gpus.verbs import verbs
    from gpukiln.gpus.verbs.watch import TICK_SCHEMA

    answers = {verb: typing.get_type_hints(verb.answer)["return"] for verb in verbs().values()}
    return {
        **{
            verb.schema: ObjectSchema(None, verb.help, nodes=[answer], failed=[Failure])
            for verb, answer in answers.items()
        },
        TICK_SCHEMA: ObjectSchema(None, "A line of gpu.watch without --json.", node=str, tick=Tick),
    }


def _k8s() -> Documents:
    from gpukiln.kubernetes import doctor
    from gpukiln.kubernetes.addons.listing import ADDONS, AddOns
    from gpukiln.kubernetes.check import evaluate, registry
    from gpukiln.kubernetes.jobs.document import JOB, JobDocument
    from gpukiln.kubernetes.nodes import render
    from gpukiln.verify.verdict import Verdict

    return {
        ADDONS: ObjectSchema(AddOns),
        evaluate.SCHEMA: ObjectSchema(evaluate.CheckReport),
        registry.SCHEMA: ObjectSchema(registry.RuleList),
        doctor.SCHEMA: ObjectSchema(doctor.Diagnosis),
        JOB: ObjectSchema(JobDocument),
        render.SCHEMA: ObjectSchema(render.Nodes),
        "k8s.rbac/1": ObjectSchema(None, "Roles and bindings to be applied.", manifests=list[dict[str, Any]]),
        "k8s.test/1": ObjectSchema(None, "The verdict on a cluster.", verdict=Verdict),
    }


def _node() -> Documents:
    from gpukiln.nodes.passthrough.model import (
        CREATE,
        LOOK,
        UNDO,
        UNDONE,
        Passthrough,
        Undo,
        UndoResult,
        VmCreation,
    )
    from gpukiln.nodes.results import RunResult
    from gpukiln.nodes.runs import OldRun
    from gpukiln.nodes.scenarios import ScenarioResult
    from gpukiln.verify.verdict import Verdict

    run = ObjectSchema(RunResult, id=str, unfinished=list[str])
    host = ObjectSchema(host=str, reason=str, diagnosis=str, verdict=Verdict | None)
    verdicts = ObjectSchema(None, "One verdict a host, or the reason why it has none.", hosts=[host])
    scenario = ObjectSchema(name=str, title=str, image=str)
    return {
        "node.apply/1": run,
        "node.doctor/1": verdicts,
        "node.drift/1": run,
        LOOK: ObjectSchema(Passthrough),
        CREATE: ObjectSchema(VmCreation),
        UNDO: ObjectSchema(Undo),
        UNDONE: ObjectSchema(UndoResult),
        "node.runs/1": ObjectSchema(None, "The folders of earlier runs.", runs=[OldRun]),
        "node.test/1": ObjectSchema(
            None, "The results of the scenarios.", id=str, scenarios=[ScenarioResult], not_run=list[str]
        ),
        "node.test.list/1": ObjectSchema(None, "Molecule's scenarios.", scenarios=[scenario]),
        "node.verify/1": verdicts,
    }


def _offer() -> Documents:
    from gpukiln.offers.listing import CHECK, LIST, SHOW, FitReport, OfferDetails, OfferListing
    from gpukiln.offers.refresh import REFRESH, RefreshDocument

    return {
        LIST: ObjectSchema(OfferListing),
        SHOW: ObjectSchema(OfferDetails),
        CHECK: ObjectSchema(FitReport),
        REFRESH: ObjectSchema(RefreshDocument),
    }


def _project() -> Documents:
    from gpukiln.cli.settings import Value

    return {"project.config/1": ObjectSchema(None, "Each setting of a project.", settings=[Value])}


def _workspace() -> Documents:
    from gpukiln.workspaces.usage import USAGE, OwnersUsage
    from gpukiln.workspaces.view import (
        LIST,
        PLAN,
        SHOW,
        STATUS,
        Status,
        WorkspaceDetails,
        WorkspaceListing,
        WorkspacePreview,
    )
    from gpukiln.workspaces.volumes import Home

    return {
        "workspace.env/1": ObjectSchema(
            None, "Variables by which programs find a workspace.", variables=dict[str, str]
        ),
        LIST: ObjectSchema(WorkspaceListing),
        "workspace.move/1": ObjectSchema(Home),
        PLAN: ObjectSchema(WorkspacePreview),
        SHOW: ObjectSchema(WorkspaceDetails),
        STATUS: ObjectSchema(Status),
        USAGE: ObjectSchema(OwnersUsage),
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
def schemas_of(noun: str) -> tuple[dict[str, dict[str, Any]], SchemaBuilder]:
    """The schema of each document of a noun's commands, and the builder with their definitions."""
    builder = _forms(noun)
    documents = {name: builder.of(form) for name, form in NOUNS[noun]().items()}
    for name, form in documents.items():
        constant = {"schema": {"const": name}}
        # First in the file for readers; again, because a record's own `schema`, its version, is replaced.
        form["properties"] = constant | form["properties"] | constant
        form["required"] = list(dict.fromkeys(["schema", *form["required"]]))
    return documents, builder


def schema_of(noun: str) -> dict[str, Any]:
    """One schema of all documents of a noun's commands; `schema` in a document names the document."""
    schemas, builder = schemas_of(noun)
    documents, title = [*schemas.values()], f"What invoke {noun}.* prints with --json"
    if noun == "workspace":
        from gpukiln.workspaces.contract import Outputs, Workspace

        title = f"What a workspace is asked for, and what invoke {noun}.* prints with --json"
        # Workspace is what people write, Outputs what Terraform's module answers.
        documents = [builder.of(Workspace), builder.of(Outputs), *documents]
    if noun == "gpu":
        title = f"What gpukiln-gpu and invoke {noun}.* print with --json"
    return {"$schema": DIALECT, "title": title, "oneOf": documents, "$defs": builder.used_by(documents)}


def verdict_schema() -> dict[str, Any]:
    """The schema of results.json, which is a document and a part of others."""
    from gpukiln.verify.verdict import Verdict

    builder = _forms()
    builder.of(Verdict)
    form = builder.defs[Verdict.__name__]
    return {"$schema": DIALECT, "title": "A verdict: results.json", **form, "$defs": builder.used_by([form])}


def _forms(noun: str = "") -> SchemaBuilder:
    from pydantic import NonNegativeInt

    from gpukiln.findings import OUTCOMES
    from gpukiln.release.log import Release
    from gpukiln.release.overview import ChannelRow
    from gpukiln.verify.verdict import Verdict

    # All other documents are written by gpukiln, which leaves no field out; a contract is written by people.
    written: type | None = None
    if noun == "workspace":
        from gpukiln.workspaces.contract import Workspace

        written = Workspace
    counts = ObjectSchema(**dict.fromkeys(OUTCOMES, NonNegativeInt))
    return SchemaBuilder(
        {
            # What the serializers of these types add: pydantic describes only declared fields.
            Verdict: {"passed": bool, "counts": counts},
            Release: {"schema": int, "parameter": str},
            ChannelRow: {"parameter": str},
        },
        written,
    )


def files() -> dict[str, str]:
    """Every published schema by the name of its file."""
    schemas = {**{noun: schema_of(noun) for noun in NOUNS}, "verdict": verdict_schema()}
    # Whoever edits a file by hand reads where it is from; JSON has no comments.
    comment = {"$comment": "Generated: python -m gpukiln.cli.schemas docs/schemas"}
    return {f"{name}.json": _text(comment | schema) + "\n" for name, schema in schemas.items()}


def _text(value: Any, indent: str = "", taken: int = 0) -> str:
    """JSON with as much on each line as fits: short objects are whole, plain values fill lines.

    Args:
        indent: The spaces at the beginning of the line.
        taken: Characters of the line in use before and after the value.
    """
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or len(indent) + taken + len(line) <= WIDTH:
        return line
    inner, lines, space = f"{indent} ", list[str](), 0
    for key, item in value.items() if isinstance(value, dict) else (("", element) for element in value):
        name = f"{json.dumps(key)}: " if key else ""
        text, plain = name + _text(item, inner, len(name) + 1), not isinstance(item, dict | list)
        if plain and lines and len(text) < space:
            lines[-1] += f", {text}"
        else:
            lines.append(inner + text)
        space = WIDTH - len(lines[-1]) - 2 if plain else 0  # 2: a comma and a blank
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(lines) + f"\n{indent}{end}"


def main(folder: str) -> None:
    """Write every schema into a folder."""
    for name, text in files().items():
        # Files of the repository; the default of write_atomic is private.
        write_atomic(Path(folder) / name, text, mode=0o644)


if __name__ == "__main__":
    main(*sys.argv[1:])
