"""Reports the health of a node's GPUs to the cluster: a node condition, and a taint while the GPUs are sick.

It runs in two containers of one pod and needs nothing but Python:

    check FILE    runs the node's `gpukiln-gpu health` and writes the result; privileged, no credentials
    report FILE   sends the result to the API server; has the pod's credentials and no privileges

The condition GPUProblem is True while the GPUs are sick, False while they are well, and Unknown when their
state is unknown. A node that is labelled for its GPUs and has none is sick. The agent adds the taint when the
GPUs are sick, and removes it after three checks in a row that find them well; while their state is unknown
the taint stays as it is. The agent changes no other condition and no other taint.

Environment: NODE_NAME, KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
"""

import calendar
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONDITION, TAINT = "GPUProblem", "gpukiln.io/gpu-sick"
WELL, SICK, UNKNOWN = "well", "sick", "unknown"
CONDITION_STATUSES = {
    WELL: ("False", "GPUsAreWell"),
    SICK: ("True", "GPUsAreSick"),
    UNKNOWN: ("Unknown", "NotKnown"),
}
HEALTH_COMMAND = ("nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--", "/usr/local/bin/gpukiln-gpu")
CHECK_INTERVAL_S, REPORT_INTERVAL_S = 60, 15
CHECK_TIMEOUT_S = 270  # the driver may take two minutes to start, and a GPU that hangs costs 40 s, each twice
STALE_S = 600  # a result that is older says nothing about the GPUs now
# The kubelet writes an unchanged condition every 5 minutes, too (nodeStatusReportFrequency).
HEARTBEAT_S = 300
HEALTHY_CHECKS = 3  # in a row, before the agent removes the taint
CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

HealthResult = dict[str, Any]  # of one check: {state, message, at}


