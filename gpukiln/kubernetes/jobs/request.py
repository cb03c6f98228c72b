"""Reads what a job is to be, and refuses what no cluster could run as it was meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from gpukiln.catalog.instance_types import instance_types
from gpukiln.errors import IncompatibleError, RefusedError, UsageError
from gpukiln.kubernetes import machines
from gpukiln.kubernetes.check.formats import (
    LABEL,
    LABEL_1035,
    LABEL_KEY,
    LABEL_VALUE,
    SUBDOMAIN,
    is_label,
)
from gpukiln.kubernetes.jobs import choice
from gpukiln.kubernetes.jobs.choice import Provider, SelectBy
from gpukiln.kubernetes.jobs.options import JobOptions
from gpukiln.kubernetes.jobs.render import manifests
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.quantity import parse_quantity, quantity
from gpukiln.redact import redact
from gpukiln.units import MIB, Duration, Memory, is_whole

CPU_A_GPU, MEMORY_A_GPU_GIB = 3, 12  # what a node with 4 vCPU and 16 GiB for each GPU has left
GRACE_S, SPOT_GRACE_S = 30, 110  # Kubernetes' own; EC2 says two minutes before that it takes a spot machine
WEIGHTS = range(1, 101)  # k8s.io/api/core/v1, PreferredSchedulingTerm
VARIABLE = re.compile(r"(?!\.\.|\.$)[-._a-zA-Z][-._a-zA-Z0-9]*")
MOST_PODS = 100_000  # of an Indexed Job (pkg/apis/batch/validation)
MOST_INT32 = 2**31 - 1  # what backoffLimit and ttlSecondsAfterFinished may be (k8s.io/api/batch/v1)
# Labels that the server gives the pods of a Job, and refuses a Job for (pkg/registry/batch/job/strategy.go).
CONTROLLER_LABELS = (
    "job-name",
    "controller-uid",
    "batch.kubernetes.io/job-name",
    "batch.kubernetes.io/controller-uid",
)
# distribution/reference: [HOST[:PORT]/]PATH[:TAG][@DIGEST]
IMAGE = re.compile(
    r"(?P<name>(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
DEVICE_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "the device plugin gives a container its GPUs, numbered from 0; this hides some "
    "of them, and with MIG all",
    "NVIDIA_VISIBLE_DEVICES": "the device plugin sets it; a value of the pod's may win, and shows every GPU "
    "of the node",
}
Security = Literal["", "restricted"]
MOST_ID = 2**31 - 1  # kubernetes/kubernetes:pkg/apis/core/validation, IsValidUserID
RENDEZVOUS_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
    "NPROC_PER_NODE",
    "JOB_COMPLETION_INDEX",
)


@dataclass(frozen=True)
class Mount:
    """A place in the container that is not of the image.

    Args:
        source: Name of a claim, a folder of the node (begins with /), or empty: the pod's own.
        size: Of the pod's own: most that it may hold.
    """

    path: str
    source: str = ""
    size: str = ""


@dataclass(frozen=True)
class GpuJob:
    """A job that was checked; quantities are Kubernetes' own texts.

    Args:
        models: Keys of the catalogue; none: any GPU.
        products: Values of the label nvidia.com/gpu.product that were named instead of models.
        prefer: Models and their weights, 1 to 100.
        types: Instance types that can run it; empty where `products` name nodes of one's own.
        mig: A profile of which `gpus` are wanted, instead of whole GPUs.
        shared: Whether GPUs that several pods share will do.
        memory: Of the container, /dev/shm included.
        timeout_s: Of the whole Job, retries and waiting for a node included.
        ttl_s: How long it stays after its end, logs with it.
        retries: For failures of its own; what the cluster interrupts is not counted.
        give_up: Exit codes after which it is not tried again.
        nodes: Pods that run at once and know each other.
        provider: Who makes the nodes; with it on demand is chosen where spot is not.
        arguments: Whether `command` goes to the image's entrypoint and does not replace it.
        security: restricted: pods that Pod Security of that level admits; empty: the image's own settings.
        run_as: User and group instead of the image's; none: the image's.
    """

    name: str
    image: str
    command: tuple[str, ...]
    namespace: str
    gpus: int
    models: tuple[str, ...]
    products: tuple[str, ...]
    prefer: tuple[tuple[str, int], ...]
    select_by: SelectBy
    types: tuple[str, ...]
    mig: str
    shared: bool
    arch: str
    cpu: str
    memory: str
    shm: str
    timeout_s: int
    ttl_s: int
    grace_s: int
    retries: int
    give_up: tuple[int, ...]
    nodes: int
    queue: str
    provider: Provider | None
    spot: bool
    mounts: tuple[Mount, ...]
    env: tuple[tuple[str, str], ...]
    env_secrets: tuple[str, ...]
    service_account: str
    pull_secrets: tuple[str, ...]
    runtime_class: str
    priority_class: str
    tolerate: tuple[tuple[str, str], ...]
    node_labels: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]
    resources: tuple[tuple[str, str], ...]
    arguments: bool
    security: Security
    run_as: tuple[int, int] | None

    def manifests(self) -> list[Manifest]:
        """The Job, and the Service by which its pods find each other where they are several."""
        return manifests(self)

    def notes(self) -> list[str]:
        """What its user may not have in mind."""
        return list(_notes(self))


def _check_counts(gpus: int, nodes: int, retries: int) -> None:
    for number, option in ((gpus, "--gpus"), (nodes, "--nodes")):
        if number < 1:
            raise UsageError(f"{option} {number}, wanted 1 or more")
    if nodes > MOST_PODS:
        raise UsageError(f"--nodes {nodes}: an Indexed Job has at most {MOST_PODS} pods")
    if not 0 <= retries * nodes <= MOST_INT32:
        raise UsageError(f"--retries {retries}, wanted 0 or more, with --nodes at most {MOST_INT32} in all")


def _codes(given: str | Sequence[int]) -> tuple[int, ...]:
    codes = _texts(given) if isinstance(given, str) else [str(code) for code in given]
    for code in codes:
        if not is_whole(code) or not 1 <= int(code) <= 255:
            raise UsageError(f"--give-up {code!r} is no exit code of a failure", hint="wanted 1 to 255")
    return tuple(sorted({int(code) for code in codes}))


def gpu_job(image: str, **options: Any) -> GpuJob:
    """Read and check a GPU job; `manifests()` of what is returned is what the API server takes.

    What holds several values is a list, or a mapping where each is KEY=VALUE. docs/k8s-jobs.md says what each
    means.

    Args:
        options: Those of `JobOptions`.

    Raises:
        UsageError: Something is not understood.
        IncompatibleError: No machine could run it.
        RefusedError: It would run, and not as it is meant.
    """
    return job_from_options(JobOptions(image=image, **options))


def job_from_options(options: JobOptions) -> GpuJob:
    """As `gpu_job`."""
    arch = options.arch
    _check_image(options.image, allow_latest=options.allow_latest)
    chosen_name = options.name or _name_of(options.image)
    _check_names(chosen_name, options.namespace, options.nodes)
    _check_counts(options.gpus, options.nodes, options.retries)
    models = choice.models_of(_texts(options.gpu_model), "--gpu-model")
    products, named = _texts(options.product), _texts(options.instance_type)
    by = options.select_by or ("instance-type" if named else "product")
    choice.check_choice("--select-by", by, SelectBy)
    _check_choices(by, models, products, named, options.mig, shared=options.shared)
    weights = _weights(options.prefer, models, products)
    if arch and arch not in machines.ARCHES:
        raise UsageError(f"--arch {arch!r}", hint=f"wanted: {' or '.join(machines.ARCHES)}")
    if options.mig:
        choice.check_mig(options.mig, models)
    cpu = _cpu(options.cpu, options.gpus)
    whole, shared_memory = _memory(options.memory, options.shm, options.gpus)
    requested = parse_quantity(cpu, "--cpu", ""), Decimal(whole)
    types: tuple[str, ...] = ()
    if products:  # somebody's own nodes
        arch = arch or "x86_64"
    else:
        arch, types = _machines(named, models, options.gpus, options.mig, arch, requested)
    _check_preferred(weights, types, options.gpus)

    if options.provider:
        choice.check_choice("--provider", options.provider, Provider)
    elif options.spot:
        raise UsageError(
            "--spot needs --provider: every one has a label of its own for spot nodes",
            hint=f"one of {', '.join(choice.SPOT)}",
        )
    if options.security:
        choice.check_choice("--security", options.security, Security)
    job = GpuJob(
        name=chosen_name,
        image=options.image,
        command=tuple(options.command),
        namespace=options.namespace,
        gpus=options.gpus,
        models=models,
        products=products,
        prefer=weights,
        select_by=by,  # type: ignore[arg-type]  # check_choice
        types=types,
        mig=options.mig,
        shared=options.shared,
        arch=arch,
        cpu=cpu,
        memory=whole.quantity,
        shm=shared_memory.quantity if shared_memory else "",
        timeout_s=int(Duration.parse(options.timeout, "--timeout", least=1, most=MOST_INT32)),
        ttl_s=int(Duration.parse(options.ttl, "--ttl", least=1, most=MOST_INT32)),
        grace_s=int(Duration.parse(options.grace, "--grace", least=1, most=MOST_INT32))
        if options.grace
        else (SPOT_GRACE_S if options.spot else GRACE_S),
        retries=options.retries,
        give_up=_codes(options.give_up),
        nodes=options.nodes,
        queue=_queue(options.queue),
        provider=options.provider or None,  # type: ignore[arg-type]  # check_choice
        spot=options.spot,
        mounts=_mounts(_texts(options.cache), _texts(options.scratch)),
        env=_env(options.env, several=options.nodes > 1),
        env_secrets=tuple(_named(secret, "--env-secret") for secret in _texts(options.env_secret)),
        service_account=_named(options.service_account, "--service-account"),
        pull_secrets=tuple(_named(secret, "--pull-secret") for secret in _texts(options.pull_secret)),
        runtime_class=_named(options.runtime_class, "--runtime-class"),
        priority_class=_named(options.priority_class, "--priority-class"),
        tolerate=_tolerated(_texts(options.tolerate)),
        node_labels=_labels(options.node_label, "--node-label"),
        labels=_labels(options.label, "--label"),
        resources=_resources(options.resource, scratch=bool(_texts(options.scratch))),
        arguments=options.arguments,
        security="",
        run_as=_user(options.run_as),
    )
    return with_restricted_security(job) if options.security else job


def with_restricted_security(job: GpuJob) -> GpuJob:
    """The job with pods that Pod Security `restricted` admits.

    Raises:
        IncompatibleError: It can't be had in that form.
    """
    if mounted := host_folders(job):
        raise IncompatibleError(
            f"--cache {mounted[0]}: Pod Security restricted admits no folder of the node",
            hint="--cache CLAIM:/PATH, or --scratch SIZE:/PATH",
        )
    if job.run_as and job.run_as[0] == 0:
        raise IncompatibleError(
            "--run-as 0 is root, which Pod Security restricted does not admit", hint="such as --run-as 1000"
        )
    return replace(job, security="restricted")


def host_folders(job: GpuJob) -> list[str]:
    """Folders of the node that it mounts, as they were typed."""
    return [f"{mount.source}:{mount.path}" for mount in job.mounts if mount.source.startswith("/")]


def _user(text: str) -> tuple[int, int] | None:
    """A user and its group; the same number where no group is named."""
    if not text:
        return None
    user, colon, group = text.partition(":")
    parts = (user, group if colon else user)
    if not all(is_whole(part) and int(part) <= MOST_ID for part in parts):
        raise UsageError(f"--run-as {text!r}, wanted UID or UID:GID, 0 to {MOST_ID}", hint="--run-as 1000")
    return int(parts[0]), int(parts[1])


def _check_image(image: str, *, allow_latest: bool) -> None:
    if not image:
        raise UsageError("--image is missing", hint="the container image, with its tag or digest")
    match = IMAGE.fullmatch(image)
    if not match:
        raise UsageError(
            f"--image {image!r} is no reference of an image",
            hint="wanted: [HOST/]NAME:TAG or [HOST/]NAME@sha256:..., in lower case",
        )
    if not match["digest"] and match["tag"] in (None, "latest") and not allow_latest:
        what = "tag latest" if match["tag"] else "no tag, which means latest"
        raise RefusedError(
            f"--image {image} has {what}: it is another image tomorrow, and on each node another one",
            hint="name the version's tag or its digest; --allow-latest takes it as it is",
        )


def _name_of(image: str) -> str:
    """The last part of an image's name, as the name of an object."""
    last = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "job"


