"""Runs a real control plane on loopback: etcd, API server, controller manager, scheduler.

They are children of the embedded cloud's server, in its process namespace, so that none of them outlives it.
Each start makes a new, empty cluster. Flags: kubernetes-sigs/controller-runtime,
pkg/internal/testing/controlplane (apiserver.go, etcd.go), and kubeadm's defaults for the controllers.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpukiln.clouds.ec2 import wait_until
from gpukiln.clouds.embedded.cluster.programs import PLUGIN, Programs
from gpukiln.clouds.embedded.cluster.relay import Relay, egress_proxy
from gpukiln.clouds.embedded.network import METADATA
from gpukiln.errors import UnavailableError
from gpukiln.files import write_atomic

NAME = "rehearsal"  # of the context, and the value of the tag gpukiln:cluster of its nodes
START, STOP = "/gpukiln/cluster/start", "/gpukiln/cluster/stop"  # paths of the server
START_S = 90.0
POLL_S = 0.2
STOP_S = 10.0
LOG_LINES = 5
SERVICES = "10.96.0.0/16"  # kubeadm's default
PODS = "10.244.0.0/24"  # of one node: the nodes of this cluster have no network between them

JOIN = "/usr/local/sbin/gpukiln-join"  # on the disk of a machine
# The words are those of --user-data, see gpukiln.kubernetes.canary.
USER_DATA = f"""\
#!/bin/sh
exec {JOIN} "GPUKILN_NODE_LABELS" "GPUKILN_NODE_TAINTS"
"""


@dataclass(frozen=True)
class ClusterFiles:
    """The files of the cluster; only their owner can read the folder.

    Args:
        folder: Has certificates, logs, etcd's data, and the kubeconfig.
    """

    folder: Path

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def user_data(self) -> Path:
        """Joins a machine whose disk `node.prepare` has prepared."""
        return self.folder / "user-data.sh"

    @property
    def egress(self) -> Path:
        """The socket through which the API server reaches kubelets."""
        return self.folder / "egress.sock"


class ControlPlane:
    """The control plane of one embedded cloud; its methods may be called by several threads.

    Args:
        files: Where its files go.
        kubelet: Opens a connection to the kubelet of a node, by its name.
    """

    def __init__(self, files: ClusterFiles, kubelet: Callable[[str], socket.socket]) -> None:
        self.files = files
        self._kubelet = kubelet
        self._egress: Relay | None = None
        self.programs: Programs | None = None
        self.port = 0  # of the API server, on 127.0.0.1
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether all of its programs run."""
        return bool(self._processes) and all(process.poll() is None for process in self._processes.values())

    def start(self, programs: Programs) -> None:
        """Start a new, empty cluster; one that runs stays.

        Raises:
            UnavailableError: A program ended, or the API server is not ready in time; nothing runs then.
        """
        with self._lock:
            if self.running:
                return
            self._stop()
            shutil.rmtree(self.files.folder, ignore_errors=True)
            self.files.folder.mkdir(parents=True, mode=0o700)
            self.programs = programs
            try:
                self._start(programs)
            except BaseException:
                self._stop()
                raise

    def stop(self) -> bool:
        """End it and remove its files; whether it ran."""
        with self._lock:
            ran = bool(self._processes)
            self._stop()
            shutil.rmtree(self.files.folder, ignore_errors=True)
            return ran

    def status(self) -> dict[str, Any] | None:
        """Address and programs; None where there is no cluster."""
        # a copy: another thread may be starting the cluster
        processes = dict(self._processes)
        if not processes:
            return None
        return {
            "context": NAME,
            "url": f"https://127.0.0.1:{self.port}",
            "kubeconfig": str(self.files.kubeconfig),
            "user_data": str(self.files.user_data),
            "programs": {name: process.poll() is None for name, process in processes.items()},
            "device_plugin": self.programs is not None and self.programs.has(PLUGIN),
        }

    def require_programs(self) -> Programs:
        """Its programs.

        Raises:
            UnavailableError: It does not run.
        """
        if not self.running or self.programs is None:
            raise UnavailableError(
                f"the cluster {NAME} does not run, so that no machine can join it",
                hint="`invoke cloud.cluster up` starts it",
            )
        return self.programs

    def relay(self, listener: socket.socket) -> Relay:
        """Connects a machine, at a socket in its network, to the API server."""
        return Relay(listener, lambda _: socket.create_connection(("127.0.0.1", self.port)))

    def _start(self, programs: Programs) -> None:
        from gpukiln.clouds.embedded.cluster.certificates import (  # noqa: PLC0415 - slow to import
            CertificateAuthority,
        )

        folder = self.files.folder
        etcd_port, peer_port, self.port = free_ports(3)
        authority = CertificateAuthority(folder)
        authority.create()
        authority.issue("server", "kube-apiserver", hosts=("127.0.0.1", METADATA, "kubernetes.default"))
        authority.issue("accounts", "service-accounts")
        # Groups that Kubernetes knows (kubernetes.io, "Using RBAC Authorization", default roles).
        users = {
            "admin": ("admin", ("system:masters",)),
            "kubelet-client": ("kube-apiserver", ("system:masters",)),
            "controller-manager": ("system:kube-controller-manager", ()),
            "scheduler": ("system:kube-scheduler", ()),
        }
        for file, (user, groups) in users.items():
            authority.issue(file, user, groups=groups)
        for file in ("admin", "controller-manager", "scheduler"):
            target = self.files.kubeconfig if file == "admin" else folder / f"{file}.kubeconfig"
            write_kubeconfig(target, f"https://127.0.0.1:{self.port}", folder, file)
        self._egress = egress_proxy(self.files.egress, self._kubelet)
        write_atomic(folder / "egress.yaml", yaml.safe_dump(_egress(self.files.egress)))
        etcd = f"http://127.0.0.1:{etcd_port}"
        write_atomic(self.files.user_data, USER_DATA)
        self._run(programs, "etcd", _etcd_flags(folder, etcd, f"http://127.0.0.1:{peer_port}"))
        self._run(programs, "kube-apiserver", _api_flags(folder, etcd, self.port))
        self._wait_until_ready(folder)
        self._run(programs, "kube-controller-manager", _manager_flags(folder))
        self._run(programs, "kube-scheduler", _common_flags(folder, "scheduler"))

    def _run(self, programs: Programs, name: str, flags: list[str]) -> None:
        with (self.files.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [str(programs[name]), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.files.folder,
            )

    def _wait_until_ready(self, folder: Path) -> None:
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        context.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        url = f"https://127.0.0.1:{self.port}/readyz"

        def is_ready() -> bool | None:
            if ended := [name for name, process in self._processes.items() if process.poll() is not None]:
                raise self._failure(ended[0], "ended")
            try:
                with urllib.request.urlopen(url, context=context, timeout=5):
                    return True
            except OSError:  # an HTTPError, too: some part of it is not ready
                return None

        def late() -> UnavailableError:
            return self._failure("kube-apiserver", f"is not ready after {START_S:.0f} s")

        wait_until(is_ready, late, timeout_s=START_S, pause_s=POLL_S)

    def _failure(self, name: str, problem: str) -> UnavailableError:
        log = (self.files.folder / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        return UnavailableError(f"{name} {problem}", hint="the end of its log says why", details=tuple(log))

    def _stop(self) -> None:
        # the API server before etcd, which it would wait for
        for process in reversed(list(self._processes.values())):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._egress:
            self._egress.stop()
            self._egress = None


def write_kubeconfig(file: Path, server: str, folder: Path, user: str) -> None:
    """A kubeconfig with a user's certificate and key in it.

    Args:
        folder: Has `ca.crt`, and the user's `.crt` and `.key`.
    """

    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    secrets = {
        "client-certificate-data": encoded(f"{user}.crt"),
        "client-key-data": encoded(f"{user}.key"),
    }
    cluster = {"server": server, "certificate-authority-data": encoded("ca.crt")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": NAME,
        "clusters": [{"name": NAME, "cluster": cluster}],
        "users": [{"name": user, "user": secrets}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": user}}],
    }
    write_atomic(file, json.dumps(document, indent=2))


def _etcd_flags(folder: Path, clients: str, peers: str) -> list[str]:
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        # A cluster that ends with its server has nothing to keep after a power failure.
        "--unsafe-no-fsync",
    ]


def _api_flags(folder: Path, etcd: str, port: int) -> list[str]:
    return [
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--etcd-servers={etcd}",
        f"--client-ca-file={folder / 'ca.crt'}",
        f"--tls-cert-file={folder / 'server.crt'}",
        f"--tls-private-key-file={folder / 'server.key'}",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        # As on EKS: ExtendedResourceToleration adds the toleration of nvidia.com/gpu to pods that ask for it.
        "--enable-admission-plugins=NodeRestriction,ExtendedResourceToleration",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'accounts.key'}",
        f"--service-account-signing-key-file={folder / 'accounts.key'}",
        f"--service-cluster-ip-range={SERVICES}",
        f"--kubelet-certificate-authority={folder / 'ca.crt'}",
        f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
        f"--kubelet-client-key={folder / 'kubelet-client.key'}",
        # The address of a node is that of its own network; the relay finds the machine by its name.
        "--kubelet-preferred-address-types=Hostname",
        f"--egress-selector-config-file={folder / 'egress.yaml'}",
    ]


def _manager_flags(folder: Path) -> list[str]:
    return [
        *_common_flags(folder, "controller-manager"),
        "--use-service-account-credentials=true",
        f"--root-ca-file={folder / 'ca.crt'}",
        f"--service-account-private-key-file={folder / 'accounts.key'}",
    ]


def _common_flags(folder: Path, user: str) -> list[str]:
    kubeconfig = folder / f"{user}.kubeconfig"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        # no health server: several clusters may run on this computer
        "--secure-port=0",
    ]


def _egress(path: Path) -> dict[str, Any]:
    """All connections to nodes go through a socket (kubernetes.io, "Set up Konnectivity service")."""
    connection = {"proxyProtocol": "HTTPConnect", "transport": {"uds": {"udsName": str(path)}}}
    return {
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": connection}],
    }


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()
