"""moto's EC2 as an HTTP endpoint that refuses chosen calls, as EC2 does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl
from urllib.request import urlopen

import boto3
import pytest
from botocore.config import Config
from moto.ec2.models import EC2Backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Call = dict[str, str]
REFUSAL = (
    "<?xml version='1.0' encoding='UTF-8'?><Response><Errors><Error><Code>{}</Code>"
    "<Message>{}</Message></Error></Errors><RequestID>0</RequestID></Response>"
)


class Endpoint:
    """An endpoint, with what it was asked."""

    ssh_port = 0
    ssh_cidr = "127.0.0.0/8"
    subnet_id = None
    name = "aws"
    region = "us-west-2"
    has_gpus = True

    def __init__(self) -> None:
        self.url = ""
        self.forget()
        self._clients: dict[tuple[str, int], object] = {}
        self._moto = DomainDispatcherApplication(create_backend_app)

    def forget(self) -> None:
        """Refuse nothing, and forget what was asked."""
        self.calls: list[Call] = []
        self.refuse: Callable[[Call], tuple[str, str] | None] = lambda _: None
        self.after: Callable[[Call], None] = lambda _: None
        self.status = "400 Bad Request"

    def __call__(self, environ, start_response):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = BytesIO(body)
        call = dict(parse_qsl(body.decode(errors="replace")))
        self.calls.append(call)
        if refusal := self.refuse(call):
            start_response(self.status, [("Content-Type", "text/xml")])
            return [REFUSAL.format(*refusal).encode()]
        answer = list(self._moto(environ, start_response))
        self.after(call)
        return answer

    def client(self, service, *, attempts=8):
        if (service, attempts) not in self._clients:
            self._clients[service, attempts] = boto3.client(
                service,
                region_name=self.region,
                endpoint_url=self.url,
                aws_access_key_id="x",
                aws_secret_access_key="x",  # noqa: S106 - moto takes any
                config=Config(retries={"mode": "standard", "total_max_attempts": attempts}),
            )
        return self._clients[service, attempts]

    def address(self, _instance):
        return "127.0.0.1"

    def asked(self, action: str) -> list[Call]:
        return [call for call in self.calls if call.get("Action") == action]


@contextmanager
def tagged_snapshots() -> Iterator[None]:
    """Have CreateImage take tags of the snapshot as EC2 does; moto's own raises NotImplementedError."""
    without = EC2Backend.create_image

    def create_image(self: EC2Backend, *args: str, tag_specifications: list[dict[str, Any]]) -> Any:
        by_kind = {one["ResourceType"]: one for one in tag_specifications}
        snapshot = by_kind.pop("snapshot", {"Tags": []})
        image = without(self, *args, tag_specifications=[*by_kind.values()])
        image.ebs_snapshot.add_tags({tag["Key"]: tag["Value"] for tag in snapshot["Tags"]})
        return image

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EC2Backend, "create_image", create_image)
        yield


@contextmanager
def serve() -> Iterator[Endpoint]:
    """Start an endpoint on a free port, with nothing of what this process's moto had before."""
    with tagged_snapshots():
        yield from _served()


def _served() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    server = make_server("127.0.0.1", 0, endpoint, threaded=True)
    endpoint.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with urlopen(f"{endpoint.url}/moto-api/reset", b""):  # noqa: S310 - our own server
            endpoint.forget()
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