def _check_names(name: str, namespace: str, nodes: int) -> None:
    if not LABEL.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
        raise UsageError(
            f"--name {name!r}: wanted at most 63 small letters, digits and `-`, no `-` at its ends",
            hint=f"did you mean {near}?" if near and near != name else "another name",
        )
    if namespace and not LABEL.fullmatch(namespace):
        raise UsageError(f"--namespace {namespace!r} can't be one", hint="small letters, digits and `-`")
    if nodes > 1 and not LABEL_1035.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: with --nodes a Service bears it, whose name begins with a letter",
            hint=f"--name job-{name}",
        )
    host = f"{name}-{nodes - 1}"
    if nodes > 1 and len(host) > 63:
        raise UsageError(
            f"--name {name!r} is too long: {host} is the name of a host, at most 63 characters",
            hint=f"at most {63 - len(host) + len(name)} characters",
        )


def _check_choices(
    by: str, models: Sequence[str], products: Sequence[str], named: Sequence[str], mig: str, *, shared: bool
) -> None:
    for first_value, other, first, second in (
        (products, models, "--product", "--gpu-model"),
        (products, named, "--product", "--instance-type"),
        (products, mig, "--product", "--mig"),
        (products, shared, "--product", "--shared"),
        (mig, shared, "--mig", "--shared"),
        (products, by != "product", "--product", f"--select-by {by}"),
        (named, by != "instance-type", "--instance-type", f"--select-by {by}"),
    ):
        if first_value and other:
            raise UsageError(f"{first} and {second} exclude each other", hint="leave one of them out")
    for product in products:
        if not LABEL_VALUE.fullmatch(product):
            raise UsageError(
                f"--product {product!r} is no value of a label",
                hint=f"did you mean {product.replace(' ', '-')}?" if " " in product else "such as Tesla-T4",
            )


