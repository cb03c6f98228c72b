"""A Kubernetes cluster on this computer, for `ami.verify --cluster rehearsal --simulated`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.cli.command import JsonOptions, say
from gpukiln.errors import UsageError
from gpukiln.options import option
from gpukiln.typed import unknown

ACTIONS = ("up", "down", "status")


@dataclass(frozen=True)
class CloudCluster(JsonOptions):
    """Start a Kubernetes control plane on this computer, show it, or end it; nodes are virtual machines."""

    action: str = option("up, down or status", first=True, required=True)
    assets: str = option(
        "folder of kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and etcd; default: "
        "$KUBEBUILDER_ASSETS, else Kubernetes' programs are downloaded"
    )

    def run(self) -> None:
        from gpukiln.clouds.embedded.client import server_status
        from gpukiln.clouds.embedded.layout import Layout
        from gpukiln.kubernetes import rehearsal

        if self.action not in ACTIONS:
            raise unknown("action", self.action, ACTIONS)
        if self.assets and self.action != "up":
            raise UsageError("--assets is for `up`", hint="leave it out")
        layout = Layout()
        if self.action == "down":
            say("ended" if rehearsal.stop(layout) else "the cluster does not run")
        status = (
            rehearsal.start(layout, self.assets, say)
            if self.action == "up"
            else (server_status(layout) or {}).get("cluster")
        )
        lines = _lines(status) if status else ["the cluster does not run"] * (self.action == "status")
        self.report({"cluster": status}, lines, schema="cloud.cluster/1")


def _lines(status: dict[str, Any]) -> list[str]:
    return [
        f"context {status['context']}: {status['url']}",
        *(f"{name:24} {'runs' if runs else 'has ended'}" for name, runs in status["programs"].items()),
        f"export KUBECONFIG={status['kubeconfig']}",
    ]
