"""The embedded cloud's API without machines, for tests: python release_server.py HOME.

It is gpukiln's own extension of moto, behind a layer that can fail. /test/faults takes a list of faults, and
/test/calls tells every call since the last time; the cloud knows nothing of either.
"""

import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.server import MOTO_SETTINGS, Application
from gpukiln.clouds.embedded.snapshot_blocks import operation_of
from gpukiln.errors import UnavailableError

SLOW_S = 0.25
ERRORS = {  # kind: status, code
    "denied": (403, "UnauthorizedOperation"),
    "expired": (400, "RequestExpired"),
    "throttled": (503, "RequestLimitExceeded"),
    "broken": (500, "InternalError"),
    "missing": (404, "NoSuchEntity"),
}


class Faulty:
    """Answers with faults where it was told to, else lets the cloud answer.

    A fault is {action, region, kind, skip, times}: it begins after `skip` such calls; with `each` it meets
    the first call of every path, one fault a call. Kinds beside ERRORS: `lost` does what is asked and then
    answers 500; `pending` says of every image that it is pending; `empty` leaves every image out of a
    listing; `ignored` answers and does nothing. Of EBS: `stale` refuses the token, `corrupted` changes a byte
    on its way, `cut` ends an answer in the middle, `slow` waits.
    """

    def __init__(self, application):
        self.application, self.lock, self.end = application, threading.Lock(), lambda: None
        self.faults, self.calls, self.kept = [], [], {}

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if path.startswith("/test/"):
            return self.control(path.removeprefix("/test/"), body, start_response)
        action, region = _what(environ, body)
        fault = self._take(action, region, environ["PATH_INFO"])
        environ["wsgi.input"] = _Body(body)
        answer = _ebs if operation_of(environ) else _faulty
        return answer(self.application, environ, start_response, fault)

    def _take(self, action, region, path):
        with self.lock:
            kind = ""
            for fault in self.faults:
                if fault["action"] != action or fault["region"] not in ("", region):
                    continue
                if "each" in fault:
                    if not kind and path not in fault["each"]:
                        fault["each"].append(path)
                        kind = fault["kind"]
                elif fault["skip"]:
                    fault["skip"] -= 1
                elif fault["times"]:
                    fault["times"] -= 1
                    kind = fault["kind"]
            self.calls.append([region, action, kind])
            return kind

    def control(self, what, body, start_response):
        asked = json.loads(body or "{}")
        answer = {}
        if what == "faults":
            self.faults = asked
        elif what == "calls":
            answer, self.calls = self.calls, []
        elif what == "keep":
            Application.save(self.application)
            self.kept = {file.name: file.read_text() for file in self.application._layout.regions.iterdir()}
        elif what == "restore":
            reset(self.application._layout, self.kept)
            self.faults, self.calls = [], []
        elif what == "image":
            answer = add_image(self.application._layout, **asked)
        elif what == "metadata":
            answer = metadata(**asked)
        elif what == "inside":
            answer = inside(self, **asked)
        elif what == "state":
            set_image_state(**asked)
        elif what == "forget":
            forget_terminated()
        elif what == "reset":
            reset(self.application._layout)
            self.application._blocks.__init__(self.application._layout)  # client tokens are unknown again
            self.faults, self.calls = [], []
        start_response("200 OK", [("Content-Type", "application/json")])
        body = [json.dumps(answer).encode()]
        return _Last(body, self.end) if what == "end" else body


class _Last(list):
    """An answer after which the server ends; werkzeug closes it when it is sent."""

    def __init__(self, body, end):
        super().__init__(body)
        self.end = end

    def close(self):
        threading.Thread(target=self.end, daemon=True).start()


def _faulty(application, environ, start_response, fault):
    if fault in ERRORS:
        return _error(start_response, *ERRORS[fault], environ)
    if fault == "ignored":
        start_response("200 OK", [("Content-Length", "2")])
        return [b"{}"]
    if fault == "lost":
        b"".join(application(environ, lambda *_: None))
        return _error(start_response, *ERRORS["broken"], environ)
    if fault in ("pending", "empty"):
        return _rewritten(application, environ, start_response, fault)
    return application(environ, start_response)


class Forgetful(Application):
    """The cloud, which keeps its state only when told to: after each call that takes most of the time."""

    def save(self):
        pass


class _Body:
    def __init__(self, body):
        self.body = body

    def read(self, *_):
        body, self.body = self.body, b""
        return body


