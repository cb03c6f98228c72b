"""Machine images: plan, build, list, show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.cli.command import SIGNERS, JsonOptions, MachineOptions, PlaceOptions, say, words
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.images.modules import SigningPair
    from gpukiln.images.plan import ImagePlan

# Exit code of `plan --exit-code` when there is something to build; 1 to 6 are the kinds of failure, see
# gpukiln/errors.py.
CHANGES_PENDING = 10


@dataclass(frozen=True)
class BuildOptions(PlaceOptions, MachineOptions):
    """What an image is made of."""

    image: str = option("a folder of ami/", "eks-gpu", setting="image")
    base: str = option("base image, see ami.bases; default: the cloud's")
    instance_types: str = option(
        "GPU machines the image must run on, separated by commas; default: the image's own"
    )
    set: str = option(
        "change a component for this build, NAME.FIELD=VALUE, separated by commas", setting="components"
    )
    also: str = option(
        "optional components that the image gets too, separated by commas: dcgm, dcgm_exporter, kasmvnc"
    )
    module_key: str = option("private key (PEM) that kernel modules are signed with, for Secure Boot")
    module_certificate: str = option("its certificate (DER), which stays in the image for enrolment")
    refresh: bool = option("fetch package lists again even when they are fresh", False)

    def connect(self) -> Cloud:
        from gpukiln.clouds.select import make_cloud

        # None for what is empty: the embedded cloud refuses a value of each of these.
        account = self.pick("profile", "subnet_id", "ssh_cidr")
        return make_cloud(self.cloud, self.region, **{name: text or None for name, text in account.items()})

    def plan(self, cloud: Cloud) -> tuple[ImagePlan, SigningPair | None]:
        """The plan, and the key pair that signs kernel modules."""
        # Imported in the methods: completion and `--list` import this module for its options, and boto3,
        # Packer's and Ansible's parts would make them slow.
        from gpukiln.images.bake import tool_versions
        from gpukiln.images.modules import signing_pair
        from gpukiln.images.plan import make_plan
        from gpukiln.sources.decisions import Probes
        from gpukiln.state import state_home

        signing = signing_pair(self.module_key, self.module_certificate)
        plan = make_plan(
            self.image,
            cloud,
            probes=Probes.real(state_home() / "apt", refresh=self.refresh),
            base=self.base or None,
            instance_types=words(self.instance_types),
            overrides=words(self.set),
            also=words(self.also),
            # What builds and what signs are part of the digest: another Packer, or another key, is another
            # image.
            tools=tool_versions(),
            signer=signing.sha256 if signing else "",
        )
        return plan, signing


@dataclass(frozen=True)
class AmiPlan(BuildOptions):
    """Show what a build would do, or why it can't work; starts nothing."""

    exit_code: bool = option("exit 10 when there is something to build, 0 when not", False)

    def run(self) -> int:
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import report_killed
        from gpukiln.pipeline.reuse import preview
        from gpukiln.typed import dump

        cloud = self.connect()
        # A plan only reports them: it changes nothing.
        report_killed(Builds(), say)
        build_preview = preview(self.plan(cloud)[0], cloud, Builds())
        # usd is a property, which dump leaves out.
        cost = {**dump(build_preview.cost), "usd": build_preview.cost.usd} if build_preview.cost else None
        self.report(
            build_preview.plan,
            build_preview.parts(),
            schema="ami.plan/1",
            cost_estimate=cost,
            **build_preview.fields,
        )
        return CHANGES_PENDING if self.exit_code and not build_preview.is_current else 0


