"""Machines with GPUs: which satisfy a request, where they can be had, for how much, and what runs on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_json, words
from gpukiln.typed import dump

if TYPE_CHECKING:

    from gpukiln.clouds.base import Cloud
    from gpukiln.offers.model import Request
    from gpukiln.offers.size import Size

WHERE = {
    "regions": "regions to look in, separated by commas",
    "cloud": "ask this cloud for zones, quota, likelihood and reservations: aws (your account) or embedded "
    "(this machine); without it, what was refreshed or ships counts",
    "profile": "AWS profile (aws only)",
    "json": "print one JSON document to standard output",
}
WANTED = {
    "cpu": "vCPUs, at least",
    "memory": "main memory, at least, for example 32GiB",
    "disk": "local NVMe storage, at least, for example 500GB",
    "efa": "EFA interfaces, at least",
    "max_price": "USD an hour, at most",
    "spot": "no: on demand; only: spot; auto: whichever is cheaper",
    "volume": "a volume of gp3 that is paid for, too, for example 100GB",
    "no_address": "without a public IPv4 address, which costs money",
    "hours": "hours a month that it runs",
    "budget": "USD a month, at most; exit 6 where nothing costs so little",
    "needs": "what is to run on it, for example ollama or vllm; `invoke offer.check` says of what is known",
    "image": "what it is started from: an AMI, a build, `auto` (what a deploy would take), or a folder of docker/",
    "all": "show every machine that came near, not the nearest alone",
}
GPU = "names, memory and count with `:` between them: T4:1, 24GiB..:2, A10G,L4:1..4, H100:8"
ARCH = "x86_64, arm64 or any"
FRACTIONS = "parts of a GPU will do (vGPUs, which NVIDIA's GRID driver alone drives)"
SHOWN_NEAR, SHOWN_OFFERS = 8, 20
HERE = "us-west-2"


@command(name="list", help={"gpu": GPU, "arch": ARCH, "fractions": FRACTIONS, **WANTED, **WHERE})
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
    use = {"hours": hours, "volume": volume, "no_address": no_address, "budget": budget}
    _answer(request, None, use, needs, image, regions, cloud, profile, json=json, all=all)


def _answer(
    request: Request,
    size: Size | None,
    use: dict[str, Any],
    needs: str,
    image: str,
    regions: str,
    cloud: str,
    profile: str,
    *,
    json: bool,
    all: bool,
) -> None:
    from datetime import UTC, datetime

    from gpukiln.catalog.regions import check_region
    from gpukiln.errors import GpukilnError
    from gpukiln.offers import listing
    from gpukiln.offers.cost import Use
    from gpukiln.offers.request import gigabytes, money

    named = words(regions) or [HERE]
    for region in named:
        check_region(region)
    paid = Use(
        use["hours"],
        gigabytes(use["volume"], "--volume") if use["volume"] else 0,
        address=not use["no_address"],
    )
    today = datetime.now(UTC).date()
    found = listing.listing(
        request,
        named,
        today,
        size=size,
        use=paid,
        budget=money(use["budget"], "--budget") if use["budget"] else None,
        cloud=_cloud(cloud, named[0], profile),
        runs=_runs(needs, image, today),
    )
    if json:
        print_json(dump(found.listing))
    else:
        _show(found.listing, all=all)
    if found.error:
        raise found.error
    del GpukilnError


def _cloud(name: str, region: str, profile: str) -> Cloud | None:
    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError

    if not name:
        if profile:
            raise UsageError("--profile is for --cloud aws", hint="add --cloud aws, or leave it out")
        return None
    return make_cloud(name, region, profile=profile or None)