def _weights(
    prefer: Mapping[str, int] | Sequence[str], models: Sequence[str], products: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    weights: dict[str, int] = {}
    for name, weight in _pairs(prefer, "--prefer", "L4=80"):
        if products:
            raise UsageError("--prefer and --product exclude each other", hint="--gpu-model names models")
        if not is_whole(str(weight)) or int(weight) not in WEIGHTS:
            raise UsageError(f"--prefer {name}={weight}: {weight!r} is no weight", hint="wanted: 1 to 100")
        for key in choice.models_of([name], "--prefer"):
            if models and key not in models:
                raise UsageError(
                    f"--prefer {name}: --gpu-model excludes it", hint=f"add {name} to --gpu-model"
                )
            weights[key] = int(weight)
    return tuple(weights.items())


def _machines(
    named: Sequence[str],
    models: Sequence[str],
    count: int,
    mig: str,
    arch: str,
    requested: tuple[Decimal, Decimal],
) -> tuple[str, tuple[str, ...]]:
    """The architecture and the instance types that can run it; each of those that were named must."""
    if named:
        types = choice.named_types(named, models, count, mig)
        for name in types:
            choice.types_with_capacity([name], *requested)
    else:
        types = choice.candidates(models, count, mig, arch)
    arch = arch or choice.arch_of(models or named, types)
    matching = tuple(name for name in types if instance_types()[name].arch == arch)
    if named and not matching:
        raise UsageError(f"--instance-type {', '.join(named)} and --arch {arch} exclude each other")
    return arch, choice.types_with_capacity(matching, *requested)


def _check_preferred(weights: Sequence[tuple[str, int]], types: Sequence[str], count: int) -> None:
    """A preference for what can't be had anyway is a mistake that nobody would see."""
    there = {instance_types()[name].gpu for name in types}
    for model, _ in weights:
        if model not in there:
            raise IncompatibleError(
                f"--prefer {model}: none of the machines that can run it has {count} of that GPU",
                hint=f"they have {', '.join(sorted(there))}",
            )


def _cpu(text: str, gpus: int) -> str:
    cpu = (text or str(CPU_A_GPU * gpus)).strip()
    if parse_quantity(cpu, "--cpu", "3500m or 4") * 1000 % 1:
        raise UsageError(f"--cpu {cpu}: the least part of a CPU is 1m", hint="such as 500m")
    if cpu.endswith(("k", "M", "G", "T", "P", "E", "i")):
        raise UsageError(f"--cpu {cpu} is a unit of memory", hint="such as 3500m or 4")
    return cpu


def _memory(memory: str, shm: str, gpus: int) -> tuple[Memory, Memory]:
    """Memory and the shared memory in it, as the kernel counts it."""
    whole = Memory.parse(memory or f"{MEMORY_A_GPU_GIB * gpus}Gi", "--memory")
    if whole < 4 * MIB:
        raise UsageError(f"--memory {memory} is {whole.shown}, wanted 4 MiB or more", hint="such as 14GiB")
    shared = Memory.parse(shm, "--shm", zero=True) if shm.strip() else Memory(0)
    if shared >= whole:
        raise UsageError(
            f"--shm {shm} leaves nothing of --memory {whole.shown}: /dev/shm is a part of it",
            hint="more --memory, or less --shm: the kernel counts both against the container's limit",
        )
    return whole, shared


def _mounts(caches: Sequence[str], scratches: Sequence[str]) -> tuple[Mount, ...]:
    mounts = []
    for text in caches:
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            raise UsageError(
                f"--cache {text!r}, wanted CLAIM:/PATH or /FOLDER-OF-THE-NODE:/PATH", hint="models:/models"
            )
        mounts.append(Mount(path, source if source.startswith("/") else _named(source, "--cache")))
    for text in scratches:
        size, _, path = text.partition(":")
        if not path.startswith("/"):
            raise UsageError(f"--scratch {text!r}, wanted SIZE:/PATH", hint="200Gi:/scratch")
        mounts.append(Mount(path, size=Memory.parse(size, "--scratch").quantity))
    for mount in mounts:
        for path in (mount.path, mount.source):
            if ".." in path.split("/"):
                raise UsageError(
                    f"{path} goes up by `..`, which the server refuses", hint="the path without it"
                )
        if ":" in mount.path:
            raise UsageError(f"a path in a container holds no `:`, as {mount.path} does", hint="another path")
    paths = ["/dev/shm", *(mount.path.rstrip("/") for mount in mounts)]  # noqa: S108 - the container's
    for path in paths:
        if not path or paths.count(path) > 1:
            raise UsageError(f"{path or '/'} can't be mounted {'twice' if path else 'over'}")
    return tuple(mounts)


def _env(env: Mapping[str, str] | Sequence[str], *, several: bool) -> tuple[tuple[str, str], ...]:
    variables: dict[str, str] = {}
    for name, value in _pairs(env, "--env", "NAME=value"):
        if not VARIABLE.fullmatch(name):
            raise UsageError(f"--env {name!r} can't be the name of a variable", hint="letters, digits, _ - .")
        if name in DEVICE_VARIABLES:
            raise RefusedError(
                f"--env {name}: {DEVICE_VARIABLES[name]}", hint="leave it out: --gpus says how many"
            )
        if several and (name in RENDEZVOUS_VARIABLES or name.startswith("PET_")):
            raise UsageError(f"--env {name} is set for every pod of --nodes", hint="leave it out")
        variables[name] = str(value)
    return tuple(variables.items())


def _tolerated(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    tolerations = []
    for text in texts:
        key, _, value = text.partition("=")
        if not is_label(key, value):
            raise UsageError(f"--tolerate {text!r}, wanted KEY or KEY=VALUE of a taint", hint="spot=true")
        tolerations.append((key, value))
    return tuple(tolerations)


def _labels(labels: Mapping[str, str] | Sequence[str], option: str) -> tuple[tuple[str, str], ...]:
    pairs = {}
    for key, value in _pairs(labels, option, "team=vision"):
        if not is_label(key, value):
            raise UsageError(f"{option} {key}={value} is no label", hint="team=vision, for example")
        if option == "--label" and key in CONTROLLER_LABELS:
            raise UsageError(
                f"--label {key}: the server sets it, and refuses a Job that has it",
                hint="--name NAME names the Job",
            )
        pairs[key] = value
    return tuple(pairs.items())


def _resources(resources: Mapping[str, str] | Sequence[str], *, scratch: bool) -> tuple[tuple[str, str], ...]:
    amounts = {}
    for name, value in _pairs(resources, "--resource", "vpc.amazonaws.com/efa=4"):
        if name in ("cpu", "memory") or name.startswith("nvidia.com/"):
            raise UsageError(
                f"--resource {name} has an option of its own", hint="--cpu, --memory, --gpus, --mig"
            )
        page = name.removeprefix("hugepages-") if name.startswith("hugepages-") else ""
        domain, slash, _ = name.rpartition("/")
        known = name == "ephemeral-storage" or (bool(page) and bool(quantity(page)))
        extended = bool(slash) and LABEL_KEY.fullmatch(name) and not domain.startswith("requests.")
        if not known and not extended:
            raise UsageError(f"--resource {name} is none that a pod can ask for", hint="such as DOMAIN/NAME")
        if name == "ephemeral-storage" and scratch:
            raise UsageError(
                "--resource ephemeral-storage and --scratch both ask for the node's disk",
                hint="leave one of them out: --scratch asks for what its folders hold",
            )
        if not slash:
            size = Memory.parse(value, f"--resource {name}")
            if page and int(size) % int(quantity(page) or 1):
                raise UsageError(f"--resource {name}={value}: wanted whole pages of {page}")
            amounts[name] = size.quantity
            continue
        if parse_quantity(value, f"--resource {name}", "4") % 1:
            raise UsageError(f"--resource {name}={value}: wanted a whole number")
        amounts[name] = value.strip()
    return tuple(amounts.items())


def _queue(text: str) -> str:
    """A LocalQueue's name, which is the value of a label, too."""
    if len(text) > 63:
        raise UsageError(f"--queue {text!r} is no value of a label", hint="at most 63 characters")
    return _named(text, "--queue")


def _named(text: str, option: str) -> str:
    """A name of an object, or nothing."""
    if text and not SUBDOMAIN.fullmatch(text):
        raise UsageError(
            f"{option} {text!r} can't be the name of an object", hint="small letters, digits, `-` and `.`"
        )
    return text


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Values of which each may hold several, with commas between them."""
    each = [value] if isinstance(value, str) else value
    return tuple(part.strip() for text in each for part in text.split(",") if part.strip())


def _pairs(value: Mapping[str, Any] | Sequence[str], option: str, example: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    pairs = []
    for text in [value] if isinstance(value, str) else value:
        name, equals, rest = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r} has no `=`", hint=f"wanted: {example}")
        pairs.append((name.strip(), rest))
    return pairs


def _notes(job: GpuJob) -> Any:
    if job.types and not job.mig:
        smallest, others = choice.unused_gpus(job.types, job.gpus)
        if others > 0:
            yield (
                f"the smallest type with {job.gpus} GPUs is {smallest}: {others} more of its GPUs "
                f"are paid for, whether other pods use them or not"
            )
    if job.gpus > 1 and (job.mig or any("-MIG-" in product for product in job.products)):
        yield (
            f"a CUDA process uses one MIG device, the first that it sees, and each pod has {job.gpus}: start "
            "one process per device with CUDA_VISIBLE_DEVICES=UUID (nvidia-smi -L in the container lists "
            "them), or take --gpus 1 in several Jobs, or a larger profile"
        )
    if job.arch == "arm64":
        yield "these machines are arm64: the image must be built for it"
    if job.security and not job.run_as:
        yield (
            "Pod Security restricted: a container whose image names root or no number as its user does not "
            "start; --run-as UID names another"
        )
    for name, value in job.env:
        if value and redact(f"{name}={value}") != f"{name}={value}":
            yield f"--env {name}: who may read Jobs reads it; --env-secret takes it from a Secret"
    if job.spot and not any(mount.source for mount in job.mounts):
        yield "spot: a checkpoint must outlive the node: --cache CLAIM:/PATH, or write it to object storage"
    if job.spot and job.nodes > 1 and not job.retries:
        yield (
            "spot with --nodes: where one pod is taken away, the others fail, which counts: "
            "--retries says how often"
        )
    claims = [mount.source for mount in job.mounts if mount.source and not mount.source.startswith("/")]
    if job.nodes > 1 and claims:
        yield f"--nodes: {', '.join(claims)} must be ReadWriteMany or ReadOnlyMany (EFS, FSx): EBS is for one"
