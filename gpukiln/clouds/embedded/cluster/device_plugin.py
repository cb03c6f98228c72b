"""A stand-in of NVIDIA's device plugin, for a cluster of this computer without NVIDIA's program.

It speaks the kubelet's device plugin interface, version v1beta1: gRPC on two sockets of a folder
(kubernetes/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto). The GPUs are those that `nvidia-smi -L` lists.
A GPU that is no longer listed is unhealthy until the plugin starts again, as with NVIDIA's
(k8s-device-plugin, internal/rm/health.go).

It runs in a pod, as one file with the packages h2, hpack and hyperframe: Python 3.9.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

FOLDER = Path("/var/lib/kubelet/device-plugins")
OWN = "nvidia-gpu.sock"
RESOURCE, VERSION = "nvidia.com/gpu", "v1beta1"
SERVICE = "/v1beta1.DevicePlugin/"
MOUNTS = "/var/run/nvidia-container-devices/"  # NVIDIA/nvidia-container-toolkit, volume mounts as device list
POLL_S = 5.0
CHUNK = 65536
OK, UNIMPLEMENTED = b"0", b"12"  # grpc/grpc, doc/statuscodes.md


def varint(number: int) -> bytes:
    """A number as Protocol Buffers encode it.

    >>> varint(300).hex()
    'ac02'
    """
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def field(number: int, value: bytes | str | bool) -> bytes:
    """A field of a message: text and messages by their length, a truth value as a number.

    >>> field(1, "abc").hex(), field(3, True).hex()
    ('0a03616263', '1801')
    """
    if isinstance(value, bool):
        return varint(number << 3) + varint(int(value))
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def fields(message: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message that have a length; others are left out.

    >>> fields(field(1, "abc") + field(3, True))
    [(1, b'abc')]
    """
    pairs, at = [], 0

    def number() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = message[at]
            at += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result

    while at < len(message):
        key = number()
        size = number()
        if key & 7 == 2:
            pairs.append((key >> 3, message[at : at + size]))
            at += size
    return pairs


def frame(message: bytes) -> bytes:
    """A message as gRPC sends it: not compressed, its length in four bytes."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def list_gpus() -> list[str]:
    """UUIDs of the GPUs, in NVML's order; a GPU that fell off the bus is not listed."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [
        line.rpartition("UUID: ")[2].rstrip(")") for line in listed.stdout.splitlines() if "UUID: " in line
    ]


class Plugin:
    """The GPUs and their health, shared by all connections."""

    def __init__(self) -> None:
        self.uuids = list_gpus()
        self.healthy = set(self.uuids)
        self.changed = threading.Condition()

    def look(self) -> None:
        """Mark GPUs that are no longer listed; they stay unhealthy."""
        lost = self.healthy - set(list_gpus())
        if lost:
            print("unhealthy: " + ", ".join(sorted(lost)), flush=True)
            with self.changed:
                self.healthy -= lost
                self.changed.notify_all()

    def devices(self) -> bytes:
        """ListAndWatchResponse."""
        return b"".join(
            field(1, field(1, uuid) + field(2, "Healthy" if uuid in self.healthy else "Unhealthy"))
            for uuid in self.uuids
        )

    def allocate(self, request: bytes) -> bytes:
        """AllocateResponse: a mount for each GPU, by which NVIDIA's runtime knows it."""
        answer = b""
        for _, container in fields(request):
            mounts = b"".join(
                field(2, field(1, MOUNTS + uuid.decode()) + field(2, "/dev/null") + field(3, True))
                for _, uuid in fields(container)
            )
            answer += field(1, mounts)
        return answer


