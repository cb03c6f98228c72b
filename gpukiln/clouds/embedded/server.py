"""The embedded cloud's server process: moto's HTTP endpoint with machines behind it.

It runs in PID and mount namespaces of its own (`client._start_server`): however it ends, its machines and
mounts end with it. It stops when it has had no machine and no request for a while.
"""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gpukiln.clouds.embedded import cgroups, volume_files
from gpukiln.clouds.embedded.base import remove_unfinished
from gpukiln.clouds.embedded.cluster.control_plane import START, STOP
from gpukiln.clouds.embedded.cluster.programs import Programs
from gpukiln.clouds.embedded.layout import LOCK_PROBE_S, Layout, read_endpoint, write_in_place
from gpukiln.clouds.embedded.network import INSTANCE
from gpukiln.clouds.embedded.refusals import Refusal, internal_error, refusal_of, unknown_region
from gpukiln.clouds.embedded.snapshot_blocks import SnapshotBlocks, operation_of
from gpukiln.clouds.embedded.version import code_version
from gpukiln.errors import BusyError, GpukilnError, UnavailableError, UsageError
from gpukiln.files import remove, remove_partial, write_atomic
from gpukiln.locks import locked
from gpukiln.parsing import parse_json

MOTO_SETTINGS = {  # moto reads these at its import
    # moto's example images have no disks; validation refuses unknown images, as EC2 does.
    "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
    "MOTO_ENABLE_AMI_VALIDATION": "true",
    "MOTO_ENABLE_KEYPAIR_VALIDATION": "false",
}
CHECK_S = 5  # seconds between two checks of the server's files
IDLE_S = 1800  # seconds without a machine and without a request before the server ends
log = logging.getLogger("gpukiln.embedded")
OWN, STATUS = "/gpukiln/", "/gpukiln/status"
Start = Callable[..., Any]
Answer = Callable[[dict[str, Any]], dict[str, Any]]  # of one of the server's own paths


