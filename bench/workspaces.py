"""How long `workspace.up` takes beside what EC2 takes: from the plan to a machine that runs, with its home.

    scripts/run python -m bench.workspaces

The API is the embedded cloud's without machines behind it, so an instance runs at once: what is left is ours,
and the API's own answers, which are counted apart. See bench/README.md, "Working on a machine".
"""

import os
import statistics
import tempfile
import time
from datetime import UTC, datetime

from botocore.client import BaseClient

from gpukiln.workspaces import lifecycle, provision
from gpukiln.workspaces.contract import ComputeProfile, Workspace
from gpukiln.workspaces.plan import plan
from gpukiln.workspaces.spec import UpOptions, spec_of
from tests.support.release_cloud import Cloud, end_server, make_image, tell

BAR_S = 5.0
TIMES = 9


def main() -> int:
    """Up and down in turns."""
    calls: list[float] = []
    direct = BaseClient._make_api_call

    def timed(client, operation, parameters):
        began = time.perf_counter()
        try:
            return direct(client, operation, parameters)
        finally:
            calls.append(time.perf_counter() - began)

    BaseClient._make_api_call = timed
    profile = ComputeProfile(8, "32Gi", "5Gi", gpu_type="T4")
    wanted = Workspace("vision", "ann", "us-west-2", compute_profile=profile)
    spec = spec_of(wanted, UpOptions(simulated=True))
    took: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["GPUKILN_HOME"] = home
        tell("reset")
        make_image("b1")
        for _ in range(TIMES):
            calls.clear()
            began = time.perf_counter()
            made = plan(Cloud(), spec, datetime.now(UTC).date())
            provision.start(Cloud(), made, say=lambda _: None)
            took.append((time.perf_counter() - began, sum(calls), len(calls)))
            for found in lifecycle.find_workspaces(Cloud(), "vision"):
                lifecycle.remove_workspace(Cloud(), wanted, found, keep_home=False)
    end_server()
    whole = statistics.median(row[0] for row in took)
    api = statistics.median(row[1] for row in took)
    print(f"plan to running {whole:.2f} s: {api:.2f} s in {took[-1][2]} calls, {whole - api:.2f} s ours")
    return int(whole > BAR_S)


if __name__ == "__main__":
    raise SystemExit(main())
