"""The quotas of EC2 that GPU instances count against.

Codes and names: AWS General Reference, "Amazon EC2 instance type quotas". A quota counts virtual CPUs of one
market in one region.
"""

import re
from dataclasses import dataclass
from typing import Literal

Market = Literal["on-demand", "spot"]


@dataclass(frozen=True)
class Quota:
    """A quota of the service `ec2`.

    Args:
        families: What it counts: first letters of types (`g`), with a generation (`p5`) where it is of some.
    """

    code: str
    name: str
    market: Market
    families: tuple[str, ...]


G, P, DL = ("g", "gr", "vt"), ("p",), ("dl",)
# The page names no quota of spot P6 instances.
QUOTAS = (
    Quota("L-DB2E81BA", "Running On-Demand G and VT instances", "on-demand", G),
    Quota("L-417A185B", "Running On-Demand P instances", "on-demand", P),
    Quota("L-6E869C2A", "Running On-Demand DL instances", "on-demand", DL),
    Quota("L-3819A6DF", "All G and VT Spot Instance Requests", "spot", G),
    Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", "spot", ("p2", "p3", "p4")),
    Quota("L-C4BD4855", "All P5 Spot Instance Requests", "spot", ("p5",)),
    Quota("L-85EED4F7", "All DL Spot Instance Requests", "spot", DL),
)


def quota_of(instance_type: str, market: Market) -> Quota | None:
    """The quota that an instance counts against.

    Returns:
        None where no source names it.

    >>> quota_of("g5.xlarge", "on-demand").name
    'Running On-Demand G and VT instances'
    >>> quota_of("p6-b200.48xlarge", "spot") is None
    True
    """
    # Metal and flex sizes count like the others: only the family matters.
    if not (parts := re.match(r"([a-z]+)(\d+)", instance_type)):
        return None
    letters, generation = parts.groups()
    family = {letters, letters + generation}
    return next((quota for quota in QUOTAS if quota.market == market and family & set(quota.families)), None)
