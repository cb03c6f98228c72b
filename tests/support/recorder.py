"""Records every call that commands make on the embedded cloud, and judges them by an IAM policy.

The recorder stands between the commands and the cloud: it takes the endpoint's place in the file that tells
everybody (boto3, Packer, the AWS CLI) where the cloud is, and hands each request on as it is.
"""

import http.client
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import boto3

from gpukiln.clouds.embedded.layout import Layout

ACCOUNT = "123456789012"  # moto's
KINDS = {"ami": "image", "snap": "snapshot", "i": "instance", "vol": "volume", "sg": "security-group"}
KINDS |= {"subnet": "subnet", "vpc": "vpc"}
ID = re.compile(rf"({'|'.join(KINDS)})-[0-9a-f]{{8,}}")
OF_NO_ACCOUNT = ("image", "snapshot")
# What a call makes, so IAM asks for it too (Service Authorization Reference, Amazon EC2).
MAKES = {
    "RunInstances": ("instance", "volume", "network-interface"),
    "CreateKeyPair": ("key-pair",),
    "CreateSecurityGroup": ("security-group",),
    "CreateImage": ("image", "snapshot"),
    "CopyImage": ("image", "snapshot"),
}
ON_ONE_IMAGE = "DescribeImageAttribute"  # the other Describe calls are listings, which have no resource
HOP = {"connection", "content-length", "transfer-encoding", "server", "date"}  # not handed on


@dataclass(frozen=True)
class Touched:
    """A resource of a call: its ARN, the tags that the call gives it, and those that it had."""

    arn: str
    given: frozenset[str] = frozenset()
    had: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Call:
    """One call: in which step, by whom, where, on what. `within` is the call that tags what it makes."""

    step: str
    by: str
    action: str
    region: str
    touched: tuple[Touched, ...]
    within: str = ""

    @property
    def changes(self) -> bool:
        return not self.action.partition(":")[2].startswith(("Describe", "Get", "List"))


class Recorder:
    """Keeps the calls of the step that is going on.

    Args:
        home: The state folder, whose cloud has been started.
    """

    def __init__(self, home) -> None:
        self.layout, self.step, self.calls = Layout(home), "", []
        self._real = json.loads(self.layout.endpoint.read_text())
        self._clients, self._making = {}, threading.Lock()

    @contextmanager
    def during(self, step: str) -> Iterator[list[Call]]:
        """Record a step; yields its calls."""
        of_step: list[Call] = []
        self.step, before = step, len(self.calls)
        try:
            yield of_step
        finally:
            self.step = ""
            of_step += self.calls[before:]

    @contextmanager
    def listening(self) -> Iterator["Recorder"]:
        """Take the endpoint's place."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                recorder.note(self.headers, body)
                status, headers, answer = recorder.ask(self.command, self.path, self.headers, body)
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST  # noqa: N815 - http.server's name

            def log_message(self, *_) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            self.layout.endpoint.write_text(json.dumps({"url": url, "port": self._real["port"]}))
            yield self
        finally:
            self.layout.endpoint.write_text(json.dumps(self._real))
            server.shutdown()
            server.server_close()

    def ask(self, method, path, headers, body):
        """The cloud's own answer."""
        link = http.client.HTTPConnection(urlsplit(self._real["url"]).netloc, timeout=900)
        try:
            link.request(method, path, body, dict(headers.items()))
            answer = link.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            link.close()

    def note(self, headers, body: bytes) -> None:
        """Keep what a call is, before it is done: tags are those that things had."""
        agent = headers.get("User-Agent", "")
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/", headers.get("Authorization", ""))
        if not (self.step and scope):
            return
        region, service = scope.groups()
        by = "gpukiln" if "Boto" in agent else "packer"  # its SDK names itself alone
        if target := headers.get("X-Amz-Target"):
            name, asked = target.rpartition(".")[2], json.loads(body or b"{}")
            touched = tuple(Touched(arn) for arn in _parameters(asked, region, service))
            self.calls.append(Call(self.step, by, f"{service}:{name}", region, touched))
            return
        asked = dict(parse_qsl(body.decode(), keep_blank_values=True))
        name = asked["Action"]
        given = _tags_by_kind(asked)
        touched = tuple(self._touched(name, asked, region, given)) if service == "ec2" else (Touched("*"),)
        self.calls.append(Call(self.step, by, f"{service}:{name}", region, touched))
        for kind, tags in given.items():  # IAM asks whether it may tag, too
            made = (Touched(_arn(kind, "*", region), tags),)
            self.calls.append(Call(self.step, by, "ec2:CreateTags", region, made, within=name))

    def _touched(self, name, asked, region, given) -> Iterator[Touched]:
        if name.startswith(("Describe", "GetImage")) and name != ON_ONE_IMAGE:
            yield Touched("*")
            return
        request = frozenset(v for k, v in asked.items() if re.fullmatch(r"Tag\.\d+\.Key", k))
        ec2 = self.client("ec2", region)
        for text in {v for k, v in asked.items() if ID.fullmatch(v) and not re.search(r"\bTag\.", k)}:
            found = ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [text]}])["Tags"]
            had = frozenset(tag["Key"] for tag in found)
            yield Touched(_arn(KINDS[text.partition("-")[0]], text, region), request, had)
        if "KeyName" in asked and name != "CreateKeyPair":
            [pair] = ec2.describe_key_pairs(KeyNames=[asked["KeyName"]])["KeyPairs"]
            had = frozenset(tag["Key"] for tag in pair["Tags"])
            yield Touched(_arn("key-pair", asked["KeyName"], region), request, had)
        for kind in MAKES.get(name, ()):
            yield Touched(_arn(kind, "new", region), given.get(kind, frozenset()))

    def client(self, service: str, region: str):
        """The test's own way to the cloud, which is not recorded."""
        with self._making:
            if (service, region) not in self._clients:
                self._clients[service, region] = boto3.client(
                    service,
                    region_name=region,
                    endpoint_url=self._real["url"],
                    aws_access_key_id=self.layout.access_key,
                    aws_secret_access_key="x",  # noqa: S106 - the server looks at the key's id
                )
            return self._clients[service, region]

    def table(self) -> str:
        """How many calls each step made, and how many of them changed something."""
        counts = Counter((call.step, call.by, call.changes) for call in self.calls if not call.within)
        rows = dict.fromkeys((step, by) for step, by, _ in counts)
        return "\n".join(
            f"{step:10} {by:8} {counts[step, by, False]:4} read, {counts[step, by, True]:4} change"
            for step, by in rows
        )


