"""What a workspace's agent meets on a machine: instance metadata, AWS, and what cloud-init wrote."""

import base64
import email
import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from gpukiln.clouds.embedded.metadata import InstanceMetadata, MetadataServer


@contextmanager
def metadata_of(tree: dict[str, Any]) -> Iterator[str]:
    """Instance metadata by IMDSv2 alone; its address. The tree may change meanwhile."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = MetadataServer(listener, lambda: InstanceMetadata(tree, None, {}, tokens_required=True))
    try:
        yield address
    finally:
        server.stop()


def parts_of(user_data: bytes) -> dict[str, str]:
    """The parts of user data by their content types, as cloud-init reads them."""
    text = gzip.decompress(user_data) if user_data[:2] == b"\x1f\x8b" else user_data
    message = email.message_from_bytes(text)
    return {part.get_content_type(): str(part.get_payload()) for part in message.walk()}


def files_of(user_data: bytes) -> dict[str, tuple[str, int]]:
    """Path -> text and mode of what cloud-init's write_files writes."""
    found = yaml.safe_load(parts_of(user_data)["text/cloud-config"])["write_files"]
    texts = [
        base64.b64decode(one["content"]).decode() if one.get("encoding") == "b64" else one["content"]
        for one in found
    ]
    return {one["path"]: (text, int(one["permissions"], 8)) for one, text in zip(found, texts, strict=True)}


def write_files(user_data: bytes, root: Path) -> None:
    for path, (text, mode) in files_of(user_data).items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)


def config_of(user_data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files_of(user_data)["/etc/gpukiln/workspace.json"][0])
    return found
