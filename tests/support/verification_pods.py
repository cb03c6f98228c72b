"""What the containers of a cluster verification do, on the double of a cluster."""

import json
import re
import threading

from gpukiln.kubernetes import cluster_verification
from gpukiln.probe.gather import POD_SECTIONS
from tests.support.api_server import Outcome
from tests.support.host_machine import machine


class Container:
    """What the pods of a test say: nvidia-smi's lines of what they were granted, facts of a good machine."""

    def __init__(self, server):
        self.server, self.end = server, threading.Event()
        self.sees = lambda _, gpus: gpus
        self.named = lambda gpus: ",".join(gpus) or "void"
        self.smi_exit = 0
        self.outcome = None

    def __call__(self, pod, gpus):
        command = pod["spec"]["containers"][0]["command"][-1]
        if self.outcome:
            return self.outcome
        if "nvidia-smi" not in command:
            good = {name: machine(gpus=len(gpus))[name] for name in ("hung", *POD_SECTIONS)}
            mark = re.search(r" pod ([0-9a-f]{32}) ", command)[1]
            return Outcome(log=f"{mark}\n{json.dumps(good)}\n{mark}")
        seen = self.sees(pod, gpus)
        lines = [f"GPU {index}: Tesla T4 (UUID: {one})" for index, one in enumerate(seen)]
        code = self.smi_exit or (0 if seen else 6)
        lines += [*([] if seen else ["No devices were found"]), f"{cluster_verification.SMI_EXIT_LINE}{code}"]
        return Outcome(
            log="\n".join([*lines, f"{cluster_verification.DEVICES_LINE}{self.named(gpus)}"]), wait=self.end
        )
