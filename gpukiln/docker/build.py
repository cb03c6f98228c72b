"""Builds a container image from its plan, with a record of each build."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpukiln import programs
from gpukiln.catalog.components import apply_overrides, load_components
from gpukiln.catalog.load import ROOT
from gpukiln.docker.builds import ContainerBuild, ContainerBuilds, ContainerRecord
from gpukiln.docker.context import make_context
from gpukiln.docker.engine import BuildRequest, Engine
from gpukiln.docker.plan import ContainerPlan
from gpukiln.errors import BusyError, GpukilnError, UnavailableError
from gpukiln.files import atomic_path, remove_partial
from gpukiln.images.digest import canonical, explain_change
from gpukiln.locks import locked
from gpukiln.progress import Progress
from gpukiln.sources.mirror import install_debian

# localhost/: no engine pulls it from a registry by mistake
REPOSITORY = "localhost/gpukiln"
EXTRA_BASE_PACKAGES = ("ca-certificates",)
TAIL_LINES = 15  # of a failed build's log
CLEAN_UP_S = 180.0  # seconds that an engine gets to end the processes of a RUN


def find_existing_build(
    plan: ContainerPlan, builds: ContainerBuilds, engine: Engine
) -> ContainerBuild | None:
    """A build with the plan's digest whose image the engine still has."""
    # The engine's id is compared: another build may have taken over the reference.
    for build in builds.of(plan.image):
        record = build.read()
        if record.image and record.plan.digest == plan.digest and record.engine == engine.name:
            image = engine.inspect(record.reference)
            if image and image.id == record.image.id:
                return build
    return None


def why_build(plan: ContainerPlan, builds: ContainerBuilds) -> list[str]:
    """The changes since the last image that this machine built.

    Returns:
        The first line names the image that is compared with, the others are a change each.
    """
    for build in builds.of(plan.image):
        old = build.read()
        if old.image and old.plan.base_name == plan.base_name:
            changes = explain_change(old.plan.inputs, plan.inputs)
            if not changes:
                return [f"the image of build {old.build_id} has this digest, and the engine no longer has it"]
            return [f"since build {old.build_id}:", *(f"  {change}" for change in changes)]
    return [f"no image of it was built on this machine from {plan.base_name} yet"]


def build_container(
    plan: ContainerPlan,
    engine: Engine,
    builds: ContainerBuilds,
    progress: Progress,
    *,
    overrides: Iterable[str] = (),
    cache_from: Iterable[str] = (),
    cache_to: Iterable[str] = (),
) -> tuple[ContainerBuild, ContainerRecord]:
    """Build a container image.

    Args:
        builds: The store of the record.
        overrides: The overrides of the plan.
        cache_from: Sources of cached layers, in the engine's form.
        cache_to: Destinations of cached layers, in the engine's form.

    Raises:
        GpukilnError: It could not be built; the reason is in the record, too.
    """
    # Read before the lock is taken: a typo in an override must not wait for another build.
    components = apply_overrides(load_components(), overrides)
    with _build_alone(builds.home):
        # Also of builds in another state folder, which have no record here.
        engine.remove_unfinished(plan.image)
        # This process has the only lock, so a record in the state running is of a killed build.
        for killed in builds.all():
            if (left := killed.read()).state == "running":
                if left.engine == engine.name:
                    engine.remove_unfinished(left.plan.image)
                killed.write(replace(left, state="aborted", error="its process was killed"))
        build = builds.create(plan.image)
        record = ContainerRecord(build.id, "running", plan, engine=engine.name)
        build.write(record)
        log = build.folder / "build.log"
        try:
            # Next to the caches, so that files are linked into the context and not copied.
            with tempfile.TemporaryDirectory(prefix="context-", dir=builds.home) as context:
                base = _base(plan, engine, builds.home, log, progress)
                with progress.step("fetch and lay out what goes in"):
                    make_context(
                        plan,
                        Path(context),
                        cache=builds.home,
                        component_of=lambda part: components[part.name],
                        log=log,
                        say=progress.say,
                    )
                reference = f"{REPOSITORY}/{plan.image}:{plan.tag}"
                with progress.step(f"build with {engine.title}"):
                    request = BuildRequest(
                        context=Path(context),
                        dockerfile=ROOT / "docker" / plan.image / "Dockerfile",
                        # The digest's tag never moves; the version's tag is for people.
                        tags=(reference, f"{REPOSITORY}/{plan.image}:{plan.version}"),
                        # The Dockerfile's ARG before FROM, so one Dockerfile serves every base.
                        arguments={"BASE": base, "CUDA": plan.cuda},
                        labels=labels(plan, build.id),
                        platform=plan.platform,
                        cache_from=tuple(cache_from),
                        cache_to=tuple(cache_to),
                    )
                    _run_build(engine, request, plan.image, log, progress)
            image = engine.inspect(reference)
            if image is None:
                raise UnavailableError(f"{engine.name} built {reference}, but does not have it (log: {log})")
            record = replace(
                record, state="built", reference=reference, image=image, durations_s=dict(progress.durations)
            )
        except BaseException as error:
            # BaseException: a build that Ctrl-C ended needs a record, too.
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "failed"
            message = error.message if isinstance(error, GpukilnError) else repr(error)
            build.write(replace(record, state=state, error=message, durations_s=progress.durations))
            raise
        build.write(record)
    return build, record