def _what(environ, body):
    scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
    if called := operation_of(environ):
        return called[0], scope[1] if scope else ""
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    action = target.split(".")[-1] if target else parse_qs(body.decode()).get("Action", [""])[0]
    return action, scope[1] if scope else ""


EBS_ERRORS = {  # botocore's model of EBS: status, code, reason
    "denied": (403, "AccessDeniedException", "UNAUTHORIZED_ACCOUNT"),
    "expired": (403, "ExpiredTokenException", ""),
    "throttled": (400, "RequestThrottledException", "ACCOUNT_THROTTLED"),
    "broken": (500, "InternalServerException", ""),
    "stale": (400, "ValidationException", "INVALID_BLOCK_TOKEN"),
}


def _ebs(application, environ, start_response, fault):
    """A call of the EBS direct APIs, with a fault."""
    if fault == "slow":
        time.sleep(SLOW_S)
    if fault == "corrupted" and environ["REQUEST_METHOD"] != "GET":
        body = environ["wsgi.input"].read()
        environ["wsgi.input"] = _Body(bytes([body[0] ^ 1]) + body[1:])
    if fault == "lost":
        b"".join(application(environ, lambda *_: None))
        fault = "broken"
    if fault in EBS_ERRORS:
        status, code, reason = EBS_ERRORS[fault]
        text = json.dumps({"Message": "a test's", "Reason": reason})
        start_response(f"{status} Error", [("x-amzn-ErrorType", code), ("Content-Length", str(len(text)))])
        return [text.encode()]
    if fault in ("corrupted", "cut") and environ["REQUEST_METHOD"] == "GET":
        return _damaged(application, environ, start_response, fault)
    return application(environ, start_response)


