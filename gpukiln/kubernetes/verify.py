"""Verifies a live cluster with the host suite, by pods that ask for its GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from gpukiln.docker.builds import ContainerBuilds
from gpukiln.errors import UsageError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.cluster_verification import GpuTestOptions, gather_cluster_facts
from gpukiln.nodes.runs import RunStore
from gpukiln.progress import Progress
from gpukiln.verify.report import LiveReport
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import Verdict

RUNNER = "runner-gpu"  # the image of docker/ that has bash and python3


def pushed_image(say: Callable[[str], None]) -> str:
    """The runner image that this computer pushed last, by digest.

    Raises:
        UsageError: It pushed none.
    """
    pushes = [push for build in ContainerBuilds().of(RUNNER) for push in build.read().pushed]
    if not pushes:
        raise UsageError(
            "no image to test with: --image is missing, and no runner image was pushed from here",
            hint=f"`invoke docker.push --image {RUNNER} --repository REPOSITORY` pushes gpukiln's; any "
            "image with bash and python3 works",
        )
    newest = max(pushes, key=lambda push: push.at)
    say(f"the pods run {newest.reference}")
    return newest.reference


def verify_cluster(cluster: Cluster, options: GpuTestOptions) -> tuple[Verdict, Path]:
    """Run the pods, and the suite on what they reported.

    Returns:
        The verdict, and the folder of its report.

    Raises:
        GpukilnError: The cluster can't be tested, see `gather_cluster_facts`.
    """
    run, progress = RunStore().create("cluster"), Progress()
    with progress.step(f"ask {cluster.context}"):
        facts = gather_cluster_facts(cluster, options, run.folder, say=progress.say)
    live = LiveReport(progress)
    with progress.step("verify"):
        verdict = run_suite(
            Target(cluster.context, f"facts://{quote(str(facts), safe='')}"),
            profile="pod",
            out_dir=run.folder,
            on_start=live.start,
            on_check=live.check,
        )
        if not verdict.passed:
            progress.fail()
    return verdict, run.folder
