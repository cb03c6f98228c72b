"""A real Kubernetes control plane on loopback, of the programs that setup-envtest unpacks.

Flags: kubernetes-sigs/controller-runtime:pkg/internal/testing/controlplane (apiserver.go, etcd.go). There is
no kubelet: nodes are objects that say what a kubelet would, and pods on them never start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from gpukiln.clouds.embedded.cluster.control_plane import free_ports
from gpukiln.errors import GpukilnError
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.manifest import Manifest

VARIABLE = "KUBEBUILDER_ASSETS"
START_S = 90.0
ADMIN = "an-administrator-of-the-tests"


def why_none() -> str:
    """Why there is none here; an empty string where it can be started."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return f"{VARIABLE} is not set: no kube-apiserver (setup-envtest unpacks one)"
    missing = [name for name in ("kube-apiserver", "etcd") if not (Path(folder) / name).is_file()]
    return f"{VARIABLE} is {folder}, which has no {' and no '.join(missing)}" if missing else ""


def has(program: str) -> bool:
    """Whether it is there, beside the two that have to be."""
    return _program(program) is not None


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[Path]:
    """Start etcd, the API server, and a scheduler where there is one; gives a kubeconfig."""
    assets = Path(os.environ[VARIABLE])
    etcd_port, peer_port, port = free_ports(3)
    kubeconfig = folder / "kubeconfig"
    server = f"https://127.0.0.1:{port}"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(server)))
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
    _keys(folder)
    etcd = f"http://127.0.0.1:{etcd_port}"
    commands = [
        [
            str(assets / "etcd"),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        ],
        [
            str(assets / "kube-apiserver"),
            "--advertise-address=127.0.0.1",
            "--allow-privileged=true",
            "--authorization-mode=RBAC",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            # accounts and taints come from controllers that do not run here
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--enable-admission-plugins=ExtendedResourceToleration",
            f"--etcd-servers={etcd}",
            f"--secure-port={port}",
            f"--service-account-issuer={server}/",
            f"--service-account-key-file={folder / 'accounts.pub'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={folder / 'tokens.csv'}",
        ],
    ]
    common = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    if scheduler := _program("kube-scheduler"):
        commands.append([scheduler, *common])
    if manager := _program("kube-controller-manager"):
        # the types of admission policies are checked by a controller; the others would want kubelets
        commands.append([manager, *common, "--controllers=validatingadmissionpolicy-status-controller"])
    with contextlib.ExitStack() as stack:
        for command in commands:
            _start(stack, folder, command)
            if command[0].endswith("kube-apiserver"):
                _wait_for(kubeconfig, folder)
        yield kubeconfig


def credentials(kubeconfig: Path, folder: Path, *, account: str, namespace: str, pod: Manifest) -> Path:
    """What a pod's projected volume holds: a token of an account that is bound to the pod, and the CA."""
    bound = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
    }
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"boundObjectRef": bound},
    }
    server = address(kubeconfig)
    asked = urllib.request.Request(  # noqa: S310 - https, on loopback
        f"{server}/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token",
        json.dumps(request).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"},
    )
    signed = kubeconfig.parent / "certificates/apiserver.crt"
    trusted = ssl.create_default_context(cafile=signed)
    with urllib.request.urlopen(asked, context=trusted) as answer:  # noqa: S310 - as above
        (folder / "token").write_text(json.load(answer)["status"]["token"])
    shutil.copy(signed, folder / "ca.crt")
    return folder


def address(kubeconfig: Path) -> str:
    return str(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get(VARIABLE, ""))


def _start(stack: contextlib.ExitStack, folder: Path, command: list[str]) -> None:
    log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("wb"))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(kubeconfig: Path, folder: Path) -> None:
    """Until it answers, and has the namespace that everything is made in."""
    end = time.monotonic() + START_S
    while True:
        try:
            if Cluster(kubeconfig=str(kubeconfig)).get("Namespace", "default"):
                return
            said = "no namespace default"
        except GpukilnError as error:
            said = str(error)
        if time.monotonic() > end:
            log = (folder / "kube-apiserver.log").read_text(errors="replace")
            raise AssertionError(f"no API server after {START_S:.0f} s: {said}\n{log[-3000:]}")
        time.sleep(0.5)


def _keys(folder: Path) -> None:
    private, public = folder / "accounts.key", folder / "accounts.pub"
    for command in (
        ["openssl", "genrsa", "-out", str(private), "2048"],
        ["openssl", "rsa", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(command, check=True, capture_output=True)


def _kubeconfig(server: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "real",
        "clusters": [{"name": "real", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": ADMIN}}],
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "admin"}}],
    }
