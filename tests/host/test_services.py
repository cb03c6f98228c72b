"""The services of a workspace answer, and compute on the GPU."""

from collections.abc import Iterator

import pytest

from gpukiln.probe.services import problem_of
from gpukiln.verify.checks import check

WORKSPACE = ("workspace",)
MIB = 1 << 20


def services_with(facts, engine) -> Iterator[tuple[str, dict]]:
    """The services with that engine (`ollama` or `vllm`), by name."""
    for name, service in facts["services"].items():
        if service["wanted"]["computes"] == engine:
            # services.answers has the reason why it does not answer.
            if engine not in service:
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
        "The container engine can't give it a GPU.",
        "The program ended: `docker logs` shows the reason.",
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
    causes=("It is still loading its model.", "Another program uses its port."),
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
    title="Ollama computes on the GPU only",
    layer="services",
    profiles=WORKSPACE,
    needs=("gpu", "real-gpu", "ollama"),
    after=("services.answers", "gpu.driver-loaded", "gpu.nvml"),
    causes=(
        "The model is larger than the free memory of the GPU.",
        "The driver is older than the release needs: Ollama then uses the processor without a message.",
        "The container was given no GPU.",
    ),
    fix="""Use a smaller model or a smaller OLLAMA_CONTEXT_LENGTH. `gpukiln-gpu procs` shows which processes
    use memory, `docker logs CONTAINER` which GPUs Ollama found.""",
)
def test_ollama(facts):
    for name, service in services_with(facts, "ollama"):
        asked = service["ollama"]
        if "not_run" in asked:
            pytest.skip(f"{name}: {asked['not_run']}")
        problem = problem_of(asked["generate"])
        assert not problem, f"{name} generates nothing with {asked['model']}: {problem}"
        problem = problem_of(asked["ps"])
        assert not problem, f"{name} does not list its loaded models: {problem}"
        loaded = [row for row in asked["ps"]["json"].get("models") or () if row["name"] == asked["model"]]
        assert loaded, f"{name} has just used {asked['model']}, but /api/ps does not list it"
        size, on_gpu = loaded[0]["size"], loaded[0]["size_vram"]
        assert size > 0, f"{name} reports no size of {asked['model']}"
        # Ollama splits a model between GPU and processor without an error, and is then many times slower.
        assert on_gpu >= size, (
            f"{name} computes {'partly' if on_gpu else 'wholly'} on the processor: {on_gpu // MIB} of "
            f"{size // MIB} MiB of {asked['model']} are in GPU memory; because: "
            f"{cpu_reason(facts, service, size)}"
        )
        facts.note(f"{asked['model']}: {size // MIB} MiB, all in GPU memory")


def cpu_reason(facts, service, size):
    """The likely reason why a model is not in GPU memory: no GPU, no free memory, or Ollama's log."""
    if not service["container"]["gpus"]:
        return "its container was given no GPU"
    memory = [(gpu["memory"]["total"], gpu["memory"]["used"]) for gpu in facts["nvml"]["gpus"]]
    # A virtual GPU may not report its memory.
    free = [total - used for total, used in memory if isinstance(total, int) and isinstance(used, int)]
    if free and max(free) < size // MIB:
        return f"{max(free)} MiB of a GPU's memory were free"
    return " | ".join(service["log"]) or "its log says nothing about GPUs"


@check(
    id="services.vllm",
    title="vLLM serves a model, and uses GPU memory for it",
    layer="services",
    profiles=WORKSPACE,
    needs=("gpu", "real-gpu", "vllm"),
    after=("services.answers", "gpu.driver-loaded", "gpu.nvml"),
    causes=("Its model could not be fetched or loaded.", "It runs on another device than the GPU."),
    fix="`docker logs CONTAINER` on the machine; `gpukiln-gpu procs` shows which processes use GPU memory.",
)
def test_vllm(facts):
    for name, service in services_with(facts, "vllm"):
        problem = problem_of(service["vllm"]["models"])
        assert not problem, f"{name} does not list its models: {problem}"
        models = [row["id"] for row in service["vllm"]["models"]["json"].get("data") or ()]
        assert models, f"{name} serves no model, wanted {service['wanted']['model']}"
        processes = [gpu["processes"] for gpu in facts["nvml"]["gpus"] if isinstance(gpu["processes"], list)]
        if not processes:
            pytest.skip("NVML does not report here which processes use the GPU")
        # vLLM's memory belongs to a worker process, not to the HTTP server.
        rows = [row for rows in processes for row in rows if row["pid"] in service["vllm"]["pids"]]
        assert rows, f"none of {name}'s processes is on a GPU, wanted one that uses its memory"
        facts.note(f"{', '.join(models)}: {sum(row['memory'] or 0 for row in rows)} MiB of GPU memory")
