"""What the services of a workspace answer: each is a real HTTP server here, and Docker is a script."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpukiln.probe import base, services
from gpukiln.workspaces.services import compose, load
from tests.support.host_evaluate import evaluate_check
from tests.support.host_machine import machine

pytestmark = pytest.mark.usefixtures("nothing_hangs")
MIB = 1 << 20
ID = "c0ffee"


class Ollama:
    """Answers as ollama/ollama's docs/api.md says; `hangs` names a path that never answers."""

    def __init__(self) -> None:
        self.models = {"llama3.2:latest": 2000 * MIB, "small:latest": 600 * MIB}
        self.on_gpu = 1.0
        self.loaded: list[str] = []
        self.online = True
        self.hangs = self.drips = ""
        self.asked: list[tuple[str, Any]] = []
        self.over = threading.Event()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/api/pull" and not self.online:
            return 500, {"error": "pull model manifest: lookup registry.ollama.ai: no such host"}
        if path == "/api/pull":
            self.models[body["model"]] = 398 * MIB
        if path == "/api/generate":
            self.loaded.append(body["model"])
        known = {
            "/api/version": {"version": "0.12.3"},
            "/api/tags": {"models": [{"name": name, "size": size} for name, size in self.models.items()]},
            "/api/pull": {"status": "success"},
            "/api/generate": {"response": "2", "done": True},
            "/api/ps": {"models": [self.row(name) for name in self.loaded]},
            "/health": {},
            "/v1/models": {"object": "list", "data": [{"id": "Qwen/Qwen3-0.6B"}]},
        }
        return (200, known[path]) if path in known else (404, {"error": "not found"})

    def row(self, name: str) -> dict[str, Any]:
        size = self.models[name]
        return {"name": name, "size": size, "size_vram": int(size * self.on_gpu)}


@pytest.fixture
def ollama() -> Iterator[tuple[Ollama, int]]:
    """The server, and its port."""
    told = Ollama()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            if self.path == told.hangs:
                told.over.wait(20)
                return
            status, said = told.answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            if self.path == told.drips:
                while not told.over.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                return
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield told, server.server_address[1]
    told.over.set()
    server.shutdown()
    server.server_close()


