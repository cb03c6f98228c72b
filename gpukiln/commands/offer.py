"""Machines with GPUs: which satisfy a request, where they can be had, for how much, and what runs on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import Command, JsonOptions, ProfileOptions, print_document, results, say, words
from gpukiln.options import option
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


@dataclass(frozen=True)
class WhereOptions(ProfileOptions, JsonOptions):
    """Where machines are looked for."""

    regions: str = option(
        "AWS regions to look in, separated by commas", HERE, also="region", setting="region"
    )
    cloud: str = option(
        "ask this cloud for zones, quota, likelihood and reservations: aws (your account) or embedded "
        "(this machine); without it, what was refreshed or ships counts"
    )

    def where(self) -> Cloud | None:
        """The cloud that is asked, in the first of the regions; None: none is."""
        from gpukiln.clouds.select import make_cloud
        from gpukiln.errors import UsageError

        if not self.cloud:
            if self.profile:
                raise UsageError("--profile is for --cloud aws", hint="add --cloud aws, or leave it out")
            return None
        return make_cloud(self.cloud, region_names(self.regions)[0], profile=self.profile or None)


@dataclass(frozen=True)
class PaidOptions(Command):
    """What is paid for beside the machine."""

    volume: str = option("a volume of gp3 that is paid for, too, for example 100GB")
    no_address: bool = option("without a public IPv4 address, which costs money", False)
    hours: int = option("hours a month that it runs", 730)

    def use(self) -> MachineUsage:
        from gpukiln.errors import UsageError
        from gpukiln.offers.cost import MAX_HOURS_PER_MONTH, MachineUsage
        from gpukiln.units import Memory

        if not 1 <= self.hours <= MAX_HOURS_PER_MONTH:
            raise UsageError(
                f"--hours {self.hours}, wanted hours of a month", hint=f"1 to {MAX_HOURS_PER_MONTH}"
            )
        volume = Memory.parse(self.volume, "--volume", zero=True).gb if self.volume else 0
        return MachineUsage(self.hours, volume, address=not self.no_address)


@dataclass(frozen=True)
class SoftwareOptions(Command):
    """What is to run on a machine."""

    needs: str = option("what is to run on it, for example ollama, vllm, pytorch-cu128 or cuda-12.4")
    image: str = option(
        "what it is started from: an AMI, a build (id or `last`), or a folder of docker/ for its CUDA; "
        "`auto`: what a deploy would take, which --cloud is asked for"
    )


@dataclass(frozen=True)
class WantedOptions(PaidOptions, SoftwareOptions, WhereOptions):
    """What a machine must have, whatever its GPUs are."""

    cpu: int = option("vCPUs, at least", 0)
    memory: str = option("main memory, at least, for example 32GiB")
    disk: str = option("local NVMe storage, at least, for example 500GB")
    max_price: str = option("USD an hour, at most")
    spot: str = option("no: on demand; only: spot; auto: whichever is cheaper", "no")
    budget: str = option("USD a month, at most; exit 6 where nothing costs so little")
    all: bool = option("show everything, not the first and the nearest alone", False)

    def listing(self, request: Request, size: Size | None = None) -> GpukilnError | None:
        """Print the machines of a request; returns the error that the command ends with, or None."""
        from gpukiln.errors import UsageError
        from gpukiln.offers import view
        from gpukiln.offers.listing import list_offers
        from gpukiln.units import Money

        use, regions, where = self.use(), region_names(self.regions), self.where()
        runs = _runs(self.needs, self.image, where)
        if runs.choose and where is None:
            raise UsageError("--image auto is asked of a cloud", hint="add --cloud aws or --cloud embedded")
        budget = Money.parse(self.budget, "--budget") if self.budget else None
        found, error = list_offers(
            request, regions, _today(), use=use, runs=runs, cloud=where, size=size, budget=budget
        )
        _show(found, view.listing_parts(found, all=self.all), json=self.json)
        return error


@dataclass(frozen=True)
class OfferList(WantedOptions):
    """List every machine that satisfies all of a request, in order of price, and those that came near."""

    gpu: str = option("names, memory and count with `:` between them: T4:1, 24GiB..:2, A10G,L4:1..4, H100:8")
    arch: str = option("x86_64, arm64 or any", "x86_64")
    efa: int = option("EFA interfaces, at least", 0)
    fractions: bool = option("parts of a GPU will do (vGPUs, which NVIDIA's GRID driver alone drives)", False)

    def run(self) -> None:
        from gpukiln.offers.request import parse_request

        names = ("gpu", "cpu", "memory", "disk", "arch", "efa", "max_price", "spot", "fractions")
        if error := self.listing(parse_request(**self.pick(*names))):
            raise error


@dataclass(frozen=True)
class OfferSize(WantedOptions):
    """Say how much GPU memory a model needs, term by term, and list the machines that have it."""

    params: str = option("weights of the model, for example 7e9 or 7B")
    precision: str = option("of the weights: fp32, bf16, fp16, fp8, int8, int4", "bf16")
    mode: str = option("infer, train or lora", "infer")
    batch: int = option("sequences at a time", 1)
    context: int = option("tokens of a sequence", 4096)
    layers: int = option("of the model; default: estimated from its weights", 0)
    width: int = option("of the model (hidden size); default: estimated", 0)
    kv_width: int = option(
        "key/value heads times the width of a head; default: as if every head had its own", 0
    )
    vocabulary: int = option("tokens that the model knows", 128256)
    kv_precision: str = option("of keys and values that are kept; default: 16 bit")
    optimizer: str = option("adamw, adamw8bit or sgd", "adamw")
    checkpoint: str = option(
        "activations that are computed again: none, selective (attention) or full", "selective"
    )
    rank: int = option("of LoRA's adapters", 16)
    tensor_parallel: int = option("GPUs that share each layer", 1)

    def run(self) -> None:
        from gpukiln.errors import UsageError
        from gpukiln.offers import size as sizes
        from gpukiln.offers.request import parse_request

        if not self.params:
            raise UsageError("--params is missing", hint="the model's weights, for example --params 7e9")
        weights = sizes.parameters(self.params)
        model = sizes.Model(weights, self.layers, self.width, self.kv_width, self.vocabulary)
        found = sizes.size(model, sizes.ModelRun(**self.pick(*(one.name for one in fields(sizes.ModelRun)))))
        wanted = parse_request("", **self.pick("cpu", "memory", "disk", "max_price", "spot"))
        request = sizes.to_request(found, wanted)
        if error := self.listing(request, found):
            if sizes.needs_more_gpus(request):
                more = self.tensor_parallel * 2
                error.hint = f"--tensor-parallel {more} shares it among more GPUs; or fewer bits"
            raise error


@dataclass(frozen=True)
class OfferShow(PaidOptions, WhereOptions):
    """Show one machine: what it has, what it costs, and where it can be had."""

    type: str = option("an EC2 instance type", first=True)
    spot: bool = option("ask for quota and likelihood of spot, not of on demand", False)

    def run(self) -> None:
        from gpukiln.errors import UsageError
        from gpukiln.offers import view
        from gpukiln.offers.listing import show_offer

        if not self.type:
            raise UsageError("no instance type is named", hint="invoke offer.show g6.xlarge, for example")
        regions = region_names(self.regions)
        found = show_offer(self.type, regions, _today(), use=self.use(), cloud=self.where(), spot=self.spot)
        _show(found, view.shown_parts(found), json=self.json)


@dataclass(frozen=True)
class OfferCheck(SoftwareOptions, WhereOptions):
    """Say whether an image and what is to run on it fit machines, and by which rule; exit 3 where not."""

    what: str = option("an AMI or a build (id or `last`), and instance types", first=True, several=True)

    def run(self) -> None:
        from gpukiln.catalog.instance_types import instance_type, instance_types
        from gpukiln.errors import IncompatibleError, UsageError
        from gpukiln.offers import view
        from gpukiln.offers.listing import check_machines

        named = words(self.what)
        machines = [word for word in named if word in instance_types()]
        others = [word for word in named if word not in machines]
        looks = [word for word in others if "." in word and not word.startswith("ami-")]
        for word in looks:
            instance_type(word)  # says which are near
        if len(others) > 1 or (others and self.image):
            raise UsageError(f"{', '.join([*others, self.image])}: more than one image", hint="one at a time")
        if not machines:
            raise UsageError(
                "no instance type is named", hint="invoke offer.check ami-0123 g6.xlarge, for example"
            )
        if not (others or self.image or self.needs):
            raise UsageError(
                "nothing is named that is to run there", hint="an AMI, a build, --image or --needs"
            )
        one_region(self.regions)
        runs = _runs(self.needs, self.image or "".join(others), self.where())
        if runs.choose:
            raise UsageError(
                "--image auto is chosen among what a region has", hint="`invoke offer.list --image auto`"
            )
        found = check_machines(machines, runs, _today())
        _show(found, view.checked_parts(found), json=self.json)
        if wrong := [one for one in found.machines if not one.fits]:
            first = next(row for row in wrong[0].findings if row.severity == "error")
            raise IncompatibleError(f"{wrong[0].instance_type}: {first.message}", hint=first.remedy)


@dataclass(frozen=True)
class OfferRefresh(WhereOptions):
    """Ask a region for types, zones, prices and quotas, and keep the answers with their day."""

    cloud: str = option("aws (your account) or embedded (this machine)", "embedded", setting="cloud")
    diff: bool = option(
        "say what it has that the shipped catalogue has not, as a patch; exit 10 where there is any", False
    )

    def run(self) -> int:
        from gpukiln.errors import UsageError
        from gpukiln.offers import cache, view
        from gpukiln.offers.difference import difference
        from gpukiln.offers.refresh import REFRESH, RefreshDocument, require_complete
        from gpukiln.offers.refresh import refresh as ask

        region, where = one_region(self.regions), self.where()
        if where is None:
            raise UsageError("--cloud is empty", hint="aws or embedded")
        asked = ask(where, say)
        fresh = not any(part.error for part in asked.parts if part.name == "types")
        types = cache.read(where.name, region).types if self.diff and fresh else None
        found = RefreshDocument(REFRESH, asked, difference(types, region) if types else None)
        _show(found, view.refresh_parts(found), json=self.json)
        require_complete(asked)
        return 10 if found.difference and found.difference.patch else 0


def _show(found: Any, parts: Iterable[RenderableType], *, json: bool) -> None:
    """One document, or its parts for people."""
    if json:
        print_document(found.schema, dump(found))
        return
    console = results()
    for part in parts:
        if isinstance(part, str):
            console.print_text(part)
        else:
            console.print(part)


def _today() -> Any:
    from datetime import UTC, datetime

    return datetime.now(UTC).date()


def region_names(text: str) -> list[str]:
    from gpukiln.catalog import offerings

    named = words(text) or [HERE]
    for region in named:
        if region not in offerings.regions():
            from gpukiln.catalog.regions import check_region  # botocore's, slow to import

            check_region(region)
    return list(dict.fromkeys(named))


def one_region(text: str) -> str:
    from gpukiln.errors import UsageError

    named = region_names(text)
    if len(named) > 1:
        raise UsageError(f"--regions {text} names {len(named)} regions", hint="one at a time")
    return named[0]


def _runs(needs: str, image: str, cloud: Cloud | None) -> RunSpec:
    """What is to run on a machine: an image of docker/ is a workload, any other is what it starts from."""
    from gpukiln.catalog.workloads import cuda_workload, workload
    from gpukiln.errors import UsageError
    from gpukiln.offers.fit import subject_of_ami, subject_of_record
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
        return RunSpec(workload=cuda_workload(load_components()["cuda"].version or ""))
    builds = Builds(state_home())
    if not image.startswith("ami-"):
        return RunSpec(image=subject_of_record(builds.find(image).read()), workload=asked)
    for folder in builds.all():
        record = folder.read()
        if record.bake and record.bake.image_id == image:
            return RunSpec(image=subject_of_record(record), workload=asked)
    if cloud is None:
        raise UsageError(
            f"{image} was not built here", hint="--cloud says where to look it up: aws or embedded"
        )
    return RunSpec(image=subject_of_ami(cloud, image), workload=asked)