class Application:
    """WSGI application: the server's own paths, and moto for all others; state is saved after every change.

    Args:
        layout: The cloud's files.
        moto: moto's WSGI application.
        registry: The WSGI application of ECR's images.
        stop: Called to stop the server.
    """

    def __init__(
        self, layout: Layout, machines: Any, moto: Any, registry: Any, stop: Callable[[], None]
    ) -> None:
        self._layout, self._machines, self._stop = layout, machines, stop
        self._moto, self._registry = moto, registry
        self._blocks = SnapshotBlocks(layout)
        self._access_key = layout.access_key
        self._own: dict[tuple[str, str], Answer] = {
            ("GET", STATUS): lambda _: self.status(),
            ("POST", "/gpukiln/stop"): self._stop_soon,
            ("POST", "/gpukiln/interrupt"): _interrupt,
            ("POST", "/gpukiln/gpus"): self._change_gpus,
            ("POST", START): self._start_cluster,
            ("POST", STOP): lambda _: {"ran": self._machines.cluster.stop()},
        }
        self.last_request = time.monotonic()

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "")
        authorization = environ.get("HTTP_AUTHORIZATION", "")
        # AWS has APIs below /v2/ too; their requests are signed
        if path.startswith("/v2/") and "Credential=" not in authorization and INSTANCE not in environ:
            self.last_request = time.monotonic()
            if environ["REQUEST_METHOD"] == "PUT" and "/manifests/" in path:
                return self._change(self._registry, environ, start_response)
            return self._registry(environ, start_response)  # type: ignore[no-any-return]
        if refusal := self._refusal(path, environ):
            return _answer(start_response, *refusal)
        if path != STATUS:  # a request for the status does not keep the server alive
            self.last_request = time.monotonic()
        if path.startswith(OWN):
            return self._answer_own(environ, start_response)
        return self._answer_service(environ, start_response)

    def _answer_service(self, environ: dict[str, Any], start_response: Start) -> list[bytes]:
        if answered := self._answer_market(environ):
            return _answer(start_response, *answered)
        called = operation_of(environ)
        if called and called[0] == "PutSnapshotBlock":  # thousands of them, and none changes the saved state
            return self._blocks(environ, start_response)
        return self._change(self._blocks if called else self._moto, environ, start_response)

    def _answer_own(self, environ: dict[str, Any], start_response: Start) -> list[bytes]:
        """JSON in, JSON out; `client.ask_server` raises gpukiln's errors again."""
        route = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        try:
            if route not in self._own:
                raise UsageError(f"the embedded cloud's server has no {' '.join(route)}")
            return _json(start_response, self._own[route](_document(environ)))
        except GpukilnError as error:
            status, failure = HTTPStatus.BAD_REQUEST, error
        except Exception as error:  # a crash would answer a page of HTML
            log.exception("%s %s", *route)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            failure = UnavailableError(
                f"the embedded cloud's server failed: {type(error).__name__}: {error}",
                hint=f"see its log: {self._layout.server_log}",
            )
        return _json(start_response, {"error": error_document(failure)}, status)

    def _answer_market(self, environ: dict[str, Any]) -> Refusal | None:
        from gpukiln.clouds.embedded import market  # noqa: PLC0415 - moto is slow to import

        return market.answer(self._layout, environ)

    def _change_gpus(self, document: dict[str, Any]) -> dict[str, Any]:
        from gpukiln.clouds.embedded.gpus import requests  # noqa: PLC0415 - moto is slow to import

        result = requests.answer(self._machines, document)
        self.save()  # the request may have changed tags
        return result

    def _stop_soon(self, _: dict[str, Any]) -> dict[str, Any]:
        threading.Thread(target=self._stop).start()
        return {"stopping": True}

    def _refusal(self, path: str, environ: dict[str, Any]) -> Refusal | None:
        """Refuse keys that are neither the cloud's nor of a machine's role: machines run as root here."""
        from gpukiln.clouds.embedded import (  # noqa: PLC0415 - moto is slow to import
            role_credentials,
            role_policies,
        )

        authorization = environ.get("HTTP_AUTHORIZATION", "")
        match, inside = re.search("Credential=([^/]+)/", authorization), environ.get(INSTANCE)
        key, token = match[1] if match else "", environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")
        # Machines' roles get AWS's APIs only, not the server's own paths.
        if not path.startswith(OWN) and (holder := role_credentials.holder(key, token)):
            instance, role = holder
            if inside in (None, instance.id):
                return unknown_region(authorization) or role_policies.refusal(environ, instance, role)
        if key == self._access_key and not inside:
            return unknown_region(authorization)
        message = "The access key is not this cloud's; `invoke cloud.env` prints the settings"
        if inside:
            message = f"The access key is not that of {inside}'s role, which is in its instance metadata"
        return refusal_of(authorization, 401, "AuthFailure", message)

    def _change(self, application: Any, environ: dict[str, Any], start_response: Start) -> list[bytes]:
        """Call the application, and answer success only when the change is on disk."""
        answered: list[Any] = []
        body = list(application(environ, lambda *answer: answered.append(answer)))
        # EC2, SSM and IAM send reads by POST too; unchanged files are not written again.
        if environ["REQUEST_METHOD"] != "GET":
            try:
                self.save()
            except (OSError, GpukilnError) as error:
                log.exception("a change is not on disk")
                message = f"the change is not on disk: {error}"
                return _answer(
                    start_response, *internal_error(environ.get("HTTP_AUTHORIZATION", ""), message)
                )
        start_response(*answered[-1])
        return body

    def _start_cluster(self, document: dict[str, Any]) -> dict[str, Any]:
        paths = {name: Path(path) for name, path in document["programs"].items()}
        self._machines.cluster.start(Programs(paths))
        return self._machines.cluster.status() or {}

    def status(self) -> dict[str, Any]:
        """What `invoke cloud.status` shows."""
        return {
            "home": {"path": str(self._layout.home), **(self._layout.identity() or {})},
            "code": code_version(),
            "ssh_port": self._machines.ssh_port,
            "cluster": self._machines.cluster.status(),
            "machines": [
                {
                    "instance_id": machine.spec.instance_id,
                    "kind": machine.spec.kind,
                    "address": machine.spec.address,
                    "ssh_port": machine.spec.ssh_port,
                    "running": machine.running,
                    "simulated": machine.gpu_files is not None,
                }
                for machine in self._machines.all()
            ],
        }

    def save(self) -> None:
        """Save what outlives the process, for every region that was used."""
        from moto.core.models import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - moto is slow to import
        from moto.ec2.models import ec2_backends  # noqa: PLC0415 - moto is slow to import
        from moto.ecr.models import ecr_backends  # noqa: PLC0415 - moto is slow to import
        from moto.iam.models import iam_backends  # noqa: PLC0415 - moto is slow to import
        from moto.secretsmanager.models import secretsmanager_backends  # noqa: PLC0415 - likewise
        from moto.ssm.models import ssm_backends  # noqa: PLC0415 - moto is slow to import

        from gpukiln.clouds.embedded import (  # noqa: PLC0415 - moto is slow to import
            account_store,
            regions,
            registry,
            store,
            volumes,
        )

        kept: tuple[Any, ...] = ec2_backends, ssm_backends, ecr_backends, secretsmanager_backends
        every = [backends[DEFAULT_ACCOUNT_ID] for backends in kept]
        iam = iam_backends[DEFAULT_ACCOUNT_ID]
        with regions.changing:
            touched = {region for backends in every for region in list(backends)}
            touched |= {account_store.IAM_REGION} if account_store.IAM_PARTITION in iam else set()
            for region in sorted(touched):
                ec2, ssm, ecr, secrets = (backends[region] for backends in every)
                document = {**store.dump_region(ec2, ssm), "repositories": registry.dump(ecr)}
                document["secrets"] = account_store.dump_secrets(secrets)
                if region == account_store.IAM_REGION:
                    document["iam"] = account_store.dump_iam(iam[account_store.IAM_PARTITION])
                regions.write_region(self._layout, region, document)
                volumes.save(self._layout, ec2)

    def idle(self) -> bool:
        """Whether the server is unused."""
        unused = not self._machines.all() and not self._machines.cluster.running
        return unused and time.monotonic() - self.last_request > IDLE_S


