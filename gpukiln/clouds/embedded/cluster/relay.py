"""Connections between the API server and nodes: from a machine's network to it, and from it to kubelets."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)
API_PORT = 6443  # of the API server at the metadata address of a machine; kubeadm's port
KUBELET_PORT = 10250  # kubernetes.io, "Ports and Protocols"
CHUNK = 1 << 16
REQUEST = 8192  # bytes of a CONNECT request


class Relay:
    """Passes each connection of a listening socket on.

    Args:
        listener: This class closes it.
        connect: Opens the other side for a client.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[socket.socket], socket.socket]) -> None:
        self._listener = listener
        self._connect = connect
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections; those that are open end with the machine or the API server."""
        # close(2) alone does not wake a thread that waits in accept(2)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                server = self._connect(client)
            except OSError as error:
                log.warning("can't pass a connection on: %s", error)
                return
            with server:
                pass_on(client, server)


def egress_proxy(path: Path, kubelet: Callable[[str], socket.socket]) -> Relay:
    """The proxy through which the API server reaches kubelets: HTTP CONNECT on a socket (RFC 9110, 9.3.6).

    Args:
        path: Of the socket.
        kubelet: Opens a connection to the kubelet of a node, by its name.

    Raises:
        OSError: The socket can't be created.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def connect(client: socket.socket) -> socket.socket:
        request = b""
        while b"\r\n\r\n" not in request and len(request) < REQUEST:
            if not (part := client.recv(REQUEST)):
                raise OSError("the API server ended a connection")
            request += part
        try:
            server = kubelet(connect_target(request.decode(errors="replace")))
        except (OSError, ValueError) as error:
            client.sendall(f"HTTP/1.1 502 {error}\r\n\r\n".encode())
            raise OSError(f"no connection to a kubelet: {error}") from error
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return server

    return Relay(listener, connect)


def connect_target(request: str) -> str:
    r"""The node of a CONNECT request to a kubelet.

    Raises:
        ValueError: It is another request, or for another port.

    >>> connect_target("CONNECT i-0a:10250 HTTP/1.1\r\nHost: i-0a:10250\r\n\r\n")
    'i-0a'
    >>> connect_target("CONNECT i-0a:80 HTTP/1.1\r\n\r\n")
    Traceback (most recent call last):
    ValueError: wanted CONNECT NODE:10250, found 'CONNECT i-0a:80 HTTP/1.1'
    """
    line = request.partition("\r\n")[0]
    method, target, *_ = [*line.split(" "), ""]
    node, _, port = target.rpartition(":")
    if method != "CONNECT" or port != str(KUBELET_PORT) or not node:
        raise ValueError(f"wanted CONNECT NODE:{KUBELET_PORT}, found {line!r}")
    return node


def pass_on(one_end: socket.socket, other_end: socket.socket) -> None:
    """Pass bytes between two connections in both directions, until both have ended."""
    back = threading.Thread(target=_copy, args=(other_end, one_end), daemon=True)
    back.start()
    _copy(one_end, other_end)
    back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            target.sendall(chunk)
    # The other direction may go on: an answer comes after the end of a request.
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
