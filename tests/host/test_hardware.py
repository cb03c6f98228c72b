"""The machine has the GPUs that it should have."""

from gpukiln.verify.checks import check


@check(
    id="hardware.gpus",
    title="The GPUs that the machine should have are on the PCI bus",
    layer="hardware",
    profiles=("image", "node", "eks-node", "workspace"),
    needs=("gpu",),
    causes=(
        "the instance type has no GPU, or fewer",
        "the GPU has no power, is not seated, or is switched off in the firmware's settings",
        "a hypervisor does not pass it through to this virtual machine",
        "it fell off the bus",
    ),
    fix="`lspci -d 10de:` lists what the bus has, `dmesg | grep -i pci` what the kernel said of it; "
    "drivers and "
    "containers come after that. With `--expect-gpus` another number is wanted.",
)
def test_gpus(facts):
    """What is wanted is decided by the need `gpu`, for every check alike; here it is the first to say so."""
    facts.note(f"{facts.gpu_count} GPUs")
