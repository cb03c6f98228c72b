"""The page of GPU faults: `python -m gpukiln.cli.fault_page > docs/gpu-faults.md`."""

import sys

from gpukiln.catalog.xid import explain, xids
from gpukiln.findings import SEVERITIES
from gpukiln.gpus.faults import DEVICE_FAULTS, LOG_FAULTS

HEAD = """\
# Faults of a GPU

One table decides how much a fault weighs, and what to do. `gpukiln-gpu list`, leases, `health`, `watch` and
`insights`, the suite's checks and the alerts of the monitoring add-on read it. This page is made of it:
`python -m gpukiln.cli.fault_page > docs/gpu-faults.md`.

*error*: the GPU is sick: it gets no lease, and its node no work. *warning*: it works, and somebody should
look. *info*: worth knowing.

## What a GPU says of itself
"""


def page() -> str:
    """docs/gpu-faults.md."""
    lines = ["", "| id | severity | what it means | next | source |", "|---|---|---|---|---|"]
    lines += [
        f"| `{fault.id}` | {fault.severity} | {fault.text} | {fault.remedy} | {fault.source} |"
        for fault in DEVICE_FAULTS
    ]
    lines += ["", "## What the kernel's log says without a number", ""]
    lines += ["| id | severity | what it means | next | source |", "|---|---|---|---|---|"]
    lines += [
        f"| `{id}` | {fault.severity} | {fault.text} | {fault.remedy} | {fault.source} |"
        for id, fault in LOG_FAULTS.items()
    ]
    lines += [
        *("", "## Xids", ""),
        "Severity and next step are those of NVIDIA's immediate action (catalog/data/xid.yaml). An Xid",
        "that a reset ends is over once the driver says that no recovery action is left (Xid 154), or",
        "`gpukiln-gpu reset` has reset it; the others count until the next boot. SXids of NVSwitches are",
        "errors where they call themselves fatal.",
        *("", "| severity | Xids |", "|---|---|"),
    ]
    for severity in SEVERITIES:
        numbers = [str(number) for number, row in sorted(xids().items()) if row.severity == severity]
        lines.append(f"| {severity} | {', '.join(numbers)} |")
    lines += [
        "",
        # Xids of severity info ask for nothing on the GPU itself; the table above has their numbers.
        *(f"- {explain(number)}" for number, row in sorted(xids().items()) if row.severity != "info"),
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
