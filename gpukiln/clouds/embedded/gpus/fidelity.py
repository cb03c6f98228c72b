"""The table of the double's functions with their sources, and the page docs/simulated-gpus.md.

`python -m gpukiln.clouds.embedded.gpus.fidelity > docs/simulated-gpus.md` writes the page.
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

NVIDIA's nvidia-smi refuses any NVML but its driver's, so a stand-in is where the image has it: a small
program that asks whatever libnvidia-ml.so.1 it finds, for what gpukiln and users of simulated machines read.

| option | answer |
|---|---|
| none, `-L` | the summary, in the layout of drivers 550 to 580; the GPUs and their MIG devices |
| `-h` | the driver's version, and these options |
| `-q`, `-q -x` | the main values of each GPU and its processes, as text or XML |
| `--query-gpu` | about 60 fields by NVIDIA's names; an unknown field is refused with that list |
| `--query-compute-apps` | a row for each process |
| `-pm`, `-e`, `-mig`, `-pl`, `-lgc`, `-rgc`, `-r` | set through NVML |
| `topo -m` | the matrix |
| `mig -lgip`, `-cgi LIST [-C]`, `-dci`, `-dgi` | profiles; creates and destroys instances |
| `-i` | GPUs by index, UUID or address |

Everything else (`dmon`, `pmon`, `-l`, `-d`, `nvlink`, `topo -p2p`, other queries and settings) ends with exit
code 2 and this list. Other exit codes are those of nvidia-smi(1). A value without a function in the library
is `N/A`.

## What can be set

`invoke cloud.gpus MACHINE --set GPU.NAME=VALUE`; GPU is an index, `last` or `*`.

"""


@strict
class FunctionGroup:
    """Functions of NVML with the same kind of answer.

    Args:
        source: The source of the answer, see functions.yaml.
        names: Functions that every branch of the driver has.
        later: Further functions, by the branch that added them.
    """

    answers: str
    source: str
    names: tuple[str, ...] = ()
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def of_branch(self, branch: int) -> Iterator[str]:
        """The functions that a branch of the driver has."""
        yield from self.names
        for since, names in self.later.items():
            if since <= branch:
                yield from names


@cache
def functions() -> tuple[FunctionGroup, ...]:
    """All functions of the double."""
    rows = yaml.safe_load(FUNCTIONS.read_text(encoding="utf-8"))
    return load(tuple[FunctionGroup, ...], rows, where=FUNCTIONS.name)


def page() -> str:
    """The text of docs/simulated-gpus.md."""
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
