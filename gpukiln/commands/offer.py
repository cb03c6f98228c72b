"""Machines with GPUs: which satisfy a request, where they can be had, for how much, and what runs on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from gpukiln.clouds.base import Cloud
    from gpukiln.errors import GpukilnError
    from gpukiln.offers.cost import MachineUsage
    from gpukiln.offers.listing import RunSpec
    from gpukiln.offers.model import Request
    from gpukiln.offers.size import Size

HERE = "us-west-2"
WHERE = {
    "regions": "regions to look in, separated by commas",
    "cloud": "ask this cloud for zones, quota, likelihood and reservations: aws (your account) or embedded "
    "(this machine); without it, what was refreshed or ships counts",
    "profile": "AWS profile (aws only)",
    "json": "print one JSON document to standard output",
}
PAID = {
    "volume": "a volume of gp3 that is paid for, too, for example 100GB",
    "no_address": "without a public IPv4 address, which costs money",
    "hours": "hours a month that it runs",
}
RUNS = {
    "needs": "what is to run on it, for example ollama, vllm, pytorch-cu128 or cuda-12.4",
    "image": "what it is started from: an AMI, a build (id or `last`), or a folder of docker/ for its CUDA",
}
WANTED = {
    "cpu": "vCPUs, at least",
    "memory": "main memory, at least, for example 32GiB",
    "disk": "local NVMe storage, at least, for example 500GB",
    "max_price": "USD an hour, at most",
    "spot": "no: on demand; only: spot; auto: whichever is cheaper",
    **PAID,
    "budget": "USD a month, at most; exit 6 where nothing costs so little",
    "needs": RUNS["needs"],
    "image": f"{RUNS['image']}; `auto`: what a deploy would take, which --cloud is asked for",
    "all": "show everything, not the first and the nearest alone",
    **WHERE,
}


@command(
    name="list",
    help={
        "gpu": "names, memory and count with `:` between them: T4:1, 24GiB..:2, A10G,L4:1..4, H100:8",
        "arch": "x86_64, arm64 or any",
        "efa": "EFA interfaces, at least",
        "fractions": "parts of a GPU will do (vGPUs, which NVIDIA's GRID driver alone drives)",
        **WANTED,
    },
)
def list_(
    _: Any,
    gpu: str = "",
    cpu: int = 0,
    memory: str = "",
    disk: str = "",
    arch: str = "x86_64",
    efa: int = 0,
    max_price: str = "",
    spot: str = "no",
    fractions: bool = False,
    volume: str = "",
    no_address: bool = False,
    hours: int = 730,
    budget: str = "",
    needs: str = "",
    image: str = "",
    all: bool = False,
    regions: str = HERE,
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """List every machine that satisfies all of a request, in order of price, and those that came near."""
    from gpukiln.offers.request import parse

    request = parse(
        gpu,
        cpu=cpu,
        memory=memory,
        disk=disk,
        arch=arch,
        efa=efa,
        max_price=max_price,
        spot=spot,
        fractions=fractions,
    )
    use = _use(hours, volume, no_address=no_address)
    where = _regions(regions)
    if error := _list(request, None, use, budget, needs, image, where, cloud, profile, all=all, json=json):
        raise error


@command(
    help={
        "params": "weights of the model, for example 7e9 or 7B",
        "precision": "of the weights: fp32, bf16, fp16, fp8, int8, int4",
        "mode": "infer, train or lora",
        "batch": "sequences at a time",
        "context": "tokens of a sequence",
        "layers": "of the model; default: estimated from its weights",
        "width": "of the model (hidden size); default: estimated",
        "kv_width": "key/value heads times the width of a head; default: as if every head had its own",
        "vocabulary": "tokens that the model knows",
        "kv_precision": "of keys and values that are kept; default: 16 bit",
        "optimizer": "adamw, adamw8bit or sgd",
        "checkpoint": "activations that are computed again: none, selective (attention) or full",
        "rank": "of LoRA's adapters",
        "tensor_parallel": "GPUs that share each layer",
        **WANTED,
    }
)
def size(
    _: Any,
    params: str = "",
    precision: str = "bf16",
    mode: str = "infer",
    batch: int = 1,
    context: int = 4096,
    layers: int = 0,
    width: int = 0,
    kv_width: int = 0,
    vocabulary: int = 128256,
    kv_precision: str = "",
    optimizer: str = "adamw",
    checkpoint: str = "selective",
    rank: int = 16,
    tensor_parallel: int = 1,
    cpu: int = 0,
    memory: str = "",
    disk: str = "",
    max_price: str = "",
    spot: str = "no",
    volume: str = "",
    no_address: bool = False,
    hours: int = 730,
    budget: str = "",
    needs: str = "",
    image: str = "",
    all: bool = False,
    regions: str = HERE,
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """Say how much GPU memory a model needs, term by term, and list the machines that have it."""
    from gpukiln.errors import UsageError
    from gpukiln.offers import size as sizes
    from gpukiln.offers.request import parse

    if not params:
        raise UsageError("--params is missing", hint="the model's weights, for example --params 7e9")
    model = sizes.Model(sizes.parameters(params), layers, width, kv_width, vocabulary)
    run = sizes.ModelRun(
        mode,  # type: ignore[arg-type]  # size() says what is wrong with it
        precision,
        batch,
        context,
        tensor_parallel,
        kv_precision,
        optimizer,
        checkpoint,
        rank,
    )
    found = sizes.size(model, run)
    wanted = parse("", cpu=cpu, memory=memory, disk=disk, max_price=max_price, spot=spot)
    request, where = sizes.as_request(found, wanted), _regions(regions)
    use = _use(hours, volume, no_address=no_address)
    if error := _list(request, found, use, budget, needs, image, where, cloud, profile, all=all, json=json):
        if sizes.too_large(request):
            error.hint = f"--tensor-parallel {tensor_parallel * 2} shares it among more GPUs; or fewer bits"
        raise error


@command(
    help={
        "type": "an EC2 instance type",
        "spot": "ask for quota and likelihood of spot, not of on demand",
        **PAID,
        **WHERE,
    }
)
def show(
    _: Any,
    type: str = "",
    spot: bool = False,
    volume: str = "",
    no_address: bool = False,
    hours: int = 730,
    regions: str = HERE,
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """Show one machine: what it has, what it costs, and where it can be had."""
    from gpukiln.errors import UsageError
    from gpukiln.offers import view
    from gpukiln.offers.listing import shown

    if not type:
        raise UsageError("no instance type is named", hint="invoke offer.show g6.xlarge, for example")
    named = _regions(regions)
    found = shown(
        type,
        named,
        _today(),
        use=_use(hours, volume, no_address=no_address),
        cloud=_cloud(cloud, named[0], profile),
        spot=spot,
    )
    _print(found, view.shown_parts(found), json=json)


show.first = "type"


@command(
    help={
        "what": "an AMI or a build (id or `last`), and instance types",
        **RUNS,
        **{name: WHERE[name] for name in ("profile", "json")},
        "cloud": "where an AMI is: aws or embedded",
        "regions": "the region of an AMI",
    }
)
def check(
    _: Any,
    what: str = "",
    needs: str = "",
    image: str = "",
    regions: str = HERE,
    cloud: str = "",
    profile: str = "",
    json: bool = False,
) -> None:
    """Say whether an image and what is to run on it fit machines, and by which rule; exit 3 where not."""
    from gpukiln.catalog.instance_types import instance_type, instance_types
    from gpukiln.errors import IncompatibleError, UsageError
    from gpukiln.offers import view
    from gpukiln.offers.listing import checked

    named = words(what)
    machines = [word for word in named if word in instance_types()]
    others = [word for word in named if word not in machines]
    looks = [word for word in others if "." in word and not word.startswith("ami-")]
    for word in looks:
        instance_type(word)  # says which are near
    if len(others) > 1 or (others and image):
        raise UsageError(f"{', '.join([*others, image])}: more than one image", hint="one at a time")
    if not machines:
        raise UsageError(
            "no instance type is named", hint="invoke offer.check ami-0123 g6.xlarge, for example"
        )
    if not (others or image or needs):
        raise UsageError("nothing is named that is to run there", hint="an AMI, a build, --image or --needs")
    region = _one_region(regions, "--regions")
    runs = _runs(needs, image or "".join(others), _cloud(cloud, region, profile))
    if runs.choose:
        raise UsageError(
            "--image auto is chosen among what a region has", hint="`invoke offer.list --image auto`"
        )
    found = checked(machines, runs, _today())
    _print(found, view.checked_parts(found), json=json)
    if wrong := [one for one in found.machines if not one.fits]:
        first = next(row for row in wrong[0].findings if row.severity == "error")
        raise IncompatibleError(f"{wrong[0].instance_type}: {first.message}", hint=first.remedy)


check.first, check.several = "what", True


@command(
    help={
        "cloud": "aws (your account) or embedded (this machine)",
        "region": "the region that is asked",
        "diff": "say what it has that the shipped catalogue has not, as a patch; exit 10 where there is any",
        **{name: WHERE[name] for name in ("profile", "json")},
    }
)
def refresh(
    _: Any,
    cloud: str = "embedded",
    region: str = HERE,
    profile: str = "",
    diff: bool = False,
    json: bool = False,
) -> int:
    """Ask a region for types, zones, prices and quotas, and keep the answers with their day."""
    from gpukiln.offers import cache, view
    from gpukiln.offers.difference import difference
    from gpukiln.offers.refresh import REFRESH, RefreshDocument, require_complete
    from gpukiln.offers.refresh import refresh as ask

    named = _one_region(region, "--region")
    where = _cloud(cloud, named, profile)
    assert where is not None  # noqa: S101 - a cloud was named
    asked = ask(where, say)
    fresh = not any(part.error for part in asked.parts if part.name == "types")
    types = cache.read(where.name, named).types if diff and fresh else None
    found = RefreshDocument(REFRESH, asked, difference(types, named) if types else None)
    _print(found, view.refresh_parts(found), json=json)
    require_complete(asked)
    return 10 if found.difference and found.difference.patch else 0


def _list(
    request: Request,
    size: Size | None,
    use: MachineUsage,
    budget: str,
    needs: str,
    image: str,
    regions: list[str],
    cloud: str,
    profile: str,
    *,
    all: bool,
    json: bool,
) -> GpukilnError | None:
    """Print what satisfies a request; return why nothing does where that is so."""
    from gpukiln.errors import UsageError
    from gpukiln.offers import view
    from gpukiln.offers.listing import listing
    from gpukiln.units import Money

    where = _cloud(cloud, regions[0], profile)
    runs = _runs(needs, image, where)
    if runs.choose and where is None:
        raise UsageError("--image auto is asked of a cloud", hint="add --cloud aws or --cloud embedded")
    most = Money.parse(budget, "--budget") if budget else None
    found, error = listing(
        request, regions, _today(), use=use, runs=runs, cloud=where, size=size, budget=most
    )
    _print(found, view.listing_parts(found, all=all), json=json)
    return error


def _print(found: Any, parts: Iterable[RenderableType], *, json: bool) -> None:
    """One document, or its parts for people."""
    if json:
        print_document(found.schema, dump(found))
        return
    console = results()
    for part in parts:
        if isinstance(part, str):
            console.tell(part)
        else:
            console.print(part)


def _today() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC).date()


def _regions(text: str) -> list[str]:
    from gpukiln.catalog import offerings

    named = words(text) or [HERE]
    for region in named:
        if region not in offerings.regions():
            from gpukiln.catalog.regions import check_region  # botocore's, slow to import

            check_region(region)
    return list(dict.fromkeys(named))


def _one_region(text: str, option: str) -> str:
    from gpukiln.errors import UsageError

    named = _regions(text)
    if len(named) > 1:
        raise UsageError(f"{option} {text} names {len(named)} regions", hint="one at a time")
    return named[0]


def _use(hours: int, volume: str, *, no_address: bool) -> MachineUsage:
    from gpukiln.errors import UsageError
    from gpukiln.offers.cost import HOURS_MOST, MachineUsage
    from gpukiln.units import Memory

    if not 1 <= hours <= HOURS_MOST:
        raise UsageError(f"--hours {hours}, wanted hours of a month", hint=f"1 to {HOURS_MOST}")
    return MachineUsage(
        hours, Memory.parse(volume, "--volume", zero=True).gb if volume else 0, address=not no_address
    )


def _cloud(name: str, region: str, profile: str) -> Cloud | None:
    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError

    if not name:
        if profile:
            raise UsageError("--profile is for --cloud aws", hint="add --cloud aws, or leave it out")
        return None
    return make_cloud(name, region, profile=profile or None)


def _runs(needs: str, image: str, cloud: Cloud | None) -> RunSpec:
    """What is to run on a machine: an image of docker/ is a workload, any other is what it starts from."""
    from gpukiln.catalog.workloads import of_cuda, workload
    from gpukiln.errors import UsageError
    from gpukiln.offers.fit import of_ami, of_record
    from gpukiln.offers.listing import RunSpec

    asked = workload(needs) if needs else None
    if not image:
        return RunSpec(workload=asked)
    if image == "auto":
        return RunSpec(choose=True, workload=asked)
    from gpukiln.catalog.components import load_components
    from gpukiln.catalog.containers import container_names
    from gpukiln.images.builds import Builds
    from gpukiln.state import state_home

    if image in container_names():
        if asked:
            raise UsageError(
                f"--needs {needs} and --image {image} are both what is to run", hint="one of them"
            )
        return RunSpec(workload=of_cuda(load_components()["cuda"].version or ""))
    builds = Builds(state_home())
    if not image.startswith("ami-"):
        return RunSpec(image=of_record(builds.find(image).read()), workload=asked)
    for folder in builds.all():
        record = folder.read()
        if record.bake and record.bake.image_id == image:
            return RunSpec(image=of_record(record), workload=asked)
    if cloud is None:
        raise UsageError(
            f"{image} was not built here", hint="--cloud says where to look it up: aws or embedded"
        )
    return RunSpec(image=of_ami(cloud, image), workload=asked)
