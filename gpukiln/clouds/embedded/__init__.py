"""An EC2 on this computer: moto answers the API on loopback, and real machines boot from raw disks behind it.

Central values: `layout.Layout` (the cloud's files), `machine.MachineSpec` and `LocalMachine` (a machine, as a
container or a virtual machine), `regions.StoredRegion` (what a region keeps on disk), `scarcity.Script`
(scripted shortages).

Server: `server` is the process and its WSGI application, `client` starts and calls it, `cloud` is the `Cloud`
above it. API: `ec2` puts machines behind moto's EC2; `images`, `volumes`, `launch_devices`, `snapshot_blocks`
put disks behind its images, volumes and snapshots; `image_calls`, `market`, `signing_calls`, `registry`
answer calls that moto lacks; `request_checks`, `refusals`, `capacity`, `role_policies` refuse what EC2
refuses. Machines: `machines`, `lifecycle`, `container`, `virtual_machine`, `network`, `metadata`,
`machine_api`, `block_devices`, `container_devices`, `cgroups`, `chroot`, `qmp`, `hardware`, `accelerator`. On
disk: `layout`, `regions`, `store`, `account_store`, `volume_files`, `inventory`, `clean`, `base` (the base
image). `gpus/` are simulated GPUs.
"""