def check_health(command: Sequence[str] = HEALTH_COMMAND) -> HealthResult:
    try:
        done = subprocess.run(
            # The exit code says whether the GPUs are sick, too, so it is not checked.
            [*command, "health", "--json"],
            capture_output=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _result(UNKNOWN, f"gpukiln-gpu did not answer within {CHECK_TIMEOUT_S} s")
    except OSError as error:
        return _result(UNKNOWN, f"gpukiln-gpu can't be run: {error}")
    try:
        [node] = json.loads(done.stdout)["nodes"]
        state, message, gpus = node["state"], node["message"], node["gpus"]
    except (ValueError, KeyError, TypeError):
        printed = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing"]
        return _result(UNKNOWN, f"gpukiln-gpu exited with {done.returncode} and printed {printed[0]}")
    if state == WELL and not gpus:
        return _result(SICK, f"this node is labelled for its GPUs and has none: {message}")
    return _result(state if state in CONDITION_STATUSES else UNKNOWN, message)


def _result(state: str, message: str) -> HealthResult:
    # Events and `kubectl describe` show messages on one line.
    return {"state": state, "message": message[:200], "at": time.time()}


def write(path: Path, result: HealthResult) -> None:
    """Replace the file in one step, because the other container reads it at any time."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(path)


def read(path: Path, now: float) -> HealthResult:
    """The last result; UNKNOWN if there is none or it is older than `STALE_S`."""
    try:
        result: HealthResult = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"state": UNKNOWN, "message": "no check has run yet", "at": 0}
    if now - result["at"] > STALE_S:
        text = f"the last check was {(now - result['at']) // 60:.0f} minutes ago"
        return {"state": UNKNOWN, "message": text, "at": result["at"]}
    return result


class Api:
    """The node object in the cluster; credentials are read at each request: the kubelet renews them."""

    def __init__(self, address: str = "", credentials: Path = CREDENTIALS) -> None:
        self.credentials = credentials
        if not address:
            host = os.environ["KUBERNETES_SERVICE_HOST"]
            # An IPv6 address needs brackets in a URL (RFC 3986).
            host = f"[{host}]" if ":" in host else host
            address = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        self.node = f"{address}/api/v1/nodes/{os.environ['NODE_NAME']}"

    def get(self) -> dict[str, Any]:
        return self._send(urllib.request.Request(self.node))  # noqa: S310 - https, or the address of a test

    def patch(self, part: str, patch: dict[str, Any], kind: str) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - as above
            self.node + part,
            data=json.dumps(patch).encode(),
            headers={"Content-Type": f"application/{kind}-patch+json"},
            method="PATCH",
        )
        return self._send(request)

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        token = (self.credentials / "token").read_text(encoding="utf-8").strip()
        request.add_header("Authorization", f"Bearer {token}")
        trusted = None
        if request.type == "https":
            trusted = ssl.create_default_context(cafile=str(self.credentials / "ca.crt"))
        with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:  # noqa: S310 - as above
            node: dict[str, Any] = json.load(answer)
        return node


class NodeReporter:
    """Writes the condition and the taint where they changed."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.well = 0  # healthy checks in a row
        self.counted = 0.0  # time of the check that was counted last: a result is read several times

    def report(self, result: HealthResult, now: float) -> None:
        """Update the node from the result of a check.

        Raises:
            OSError: The API server did not answer or refused; the next call may succeed.
        """
        # The file is read more often than it is written: a result counts once.
        if result["at"] != self.counted:
            self.well = self.well + 1 if result["state"] == WELL else 0
            self.counted = result["at"]
        self._taint(self._condition(self.api.get(), result, now), result["state"])

    def _condition(self, node: dict[str, Any], result: HealthResult, now: float) -> dict[str, Any]:
        """Write the condition if it changed or its heartbeat is due; returns the node after that."""
        status, reason = CONDITION_STATUSES[result["state"]]
        new = {"type": CONDITION, "status": status, "reason": reason, "message": result["message"]}
        conditions = node.get("status", {}).get("conditions", [])
        old: dict[str, Any] = next(
            (condition for condition in conditions if condition["type"] == CONDITION), {}
        )
        same = all(old.get(key) == value for key, value in new.items())
        if same and now - _seconds(old.get("lastHeartbeatTime", "")) < HEARTBEAT_S:
            return node
        stamp = time.strftime(TIME_FORMAT, time.gmtime(now))
        turned = old.get("status") != status
        new["lastHeartbeatTime"] = stamp
        new["lastTransitionTime"] = stamp if turned else old.get("lastTransitionTime", stamp)
        # A strategic merge patch merges conditions by their type, and leaves those of others as they are.
        node = self.api.patch("/status", {"status": {"conditions": [new]}}, "strategic-merge")
        if turned:
            print(f"{CONDITION} is {status}: {result['message']}", flush=True)
        return node

    def _taint(self, node: dict[str, Any], state: str) -> None:
        taints = node.get("spec", {}).get("taints", [])
        others = [taint for taint in taints if taint["key"] != TAINT]
        put = state == SICK and others == taints
        taken_off = state == WELL and self.well >= HEALTHY_CHECKS and others != taints
        if not (put or taken_off):
            return
        taints_after = [*others, {"key": TAINT, "value": "true", "effect": "NoSchedule"}] if put else others
        # A merge patch replaces the whole list (RFC 7386): with resourceVersion the API server refuses the
        # patch if somebody changed the taints since they were read.
        version = {"resourceVersion": node["metadata"]["resourceVersion"]}
        self.api.patch("", {"metadata": version, "spec": {"taints": taints_after}}, "merge")
        print(f"{TAINT} {'added' if put else 'removed'}", flush=True)


def _seconds(text: str) -> int:
    try:
        return calendar.timegm(time.strptime(text, TIME_FORMAT))
    except ValueError:
        return 0


def main(verb: str, file: str) -> None:
    path = Path(file)
    reporter = NodeReporter(Api()) if verb == "report" else None
    while True:
        if reporter is None:
            write(path, check_health())
            time.sleep(CHECK_INTERVAL_S)
            continue
        try:
            reporter.report(read(path, time.time()), time.time())
        except (OSError, ValueError) as error:  # tried again in REPORT_INTERVAL_S
            print(f"the API server: {error}", file=sys.stderr, flush=True)
        time.sleep(REPORT_INTERVAL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
