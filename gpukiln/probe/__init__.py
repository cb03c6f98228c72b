"""What runs on a machine and gathers its facts: standard library and pynvml, Python 3.9.

The facts are plain data, one section for each topic; `gather.py` lists the sections and has the rules for
all modules that are sent to a machine. `packing.py` makes one command of them, so that one round trip is
enough.

- `base`: runs commands and reads files, with evidence, time limits and a list of tools that hang; `child`:
  runs what may never return in a child process; `sections`: gathers one section after the other.
- `gpus`, `nvml`, `nvml_values`, `xids`, `pcie`: the GPUs by the PCI bus, NVML and the kernel's log; `cuda`,
  `ptx`: computes on them; `simulated`: recognises simulated ones.
- `libraries`, `loading`, `firmware`: the driver's files; `hygiene`, `scripts`: identities, files of the
  build and credentials; `container`, `services`, `desktop`, `monitoring`, `storage`, `nodeadm`, `runner`:
  everything else.
- `contact` and `contact_*`: the program scripts/first-contact; `recording`: records NVML's values for
  simulated GPUs; `passthrough`: a hypervisor's PCI devices, sent alone.
"""