def error_document(error: GpukilnError) -> dict[str, Any]:
    """One of gpukiln's errors as JSON."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
    }


def _interrupt(document: dict[str, Any]) -> dict[str, Any]:
    from gpukiln.clouds.embedded import spot  # noqa: PLC0415 - moto is slow to import

    return spot.interrupt(document)


def _document(environ: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, which may be empty."""
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    try:
        document = parse_json(body or "{}")
    except ValueError as error:
        raise UsageError(f"the request is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"the request is a {type(document).__name__}, wanted an object")
    return document


def _json(start_response: Start, document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> list[bytes]:
    return _answer(start_response, status, "application/json", json.dumps(document).encode())


def _answer(start_response: Start, status: int, kind: str, body: bytes) -> list[bytes]:
    line = f"{int(status)} {HTTPStatus(status).phrase}"
    start_response(line, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def sweep(layout: Layout) -> None:
    """Remove what a killed server left: partial disks, and volumes of machines that ended with it.

    A complete disk stays, even where no region has it: `invoke cloud.status` shows it.

    Args:
        layout: The cloud's files.
    """
    for folder in layout.machines.iterdir():
        log.info("removing the folder of %s", folder.name)
        cgroups.remove(folder.name)
        remove(folder)
    for file in remove_partial(layout.root, layout.regions, layout.snapshots):
        log.info("removed %s, a partial file", file)
    remove_unfinished(layout)
    volume_files.sweep(layout)


def main() -> int:
    """Serve until a stop is requested or the server is idle.

    Returns:
        The exit code.
    """
    os.environ.update(MOTO_SETTINGS)
    layout = Layout(Path(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    layout.create()
    busy = BusyError("another server is running", hint="use that one")
    try:
        with locked(layout.server_lock, busy=busy, wait_s=LOCK_PROBE_S):
            # `ip netns` has a file for each namespace here: in a tmpfs of this mount namespace none is left
            Path("/run/netns").mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=True)
            sweep(layout)
            return _serve(layout)
    except GpukilnError as error:  # the client prints the end of the log
        log.error("%s; next: %s", error.message, error.hint)
        return error.exit_code


def _serve(layout: Layout) -> int:
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415 - reads MOTO_SETTINGS when imported
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server  # noqa: PLC0415 - slow to import

    from gpukiln.clouds.embedded import ec2, registry  # noqa: PLC0415 - moto is slow to import
    from gpukiln.clouds.embedded.machines import Machines  # noqa: PLC0415 - moto is slow to import

    machines = Machines(layout)
    ec2.install(machines)
    registry.install(layout)
    stopping = threading.Event()
    moto = DomainDispatcherApplication(create_backend_app)
    application = Application(layout, machines, moto, registry.Registry(layout), stopping.set)
    machines.api = application
    server = make_server(
        "127.0.0.1", _previous_port(layout), application, threaded=True, request_handler=MotoRequestHandler
    )
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home, key = layout.identity(), layout.access_key
    address = {"url": f"http://127.0.0.1:{server.port}", "port": server.port, "home": home}
    write_atomic(layout.endpoint, json.dumps(address))
    log.info("serving on port %s", server.port)
    while not stopping.wait(CHECK_S) and not application.idle():
        if layout.identity() != home:
            log.error("%s is no longer the folder of this server", layout.root)
            break
        _restore_client_files(layout, address, key)
    log.info("ending")
    server.shutdown()
    for machine in machines.all():
        # Machines end with the server; their volumes are swept below unless they are to be kept.
        machines.remove(machine.spec.instance_id)
    machines.cluster.stop()
    application.save()
    volume_files.sweep(layout)
    return 0


def _restore_client_files(layout: Layout, address: dict[str, Any], key: str) -> None:
    """Write the files by which clients find this server again where they were damaged."""
    with contextlib.suppress(OSError):  # the disk may be full; the next check tries again
        if not read_endpoint(layout):
            log.warning("%s is damaged and is written again", layout.endpoint)
            write_in_place(layout.endpoint, json.dumps(address))
        try:
            current_key = layout.access_key
        except GpukilnError:
            current_key = ""
        if current_key != key:
            log.warning("%s is damaged and is written again", layout.key_file)
            write_in_place(layout.key_file, key)


def _previous_port(layout: Layout) -> int:
    """The last server's port, so that a shell's AWS_ENDPOINT_URL stays valid; 0 (any) where it is in use."""
    last = read_endpoint(layout)
    if last.get("home") != layout.identity():
        return 0  # the folder is a copy: the port belongs to the original folder's server
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        port = int(last["port"])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        return port
    return 0


if __name__ == "__main__":
    # threads may still wait; PID 1 has to exit by itself
    code = main()
    logging.shutdown()
    os._exit(code)
