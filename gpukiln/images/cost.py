"""The cost of a build on AWS: machine seconds at the catalogue's price, and the snapshot that stays.

Not included: the volumes of both machines while they run (30 GiB of gp3 cost about a twentieth of m5.xlarge),
traffic and tax. The embedded cloud costs nothing.
"""

from collections.abc import Mapping

from gpukiln.catalog.prices import DatedPrice, machine_price, snapshot_price
from gpukiln.images.plan import ImagePlan
from gpukiln.instances.launch import LaunchedMachine
from gpukiln.typed import strict
from gpukiln.units import Duration, Money

# For the first build on a machine. Bake: awslabs/amazon-eks-ami names 45 to 60 minutes; verify: a guess.
ASSUMED_S = {"bake": 3600.0, "verify": 900.0}
# the steps of a build that an instance is paid for
STEPS = {"bake": ("bake",), "verify": ("boot from the image", "verify", "remove the machine")}


@strict
class MachineCost:
    """The cost of a machine.

    Args:
        purpose: bake or verify.
        spot: Whether it was a spot instance, which costs at most the price on demand.
        seconds: How long it ran.
        usd: The cost, or None without a price.
        as_of: The day of the price, or why there is none.
    """

    purpose: str
    instance_type: str
    spot: bool
    seconds: float
    usd: float | None
    as_of: str


@strict
class Cost:
    """The cost of a build.

    Args:
        basis: The source of the durations.
        snapshot_gib: Size of the volume; AWS charges only for the blocks that were written.
        snapshot_usd_month: The most that the snapshot costs in a month, or None without a price.
        snapshot_as_of: The day of that price, or why there is none.
    """

    basis: str
    machines: tuple[MachineCost, ...]
    snapshot_gib: int
    snapshot_usd_month: float | None
    snapshot_as_of: str

    @property
    def usd(self) -> float | None:
        """The cost of all machines, or None where one has no price."""
        parts = [machine.usd for machine in self.machines]
        # A partial sum would look like the whole cost.
        return round(sum(part or 0 for part in parts), 4) if None not in parts else None


def estimate(plan: ImagePlan, durations_s: Mapping[str, float]) -> Cost | None:
    """Estimate the cost of a build.

    Args:
        durations_s: Seconds of each step of the last build; empty where there was none.

    Returns:
        The estimate; None where it costs nothing.
    """
    if plan.cloud != "aws":
        return None
    # One build's times, or the assumed ones: a mix of both would be neither.
    known = "bake" in durations_s
    seconds = {purpose: _seconds(durations_s, purpose) if known else ASSUMED_S[purpose] for purpose in STEPS}
    basis = "as long as the last build here" if known else "assumed: nothing was built here yet"
    # The first type is the one that a verification tries first.
    types = {"bake": plan.builder_instance_type, "verify": plan.instance_types[0]}
    machines = tuple(_machine(plan, purpose, types[purpose], seconds[purpose]) for purpose in STEPS)
    return _cost(plan, basis, machines)


def measured_cost(
    plan: ImagePlan,
    durations_s: Mapping[str, float],
    machine: LaunchedMachine | None,
    before: Cost | None = None,
) -> Cost | None:
    """The cost of a build, or of one more verification of it.

    Args:
        durations_s: Seconds of each step of this run.
        machine: The machine of the verification; None where none was started.
        before: The cost of earlier runs.

    Returns:
        The cost; None where it costs nothing.
    """
    if plan.cloud != "aws":
        return None
    machines = before.machines if before else ()
    # A verification alone adds no bake: that was counted with its build.
    if "bake" in durations_s:
        machines += (_machine(plan, "bake", plan.builder_instance_type, _seconds(durations_s, "bake")),)
    if machine:
        seconds = _seconds(durations_s, "verify")
        machines += (_machine(plan, "verify", machine.instance_type, seconds, spot=machine.spot),)
    return _cost(plan, "measured", machines)


def cost_lines(cost: Cost | None) -> list[str]:
    """A cost for people.

    Args:
        cost: The cost; None is nothing.

    Returns:
        Lines of text.
    """
    if cost is None:
        return ["cost: none, the embedded cloud is this machine"]
    total = "not known" if cost.usd is None else f"{_at_most(cost)}{Money(cost.usd).shown} USD"
    lines = [f"cost: {total}, machine time {cost.basis}"]
    for machine in cost.machines:
        price = (
            f"no price: {machine.as_of}"
            if machine.usd is None
            else f"{Money(machine.usd).shown} USD, price of {machine.as_of}"
        )
        spot = " (spot: at most)" if machine.spot else ""
        duration = Duration(machine.seconds).shown
        lines.append(f"  {machine.purpose} on {machine.instance_type}{spot} for {duration}: {price}")
    month = cost.snapshot_usd_month
    price = (
        f"no price: {cost.snapshot_as_of}"
        if month is None
        else f"at most {Money(month).shown} USD a month, price of {cost.snapshot_as_of}"
    )
    return [*lines, f"  snapshot of {cost.snapshot_gib} GiB: {price}"]


def _at_most(cost: Cost) -> str:
    return "at most " if any(machine.spot for machine in cost.machines) else ""


def _seconds(durations_s: Mapping[str, float], purpose: str) -> float:
    return round(sum(durations_s.get(step, 0.0) for step in STEPS[purpose]), 1)


def _machine(plan: ImagePlan, purpose: str, name: str, seconds: float, *, spot: bool = False) -> MachineCost:
    price = machine_price(name, plan.region)
    # EC2 bills Linux instances by the second; prices are by the hour.
    usd = round(float(price.usd) * seconds / 3600, 4) if price else None
    return MachineCost(purpose, name, spot, seconds, usd, _as_of(price, name, plan.region))


def _cost(plan: ImagePlan, basis: str, machines: tuple[MachineCost, ...]) -> Cost:
    price = snapshot_price(plan.region)
    # At most: EBS charges for written blocks, the volume's size is the upper bound.
    month = round(float(price.usd) * plan.volume_size_gib, 4) if price else None
    as_of = _as_of(price, "snapshots", plan.region)
    return Cost(basis, machines, plan.volume_size_gib, month, as_of)


def _as_of(price: DatedPrice | None, what: str, region: str) -> str:
    return price.as_of if price else f"the catalogue has none for {what} in {region}"
