"""Gathers whether the services of a workspace run, answer, and compute on the GPU.

Runs on the machine that is verified, by the rules of `gpukiln.probe.gather`, with one exception: where Ollama
has no model, that of its definition is fetched, because without one it is unknown where Ollama computes.
The first line of the Compose file names the services (gpukiln/workspaces/services.py).
"""

from __future__ import annotations

import http.client
import json
import re
import time
from typing import Any

from gpukiln.probe.base import REDACT_CHARS, check_output, evidence, read, run, tail, watch
from gpukiln.redact import redact

COMPOSE = "/etc/gpukiln/compose.yaml"
PROJECT = "gpukiln"  # Compose's project, by which the containers are found
HOST = "127.0.0.1"
# generating first reads a model of several GB from the disk
ANSWER_S, PULL_S, GENERATE_S = 10.0, 300.0, 180.0
PIECE = 1 << 16
MAX_ANSWER_BYTES = 4 << 20  # of an HTTP answer; a larger one is an error
# Lines about GPUs in Ollama's log (ollama/ollama, discover/ and llm/).
ABOUT_GPUS = re.compile(r"(?i)no compatible gpus|inference compute|cuda|vram|offload|driver|nvml")


def services() -> dict[str, Any]:
    """{name: {wanted, container, http, and ollama or vllm, by its engine}}; empty: there are none.

    wanted is its entry in the Compose file; for container and http see the functions below.
    """
    said = re.match(r"x-gpukiln: (\{.*\})\n", read(COMPOSE) or "")
    if not said:
        return {}
    rows: dict[str, Any] = {}
    by_service = containers()
    for name, declared in json.loads(said[1]).items():
        box = by_service.get(name)
        row = rows[name] = {"wanted": declared, "container": box}
        row["http"] = http_request(declared["port"], declared["answers"])
        if box and row["http"].get("status") == 200:
            if declared["computes"] == "ollama":
                row["ollama"] = ollama(declared["port"], declared["model"])
                row["log"] = log_of(box["id"])
            elif declared["computes"] == "vllm":
                row["vllm"] = {
                    "models": http_request(declared["port"], "/v1/models"),
                    "pids": pids_of(box["id"]),
                }
    return rows


def containers() -> dict[str, Any]:
    """{service: {id, state, exit_code, error, health, gpus}} of the project; gpus: whether it has any."""
    label = f"label=com.docker.compose.project={PROJECT}"
    ids = check_output("docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()
    rows = json.loads(check_output("docker", "inspect", *ids)) if ids else []
    by_service = {}
    for row in rows:
        state = row["State"]
        by_service[row["Config"]["Labels"]["com.docker.compose.service"]] = {
            "id": row["Id"],
            "state": state["Status"],
            "exit_code": state["ExitCode"],
            "error": state["Error"],
            "health": (state.get("Health") or {}).get("Status"),
            "gpus": bool(row["HostConfig"].get("DeviceRequests")),
        }
    return by_service


def pids_of(container: str) -> list[int]:
    """A container's process ids on the host."""
    return [
        int(word) for word in check_output("docker", "top", container, "-eo", "pid").split() if word.isdigit()
    ]


def log_of(container: str) -> list[str]:
    """The last lines about GPUs in a container's log."""
    said = run("docker", "logs", "--tail", "400", container)
    lines = [line for line in (said["out"] + said["err"]).splitlines() if ABOUT_GPUS.search(line)]
    return [tail(redact(line), 300) for line in lines[-3:]]


def ollama(port: int, model: str) -> dict[str, Any]:
    """{model, generate, ps}, or {not_run: why}: generates a few words, then reads where the model is.

    `size_vram` of /api/ps is the part of `size` that is in GPU memory (ollama/ollama, docs/api.md, List
    Running Models; `ollama ps` shows 100% GPU where they are equal).
    """
    tags = http_request(port, "/api/tags")
    sizes = {str(row["name"]): int(row["size"]) for row in (tags.get("json") or {}).get("models") or ()}
    if not sizes:
        pulled = http_request(port, "/api/pull", {"model": model, "stream": False}, PULL_S)
        if problem := problem_of(pulled):
            return {"not_run": f"it has no model, and {model} can't be fetched: {problem}"}
    # The smallest model that is there: it is loaded fastest.
    elif model not in sizes:
        model = min(sizes, key=lambda name: sizes[name])
    options = {"num_predict": 4}
    asked = {"model": model, "prompt": "1 + 1 =", "stream": False, "options": options}
    generate = http_request(port, "/api/generate", asked, GENERATE_S)
    return {"model": model, "generate": generate, "ps": http_request(port, "/api/ps")}


def problem_of(answer: dict[str, Any]) -> str:
    """The problem of an answer; empty where it is good.

    >>> problem_of({"error": "no answer in 10 s"})
    'no answer in 10 s'
    >>> problem_of({"status": 200, "json": {}, "text": "{}"})
    ''
    """
    if "error" in answer:
        return str(answer["error"])
    said = answer.get("json")
    error = said.get("error") if isinstance(said, dict) else None
    if answer["status"] != 200 or error:
        return f"{answer['status']} {tail(str(error or answer['text']), 300)}".strip()
    return ""


def http_request(port: int, path: str, body: Any = None, seconds: float = 0.0) -> dict[str, Any]:
    """{status, json or null, text}, or {error: why}; within the seconds, however slowly the answer arrives.

    seconds: 0 for ANSWER_S.
    """
    method = "GET" if body is None else "POST"
    row: dict[str, Any] = {"file": f"{method} http://{HOST}:{port}{path}", "out": ""}
    evidence.append(row)
    limit = watch.limit(seconds or ANSWER_S)
    watch.alive(limit + ANSWER_S)
    # The timeout of http.client is for each read: a server that sends byte by byte would never reach it.
    until = time.monotonic() + limit
    connection = http.client.HTTPConnection(HOST, port, timeout=limit)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        raw = b""
        while piece := answer.read1(PIECE):
            raw += piece
            if time.monotonic() > until:
                raise TimeoutError
            if len(raw) > MAX_ANSWER_BYTES:
                row["out"] = f"more than {MAX_ANSWER_BYTES} bytes"
                return {"error": row["out"]}
    except TimeoutError:
        row["out"] = f"no answer in {limit:.0f} s"
        return {"error": row["out"]}
    except (OSError, http.client.HTTPException) as error:
        row["out"] = f"{type(error).__name__}: {error}"
        return {"error": row["out"]}
    finally:
        connection.close()
    text = raw.decode("utf-8", "replace")
    row["out"] = f"{answer.status} {redact(text[:1000])}"
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    return {"status": answer.status, "json": said, "text": tail(redact(text[-REDACT_CHARS:]), 300)}
