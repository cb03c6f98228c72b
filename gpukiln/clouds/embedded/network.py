"""The network of a machine: a namespace, slirp4netns for outgoing connections, one loopback address for SSH.

Nothing on this computer is changed: no bridge, no NAT, no route. The machine's private address is in
127.0.0.0/8, so programs on this computer can connect to it; slirp4netns forwards the connections into the
namespace.
"""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from ctypes import CDLL, get_errno
from pathlib import Path

from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json
from gpukiln.programs import tool

GUEST = "10.0.2.100"  # the address that slirp4netns --configure gives the interface
GATEWAY = "10.0.2.2"
NAMESERVER = "10.0.2.3"  # slirp4netns answers here through this computer's resolver
METADATA = "169.254.169.254"
API_PORT = 8080  # on the same address as the metadata service
API = f"http://{METADATA}:{API_PORT}"
INSTANCE = (
    "gpukiln.instance"  # key in WSGI's environ for the calling machine; a request's header can't set it
)
CONNECT_S = 10.0
CLONE_NEWNET = 0x40000000  # linux/sched.h


class MachineNetwork:
    """The network of one machine.

    Args:
        name: Name of the namespace, at most 60 characters.
        folder: Folder for the control socket and the log.
        address: The machine's private IPv4 address, in 127.0.0.0/8.
        ssh_port: Port on that address that is forwarded to the machine's port 22.
    """

    def __init__(self, name: str, folder: Path, *, address: str, ssh_port: int) -> None:
        self.name = name
        self.address = address
        self.ssh_port = ssh_port
        self._control = folder / "network.sock"
        self._log = folder / "network.log"
        self._slirp: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> Path:
        """The namespace's file."""
        return Path("/run/netns") / self.name

    def start(self) -> None:
        """Create the namespace and connect it.

        Raises:
            UnavailableError: A tool is missing, or the address is in use.
        """
        tool("ip", "netns", "add", self.name)
        tool("ip", "-n", self.name, "link", "set", "lo", "up")
        tool("ip", "-n", self.name, "address", "add", f"{METADATA}/32", "dev", "lo")
        self._control.unlink(missing_ok=True)
        ready_read, ready_write = os.pipe()
        with self._log.open("ab") as log:
            self._slirp = subprocess.Popen(
                [
                    # Host loopback is disabled, so that machines can't reach services on this
                    # computer's 127.0.0.1 (slirp4netns(1), --disable-host-loopback).
                    *("slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback"),
                    *(f"--ready-fd={ready_write}", f"--api-socket={self._control}"),
                    *("--netns-type=path", str(self.path), "eth0"),
                ],
                pass_fds=(ready_write,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(ready_write)
        # slirp4netns writes one byte when the interface is configured; end of file means that it has ended.
        ready = os.read(ready_read, 1)
        os.close(ready_read)
        if not ready:
            tail = self._log.read_text(errors="replace").splitlines()[-3:]
            raise UnavailableError("slirp4netns did not start", details=tuple(tail))
        self._forward(self.ssh_port, 22)

    def _forward(self, host_port: int, guest_port: int) -> None:
        request = {
            "execute": "add_hostfwd",
            "arguments": {
                "proto": "tcp",
                "host_addr": self.address,
                "host_port": host_port,
                "guest_addr": GUEST,
                "guest_port": guest_port,
            },
        }
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(10)
            control.connect(str(self._control))
            control.sendall(json.dumps(request).encode())
            # The API answers one request per connection, after its end.
            control.shutdown(socket.SHUT_WR)
            answer = parse_json(control.recv(65536))
        if "error" in answer:
            raise UnavailableError(
                f"can't forward {self.address}:{host_port}: {answer['error'].get('desc', answer['error'])}",
                hint="another embedded cloud may use the address; `invoke cloud.status` shows this one's",
            )

    def listen(self, port: int) -> socket.socket:
        """Listen on the metadata address inside the namespace.

        Args:
            port: TCP port.

        Returns:
            A listening socket; any thread can use it.

        Raises:
            OSError: The namespace can't be entered, or the address can't be bound.
        """
        return self._inside(lambda: socket.create_server((METADATA, port)))

    def connect(self, port: int) -> socket.socket:
        """Connect to a port of the machine.

        Raises:
            OSError: Nothing listens there, or the namespace can't be entered.
        """
        return self._inside(lambda: socket.create_connection((GUEST, port), timeout=CONNECT_S))

    def _inside(self, action: Callable[[], socket.socket]) -> socket.socket:
        """Call a function inside the namespace."""
        results: list[socket.socket | OSError] = []

        def enter_and_act() -> None:  # setns changes only the calling thread
            try:
                with self.path.open("rb") as namespace:
                    libc = CDLL(None, use_errno=True)
                    if libc.setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(get_errno(), "setns")
                results.append(action())
            except OSError as error:
                results.append(error)

        thread = threading.Thread(target=enter_and_act)
        thread.start()
        thread.join()
        if isinstance(results[0], OSError):
            raise results[0]
        return results[0]

    def stop(self) -> None:
        """Remove the network; a second call does nothing."""
        if self._slirp:
            self._slirp.kill()
            self._slirp.wait()
            self._slirp = None
        if self.path.exists():
            tool("ip", "netns", "delete", self.name)


def free_ssh_port(address: str) -> int:
    """The port for SSH on machines' addresses.

    Args:
        address: An address in the machines' range.

    Returns:
        22, or 2222 where an sshd of this computer listens on port 22 of every address.
    """
    with socket.socket() as probe:
        try:
            probe.bind((address, 22))
        except OSError:
            return 2222
    return 22
