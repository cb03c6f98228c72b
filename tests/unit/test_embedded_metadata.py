"""The metadata service answers as EC2's does."""

import http.client
import socket

import pytest

from gpukiln.clouds.embedded.metadata import (
    TOKEN_HEADER,
    TTL_HEADER,
    InstanceMetadata,
    MetadataServer,
    PublicKeys,
    lookup,
)

TREE = {
    "instance-id": "i-1",
    "placement": {"region": "us-west-2"},
    "public-keys": PublicKeys({"0": {"openssh-key": "ssh-ed25519 AAAA"}}, name="mine"),
}


def metadata(**changes):
    values = {"tree": TREE, "user_data": b"#!/bin/sh\n", "identity": {"region": "us-west-2"}}
    return InstanceMetadata(**{**values, "tokens_required": True, **changes})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/latest/meta-data/instance-id", b"i-1"),
        ("/2021-03-23/meta-data/instance-id", b"i-1"),
        ("/latest/meta-data/", b"instance-id\nplacement/\npublic-keys/"),
        ("/latest/meta-data/public-keys/", b"0=mine"),
        ("/latest/meta-data/public-keys/0/openssh-key", b"ssh-ed25519 AAAA"),
        ("/latest/user-data", b"#!/bin/sh\n"),
        ("/latest/dynamic/", b"instance-identity/"),
        ("/latest/dynamic/instance-identity/document", b'{\n  "region": "us-west-2"\n}'),
        ("/latest/meta-data/nothing", None),
        ("/newest/meta-data/instance-id", None),
    ],
)
def test_paths(path, body):
    assert lookup(metadata(), path) == body


def test_no_user_data_is_not_found_rather_than_empty():
    assert lookup(metadata(user_data=None), "/latest/user-data") is None


@pytest.fixture
def served():
    current = {"metadata": metadata()}
    listener = socket.create_server(("127.0.0.1", 0))
    server = MetadataServer(listener, lambda: current["metadata"])
    yield current, listener.getsockname()[1]
    server.stop()


def ask(port, method, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_required_token_is_required_and_suffices(served):
    _, port = served
    assert ask(port, "GET", "/latest/meta-data/instance-id")[0] == 401
    status, token = ask(port, "PUT", "/latest/api/token", **{TTL_HEADER: "60"})
    assert status == 200
    assert ask(port, "GET", "/latest/meta-data/instance-id", **{TOKEN_HEADER: token.decode()}) == (
        200,
        b"i-1",
    )
    assert ask(port, "GET", "/latest/meta-data/instance-id", **{TOKEN_HEADER: "forged"})[0] == 401


def test_without_the_requirement_a_request_needs_no_token(served):
    current, port = served
    current["metadata"] = metadata(tokens_required=False)
    assert ask(port, "GET", "/latest/meta-data/instance-id") == (200, b"i-1")


@pytest.mark.parametrize("ttl", ["0", "21601", "soon"])
def test_a_bad_lifetime_is_refused(served, ttl):
    assert ask(served[1], "PUT", "/latest/api/token", **{TTL_HEADER: ttl})[0] == 400