def _damaged(application, environ, start_response, fault):
    kept = []
    body = b"".join(application(environ, lambda *answer: kept.extend(answer)))
    start_response(kept[0], [*kept[1], ("Connection", "close")])
    return [bytes([body[0] ^ 1]) + body[1:] if fault == "corrupted" else body[: len(body) // 2]]


def _error(start_response, status, code, environ):
    if environ.get("HTTP_X_AMZ_TARGET"):
        names = {"UnauthorizedOperation": "AccessDeniedException", "RequestExpired": "ExpiredTokenException"}
        text = json.dumps(
            {"__type": names.get(code, code.replace("RequestLimitExceeded", "ThrottlingException"))}
        )
    else:
        inner = f"<Error><Code>{code}</Code><Message>a test's</Message></Error>"
        text = f"<Response><Errors>{inner}</Errors></Response>"
    start_response(f"{status} Error", [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
    return [text.encode()]


def _rewritten(application, environ, start_response, fault):
    kept = []
    body = b"".join(application(environ, lambda *answer: kept.extend(answer)))
    if fault == "pending":
        body = body.replace(b"<imageState>available<", b"<imageState>pending<")
    else:
        body = re.sub(rb"<imagesSet>.*</imagesSet>", b"<imagesSet></imagesSet>", body, flags=re.DOTALL)
    headers = [(name, value) for name, value in kept[1] if name.lower() != "content-length"]
    start_response(kept[0], [*headers, ("Content-Length", str(len(body)))])
    return [body]


def add_image(layout, *, region, image_id, name, tags, days_old=0, encrypted=False):
    """An image with a disk of 4 MiB, as if it had been built here some days ago."""
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto reads its settings first
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    from gpukiln.clouds.embedded import store  # noqa: PLC0415 - moto reads its settings first

    ec2 = ec2_backends[DEFAULT_ACCOUNT_ID][region]
    snapshot_id = image_id.replace("ami-", "snap-")
    snapshot = store.add_snapshot(
        ec2, snapshot_id, size_gib=1, from_ami=image_id, tags=tags, encrypted=encrypted
    )
    created = (datetime.now(UTC) - timedelta(days_old)).replace(tzinfo=None).isoformat()
    fields = {"name": name, "architecture": "x86_64", "virtualization_type": "hvm", "hypervisor": "xen"}
    fields |= {"root_device_type": "ebs", "root_device_name": "/dev/xvda", "boot_mode": "legacy-bios"}
    image = store.add_image(
        ec2, image_id, snapshot, {**fields, "imds_support": "v2.0", "tags": tags, "creation_date": created}
    )
    disk = layout.snapshot(snapshot_id)
    with disk.open("wb") as file:
        file.write(image_id.encode())
        file.truncate(4 << 20)
    return {"ImageId": image.id, "SnapshotId": snapshot_id}


def set_image_state(*, region, image_id, state):
    """As when a copy fails after it was begun."""
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto reads its settings first
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    ec2_backends[DEFAULT_ACCOUNT_ID][region].amis[image_id].state = state


def forget_terminated():
    """As EC2 does within an hour of their end; until then each listing has them all, and takes longer."""
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto reads its settings first
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    for ec2 in ec2_backends[DEFAULT_ACCOUNT_ID].values():
        for reservation in [*ec2.reservations.values()]:
            if all(instance.state == "terminated" for instance in reservation.instances):
                del ec2.reservations[reservation.id]


def metadata(*, region, instance_id, path):
    """What an instance's metadata service answers below meta-data; null: no such thing."""
    from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto reads its settings first
    from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto reads its settings first

    from gpukiln.clouds.embedded.instance_metadata import describe_instance  # noqa: PLC0415 - likewise
    from gpukiln.clouds.embedded.metadata import lookup  # noqa: PLC0415 - likewise

    instance = ec2_backends[DEFAULT_ACCOUNT_ID][region].get_instance(instance_id)
    found = lookup(describe_instance(instance), f"/latest/meta-data/{path}")
    return found if found is None else found.decode()


def inside(application, *, instance_id):
    """The API as a machine of that name reaches it; until the server ends."""
    from gpukiln.clouds.embedded.machine_api import MachineApi  # noqa: PLC0415 - moto reads its settings first

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    MachineApi(listener, application, instance_id)
    return f"http://127.0.0.1:{port}"


def reset(layout, regions=None):
    """A cloud without anything, or as its files said; disks stay as long as it may need them."""
    from moto.backends import get_backend  # noqa: PLC0415 - moto reads its settings first

    written = *layout.snapshots.glob("*.raw"), *layout.snapshots.glob(".*.partial")
    disks = () if regions else (*written, *layout.volumes.iterdir())
    for file in (*layout.regions.iterdir(), *layout.snapshots.glob("*.json"), *disks):
        file.unlink()
    for name, text in (regions or {}).items():
        (layout.regions / name).write_text(text)
    for service in ("ec2", "ssm", "autoscaling", "eks", "iam", "secretsmanager"):
        for account in get_backend(service).values():
            account.reset()


def _start(_, instance):
    """As Lifecycle.start, without a machine."""
    from gpukiln.clouds.embedded.lifecycle import _state, set_state  # noqa: PLC0415 - moto reads its settings first

    before = _state(instance)
    set_state(instance, "running")
    return before


def main():
    os.environ.update(MOTO_SETTINGS)
    logging.getLogger("werkzeug").setLevel(
        logging.WARNING
    )  # a line for each request costs a tenth of its time
    layout = Layout(Path(sys.argv[1]))
    layout.create()
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - reads MOTO_SETTINGS when imported
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415 - beside moto's

    from gpukiln.clouds.embedded import ec2, registry  # noqa: PLC0415 - moto reads its settings first
    from gpukiln.clouds.embedded.lifecycle import Lifecycle, set_state  # noqa: PLC0415 - moto reads its settings first
    from gpukiln.clouds.embedded.machines import Machines  # noqa: PLC0415 - moto reads its settings first

    Lifecycle.launch = lambda _, instance: set_state(instance, "running")  # no machine behind an instance
    Lifecycle.start = _start
    Machines.attach = _attach
    Machines.detach = lambda *_, **__: True
    machines = Machines(layout)
    ec2.install(machines)
    registry.install(layout)
    moto = DomainDispatcherApplication(create_backend_app)
    cloud = Forgetful(layout, machines, moto, registry.Registry(layout), lambda: None)
    faulty = Faulty(cloud)
    server = make_server("127.0.0.1", 0, faulty, threaded=True, request_handler=MotoRequestHandler)
    faulty.end = server.shutdown
    threading.Thread(target=_end_with_the_test, args=(server,), daemon=True).start()
    print(server.port, flush=True)
    server.serve_forever()
    shutil.rmtree(layout.home)
    os._exit(0)  # whatever a thread of moto's still waits for


def _attach(_machines, instance, _volume_id, device):
    """A machine takes every volume but one at /dev/sdp."""
    if device == "/dev/sdp":
        raise UnavailableError(f"{instance.id} does not take it")


def _end_with_the_test(server):
    """Standard input ends with the process that started this, however that ends."""
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
