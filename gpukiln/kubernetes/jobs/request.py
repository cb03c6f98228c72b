"""Reads the options of a GPU job, and refuses what no cluster could run as intended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from gpukiln.errors import RefusedError, UsageError
from gpukiln.kubernetes.check.formats import LABEL, LABEL_1035, LABEL_KEY, is_label
from gpukiln.kubernetes.images import check_reference, object_name_of
from gpukiln.kubernetes.jobs import choice
from gpukiln.kubernetes.jobs.job import GpuJob, Mount, Security, checked_mounts
from gpukiln.kubernetes.jobs.options import JobOptions
from gpukiln.kubernetes.jobs.values import exit_codes, object_name, pairs, texts, toleration, user_and_group
from gpukiln.kubernetes.quantity import parse_quantity, quantity
from gpukiln.options import flag
from gpukiln.units import MIB, Duration, Memory

CPU_A_GPU, MEMORY_A_GPU_GIB = 3, 12  # what a node with 4 vCPU and 16 GiB for each GPU has left
GRACE_S = {False: 30, True: 110}  # by spot: Kubernetes' default; EC2 warns two minutes before an interruption
# A form that every version accepts; newer ones also accept other characters (KEP-4369).
VARIABLE = re.compile(r"(?!\.\.|\.$)[-._a-zA-Z][-._a-zA-Z0-9]*")
MOST_PODS = 100_000  # of an Indexed Job (pkg/apis/batch/validation)
MOST_INT32 = 2**31 - 1  # of backoffLimit and ttlSecondsAfterFinished (k8s.io/api/batch/v1)
# Labels that the Job controller sets; the server rejects a Job with them
# (pkg/registry/batch/job/strategy.go).
CONTROLLER_LABELS = re.compile(r"(?:batch\.kubernetes\.io/)?(?:job-name|controller-uid)")
DEVICE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the device plugin gives a container its GPUs, numbered from 0; this hides some "
    "of them, and with MIG all",
    "NVIDIA_VISIBLE_DEVICES": "the device plugin sets it; the pod's own value may take precedence and show "
    "every GPU of the node",
}
RENDEZVOUS_VARIABLES = re.compile(
    "MASTER_ADDR|MASTER_PORT|NNODES|NODE_RANK|NPROC_PER_NODE|JOB_COMPLETION_INDEX|PET_.*"
)
# Fields of a job that have the name and the value of an option.
SAME = ("image", "namespace", "gpus", "mig", "shared", "retries", "nodes", "spot", "arguments")
Pairs = tuple[tuple[str, str], ...]


def gpu_job(image: str, **options: Any) -> GpuJob:
    """Read and check a GPU job; its `manifests()` are sent to the API server.

    An option with several values is a list, or a mapping for KEY=VALUE. docs/k8s-jobs.md describes the
    options.

    Args:
        options: Those of `JobOptions`.

    Raises:
        UsageError: An option is not valid.
        IncompatibleError: No machine could run it.
        RefusedError: It would run, but not as intended.
    """
    return job_from_options(JobOptions(image=image, **options))


def job_from_options(options: JobOptions) -> GpuJob:
    """As `gpu_job`."""
    check_reference(options.image, allow_latest=options.allow_latest)
    name = options.name or object_name_of(options.image)
    _check_names(name, options.namespace, options.nodes)
    _check_counts(options.gpus, options.nodes, options.retries)
    cpu = _cpu(options.cpu, options.gpus)
    memory, shm = _memory(options.memory, options.shm, options.gpus)
    machines = choice.choose_machines(options, parse_quantity(cpu, "--cpu", ""), Decimal(memory))
    if options.provider:
        choice.check_choice("--provider", options.provider, choice.Provider)
    elif options.spot:
        raise UsageError(
            "--spot needs --provider: each provider has its own label for spot nodes",
            hint=f"one of {', '.join(choice.SPOT)}",
        )
    if options.security:
        choice.check_choice("--security", options.security, Security)
    scratch = texts(options.scratch)
    fields: dict[str, Any] = {field: getattr(options, field) for field in SAME}
    for field in ("timeout", "ttl", "grace"):
        text = getattr(options, field) or str(GRACE_S[options.spot])
        fields[f"{field}_s"] = int(Duration.parse(text, flag(field), least=1, most=MOST_INT32))
    for field in ("service_account", "runtime_class", "priority_class"):
        fields[field] = object_name(getattr(options, field), flag(field))
    for field in ("env_secret", "pull_secret"):
        secrets = texts(getattr(options, field))
        fields[f"{field}s"] = tuple(object_name(secret, flag(field)) for secret in secrets)
    job = GpuJob(
        **fields,
        **vars(machines),
        name=name,
        command=tuple(options.command),
        cpu=cpu,
        memory=memory.quantity,
        shm=shm.quantity if shm else "",
        give_up=exit_codes(options.give_up),
        queue=_queue(options.queue),
        provider=options.provider or None,  # type: ignore[arg-type]  # check_choice
        mounts=checked_mounts(
            [*map(Mount.parse_cache, texts(options.cache)), *map(Mount.parse_scratch, scratch)]
        ),
        env=_env(options.env, several=options.nodes > 1),
        tolerate=tuple(map(toleration, texts(options.tolerate))),
        node_labels=_labels(options.node_label, "--node-label"),
        labels=_labels(options.label, "--label"),
        resources=_resources(options.resource, scratch=bool(scratch)),
        security="",
        run_as=user_and_group(options.run_as),
    )
    return job.restricted() if options.security else job


def _check_counts(gpus: int, nodes: int, retries: int) -> None:
    for number, option in ((gpus, "--gpus"), (nodes, "--nodes")):
        if number < 1:
            raise UsageError(f"{option} {number}, wanted 1 or more")
    if nodes > MOST_PODS:
        raise UsageError(f"--nodes {nodes}: an Indexed Job has at most {MOST_PODS} pods")
    if not 0 <= retries * nodes <= MOST_INT32:
        raise UsageError(f"--retries {retries}, wanted 0 or more, with --nodes at most {MOST_INT32} in all")


def _check_names(name: str, namespace: str, nodes: int) -> None:
    if not LABEL.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
        raise UsageError(
            f"--name {name!r}: wanted at most 63 small letters, digits and `-`, no `-` at its ends",
            hint=f"did you mean {near}?" if near and near != name else "use another name",
        )
    if namespace and not LABEL.fullmatch(namespace):
        raise UsageError(f"--namespace {namespace!r} is not valid", hint="small letters, digits and `-`")
    # RFC 1035: names of Services begin with a letter.
    if nodes > 1 and not LABEL_1035.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: with --nodes it is the name of a Service, which begins with a letter",
            hint=f"--name job-{name}",
        )
    host = f"{name}-{nodes - 1}"
    if nodes > 1 and len(host) > 63:
        raise UsageError(
            f"--name {name!r} is too long: {host} is the name of a host, at most 63 characters",
            hint=f"at most {63 - len(host) + len(name)} characters",
        )


def _cpu(text: str, gpus: int) -> str:
    cpu = (text or str(CPU_A_GPU * gpus)).strip()
    if parse_quantity(cpu, "--cpu", "3500m or 4") * 1000 % 1:
        raise UsageError(f"--cpu {cpu}: the smallest part of a CPU is 1m", hint="such as 500m")
    # 3G CPUs is a valid quantity, and always a mistake.
    if cpu.endswith(("k", "M", "G", "T", "P", "E", "i")):
        raise UsageError(f"--cpu {cpu} has a unit of memory", hint="such as 3500m or 4")
    return cpu


def _memory(memory: str, shm: str, gpus: int) -> tuple[Memory, Memory]:
    """Memory, and the shared memory in it."""
    whole = Memory.parse(memory or f"{MEMORY_A_GPU_GIB * gpus}Gi", "--memory")
    # A smaller limit is a mistake in the unit: 512m, for example, means half a byte.
    if whole < 4 * MIB:
        raise UsageError(f"--memory {memory} is {whole.shown}, wanted 4 MiB or more", hint="such as 14GiB")
    shared = Memory.parse(shm, "--shm", zero=True) if shm.strip() else Memory(0)
    if shared >= whole:
        raise UsageError(
            f"--shm {shm} leaves nothing of --memory {whole.shown}: /dev/shm is a part of it",
            hint="raise --memory or lower --shm: the kernel counts both against the container's limit",
        )
    return whole, shared


def _env(env: Mapping[str, str] | Sequence[str], *, several: bool) -> Pairs:
    variables: dict[str, str] = {}
    for name, value in pairs(env, "--env", "NAME=value"):
        if not VARIABLE.fullmatch(name):
            raise UsageError(f"--env {name!r} can't be the name of a variable", hint="letters, digits, _ - .")
        if name in DEVICE_VARIABLES:
            raise RefusedError(f"--env {name}: {DEVICE_VARIABLES[name]}", hint="remove it; use --gpus")
        if several and RENDEZVOUS_VARIABLES.fullmatch(name):
            raise UsageError(f"--env {name} is set for every pod of --nodes", hint="remove it")
        variables[name] = str(value)
    return tuple(variables.items())


def _labels(labels: Mapping[str, str] | Sequence[str], option: str) -> Pairs:
    checked = dict(pairs(labels, option, "team=vision"))
    for key, value in checked.items():
        if not is_label(key, value):
            raise UsageError(f"{option} {key}={value} is no label", hint="team=vision, for example")
        if option == "--label" and CONTROLLER_LABELS.fullmatch(key):
            raise UsageError(
                f"--label {key}: the server sets it, and rejects a Job that has it",
                hint="--name NAME names the Job",
            )
    return tuple(checked.items())


def _resources(resources: Mapping[str, str] | Sequence[str], *, scratch: bool) -> Pairs:
    amounts = {}
    for name, value in pairs(resources, "--resource", "vpc.amazonaws.com/efa=4"):
        option = f"--resource {name}"
        if name in ("cpu", "memory") or name.startswith("nvidia.com/"):
            raise UsageError(f"{option} has an option of its own", hint="--cpu, --memory, --gpus, --mig")
        page = quantity(name.removeprefix("hugepages-")) if name.startswith("hugepages-") else None
        domain, slash, _ = name.rpartition("/")
        extended = slash and LABEL_KEY.fullmatch(name) and not domain.startswith("requests.")
        if not (extended or page or name == "ephemeral-storage"):
            raise UsageError(f"{option} is no resource that a pod can request", hint="such as DOMAIN/NAME")
        if name == "ephemeral-storage" and scratch:
            raise UsageError(
                "--resource ephemeral-storage and --scratch both request the node's disk",
                hint="remove one of them: --scratch requests the size of its folders",
            )
        if extended and parse_quantity(value, option, "4") % 1:
            raise UsageError(f"{option}={value}: wanted a whole number")
        size = None if extended else Memory.parse(value, option)
        if size and page and int(size) % int(page):
            raise UsageError(f"{option}={value}: wanted whole pages of {name.removeprefix('hugepages-')}")
        amounts[name] = size.quantity if size else value.strip()
    return tuple(amounts.items())


def _queue(text: str) -> str:
    """The name of a LocalQueue, which is also the value of a label."""
    if len(text) > 63:
        raise UsageError(f"--queue {text!r} is no value of a label", hint="at most 63 characters")
    return object_name(text, "--queue")