Machine = Callable[..., None]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this a workspace with a service at a port, in a container that a script of Docker tells of."""
    monkeypatch.setattr(base, "PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(services, "COMPOSE", str(tmp_path / "compose.yaml"))

    def make(name: str, port: int, *, gpus: bool = True, state: str = "running", log: str = "") -> None:
        [definition] = load([name])
        text = compose([definition], "all" if gpus else (), user="ann").text
        (tmp_path / "compose.yaml").write_text(text.replace(f'"port": {definition.port}', f'"port": {port}'))
        row = {
            "Id": ID,
            "State": {"Status": state, "ExitCode": 0, "Error": "", "Health": {"Status": "healthy"}},
            "Config": {"Labels": {"com.docker.compose.service": name}},
            "HostConfig": {"DeviceRequests": [{"Count": -1}] if gpus else None},
        }
        (tmp_path / "row").write_text(json.dumps([row]))
        (tmp_path / "log").write_text(log)
        docker = tmp_path / "docker"
        docker.write_text(
            f'#!/bin/sh\ncase "$1 $*" in\n*com.docker.compose.project=gpukiln) echo {ID};;\n'
            f"inspect*) cat {tmp_path}/row;;\nlogs*) cat {tmp_path}/log >&2;;\n"
            f"top*) printf 'PID\\n51\\n52\\n';;\n*) exit 1;;\nesac\n"
        )
        docker.chmod(0o755)

    return make


def judged(check: str = "services.ollama") -> tuple[str, str]:
    """What the check says of what is found here."""
    data = machine()
    data["services"] = json.loads(json.dumps(services.services()))
    return evaluate_check(check, data, profile="workspace")


def test_a_machine_without_a_compose_file_has_no_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "COMPOSE", str(tmp_path / "missing"))
    assert services.services() == {}
    (tmp_path / "missing").write_text("services: {mine: {image: x}}\n")  # somebody's own
    assert services.services() == {}


def test_ollama_on_the_gpu(workspace: Machine, ollama: tuple[Ollama, int]) -> None:
    told, port = ollama
    workspace("ollama", port)
    assert judged() == ("passed", "small:latest: 600 MiB, all in GPU memory")  # the smallest that is there
    assert ("/api/pull", {"model": "qwen2.5:0.5b", "stream": False}) not in told.asked
    assert judged("services.running")[0] == judged("services.answers")[0] == "passed"


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "wholly on the processor"), (0.5, "partly on the processor: 300 of 600 MiB")]
)
def test_ollama_on_the_processor(
    workspace: Machine, ollama: tuple[Ollama, int], share: float, words: str
) -> None:
    told, port = ollama
    told.on_gpu = share
    workspace("ollama", port, log="listening\nlevel=INFO msg=no compatible GPUs were discovered\n")
    outcome, reason = judged()
    assert outcome == "failed"
    assert words in reason
    assert "because: level=INFO msg=no compatible GPUs were discovered" in reason


def test_of_a_service_s_long_error_the_end_is_kept() -> None:
    text = f"{'Traceback: ' * 60}CUDA error: out of memory"
    for answer in ({"status": 500, "text": text}, {"status": 200, "json": {"error": text}, "text": ""}):
        told = services.problem_of(answer)
        assert told == f"{answer['status']} ...{text[-300:]}"


def test_ollama_without_a_model_fetches_the_one_of_its_definition(
    workspace: Machine, ollama: tuple[Ollama, int]
) -> None:
    told, port = ollama
    told.models = {}
    workspace("ollama", port)
    assert judged() == ("passed", "qwen2.5:0.5b: 398 MiB, all in GPU memory")


def test_ollama_without_a_model_and_without_a_way_out_is_not_judged(
    workspace: Machine, ollama: tuple[Ollama, int]
) -> None:
    told, port = ollama
    told.models, told.online = {}, False
    workspace("ollama", port)
    outcome, reason = judged()
    assert outcome == "not_run"
    assert reason.startswith("ollama: it has no model, and qwen2.5:0.5b can't be fetched: 500 pull model")
    assert reason.endswith("no such host")


def test_ollama_that_hangs_while_it_generates(
    workspace: Machine, ollama: tuple[Ollama, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, port = ollama
    told.hangs = "/api/generate"
    monkeypatch.setattr(services, "GENERATE_S", 0.5)
    workspace("ollama", port)
    outcome, reason = judged()
    assert (outcome, reason) == ("failed", "ollama generates nothing with small:latest: no answer in 0 s")


def test_ollama_that_answers_nothing_fails_the_port_and_no_more(
    workspace: Machine, ollama: tuple[Ollama, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, port = ollama
    told.hangs = "/api/version"
    monkeypatch.setattr(services, "ANSWER_S", 0.5)
    workspace("ollama", port)
    outcome, reason = judged("services.answers")
    assert outcome == "failed"
    assert f"ollama, port {port}/api/version: no answer" in reason
    assert judged() == ("not_run", "ollama does not answer")


def test_an_answer_that_never_ends_is_none(ollama: tuple[Ollama, int]) -> None:
    """Each byte comes in time, all of them never do."""
    told, port = ollama
    told.drips = "/api/version"
    began = time.monotonic()
    assert services.http_request(port, "/api/version", seconds=1.0) == {"error": "no answer in 1 s"}
    assert time.monotonic() - began < 5


def test_nobody_at_the_port(workspace: Machine) -> None:
    workspace("ollama", 9, state="exited")
    outcome, reason = judged("services.answers")
    assert outcome == "failed"
    assert "ConnectionRefusedError" in reason
    assert judged("services.running") == ("failed", "ollama is exited, exit 0; wanted running")


def test_ollama_that_was_given_no_gpu_is_not_asked_where_it_computes(
    workspace: Machine, ollama: tuple[Ollama, int]
) -> None:
    told, port = ollama
    workspace("ollama", port, gpus=False)
    assert judged() == ("not_run", "no ollama with a GPU")
    assert [path for path, _ in told.asked] == ["/api/version"]


def test_vllm_tells_its_model_and_its_processes(workspace: Machine, ollama: tuple[Ollama, int]) -> None:
    workspace("vllm", ollama[1])
    assert services.services()["vllm"]["vllm"]["pids"] == [51, 52]
    outcome, reason = judged("services.vllm")
    assert (outcome, reason) == (
        "failed",
        "none of vllm's processes is on a GPU, wanted one that uses its memory",
    )


def test_docker_that_does_not_answer_is_told(workspace: Machine, tmp_path: Path) -> None:
    workspace("ollama", 9)
    (tmp_path / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="Cannot connect to the Docker daemon"):
        services.services()
