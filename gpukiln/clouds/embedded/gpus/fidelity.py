"""What the double of NVML has, and where it was taken from: the table of docs/simulated-gpus.md.

`python -m gpukiln.clouds.embedded.gpus.fidelity > docs/simulated-gpus.md` makes the page.
"""

import sys
from collections.abc import Iterator
from dataclasses import field
from functools import cache
from pathlib import Path

import yaml

from gpukiln.clouds.embedded.gpus.settings import SCENARIOS, SETTINGS
from gpukiln.typed import load, strict

FUNCTIONS = Path(__file__).with_name("functions.yaml")
HEAD = """\
# Simulated GPUs: what they answer

Machines of the embedded EC2 have them where their tag `gpukiln:gpus` says so
([embedded.md](embedded.md#simulated-gpus)). This page is made of the code:
`python -m gpukiln.clouds.embedded.gpus.fidelity > docs/simulated-gpus.md`.

What they do not do: compute (there is no CUDA, and no kernel module), be on the PCI bus, show themselves in
`/proc/driver/nvidia` and `/dev/nvidia-caps` (so that nvidia-ctk finds no MIG device), count PCIe or NVLink
traffic, or have firmware.

## nvidia-smi

NVIDIA's nvidia-smi refuses any NVML but its driver's, so a stand-in is where the image has it. It asks
whatever libnvidia-ml.so.1 it finds, and has of each branch of the driver what that branch has, in its forms:

| asked | answered | as |
|---|---|---|
| `--query-gpu`, `--help-query-gpu` | the branch's fields, aliases; no others | 535, 590, 595, 610 |
| `--query-compute-apps`, `-accounted-apps`, `-retired-pages` | rows of each GPU, and `--help-...` | 590 |
| `--query-remapped-rows`, `-supported-clocks` | the same | nvidia-smi(1) |
| `-q`, `-d SECTIONS` | text; only with `-d`: samples, supported clocks | 535, 590, 595, 610 |
| `-q -x` | every element in its order | 570.148, 580.105, 595.91 |
| nothing, `-L`, `--version` | the table, which is wider from 550 on | 535, 590, 595, 610 |
| `dmon`, `pmon` | `-i -s -d -c -o -f`; `-s pucvmet` and `-s um` | 535, 590 |
| `topo -m`, `-p2p`, `nvlink -s`, `-e`, `-c`, `mig` | matrix, links, instances | 535, 595 |
| `-pm -e -p -c -r -lgc -rgc -lmc -rmc -ac -rac -pl -am -caa -mig` | set through NVML | 535 |
| `-i`, `-f`, `-l`, `-lms` | GPUs by index, UUID or address; a file; until it is interrupted | 535 |

The sources of a branch are named in the C files: captures of nvidia_gpu_exporter and of NVIDIA's
k8s-test-infra, and public logs. Its exit codes are those of nvidia-smi(1). What NVIDIA's has and this one
lacks (`-u`, `--dtd`, `conf-compute`, `vgpu`, `drain` and more) is an invalid combination of arguments (exit
2), and what neither knows is not recognized (exit 2). A value that the library has no function for is
`N/A`; the GPU's part number, its bridge chip, its voltage and the host's PCIe generation are not in NVML,
and always are. The explanations of `--help-query-gpu` are left out.

## What can be set

`invoke cloud.gpus MACHINE --set GPU.NAME=VALUE`; GPU is an index, `last` or `*`.

"""


@strict
class Functions:
    """Functions of NVML that answer alike.

    Args:
        source: Where that was taken from, see functions.yaml.
        names: Those that every branch of the driver has.
        later: Others, by the branch that brought them.
    """

    answers: str
    source: str
    names: tuple[str, ...] = ()
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def of_branch(self, branch: int) -> Iterator[str]:
        """The names that a branch of the driver has."""
        yield from self.names
        for since, names in self.later.items():
            if since <= branch:
                yield from names


@cache
def functions() -> tuple[Functions, ...]:
    """Every function that the double has."""
    rows = yaml.safe_load(FUNCTIONS.read_text(encoding="utf-8"))
    return load(tuple[Functions, ...], rows, where=FUNCTIONS.name)


def page() -> str:
    """docs/simulated-gpus.md."""
    lines = ["| setting | what |", "|---|---|"]
    lines += [f"| `{name}` | {setting.text} |" for name, setting in SETTINGS.items()]
    lines += ["", "`--scenario NAME`, or a YAML file with `set: [1.temperature=91, last.lost=true]`:", ""]
    lines += ["| scenario | what happens |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, (text, _) in SCENARIOS.items()]
    lines += [
        *("", "## The functions of NVML", ""),
        "All that NVIDIA's library exports is there. A number is the branch of the driver that brought what",
        "stands behind it; the library of an older branch does not have it. *h* is the documentation in",
        "nvml.h, *py* nvidia-ml-py, *own* a choice of this project.",
        *("", "| functions | answers | source |", "|---|---|---|"),
    ]
    for row in functions():
        groups = [row.names, *((f"**{since}**", *names) for since, names in row.later.items())]
        words = [name if name.startswith("*") else f"`{name}`" for group in groups for name in group]
        lines.append(f"| {' '.join(words)} | {row.answers} | {row.source} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
