"""Machines with GPUs: which satisfy a request, where they can be had, for how much, and what runs on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gpukiln.cli.command import (
    CLOUD,
    DEFAULT_REGION,
    REGION_DEFAULT,
    Command,
    JsonOptions,
    ProfileOptions,
    say,
    words,
)
from gpukiln.errors import UsageError
from gpukiln.options import option

if TYPE_CHECKING:
    from datetime import date

    from gpukiln.clouds.base import Cloud
    from gpukiln.errors import GpukilnError
    from gpukiln.offers.cost import MachineUsage
    from gpukiln.offers.model import Request
    from gpukiln.offers.size import Size


@dataclass(frozen=True)
class OfferRegionOptions(ProfileOptions, JsonOptions):
    """Where machines are looked for."""

    regions: str = option(
        f"AWS regions to look in, separated by commas; {REGION_DEFAULT}", also="region", setting="region"
    )
    cloud: str = option(
        "ask this cloud for zones, quota, likelihood and reservations: aws (your account) or embedded "
        "(this machine); without it, refreshed or shipped answers are used"
    )

    @property
    def region_names(self) -> list[str]:
        """The regions.

        Raises:
            UsageError: AWS has no such region.
        """
        from gpukiln.catalog import offerings

        names = words(self.regions) or [DEFAULT_REGION]
        for name in names:
            if name not in offerings.regions():
                from gpukiln.catalog.regions import check_region

                check_region(name)
        # The user's order is kept: `connect` asks the first region.
        return list(dict.fromkeys(names))

    @property
    def only_region(self) -> str:
        """The region.

        Raises:
            UsageError: Several are named.
        """
        names = self.region_names
        if len(names) > 1:
            raise UsageError(f"--regions {self.regions} names {len(names)} regions", hint="one at a time")
        return names[0]

    def connect(self) -> Cloud | None:
        """The cloud that is asked, in the first of the regions; None: none is asked."""
        if self.cloud:
            return self.connect_to(self.cloud, self.region_names[0])
        if self.profile:
            raise UsageError("--profile is for --cloud aws", hint="add --cloud aws, or leave it out")
        return None


@dataclass(frozen=True)
class CostOptions(Command):
    """What is paid for in addition to the machine."""

    volume: str = option("a volume of gp3 whose cost is added, for example 100GB")
    no_address: bool = option("without a public IPv4 address, which costs money", False)
    # 8760 hours of a year by 12, as AWS's own calculator counts a month.
    hours: int = option("hours a month that it runs", 730)

    def usage(self) -> MachineUsage:
        from gpukiln.offers.cost import MachineUsage

        return MachineUsage.parse(self.hours, self.volume, address=not self.no_address)


@dataclass(frozen=True)
class SoftwareOptions(Command):
    """What is to run on a machine."""

    needs: str = option("what is to run on it, for example ollama, vllm, pytorch-cu128 or cuda-12.4")
    image: str = option(
        "what it is started from: an AMI, a build (id or `last`), or a folder of docker/ for its CUDA; "
        "`auto`: what a deploy would take, which --cloud is asked for"
    )


@dataclass(frozen=True)
class RequestOptions(CostOptions, SoftwareOptions, OfferRegionOptions):
    """What a machine must have, whatever its GPUs are."""

    cpu: int = option("vCPUs, at least", 0)
    memory: str = option("main memory, at least, for example 32GiB")
    disk: str = option("local NVMe storage, at least, for example 500GB")
    max_price: str = option("USD an hour, at most")
    spot: str = option("no: on demand; only: spot; auto: whichever is cheaper", "no")
    budget: str = option("USD a month, at most; exit 6 where nothing costs so little")
    all: bool = option("show everything, not the first and the nearest alone", False)

    def list_offers(self, request: Request, size: Size | None = None) -> GpukilnError | None:
        """Print the machines of a request; returns the error that the command ends with, or None."""
        from gpukiln.offers import view
        from gpukiln.offers.listing import list_offers
        from gpukiln.offers.software import run_spec
        from gpukiln.units import Money

        usage, regions, cloud = self.usage(), self.region_names, self.connect()
        runs = run_spec(self.needs, self.image, cloud)
        # What a deploy would take are the images of an account, which only its cloud can list.
        if runs.choose and cloud is None:
            raise UsageError("--image auto needs a cloud", hint="add --cloud aws or --cloud embedded")
        budget = Money.parse(self.budget, "--budget") if self.budget else None
        offers, error = list_offers(
            request, regions, _today(), use=usage, runs=runs, cloud=cloud, size=size, budget=budget
        )
        # Before the error: where nothing satisfies the request, the machines that come near are the answer.
        self.report(offers, view.listing_parts(offers, all=self.all))
        return error


@dataclass(frozen=True)
class OfferList(RequestOptions):
    """List every machine that satisfies all of a request, in order of price, and those that came near."""

    gpu: str = option("names, memory and count with `:` between them: T4:1, 24GiB..:2, A10G,L4:1..4, H100:8")
    arch: str = option("x86_64, arm64 or any", "x86_64")
    efa: int = option("EFA interfaces, at least", 0)
    fractions: bool = option("parts of a GPU will do (vGPUs, which NVIDIA's GRID driver alone drives)", False)

    def run(self) -> None:
        from gpukiln.offers.request import parse_request

        names = ("gpu", "cpu", "memory", "disk", "arch", "efa", "max_price", "spot", "fractions")
        if error := self.list_offers(parse_request(**self.pick(*names))):
            raise error


@dataclass(frozen=True)
class OfferSize(RequestOptions):
    """Report how much GPU memory a model needs, term by term, and list the machines that have it."""

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
    # As Llama 3 has.
    vocabulary: int = option("tokens that the model knows", 128256)
    kv_precision: str = option("of keys and values that are kept; default: 16 bit")
    optimizer: str = option("adamw, adamw8bit or sgd", "adamw")
    checkpoint: str = option(
        "activations that are computed again: none, selective (attention) or full", "selective"
    )
    rank: int = option("of LoRA's adapters", 16)
    tensor_parallel: int = option("GPUs that share each layer", 1)

    def run(self) -> None:
        from gpukiln.offers import size as sizes
        from gpukiln.offers.request import parse_request

        if not self.params:
            raise UsageError("--params is missing", hint="the model's weights, for example --params 7e9")
        weights = sizes.parameters(self.params)
        model = sizes.Model(weights, self.layers, self.width, self.kv_width, self.vocabulary)
        run = sizes.ModelRun(**self.pick(*(field.name for field in fields(sizes.ModelRun))))
        size = sizes.size(model, run)
        # Without GPUs, which follow from the size of the model.
        machine = parse_request("", **self.pick("cpu", "memory", "disk", "max_price", "spot"))
        request = sizes.to_request(size, machine)
        if error := self.list_offers(request, size):
            # Not for a price or a budget that no machine keeps to: more GPUs only cost more.
            if sizes.needs_more_gpus(request):
                more = self.tensor_parallel * 2
                error.hint = f"--tensor-parallel {more} shares it among more GPUs; or fewer bits"
            raise error


@dataclass(frozen=True)
class OfferShow(CostOptions, OfferRegionOptions):
    """Show one machine: what it has, what it costs, and where it can be had."""

    type: str = option("an EC2 instance type", first=True)
    spot: bool = option("ask for quota and likelihood of spot, not of on demand", False)

    def run(self) -> None:
        from gpukiln.offers import view
        from gpukiln.offers.listing import show_offer

        if not self.type:
            raise UsageError("no instance type is named", hint="invoke offer.show g6.xlarge, for example")
        usage, cloud = self.usage(), self.connect()
        details = show_offer(self.type, self.region_names, _today(), use=usage, cloud=cloud, spot=self.spot)
        self.report(details, view.shown_parts(details))


@dataclass(frozen=True)
class OfferCheck(SoftwareOptions, OfferRegionOptions):
    """Report whether an image and its workload fit machines, and by which rule. Exit 3: they do not."""

    what: str = option("an AMI or a build (id or `last`), and instance types", first=True, several=True)

    def run(self) -> None:
        from gpukiln.offers import view
        from gpukiln.offers.listing import check_machines, require_fits
        from gpukiln.offers.software import run_spec, split_machines

        machines, image = split_machines(words(self.what), self.image, self.needs)
        self.only_region  # noqa: B018 - raises where several are named
        runs = run_spec(self.needs, image, self.connect())
        if runs.choose:
            raise UsageError(
                "--image auto is chosen among the images of a region", hint="`invoke offer.list --image auto`"
            )
        check = check_machines(machines, runs, _today())
        self.report(check, view.checked_parts(check))
        require_fits(check)


@dataclass(frozen=True)
class OfferRefresh(OfferRegionOptions):
    """Ask a region for types, zones, prices and quotas, and keep the answers with their day."""

    cloud: str = CLOUD
    diff: bool = option(
        "say what it has that the shipped catalogue has not, as a patch; exit 10 where there is any", False
    )

    def run(self) -> int:
        from gpukiln.offers import view
        from gpukiln.offers.refresh import refresh_document, require_complete

        region, cloud = self.only_region, self.connect()
        if cloud is None:
            raise UsageError("--cloud is empty", hint="aws or embedded")
        # Each part may fail alone: its old answer stays, with its old day.
        document = refresh_document(cloud, region, say, diff=self.diff)
        self.report(document, view.refresh_parts(document))
        # Before the exit code 10: an answer with gaps does not show what the catalogue lacks.
        require_complete(document.refreshed)
        return 10 if document.difference and document.difference.patch else 0


def _today() -> date:
    from datetime import UTC, datetime

    # In UTC, as offers/refresh.py stores the days of answers.
    return datetime.now(UTC).date()