def labels(plan: ContainerPlan, build_id: str) -> dict[str, str]:
    """Labels of the image: the annotations of the OCI image specification, and gpukiln's own."""
    return {
        "org.opencontainers.image.title": plan.image,
        "org.opencontainers.image.description": plan.title,
        "org.opencontainers.image.created": plan.created_at,
        "org.opencontainers.image.version": plan.version,
        "org.opencontainers.image.revision": plan.git_commit or "",
        # OCI image-spec, annotations: name without digest, and the digest
        "org.opencontainers.image.base.name": (plan.base.image or plan.base_name).partition("@")[0],
        "org.opencontainers.image.base.digest": (plan.base.image or "").partition("@")[2],
        "gpukiln.build": build_id,
        "gpukiln.digest": plan.digest,
        "gpukiln.cuda": plan.cuda,
        "gpukiln.left-out": ",".join(part.name for part in plan.components if part.status == "left_out"),
    }


def _base(plan: ContainerPlan, engine: Engine, home: Path, log: Path, progress: Progress) -> str:
    """The image to start from; a base of this machine's mirror is rebuilt when its packages have changed."""
    # A base with a digest is pulled by the engine itself.
    if plan.base.image or not plan.base.codename:
        return plan.base.image or ""
    key = hashlib.sha256(
        canonical([plan.inputs["mirror"], plan.inputs["base packages"], EXTRA_BASE_PACKAGES]).encode()
    ).hexdigest()[:12]
    reference = f"{REPOSITORY}/{plan.base_name}:{key}"
    if engine.inspect(reference):
        return reference
    with progress.step(f"make the base {plan.base_name} from this machine's mirror"):
        (home / "bases").mkdir(parents=True, exist_ok=True)
        tar = home / "bases" / f"{plan.base_name}-{key}.tar"
        if not tar.exists():
            with atomic_path(tar) as partial:
                install_debian(
                    plan.base.codename,
                    partial,
                    form="tar",
                    variant="minbase",
                    packages=EXTRA_BASE_PACKAGES,
                    sources=home / "bases" / "debian.sources",
                    log=log,
                )
            # Only the newest base of a name is kept: each has some hundred MB.
            for old in tar.parent.glob(f"{plan.base_name}-*.tar"):
                if old != tar:
                    old.unlink()
        engine.load_base(tar, reference)
    return reference


def _run_build(engine: Engine, request: BuildRequest, image: str, log: Path, progress: Progress) -> None:
    """Run the engine; its output goes to the log, its steps to the progress."""
    with log.open("a") as output:

        def follow(line: str) -> None:
            output.write(line)
            output.flush()
            # Buildah and Podman print STEP, Docker Step, BuildKit `#5 [2/7] RUN ...`.
            if line.startswith(("STEP ", "Step ", "[")) or (line.startswith("#") and "] " in line):
                progress.show_activity(line.strip()[:100])

        try:
            status = programs.stream(
                engine.build_command(request),
                follow,
                # SIGINT first: the engine then ends the processes of a RUN, which SIGKILL would leave
                ends=((signal.SIGINT, CLEAN_UP_S), (signal.SIGKILL, CLEAN_UP_S)),
                environment={**os.environ, **engine.build_environment()},
            )
        except BaseException:
            engine.remove_unfinished(image)
            raise
    if status:
        raise UnavailableError(
            f"{engine.name} could not build the image: exit {status} (log: {log})",
            # The end of the log has the command that failed.
            details=tuple(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]),
        )


def is_build_running(builds: ContainerBuilds) -> bool:
    """Whether a build runs on this machine; if not, a record in the state running is of a killed build."""
    try:
        with _build_lock(builds.home):
            return False
    except BusyError:
        return True


@contextmanager
def _build_lock(home: Path) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True)
    busy = BusyError("another docker.build runs on this machine", hint="wait for it, then try again")
    with locked(home / "lock", busy=busy):
        yield


@contextmanager
def _build_alone(home: Path) -> Iterator[None]:
    """Allow one build at a time, and remove contexts and incomplete cache entries of a killed one."""
    with _build_lock(home):
        for orphan in home.glob("context-*"):
            shutil.rmtree(orphan)
        remove_partial(*(folder for folder in home.iterdir() if folder.is_dir()))
        yield
