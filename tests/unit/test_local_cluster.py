"""The cluster of this computer without its programs: certificates, relays, its pods' image, its plugin."""

import contextlib
import hashlib
import io
import json
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from gpukiln.clouds.embedded.cluster import device_plugin, image, programs
from gpukiln.clouds.embedded.cluster.certificates import CertificateAuthority
from gpukiln.clouds.embedded.cluster.control_plane import ClusterFiles, ControlPlane, write_kubeconfig
from gpukiln.clouds.embedded.cluster.node import NodeFiles
from gpukiln.clouds.embedded.cluster.programs import find_programs
from gpukiln.clouds.embedded.cluster.relay import Relay, egress_proxy
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.kubernetes import rehearsal
from gpukiln.kubernetes.doctor import is_plugin
from tests.support.harness import wait_for

GPUS = ("GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222")


def program(folder, name, text="#!/bin/sh\nexit 3\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


# --- programs -----------------------------------------------------------------------------------------------


@pytest.fixture
def assets(tmp_path, monkeypatch):
    monkeypatch.delenv(programs.VARIABLE, raising=False)
    monkeypatch.setattr(programs, "CNI_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    folder = tmp_path / "assets"
    for name in (*programs.SERVER, "etcd"):
        program(folder, name)
    for name in programs.CNI:
        program(folder / "cni", name)
    return folder


def test_programs_are_those_of_the_folder_and_nvidias_only_where_they_are(assets, tmp_path, monkeypatch):
    found = find_programs(str(assets), tmp_path, print)
    assert found["kubelet"] == assets / "kubelet"
    assert found["bridge"] == assets / "cni/bridge"
    assert not found.has("nvidia-device-plugin")
    program(assets, "nvidia-device-plugin")
    monkeypatch.setenv(programs.VARIABLE, str(assets))
    assert find_programs("", tmp_path, print).has("nvidia-device-plugin")


def test_what_is_missing_is_named_with_its_package(assets, tmp_path):
    (assets / "etcd").unlink()
    (assets / "kube-scheduler").unlink()
    with pytest.raises(UnavailableError, match=r"has no kube-scheduler, etcd") as caught:
        find_programs(str(assets), tmp_path, print)
    assert caught.value.exit_code == 4
    assert "etcd-server" in caught.value.hint
    with pytest.raises(UsageError, match="no such folder"):
        find_programs(str(assets / "none"), tmp_path, print)


def server_archive(tmp_path, monkeypatch, *, checksum=None):
    """Kubernetes' archive, of scripts, as a file."""
    file = tmp_path / "server.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name in programs.SERVER:
            member = tarfile.TarInfo(f"kubernetes/server/bin/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    actual = hashlib.sha512(file.read_bytes()).hexdigest()
    row = programs.load_server_archive()
    sha512 = dict.fromkeys(row.arch, checksum or actual)
    monkeypatch.setattr(
        programs, "load_server_archive", lambda: replace(row, url=file.as_uri(), sha512=sha512)
    )
    return file


def test_kubernetes_programs_are_downloaded_once_by_their_checksum(tmp_path, monkeypatch):
    file, cache = server_archive(tmp_path, monkeypatch), tmp_path / "cache"
    said = []
    folder = programs.download(cache, said.append)
    assert (folder / "kubelet").read_text() == "kubelet"
    assert said == [f"download {file.as_uri()}"]
    file.unlink()
    assert programs.download(cache, said.append) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_download_with_another_checksum_or_without_a_network_keeps_nothing(tmp_path, monkeypatch):
    file, cache = server_archive(tmp_path, monkeypatch, checksum="0" * 128), tmp_path / "cache"
    with pytest.raises(UnavailableError, match="wanted 0000"):
        programs.download(cache, print)
    file.unlink()
    with pytest.raises(UnavailableError, match="can't be fetched") as caught:
        programs.download(cache, print)
    assert programs.VARIABLE in caught.value.hint
    assert list(cache.iterdir()) == []


# --- certificates and connections ---------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path):
    authority = CertificateAuthority(tmp_path)
    authority.create()
    return authority


def test_a_certificate_serves_its_hosts_and_names_user_and_groups(authority):
    certificate, key = authority.issue("node", "system:node:i-0a", groups=("system:nodes",), hosts=("i-0a",))
    assert key.stat().st_mode & 0o777 == 0o600
    command = ["openssl", "verify", "-CAfile", str(authority.certificate), str(certificate)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    server.load_verify_locations(authority.certificate)
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=authority.certificate)
    client.load_cert_chain(certificate, key)
    peers = []

    def serve(listener):
        connection, _ = listener.accept()
        with contextlib.suppress(ssl.SSLError), server.wrap_socket(connection, server_side=True) as secured:
            peers.append(dict(pair for part in secured.getpeercert()["subject"] for pair in part))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with socket.create_connection(listener.getsockname()) as plain:
            client.wrap_socket(plain, server_hostname="i-0a").close()
        thread.join()
    assert peers == [{"organizationName": "system:nodes", "commonName": "system:node:i-0a"}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        plain = socket.create_connection(listener.getsockname())
        with plain, pytest.raises(ssl.SSLCertVerificationError):
            client.wrap_socket(plain, server_hostname="i-0b")


def echo():
    """A server that answers each connection with what it sent, in capitals, when it has ended."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                received = b""
                while part := client.recv(100):
                    received += part
                client.sendall(received.upper())

    threading.Thread(target=answer, daemon=True).start()
    return listener


def exchange(client, text):
    client.sendall(text)
    client.shutdown(socket.SHUT_WR)
    answer = b""
    while part := client.recv(100):
        answer += part
    return answer


def test_a_relay_passes_both_directions_on_and_stops():
    with echo() as server:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        relay = Relay(listener, lambda _: socket.create_connection(server.getsockname()))
        for _ in range(2):
            with socket.create_connection(address) as client:
                assert exchange(client, b"abc") == b"ABC"
        relay.stop()
        with pytest.raises(OSError, match="refused"), socket.create_connection(address):
            pass


def test_the_api_server_reaches_the_kubelet_of_a_node_by_its_name(tmp_path):
    def kubelet(name):
        if name != "i-0a":
            raise OSError(f"no machine is the node {name}")
        return socket.create_connection(server.getsockname())

    with echo() as server:
        proxy = egress_proxy(tmp_path / "egress.sock", kubelet)
        for target, answer in (
            ("i-0a:10250", b"HTTP/1.1 200"),
            ("i-0b:10250", b"HTTP/1.1 502 no machine is the node i-0b"),
            ("i-0a:22", b"HTTP/1.1 502 wanted CONNECT NODE:10250"),
        ):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "egress.sock"))
                client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
                assert client.recv(len(answer)) == answer
                if b"200" in answer:
                    client.recv(100)
                    assert exchange(client, b"logs") == b"LOGS"
        proxy.stop()


def test_a_kubeconfig_has_the_keys_and_only_its_owner_can_read_it(authority, tmp_path):
    authority.issue("admin", "admin", groups=("system:masters",))
    write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", tmp_path, "admin")
    assert (tmp_path / "kubeconfig").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "kubeconfig").read_text())["current-context"] == "rehearsal"


# --- the control plane --------------------------------------------------------------------------------------


def no_kubelet(name):
    raise OSError(name)


def test_a_program_that_ends_is_named_with_its_log_and_nothing_runs_or_stays(assets, tmp_path):
    plane = ControlPlane(ClusterFiles(tmp_path / "cluster"), no_kubelet)
    program(assets, "etcd", "#!/bin/sh\nexec /bin/sleep 60\n")
    program(assets, "kube-apiserver", "#!/bin/sh\necho 'unknown flag'\nexit 1\n")
    found = find_programs(str(assets), tmp_path, print)
    with pytest.raises(UnavailableError, match="kube-apiserver ended") as caught:
        plane.start(found)
    assert caught.value.details == ("unknown flag",)
    assert plane.status() is None
    with pytest.raises(UnavailableError, match="does not run") as caught:
        plane.require_programs()
    assert "cloud.cluster up" in caught.value.hint


# --- what a machine gets ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer():
    """Made of this computer's packages."""
    if not image.STATUS.exists():
        pytest.skip(f"this computer has no {image.STATUS}")
    return image.layer({"/usr/bin/gpukiln-extra": b"#!/bin/sh\n"})


def test_the_image_runs_python_and_the_programs_that_are_added(layer, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        archive.extractall(tmp_path)  # noqa: S202 - of this computer's own files
    code = "import ctypes, hashlib, json, subprocess; print('runs')"
    command = ["chroot", str(tmp_path), "/bin/bash", "-c", f'gpukiln-extra && python3 -c "{code}"']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_the_archive_is_an_oci_layout_with_both_names(layer):
    with tarfile.open(fileobj=io.BytesIO(image.oci_archive(layer))) as archive:
        index = json.load(archive.extractfile("index.json"))
        names = [row["annotations"]["io.containerd.image.name"] for row in index["manifests"]]
        assert names == [image.NAME, image.PLUGIN_NAME]
        digest = index["manifests"][0]["digest"].removeprefix("sha256:")
        manifest = json.load(archive.extractfile(f"blobs/sha256/{digest}"))
        blob = manifest["layers"][0]["digest"].removeprefix("sha256:")
        assert archive.extractfile(f"blobs/sha256/{blob}").read() == layer


@pytest.fixture
def disk(tmp_path, assets, authority):
    """The root of a disk with containerd and one package, and what makes a node of it."""
    root = tmp_path / "root"
    for folder in ("usr/bin", "etc/systemd/system", "var/lib/dpkg/info"):
        (root / folder).mkdir(parents=True)
    (root / "usr/bin/containerd").write_text("")
    (root / "var/lib/dpkg/status").write_text("Package: bash\nStatus: install ok installed\n")
    (root / "var/lib/dpkg/info/bash.list").write_text("/.\n/usr\n/usr/bin\n/usr/bin/bash\n")
    (root / "usr/bin/bash").write_text("a shell")
    for name in programs.TOOLKIT:
        program(assets, name)
    found = find_programs(str(assets), tmp_path, print)
    return root, NodeFiles("i-0a", ClusterFiles(authority.folder), found)


def test_a_disk_gets_a_kubelet_that_starts_only_when_user_data_joins(disk):
    root, node = disk
    node.prepare(root)
    unit = (root / "etc/systemd/system/kubelet.service").read_text()
    assert "--hostname-override=i-0a" in unit
    assert "ExecStart=/usr/local/bin/kubelet" in unit
    wanted = {path.name for path in (root / "etc/systemd/system/multi-user.target.wants").iterdir()}
    assert wanted == {"gpukiln-pod-image.service", "gpukiln-cdi.service"}
    assert (root / "usr/local/sbin/gpukiln-join").stat().st_mode & 0o111
    assert (root / "etc/kubernetes/kubelet.key").stat().st_mode & 0o777 == 0o600
    assert "https://169.254.169.254:6443" in (root / "etc/kubernetes/kubelet.kubeconfig").read_text()
    with tarfile.open(root / "var/lib/gpukiln/rehearsal.tar") as archive:
        [blob] = [name for name in archive.getnames() if archive.getmember(name).size > 5000]
        with tarfile.open(fileobj=archive.extractfile(blob)) as pods:
            assert "usr/bin/gpukiln-device-plugin" in pods.getnames()
            assert "usr/lib/python3/dist-packages/h2/connection.py" in pods.getnames()
    (root / "usr/local/bin/kubelet").write_text("changed")
    node.prepare(root)  # a second start changes nothing
    assert (root / "usr/local/bin/kubelet").read_text() == "changed"


def test_what_the_image_has_itself_is_not_replaced(disk):
    root, node = disk
    for name in ("kubelet", "nvidia-container-runtime"):
        (root / "usr/bin" / name).write_text("own")
    node.prepare(root)
    assert not (root / "usr/local/bin/kubelet").exists()
    assert "ExecStart=/usr/bin/kubelet" in (root / "etc/systemd/system/kubelet.service").read_text()
    assert (root / "usr/bin/nvidia-container-runtime").read_text() == "own"
    assert not (root / "etc/nvidia-container-runtime/config.toml").exists()


@pytest.mark.parametrize(
    ("gone", "said"), [("usr/bin/containerd", "containerd"), ("var/lib/dpkg/status", "status")]
)
def test_a_disk_that_can_not_be_a_node_is_refused(disk, gone, said):
    root, node = disk
    (root / gone).unlink()
    with pytest.raises(IncompatibleError, match=said):
        node.prepare(root)
    assert not (root / "etc/kubernetes").exists()


@pytest.mark.parametrize("name", [programs.PLUGIN, programs.STAND_IN])
def test_the_daemon_set_is_known_as_a_device_plugin(name):
    spec = rehearsal.device_plugin(name)["spec"]["template"]["spec"]
    assert is_plugin(spec)
    assert spec["containers"][0]["command"] == [f"/usr/bin/{name}"]


# --- the stand-in of the device plugin, called by gRPC's own library ----------------------------------------


class Kubelet:
    """The kubelet's side of the interface: takes registrations, and calls the plugin."""

    def __init__(self, folder: Path, status=grpc.StatusCode.OK) -> None:
        self.folder, self.requests = folder, []

        def register(request, context):
            self.requests.append(request)
            if status != grpc.StatusCode.OK:
                context.abort(status, "unsupported version")
            return b""

        handler = grpc.unary_unary_rpc_method_handler(register)
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": handler})]
        )
        self.server.add_insecure_port(f"unix:{folder}/kubelet.sock")
        self.server.start()
        self.channel = grpc.insecure_channel(f"unix:{folder}/{device_plugin.OWN}")

    def call(self, name, request=b""):
        return self.channel.unary_unary(f"/v1beta1.DevicePlugin/{name}")(request, timeout=20)

    def watch(self):
        return self.channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"", timeout=60)

    def end(self):
        self.channel.close()
        self.server.stop(None).wait()


@pytest.fixture
def plugin(tmp_path):
    """The plugin, on two GPUs of a program in place of nvidia-smi."""
    folder = tmp_path / "s"
    folder.mkdir()
    listed = folder / "listed"
    listed.write_text("".join(f"GPU {n}: Tesla T4 (UUID: {uuid})\n" for n, uuid in enumerate(GPUS)))
    program(folder, "nvidia-smi", f"#!/bin/sh\n/bin/cat {listed}\n")
    kubelet = Kubelet(folder)
    code = f"""
import runpy, sys
sys.argv[1:] = [{str(folder)!r}]
import time
sleep, time.sleep = time.sleep, lambda seconds: sleep(0.05)
runpy.run_path({device_plugin.__file__!r}, run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-c", code], env={"PATH": str(folder)}) as process:
        wait_for(lambda: kubelet.requests)
        yield kubelet, listed
        kubelet.end()
        process.kill()


def texts(message):
    return [value.decode() for _, value in device_plugin.fields(message)]


def devices(answer):
    return dict(texts(value) for _, value in device_plugin.fields(answer))


def test_the_plugin_registers_lists_its_gpus_and_says_when_one_is_lost(plugin):
    kubelet, listed = plugin
    assert texts(kubelet.requests[0]) == ["v1beta1", device_plugin.OWN, "nvidia.com/gpu"]
    stream = kubelet.watch()
    assert devices(next(stream)) == dict.fromkeys(GPUS, "Healthy")
    listed.write_text(f"GPU 0: Tesla T4 (UUID: {GPUS[0]})\n")
    assert devices(next(stream)) == {GPUS[0]: "Healthy", GPUS[1]: "Unhealthy"}
    stream.cancel()
    assert devices(next(kubelet.watch())) == {GPUS[0]: "Healthy", GPUS[1]: "Unhealthy"}


def test_the_plugin_answers_an_allocation_with_a_mount_for_each_gpu(plugin):
    kubelet, _ = plugin
    request = device_plugin.field(1, b"".join(device_plugin.field(1, uuid) for uuid in GPUS))
    [(_, container)] = device_plugin.fields(kubelet.call("Allocate", request))
    mounts = [texts(mount) for _, mount in device_plugin.fields(container)]
    assert mounts == [[f"/var/run/nvidia-container-devices/{uuid}", "/dev/null"] for uuid in GPUS]
    assert kubelet.call("GetDevicePluginOptions") == b""
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.call("GetPreferredAllocation")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_kubelet_that_refuses_or_is_not_there_is_said(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    with pytest.raises(OSError, match="No such file"):
        device_plugin.register(str(folder / "kubelet.sock"), device_plugin.OWN)
    kubelet = Kubelet(folder, grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(OSError, match="the kubelet refuses: unsupported version"):
        device_plugin.register(str(folder / "kubelet.sock"), device_plugin.OWN)
    kubelet.end()