class Connection:
    """A connection of the kubelet; streams that watch have a thread each."""

    def __init__(self, client: socket.socket, plugin: Plugin) -> None:
        self.client, self.plugin = client, plugin
        self.http = H2Connection(H2Configuration(client_side=False))
        self.lock = threading.Lock()
        self.calls: dict[int, tuple[str, bytes]] = {}
        self.open = True

    def serve(self) -> None:
        self.http.initiate_connection()
        self._flush()
        while True:
            try:
                data = self.client.recv(CHUNK)
            except OSError:
                data = b""
            if not data:
                self.open = False
                with self.plugin.changed:
                    self.plugin.changed.notify_all()
                return
            with self.lock:
                events = self.http.receive_data(data)
            for event in events:
                self._handle(event)
            self._flush()

    def _handle(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            self.calls[event.stream_id] = (dict(event.headers)[b":path"].decode(), b"")
        elif isinstance(event, DataReceived):
            path, body = self.calls[event.stream_id]
            self.calls[event.stream_id] = (path, body + event.data)
            with self.lock:
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            path, body = self.calls.pop(event.stream_id)
            self._answer(event.stream_id, path, body[5:])
        elif isinstance(event, StreamReset):
            self.calls.pop(event.stream_id, None)

    def _answer(self, stream: int, path: str, request: bytes) -> None:
        unary: dict[str, Callable[[], bytes]] = {
            "GetDevicePluginOptions": lambda: b"",
            "Allocate": lambda: self.plugin.allocate(request),
            "PreStartContainer": lambda: b"",
        }
        name = path[len(SERVICE) :] if path.startswith(SERVICE) else ""
        if name == "ListAndWatch":
            threading.Thread(target=self._watch, args=(stream,), daemon=True).start()
        elif name in unary:
            self._start(stream)
            self._data(stream, unary[name]())
            self._end(stream, OK)
        else:
            self._start(stream)
            self._end(stream, UNIMPLEMENTED)

    def _watch(self, stream: int) -> None:
        sent = None
        self._start(stream)
        while self.open:
            with self.plugin.changed:
                devices = self.plugin.devices()
                if devices == sent:
                    self.plugin.changed.wait()
                    continue
            try:
                self._data(stream, devices)
            except Exception as error:  # the kubelet ended the stream: it calls again
                print(f"ListAndWatch ends: {error}", flush=True)
                return
            sent = devices

    def _start(self, stream: int) -> None:
        with self.lock:
            self.http.send_headers(stream, [(b":status", b"200"), (b"content-type", b"application/grpc")])
        self._flush()

    def _data(self, stream: int, message: bytes) -> None:
        with self.lock:
            self.http.send_data(stream, frame(message))
        self._flush()

    def _end(self, stream: int, status: bytes) -> None:
        with self.lock:
            self.http.send_headers(stream, [(b"grpc-status", status)], end_stream=True)
        self._flush()

    def _flush(self) -> None:
        with self.lock:
            data = self.http.data_to_send()
            if data:
                self.client.sendall(data)


def register(kubelet: str, endpoint: str) -> None:
    """Call Registration.Register.

    Raises:
        OSError: The kubelet does not answer, or refuses.
    """
    request = field(1, VERSION) + field(2, endpoint) + field(3, RESOURCE)
    http = H2Connection(H2Configuration(client_side=True))
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(30)
        server.connect(kubelet)
        http.initiate_connection()
        stream = http.get_next_available_stream_id()
        headers = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": b"/v1beta1.Registration/Register",
            b":authority": b"localhost",
            b"content-type": b"application/grpc",
            b"te": b"trailers",
        }
        http.send_headers(stream, list(headers.items()))
        http.send_data(stream, frame(request), end_stream=True)
        server.sendall(http.data_to_send())
        while True:
            data = server.recv(CHUNK)
            if not data:
                raise OSError("the kubelet ended the connection")
            for event in http.receive_data(data):
                # An answer without a message has its status in the headers (gRPC over HTTP2, Trailers-Only).
                if isinstance(event, (TrailersReceived, ResponseReceived)):
                    status = dict(event.headers)
                    if status.get(b"grpc-status") == OK:
                        return
                    if b"grpc-status" in status:
                        reason = status.get(b"grpc-message", status[b"grpc-status"]).decode()
                        raise OSError(f"the kubelet refuses: {reason}")
            server.sendall(http.data_to_send())


def serve(folder: Path) -> None:
    """Serve and register, again for each new socket of the kubelet."""
    plugin, path, kubelet = Plugin(), folder / OWN, folder / "kubelet.sock"
    if path.exists():
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    print("GPUs: " + (", ".join(plugin.uuids) or "none"), flush=True)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=Connection(client, plugin).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    registered = 0
    while True:
        try:
            socket_id = kubelet.stat().st_ino
            if not path.exists():
                # a kubelet that starts empties the folder: this plugin starts anew, too
                sys.exit("the kubelet has started again")
            if socket_id != registered:
                register(str(kubelet), OWN)
                registered = socket_id
                print("registered", flush=True)
        except OSError as error:
            print(f"not registered: {error}", flush=True)
        plugin.look()
        time.sleep(POLL_S)


if __name__ == "__main__":
    # The first process of a container ignores SIGTERM unless it handles it (pid_namespaces(7)).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    serve(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
