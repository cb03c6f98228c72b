"""The services of a workspace do what they are there for: they answer, and compute on the GPU."""

from collections.abc import Iterator

import pytest

from gpukiln.probe.services import problem_of
from gpukiln.verify.checks import check

WORKSPACE = ("workspace",)
MIB = 1 << 20


def computing(facts, how) -> Iterator[tuple[str, dict]]:
    """The services that compute so, by name."""
    for name, service in facts["services"].items():
        if service["wanted"]["computes"] == how:
            if how not in service:
                pytest.skip(f"{name} does not answer")
            yield name, service


@check(
    id="services.running",
    title="Every service's container runs",
    layer="services",
    profiles=WORKSPACE,
    needs=("services",),
    causes=(
        "Its image could not be fetched: the workspace's egress is `none`, or its disk is full.",
        "The container engine can give it no GPU.",
        "The program ended: `docker logs` says why.",
    ),
    fix="`docker compose --project-name gpukiln ps --all` and `docker logs CONTAINER` on the machine.",
)
def test_running(facts):
    wrong = []
    for name, service in facts["services"].items():
        box = service["container"]
        if box is None:
            wrong.append(f"{name} has no container")
        elif box["state"] != "running":
            error = f" ({box['error']})" if box["error"] else ""
            wrong.append(f"{name} is {box['state']}, exit {box['exit_code']}{error}")
    assert not wrong, f"{'; '.join(wrong)}; wanted running"
    facts.note(", ".join(facts["services"]))


@check(
    id="services.answers",
    title="Every service answers on its port",
    layer="services",
    profiles=WORKSPACE,
    needs=("services",),
    after=("services.running",),
    causes=("It still loads its model.", "Another program has its port."),
    fix="`docker logs CONTAINER` on the machine; vLLM answers once its model is fetched and loaded.",
)
def test_answers(facts):
    wrong = []
    for name, service in facts["services"].items():
        if problem := problem_of(service["http"]):
            health = (service["container"] or {}).get("health")
            wrong.append(
                f"{name}, port {service['wanted']['port']}{service['wanted']['answers']}: {problem}"
                + (f" (its engine says {health})" if health else "")
            )
    assert not wrong, "; ".join(wrong)


@check(
    id="services.ollama",
    title="Ollama computes wholly on the GPU",
    layer="services",
    profiles=WORKSPACE,
    needs=("gpu", "real-gpu", "ollama"),
    after=("services.answers", "gpu.driver-loaded", "gpu.nvml"),
    causes=(
        "The model is larger than the memory of the GPU that is free.",
        "The driver is older than the release needs: it falls back to the processor in silence.",
        "The container was given no GPU.",
    ),
    fix="""A smaller model, or a smaller OLLAMA_CONTEXT_LENGTH; `gpukiln-gpu procs` shows what else holds
    memory; `docker logs CONTAINER` what Ollama found.""",
)
def test_ollama(facts):
    for name, service in computing(facts, "ollama"):
        asked = service["ollama"]
        if "not_run" in asked:
            pytest.skip(f"{name}: {asked['not_run']}")
        problem = problem_of(asked["generate"])
        assert not problem, f"{name} generates nothing with {asked['model']}: {problem}"
        problem = problem_of(asked["ps"])
        assert not problem, f"{name} does not say what it has loaded: {problem}"
        loaded = [row for row in asked["ps"]["json"].get("models") or () if row["name"] == asked["model"]]
        assert loaded, f"{name} has just used {asked['model']}, and /api/ps does not list it"
        size, on_gpu = loaded[0]["size"], loaded[0]["size_vram"]
        assert size > 0, f"{name} says that {asked['model']} has no size"
        assert on_gpu >= size, (
            f"{name} computes {'partly' if on_gpu else 'wholly'} on the processor: {on_gpu // MIB} of "
            f"{size // MIB} MiB of {asked['model']} are in GPU memory; because: {why(facts, service, size)}"
        )
        facts.note(f"{asked['model']}: {size // MIB} MiB, all in GPU memory")


def why(facts, service, size):
    """Why a model is not in GPU memory, as far as that can be told."""
    if not service["container"]["gpus"]:
        return "its container was given no GPU"
    memory = [(gpu["memory"]["total"], gpu["memory"]["used"]) for gpu in facts["nvml"]["gpus"]]
    free = [total - used for total, used in memory if isinstance(total, int) and isinstance(used, int)]
    if free and max(free) < size // MIB:
        return f"{max(free)} MiB of a GPU's memory were free"
    return " | ".join(service["log"]) or "its log says nothing about GPUs"


@check(
    id="services.vllm",
    title="vLLM serves a model, and holds GPU memory for it",
    layer="services",
    profiles=WORKSPACE,
    needs=("gpu", "real-gpu", "vllm"),
    after=("services.answers", "gpu.driver-loaded", "gpu.nvml"),
    causes=("Its model could not be fetched or loaded.", "It runs on another device than the GPU."),
    fix="`docker logs CONTAINER` on the machine; `gpukiln-gpu procs` shows who holds GPU memory.",
)
def test_vllm(facts):
    for name, service in computing(facts, "vllm"):
        problem = problem_of(service["vllm"]["models"])
        assert not problem, f"{name} does not say what it serves: {problem}"
        models = [row["id"] for row in service["vllm"]["models"]["json"].get("data") or ()]
        assert models, f"{name} serves no model, wanted {service['wanted']['model']}"
        processes = [gpu["processes"] for gpu in facts["nvml"]["gpus"] if isinstance(gpu["processes"], list)]
        if not processes:
            pytest.skip("NVML does not tell here which processes use the GPU")
        rows = [row for rows in processes for row in rows if row["pid"] in service["vllm"]["pids"]]
        assert rows, f"none of {name}'s processes is on a GPU, wanted one that holds its memory"
        facts.note(f"{', '.join(models)}: {sum(row['memory'] or 0 for row in rows)} MiB of GPU memory")
