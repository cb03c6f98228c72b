"""How much GPU memory a transformer needs, term by term.

Sources of the terms:
    ZERO      Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 3.1
    SELECTIVE Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 4 and 5
    SCALING   Kaplan et al., Scaling Laws for Neural Language Models, section 2.1 (N = 12 layers * width^2)
    PAGED     Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
    LORA      Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, section 4
    QLORA     Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, section 3
    EIGHT     Dettmers et al., 8-bit Optimizers via Block-wise Quantization
    GPTQ      Frantar et al., GPTQ: groups of 128 weights, each with a scale and a zero of 16 bit
    VLLM      vLLM documentation, engine arguments: gpu_memory_utilization (0.9 in 0.6.4, 0.92 in 2026)
    HEADS     vLLM, model_executor/models: fewer key/value heads than GPUs are copied, one to each GPU
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from gpukiln.catalog.instance_types import instance_types
from gpukiln.errors import UsageError
from gpukiln.offers.model import Request
from gpukiln.typed import unknown
from gpukiln.units import MIB, Span

Mode = Literal["infer", "train", "lora"]
MODES = ("infer", "train", "lora")
# Bytes of one weight; of int4 the scales, too.
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
NF4 = 0.5 + 0.127 / 8  # QLORA: 0.127 bit a weight for constants that are quantized, too
# Weights in fewer bits are frozen: --mode lora trains adapters next to them.
TRAINED_IN = ("fp32", "bf16", "fp16")
# Bytes of optimizer a weight that is trained in 16 bit, with the copy of it in 32 bit (ZERO: K = 12).
OPTIMIZERS = {"adamw": 12.0, "adamw8bit": 6.0, "sgd": 8.0}
COPY = 4.0  # of which this is the copy, which training in 32 bit has not
CHECKPOINTS = ("none", "selective", "full")
HEAD = 128  # width of an attention head where nothing is said: Llama's, and GPT-3's
# An allowance of this project for the CUDA context and libraries, not a measured value.
CONTEXT_MIB = 1024
# vLLM's default of gpu_memory_utilization (VLLM above); training gets the same allowance.
SHARE_USED = 0.9
MAX_COUNT = 10**9  # of anything that is counted: more is a slip of the keyboard
OWN_ALLOWANCE = "an allowance of this project"


@dataclass(frozen=True)
class Model:
    """What is known of a model; 0: estimated.

    Args:
        params: Weights.
        width: Of the residual stream (hidden size).
        kv_width: Key/value heads times width of a head: smaller than width with grouped queries.
    """

    params: float
    layers: int = 0
    width: int = 0
    kv_width: int = 0
    vocabulary: int = 128_256


@dataclass(frozen=True)
class ModelRun:
    """What is done with a model.

    Args:
        precision: Of its weights.
        batch: Sequences at a time; on one GPU, without those that data parallelism adds.
        context: Tokens of a sequence.
        tensor_parallel: GPUs that share each layer.
        kv_precision: Of keys and values that are kept; empty: 16 bit, or 32 where the weights have it.
        checkpoint: What of activations is computed again: none; selective: attention, as FlashAttention
            does; full: all but each layer's input.
        rank: Of the adapters of LoRA, which all linear layers have.
    """

    mode: Mode = "infer"
    precision: str = "bf16"
    batch: int = 1
    context: int = 4096
    tensor_parallel: int = 1
    kv_precision: str = ""
    optimizer: str = "adamw"
    checkpoint: str = "selective"
    rank: int = 16


@dataclass(frozen=True)
class Term:
    """A part of the memory.

    Args:
        bytes: On each GPU.
        formula: With the numbers put in.
    """

    name: str
    bytes: int
    formula: str
    source: str


@dataclass(frozen=True)
class Size:
    """The memory that a model needs.

    Args:
        per_gpu_mib: Of each GPU, all terms together.
        total_bytes: Of all GPUs.
        assumed: Values that were not given, and are estimated.
    """

    model: Model
    run: ModelRun
    terms: tuple[Term, ...]
    per_gpu_mib: int
    total_bytes: int
    assumed: tuple[str, ...]


def parameters(text: str) -> float:
    """A number of weights: 7e9, 7B, 350M.

    Raises:
        UsageError: It is none.

    >>> parameters("7B")
    7000000000.0
    >>> parameters("350M")
    350000000.0
    """
    number_match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        number = (
            float(number_match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[number_match[2].upper()]
            if number_match
            else 0
        )
    except ValueError:
        number = 0
    # Outside of this a unit is missing or doubled: no model has 7 weights.
    if not 1e5 <= number <= 1e14:
        raise UsageError(f"--params {text!r} is no number of weights", hint="wanted: for example 7e9 or 7B")
    return number


def size(model: Model, run: ModelRun) -> Size:
    """The memory that a model needs on each GPU.

    Raises:
        UsageError: Something is unknown, or can't be together.
    """
    _check(model, run)
    whole, assumed = _complete_model(model, run)
    terms = list(_infer(whole, run) if run.mode == "infer" else _train(whole, run))
    terms.append(
        Term("context", CONTEXT_MIB * MIB, f"{CONTEXT_MIB} MiB for CUDA and libraries", OWN_ALLOWANCE)
    )
    held = sum(term.bytes for term in terms)
    # The other way round: SHARE_USED of the card is what the terms fill.
    slack = round(held / SHARE_USED) - held
    used = f"{SHARE_USED:.0%} of a GPU's memory are used, the rest is fragmentation"
    terms.append(Term("slack", slack, used, "VLLM" if run.mode == "infer" else f"{OWN_ALLOWANCE}, as VLLM"))
    per_gpu = held + slack
    return Size(whole, run, tuple(terms), -(-per_gpu // MIB), per_gpu * run.tensor_parallel, tuple(assumed))


def to_request(size: Size, request: Request) -> Request:
    """A request with as many GPUs at least, each with at least that memory."""
    return replace(request, count=Span(size.run.tensor_parallel), gpu_memory_mib=Span(size.per_gpu_mib))


def needs_more_gpus(request: Request) -> bool:
    """Whether no machine has so much memory on so many GPUs, and one has more GPUs to share it among."""
    machines = [machine for machine in instance_types().values() if machine.status != "retired"]
    memory = request.gpu_memory_mib or Span(0)
    has_it = any(machine.gpus in request.count and machine.gpu_memory_mib in memory for machine in machines)
    return not has_it and any(machine.gpus >= 2 * request.count.low for machine in machines)


def _check(model: Model, run: ModelRun) -> None:
    for what, value, known in (
        ("--mode", run.mode, MODES),
        ("--precision", run.precision, BYTES),
        ("--kv-precision", run.kv_precision or "bf16", BYTES),
        ("--optimizer", run.optimizer, OPTIMIZERS),
        ("--checkpoint", run.checkpoint, CHECKPOINTS),
    ):
        if value not in known:
            raise unknown(what, value, known)
    for option, number, least in (
        ("--batch", run.batch, 1),
        ("--context", run.context, 1),
        ("--tensor-parallel", run.tensor_parallel, 1),
        ("--rank", run.rank, 1),
        ("--vocabulary", model.vocabulary, 1),
        ("--layers", model.layers, 0),
        ("--width", model.width, 0),
        ("--kv-width", model.kv_width, 0),
    ):
        if not least <= number <= MAX_COUNT:
            expected = f"{least} or more" if number < least else f"at most {MAX_COUNT}"
            raise UsageError(f"{option} is {number}, wanted {expected}")
    if run.mode == "train" and run.precision not in TRAINED_IN:
        raise UsageError(
            f"--mode train in {run.precision}: weights that are trained are kept in {', '.join(TRAINED_IN)}",
            hint="--precision bf16; or --mode lora, whose frozen weights may have fewer bits",
        )


def _complete_model(model: Model, run: ModelRun) -> tuple[Model, list[str]]:
    """The model with its missing values, estimated by SCALING."""
    assumed = []
    layers, width = model.layers, model.width
    if not layers and not width:
        # A width of 128 times the layers, as GPT-3 6.7B and Llama 7B have it.
        layers = max(1, round((model.params / (12 * 128**2)) ** (1 / 3)))
        width = 128 * layers
        assumed.append(
            f"{layers} layers of width {width}: weights = 12 * layers * width^2 with width = 128 * layers "
            "(SCALING)"
        )
    if not width:
        width = max(HEAD, round((model.params / 12 / layers) ** 0.5 / HEAD) * HEAD)
        assumed.append(f"width {width}: weights = 12 * layers * width^2 (SCALING)")
    if not layers:
        layers = max(1, round(model.params / 12 / width**2))
        assumed.append(f"{layers} layers: weights = 12 * layers * width^2 (SCALING)")
    kv_width = model.kv_width or width
    if not model.kv_width:
        assumed.append(
            "every head has keys and values of its own; with grouped queries it is less (--kv-width)"
        )
    if run.mode != "infer":
        assumed.append(f"a vocabulary of {model.vocabulary} (--vocabulary)")
    return Model(model.params, layers, width, kv_width, model.vocabulary), assumed


def _weights(model: Model, run: ModelRun) -> Term:
    each = NF4 if run.mode == "lora" and run.precision == "int4" else BYTES[run.precision]
    source = {"int4": "QLORA" if run.mode == "lora" else "GPTQ"}.get(run.precision, "ZERO")
    return _term("weights", model.params * each, f"{model.params:g} weights * {each:g} bytes", source, run)


def _infer(model: Model, run: ModelRun) -> list[Term]:
    kept = BYTES[run.kv_precision or ("fp32" if run.precision == "fp32" else "bf16")]
    tokens = run.batch * run.context
    worked = 4 if run.precision == "fp32" else 2
    shared, heads = run.tensor_parallel, max(1, model.kv_width // HEAD)
    copied = f" ({heads} heads of {HEAD}, copied to {shared} GPUs: HEADS)" if heads < shared else ""
    inner = f"inner 4 * {model.width}" + (f" / {shared} GPUs" if shared > 1 else "")
    return [
        _weights(model, run),
        _term(
            "kv-cache",
            2 * model.layers * model.kv_width * tokens * kept,
            f"2 * {model.layers} layers * {model.kv_width} * {run.context} tokens * {run.batch} sequences "
            f"* {kept:g} bytes{copied}",
            "PAGED",
            run,
            shared=min(shared, heads),
        ),
        Term(
            "activations",
            round((2 + 4 / shared) * model.width * tokens * worked),
            f"one layer's input and output, 2 * {model.width}, and {inner}: * {tokens} tokens "
            f"* {worked} bytes",
            SELECTIVE_ONE,
        ),
    ]


SELECTIVE_ONE = "as SELECTIVE counts a layer's, one layer at a time and nothing kept"


def _train(model: Model, run: ModelRun) -> list[Term]:
    """Weights, gradients and optimizer of what is trained, and the activations that its gradients need."""
    in_32 = run.precision == "fp32"
    each = 4 if in_32 else 2
    # LoRA adapters of rank r on all linear layers: 4 attention matrices take 2 * r * width each, the 2
    # matrices of an MLP that is 4 widths wide take 5 * r * width each.
    adapters = model.layers * 18 * model.width * run.rank
    trained = model.params if run.mode == "train" else float(adapters)
    terms = [_weights(model, run)]
    what = "weights"
    if run.mode == "lora":
        what = "adapters"
        text = f"{model.layers} layers * 18 * {model.width} * rank {run.rank}: attention 4 * 2, MLP 2 * 5"
        terms.append(_term("adapters", trained * each, f"{text}, * {each} bytes", "LORA", run))
    terms.append(_term("gradients", trained * each, f"{trained:g} {what} * {each} bytes", "ZERO", run))
    states = OPTIMIZERS[run.optimizer] - (COPY if in_32 else 0)
    source = "EIGHT" if run.optimizer == "adamw8bit" else "ZERO"
    with_copy = "" if in_32 else f", {COPY:g} of them a copy in 32 bit"
    terms.append(
        _term("optimizer", trained * states, f"{trained:g} {what} * {states:g} bytes{with_copy}", source, run)
    )
    terms.append(_activations(model, run))
    tokens, shared = run.batch * run.context, run.tensor_parallel
    terms.append(
        Term(
            "logits",
            round(4 * tokens * model.vocabulary / shared),
            f"4 bytes * {tokens} tokens * {model.vocabulary} / {shared} GPUs",
            "SELECTIVE, section 4.3",
        )
    )
    return terms


def _activations(model: Model, run: ModelRun) -> Term:
    """SELECTIVE, equations 1, 2, 4 and 6: bytes of a layer's activations in 16 bit, on each GPU."""
    shared, wide = run.tensor_parallel, model.width
    layer = run.batch * run.context * wide
    heads = max(1, wide // HEAD)
    # Equation 2 of SELECTIVE: 10 sbh are not divided by tensor parallelism, 24 sbh are.
    factor = 10 + 24 / shared
    # The attention scores (5 a s / h in equation 1), which selective recomputation drops.
    quadratic = 5 * heads * run.context / (wide * shared)
    times = 2 if run.precision == "fp32" else 1
    sbh = f"{run.context} * {run.batch} * {wide}"
    if run.checkpoint == "full":
        amount = layer * (2 * model.layers + factor + quadratic)
        text = f"{sbh} * (2 * {model.layers} layers + one of them computed again, {factor + quadratic:.1f})"
    elif run.checkpoint == "selective":
        amount = layer * factor * model.layers
        text = f"{model.layers} layers * {sbh} * (10 + 24 / {shared})"
    else:
        amount = layer * (factor + quadratic) * model.layers
        scores = f"5 * {heads} * {run.context} / ({wide} * {shared})"
        text = f"{model.layers} layers * {sbh} * (10 + 24 / {shared} + {scores})"
    return Term(
        "activations", round(amount * times), text + (" * 2, of 32 bit" if times == 2 else ""), "SELECTIVE"
    )


def _term(name: str, amount: float, formula: str, source: str, run: ModelRun, *, shared: int = 0) -> Term:
    shared = shared or run.tensor_parallel
    return Term(name, round(amount / shared), formula + (f" / {shared} GPUs" if shared > 1 else ""), source)
