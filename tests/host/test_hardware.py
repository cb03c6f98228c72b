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
        "the hypervisor does not pass the GPU through to this virtual machine",
        "the GPU fell off the bus",
    ),
    fix="`lspci -d 10de:` lists the GPUs on the bus, `dmesg | grep -i pci` shows the kernel's messages. Fix "
    "this before drivers and containers. If the number is right, give it as `--expect-gpus`.",
)
def test_gpus(facts):
    """The need `gpu` compares the numbers before each check that has it; this check is the first of them."""
    facts.note(f"{facts.gpu_count} GPUs")
