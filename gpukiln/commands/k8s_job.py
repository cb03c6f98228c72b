"""GPU jobs on Kubernetes: rendered right, submitted, followed to their end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpukiln.cli.command import KubernetesOptions, print_document, say
from gpukiln.errors import UsageError
from gpukiln.kubernetes.jobs.options import JobOptions
from gpukiln.options import flag, option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.kubernetes.cluster import Cluster
    from gpukiln.kubernetes.jobs.document import JobDocument
    from gpukiln.kubernetes.jobs.job import GpuJob
    from gpukiln.kubernetes.jobs.state import JobEnd


@dataclass(frozen=True)
class K8sJob(JobOptions, KubernetesOptions):
    """Render a GPU Job, checked against the catalogue; with --apply submit it and exit as it does."""

    output: str = option("a folder that NAME.yaml is written to")
    apply: bool = option("submit it, follow it, print its log, exit as it does", False)
    detach: bool = option("with --apply: do not follow", False)
    attach: bool = option("follow a Job that is there (--name); nothing is submitted", False)
    replace: bool = option("with --apply: remove a Job of that name that has ended", False)
    dry_run: bool = option("with --apply: the server validates and admits it, and keeps nothing", False)
    start_within: str = option("with --apply: remove it again and exit 75 where it has not started by then")
    delete_on_interrupt: bool = option("Ctrl-C removes the Job; without it the Job goes on", False)

    def run(self) -> int:
        from gpukiln.kubernetes.jobs.admission import adapt_to_namespace
        from gpukiln.kubernetes.jobs.document import attached_document
        from gpukiln.kubernetes.jobs.request import job_from_options

        self._check_together()
        # Only then: a Job is rendered without a cluster, and without its Python client.
        cluster = self.api() if self.apply or self.attach else None
        if cluster and self.attach:
            end = self._follow(cluster, self.name, self.namespace, is_submitter=False)
            return self._ended(end, attached_document(cluster, self.name, self.namespace, end))
        job = job_from_options(self)
        if cluster:
            # Before notes and file, so that both are about the Job that is submitted.
            job = adapt_to_namespace(cluster, job, say)
        for note in job.notes():
            say(f"note: {note}")
        if self.output:
            _write(job, Path(self.output))
        if cluster:
            return self._submit(cluster, job)
        if not self.output and not self.json:
            # Nothing else goes to standard output: `| kubectl apply -f -` takes it.
            print(as_yaml(job), end="")
        self._document(job)
        return 0

    def _submit(self, cluster: Cluster, job: GpuJob) -> int:
        from gpukiln.kubernetes import follow
        from gpukiln.kubernetes.jobs.document import document

        if self.dry_run:
            follow.dry_run(cluster, job)
            say(f"job {job.name}: the server would take it")
            self._document(job, cluster)
            return 0
        submission = follow.submit(cluster, job, say, replace_ended=self.replace)
        if self.detach:
            for line in follow.resume_hints(job.name, job.namespace or cluster.namespace, cluster.context):
                say(line)
            self._document(job, cluster)
            # Nobody waits here for its end, so the same command is not to continue it; --attach does.
            submission.end()
            return 0
        end = self._follow(cluster, job.name, job.namespace, is_submitter=True)
        code = self._ended(end, document(job, cluster=cluster, end=end))
        # Only now: a run that is killed before its end is reported is continued by the same command.
        submission.end()
        return code

    def _follow(self, cluster: Cluster, name: str, namespace: str, *, is_submitter: bool) -> JobEnd:
        from gpukiln.kubernetes import follow
        from gpukiln.units import Duration

        within = Duration.parse(self.start_within, "--start-within") if self.start_within else None
        where = namespace or cluster.namespace

        def write(line: str) -> None:
            # In a pipe Python buffers blocks: a CI job would show the log late, or lose its end.
            print(line, flush=True)

        try:
            return follow.follow(
                cluster,
                name,
                where,
                # With --json the document has standard output for itself.
                write=say if self.json else write,
                say=say,
                patience=follow.WaitLimits(within),
                is_submitter=is_submitter,
            )
        # The Job goes on without this process. `| head` has only read enough: it never removes the Job.
        except (KeyboardInterrupt, BrokenPipeError) as ended:
            if self.delete_on_interrupt and isinstance(ended, KeyboardInterrupt):
                cluster.delete("Job", name, where)
                say(f"job {name}: removed")
            else:
                for line in follow.resume_hints(name, where, cluster.context):
                    say(line)
            raise

    def _document(self, job: GpuJob, cluster: Cluster | None = None) -> None:
        from gpukiln.kubernetes.jobs.document import JOB, document

        if self.json:
            print_document(JOB, dump(document(job, cluster=cluster) if cluster else document(job)))

    def _ended(self, end: JobEnd, document: JobDocument) -> int:
        if self.json:
            print_document(document.schema, dump(document))
        say(f"job {document.name}: {end.state}" + (f": {end.reason}: {end.why}" if end.why else ""))
        return end.exit_code

    def _check_together(self) -> None:
        if self.apply and self.attach:
            raise UsageError("--apply submits a Job, --attach follows one that is there", hint="one of them")
        for name, given in self.pick("detach", "replace", "dry_run").items():
            if given and not self.apply:
                raise UsageError(f"{flag(name)} is for --apply", hint="add --apply, or leave it out")
        followed = (self.apply or self.attach) and not self.detach
        for name, given in self.pick("start_within", "delete_on_interrupt").items():
            if given and not followed:
                raise UsageError(
                    f"{flag(name)} is for a Job that is followed", hint="with --apply or --attach"
                )
        if self.attach and not self.name:
            raise UsageError("--attach needs --name: which Job is to be followed")


def as_yaml(job: GpuJob) -> str:
    from gpukiln.kubernetes.manifest import dump as manifest

    return manifest(*job.manifests())


def _write(job: GpuJob, output: Path) -> None:
    from gpukiln.kubernetes import folder

    name = f"{job.name}.yaml"
    [file] = folder.write(output, {name: as_yaml(job)}).files
    say(f"{file.change:8} {output / name}")
