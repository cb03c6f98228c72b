"""Kubernetes versions on EKS and how long they are supported."""

from datetime import date
from functools import cache

from gpukiln.catalog.load import data
from gpukiln.typed import load, strict


@strict
class SupportDates:
    """How long EKS supports a Kubernetes version.

    Args:
        standard_until: The last day of standard support.
        extended_until: The last day of extended support, which costs more.
    """

    # EKS: 14 months of standard support, then 12 of extended support at a higher price an hour.
    standard_until: date
    extended_until: date


@cache
def versions() -> dict[str, SupportDates]:
    """Every Kubernetes version of the catalogue, oldest first."""
    return load(dict[str, SupportDates], data("kubernetes")["versions"], where="kubernetes.yaml")
