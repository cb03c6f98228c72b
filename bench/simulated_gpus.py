"""How long programs wait for simulated GPUs, and a machine's start with them.

    scripts/run python -m bench.simulated_gpus              # a snapshot of 8 GPUs by pynvml
    scripts/run python -m bench.simulated_gpus --boots 5    # and the start of containers, with and without

See bench/README.md, "Simulated GPUs".
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import boto3

from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_profile
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.state import state_home

TYPE = "p5.48xlarge"
SNAPSHOT_BAR_MS, BOOT_BAR_S = 30, 1.0
BASE = "/aws/service/debian/release/12/latest/amd64"
# What a monitor asks of each GPU each second (gpustat and nvitop ask these).
CALLS = (
    *("Name", "UUID", "MemoryInfo", "UtilizationRates", "PowerUsage", "EnforcedPowerLimit", "FanSpeed"),
    *("PciInfo", "PersistenceMode", "PerformanceState", "ComputeMode", "MigMode", "ComputeRunningProcesses"),
    *("GraphicsRunningProcesses", "EncoderUtilization", "DecoderUtilization"),
)
SNAPSHOT = """
import sys, time, pynvml
pynvml.nvmlInit()
def ask(name, handle, *more):
    try:
        return getattr(pynvml, "nvmlDeviceGet" + name)(handle, *more)
    except pynvml.NVMLError_NotSupported:
        return None
taken = []
for _ in range(30):
    began = time.perf_counter()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for name in sys.argv[1].split():
            ask(name, handle)
        for more in (0, 1, 2, 3):
            ask("ClockInfo", handle, more)
        ask("Temperature", handle, 0)
        ask("TotalEccErrors", handle, 1, 0)
    taken.append(time.perf_counter() - began)
print(*taken)
"""


def snapshot() -> float:
    """Milliseconds of one snapshot of all GPUs, the median of 30."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        append_region(state)
        State(state).write(initial_rows(make_profile(TYPE, seed="i-1", driver="580.65.06", cuda="13.0")))
        env = library.environment(library.build(Path(folder), branch=580), state)
        command = [sys.executable, "-c", SNAPSHOT, " ".join(CALLS)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return statistics.median(map(float, done.stdout.split())) * 1000


def floor() -> float:
    """Milliseconds of as many calls of a C function that does nothing, by ctypes."""
    getpid, taken = ctypes.CDLL(None).getpid, []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(8 * (len(CALLS) + 7)):
            getpid()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1000


def boot(cloud: EmbeddedCloud, tags: list[dict[str, str]]) -> float:
    """Seconds from RunInstances to the banner of the machine's SSH."""
    settings = cloud.environment()
    ec2, ssm = (
        boto3.client(
            service,
            region_name=settings["AWS_REGION"],
            endpoint_url=settings["AWS_ENDPOINT_URL"],
            aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        )
        for service in ("ec2", "ssm")
    )
    image = ssm.get_parameter(Name=BASE)["Parameter"]["Value"]
    cloud.prepare(image, print)
    began = time.perf_counter()
    tagged = [{"ResourceType": "instance", "Tags": tags}] if tags else []
    [instance] = ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, InstanceType=TYPE, TagSpecifications=tagged
    )["Instances"]
    try:
        while not _answers(instance["PrivateIpAddress"], cloud.ssh_port):
            time.sleep(0.05)
        return time.perf_counter() - began
    finally:
        ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])


def _answers(address: str, port: int) -> bool:
    command = ["ssh-keyscan", "-T", "1", "-p", str(port), address]
    return bool(subprocess.run(command, capture_output=True, check=False).stdout)


def row(name: str, value: float, unit: str, against: float, bar: str, *, reached: Callable[[], bool]) -> None:
    """Print one figure with the floor that it is measured against."""
    told = "reached" if reached() else "not reached"
    print(f"{name:24} {value:8.2f} {unit}  floor {against:8.2f} {unit}  bar {bar}: {told}")


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--boots", type=int, default=0, help="how many starts of each kind")
    asked = parser.parse_args()
    took, least = snapshot(), floor()
    row(
        "snapshot of 8 GPUs",
        took,
        "ms",
        least,
        f"{SNAPSHOT_BAR_MS} ms",
        reached=lambda: took <= SNAPSHOT_BAR_MS,
    )
    if asked.boots:
        cloud = EmbeddedCloud("us-west-2", layout=Layout(state_home()))
        times: dict[bool, list[float]] = {False: [], True: []}
        boot(cloud, [])  # the base image is made, the page cache is warm
        for _ in range(asked.boots):
            for simulated in (False, True):
                tags = [{"Key": "gpukiln:gpus", "Value": "simulated"}] if simulated else []
                times[simulated].append(boot(cloud, tags))
        plain, given = (statistics.median(times[key]) for key in (False, True))
        told = f"{BOOT_BAR_S} s more"
        row("start of a container", given, "s", plain, told, reached=lambda: given - plain <= BOOT_BAR_S)
    return 0


if __name__ == "__main__":
    sys.exit(main() or os.EX_OK)
