"""Simulated GPUs of the embedded cloud's machines: a double of NVML, its state, and changes of the state.

Central values: `profile.GpuHardware` (the GPUs of a type), `state.State` (rows of `key value` at the end of
the library's file), `settings.SETTINGS` and `SCENARIOS` (what can be set). Modules: `profile` makes the
document of an instance type or a board from the catalogue; `start` turns it into the state of a started
machine; `state` reads and writes the rows; `library` compiles nvml/, smi/ and load/; `machine_files` puts the
files into a machine, `share` mounts them in a virtual machine; `simulated` joins these for one machine;
`requests` answers `cloud.gpus`; `fidelity` renders docs/simulated-gpus.md from functions.yaml.
"""