@dataclass(frozen=True)
class AmiBuild(BuildOptions):
    """Plan and bake an image, boot it in a new machine, verify it, and keep a record of every step."""

    force: bool = option("build even when a verified image has this digest", False)
    sign_key: str = option(f"signs provenance and verdict: {SIGNERS}")
    dry_run: bool = option("stop after the plan", False)
    module_cache: str = option("cache of compiled kernel modules: a folder, s3://BUCKET/PREFIX or none")
    stages: str = option(
        "on: go on from the last stage that is unchanged, and keep new ones; off: every role runs; "
        "default: on where snapshots cost nothing, off on aws"
    )

    def run(self) -> int:
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.bake import BakeResources
        from gpukiln.images.builds import Builds
        from gpukiln.images.module_store import open_store
        from gpukiln.images.orphans import clean_up_killed_builds, report_killed
        from gpukiln.images.plan_view import plan_table
        from gpukiln.images.stages import stages_enabled, stages_of
        from gpukiln.pipeline import reuse, steps
        from gpukiln.pipeline.verdict_tags import find_verified
        from gpukiln.progress import Progress
        from gpukiln.state import state_home
        from gpukiln.verify.digest import suite_digest

        progress, builds = Progress(), Builds()
        with progress.step("plan"):
            cloud = self.connect()
            # Before a machine is started: a key that can't sign would else be noticed at the end of the
            # build.
            signer = signer_of(self.sign_key, cloud)
            # A killed build may still run machines, which hold the quota that this build needs.
            if self.dry_run:
                report_killed(builds, say)
            else:
                clean_up_killed_builds(cloud, builds, say)
            # Before the plan, which takes a while: it refuses a wrong --stages.
            uses_stages = stages_enabled(cloud, self.stages)
            plan, signing = self.plan(cloud)
            stages = stages_of(plan, cloud) if uses_stages else None
        self.show(plan_table(plan))
        existing = None if self.force else find_verified(plan, cloud, suite_digest())
        if existing:
            self.show(f"{reuse.reuse_line(existing, then='it is verified again')} (--force builds anyway)")
        elif not self.force:
            self.show(*(f"  {line}" for line in steps.why_build(plan, builds)))
        # After the line that says which image would be reused: that is what a dry run is for.
        if self.dry_run:
            say("dry run: nothing was started")
            if not existing:
                self.report(plan, schema="ami.build.plan/1", built=False)
                return 0
        if existing:
            # Existing but verified by another suite: only the verification is missing.
            verdict = None
            if not self.dry_run:
                verdict = reuse.verify_existing(existing, plan, cloud, signer, say, self.show)
            fields = {"image_id": existing.image_id, "build_id": existing.build_id, "digest": plan.digest}
            self.report(fields, schema="ami.build.found/1", built=False, verdict=verdict)
            build_id = existing.build_id
        else:
            saved = BakeResources(open_store(self.module_cache, state_home(), cloud), stages, signing)
            build, record = steps.build_image(plan, cloud, builds, progress, saved, signer)
            verdict, build_id = record.verdict, build.id
            self.show(*steps.built_parts(build, record))
            image_id = record.bake.image_id if record.bake else None
            self.report(record, schema="ami.build/1", image_id=image_id, built=True)
        # Last, so that the document of a build whose verification failed is printed, too.
        if verdict:
            steps.require_passed(verdict, build_id)
        return 0


@dataclass(frozen=True)
class AmiList(JsonOptions):
    """List the builds of this machine, newest first."""

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import report_killed
        from gpukiln.images.record_view import builds_parts

        report_killed(Builds(), say)
        records = [build.read() for build in Builds().all()]
        self.report(None, builds_parts(Builds()) if records else (), schema="ami.list/1", builds=records)
        # The document has an empty list, which says the same.
        if not records and not self.json:
            say("no build yet: `invoke ami.build --region us-west-2` makes the first")


@dataclass(frozen=True)
class AmiTimings(JsonOptions):
    """Compare how long each step of the last builds took, newest first."""

    last: int = option("how many builds are compared", 4)

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.images.timings import timings, timings_table

        # A build that runs, or was killed in its first step, has no step that has ended.
        records = [record for build in Builds().all() if (record := build.read()).durations_s]
        rows = timings(records[: max(self.last, 1)])
        self.report(None, [timings_table(rows)] if rows else (), schema="ami.timings/1", builds=rows)
        if not rows and not self.json:
            say("no build has ended yet: `invoke ami.build --region us-west-2` makes the first")


@dataclass(frozen=True)
class AmiShow(JsonOptions):
    """Show the record of a build: plan, image, verdict, durations."""

    build: str = option("build id, AMI id or `last`", first=True, required=True)

    def run(self) -> None:
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import report_killed
        from gpukiln.images.record_view import record_parts

        build = Builds().find(self.build)
        record = build.read()
        report_killed(Builds(), say)
        self.report(record, record_parts(build, record), schema="ami.show/1")


@dataclass(frozen=True)
class AmiBases(JsonOptions):
    """List the base images of --base: the driver, and the Kubernetes versions that each was seen for."""

    def run(self) -> None:
        from gpukiln.catalog.components import load_components
        from gpukiln.catalog.driver_bases import base_rows
        from gpukiln.images.plan_view import bases_table

        rows = base_rows(load_components())
        self.report(None, [bases_table(rows)], schema="ami.bases/1", bases=rows)
