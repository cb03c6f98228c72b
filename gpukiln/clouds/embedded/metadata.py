"""Instance metadata as EC2 serves it (IMDSv2), for one machine.

Paths: AWS, "Instance metadata categories". PUT returns a session token; where the instance requires
tokens, a request without one gets 401.
"""

import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from threading import Thread
from typing import Any
from urllib.parse import unquote

from gpukiln.units import is_whole

TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - the name of a header
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
MAX_TTL = 21600  # seconds, AWS's limit


@dataclass(frozen=True)
class InstanceMetadata:
    """The content of the metadata service.

    Args:
        tree: meta-data as nested dicts; each dict is a folder.
        user_data: The user data, decoded, or None.
        identity: The instance identity document.
        tokens_required: Whether requests without a token are refused (IMDSv2 only).
    """

    tree: dict[str, Any]
    user_data: bytes | None
    identity: dict[str, Any]
    tokens_required: bool


class PublicKeys(dict[str, Any]):
    """EC2 lists public keys as `0=name` and serves them below `0/`.

    Args:
        keys: The content of the folder.
        name: Name of the only key pair.
    """

    def __init__(self, keys: dict[str, Any], *, name: str) -> None:
        super().__init__(keys)
        self.name = name


def listing(node: dict[str, Any]) -> str:
    r"""A folder as EC2 lists it.

    Args:
        node: The folder.

    Returns:
        One name in each line, folders with a slash.

    >>> listing({"ami-id": "ami-1", "network": {"interfaces": {}}})
    'ami-id\nnetwork/'
    >>> listing(PublicKeys({"0": {}}, name="ann"))
    '0=ann'
    """
    if isinstance(node, PublicKeys):
        return f"0={node.name}"
    return "\n".join(f"{name}/" if isinstance(value, dict) else name for name, value in node.items())


def lookup(metadata: InstanceMetadata, path: str) -> bytes | None:
    """The answer for a path.

    Args:
        path: The request's path, for example /latest/meta-data/instance-id.

    Returns:
        The body; None where the path does not exist.
    """
    parts = [part for part in path.split("/") if part]
    if not parts:
        return b"latest"
    if not re.fullmatch(r"latest|\d{4}-\d\d-\d\d", parts[0]):
        return None
    node: Any = {
        "dynamic": {"instance-identity": {"document": json.dumps(metadata.identity, indent=2)}},
        "meta-data": metadata.tree,
    }
    if metadata.user_data is not None:
        node["user-data"] = metadata.user_data
    for name in map(unquote, parts[1:]):
        if not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
    if isinstance(node, bytes):
        return node
    return (listing(node) if isinstance(node, dict) else str(node)).encode()


class MetadataServer:
    """The metadata service of one machine.

    Args:
        listener: A listening socket in the machine's network namespace.
        source: Called for every request, so that answers have changed tags.
    """

    def __init__(self, listener: socket, source: Callable[[], InstanceMetadata]) -> None:
        tokens: dict[str, float] = {}

        class Handler(BaseHTTPRequestHandler):
            server_version = "EC2ws"
            protocol_version = "HTTP/1.1"

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PUT(self) -> None:
                if not re.fullmatch(r"/latest/api/token/?", self.path):
                    return self._answer(404)
                ttl = self.headers.get(TTL_HEADER, "")
                if not is_whole(ttl) or not 1 <= int(ttl) <= MAX_TTL:
                    return self._answer(400)
                token = secrets.token_urlsafe(42)
                tokens[token] = time.monotonic() + int(ttl)
                return self._answer(200, token.encode())

            def do_GET(self) -> None:
                metadata = source()
                token = self.headers.get(TOKEN_HEADER)
                # IMDSv2 required: 401 without a token (EC2 user guide, "How Instance Metadata Service Version
                # 2 works").
                if token is None and metadata.tokens_required:
                    return self._answer(401)
                if token is not None and tokens.get(token, 0) < time.monotonic():
                    return self._answer(401)
                body = lookup(metadata, self.path.split("?")[0])
                return self._answer(404) if body is None else self._answer(200, body)

            def log_message(self, format: str, *args: Any) -> None:
                pass  # a machine sends dozens of requests in each boot

        # The socket is bound already, in the network namespace of the machine.
        self._server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