def _arn(kind: str, name: str, region: str) -> str:
    return f"arn:aws:ec2:{region}:{'' if kind in OF_NO_ACCOUNT else ACCOUNT}:{kind}/{name}"


def _tags_by_kind(asked) -> dict[str, frozenset[str]]:
    """The tags that a call gives what it makes, per kind."""
    found: dict[str, frozenset[str]] = {}
    for key, kind in asked.items():
        if match := re.fullmatch(r"(TagSpecification\.\d+)\.ResourceType", key):
            tag = re.compile(rf"{re.escape(match[1])}\.Tag\.\d+\.Key")
            found[kind] = frozenset(v for k, v in asked.items() if tag.fullmatch(k))
    return found


def _parameters(asked, region: str, service: str) -> list[str]:
    """The ARNs of SSM's parameters that a call names; those of AWS's publishers are of no account."""
    names = [asked[key] for key in ("Name", "Path", "ResourceId") if key in asked] + asked.get("Names", [])
    assert service == "ssm", f"{service} is new to the recorder: {asked}"
    assert names, asked
    return [
        f"arn:aws:ssm:{region}:{'' if name.startswith('/aws/') else ACCOUNT}:parameter/{name.strip('/')}"
        for name in names
    ]


def denied(calls, policy) -> list[str]:
    """The calls that a policy does not allow, each on the first resource where it does not."""
    return [
        f"{call.step}: {call.action} by {call.by} in {call.region} on {touched.arn}"
        for call in calls
        for touched in call.touched
        if not any(_allows(statement, call, touched) for statement in policy["Statement"])
    ]


def _allows(statement, call: Call, touched: Touched) -> bool:
    if call.action not in statement["Action"]:
        return False
    if not any(fnmatchcase(touched.arn, pattern) for pattern in statement["Resource"]):
        return False
    return all(
        _holds(operator, name, wanted, call, touched)
        for operator, conditions in statement.get("Condition", {}).items()
        for name, wanted in conditions.items()
    )


def _holds(operator: str, name: str, wanted, call: Call, touched: Touched) -> bool:
    kind, _, tag = name.partition("/")
    if (operator, name) == ("ForAllValues:StringEquals", "aws:TagKeys"):
        return touched.given <= frozenset(wanted)
    if (operator, name) == ("StringEquals", "aws:RequestedRegion"):
        return call.region in wanted
    if (operator, name) == ("StringEquals", "ec2:CreateAction"):
        return call.within in wanted
    tags = {"aws:RequestTag": touched.given, "aws:ResourceTag": touched.had}
    assert (operator, wanted) == ("Null", "false"), f"a condition that is new here: {operator} {name}"
    return tag in tags[kind]
