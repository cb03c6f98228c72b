"""The memory of a model: figures that the papers give themselves, and what must hold for every model."""

import random

import pytest

from gpukiln.errors import UsageError
from gpukiln.offers.model import Request
from gpukiln.offers.size import BYTES, MODES, TRAINED_IN, Model, ModelRun, parameters, size, to_request
from gpukiln.units import Span


def terms(model: Model, **run: object) -> dict[str, int]:
    return {one.name: one.bytes for one in size(model, ModelRun(**run)).terms}  # type: ignore[arg-type]


def test_training_takes_16_bytes_a_weight_as_zero_says() -> None:
    """ZeRO, section 3.1: a GPT-2 of 1.5 billion weights takes 24 GB with mixed precision and Adam."""
    found = terms(Model(1.5e9), mode="train")
    assert found["weights"] + found["gradients"] + found["optimizer"] == 24e9
    found = terms(Model(1.5e9), mode="train", precision="fp32")
    assert found["weights"] + found["gradients"] + found["optimizer"] == 24e9  # 4 + 4 + 8
    found = terms(Model(1.5e9), mode="train", optimizer="adamw8bit")
    assert found["optimizer"] == 9e9


def test_the_kv_cache_of_a_token_is_as_paged_attention_says() -> None:
    """PagedAttention, section 3: one token of OPT-13B takes 800 KB: 2 * 5120 * 40 layers * 2 bytes."""
    found = terms(Model(13e9, layers=40, width=5120), context=1)
    assert found["kv-cache"] == 2 * 5120 * 40 * 2 == 819200


def test_few_key_value_heads_are_copied_and_not_cut() -> None:
    """VLLM: max(1, heads // GPUs) on each, so 4 heads of 128 on 8 GPUs take a fourth and not an eighth."""
    four = Model(7.6e9, layers=28, width=3584, kv_width=4 * 128)
    whole = terms(four)["kv-cache"]
    assert whole == 2 * 28 * 512 * 4096 * 2
    assert [terms(four, tensor_parallel=gpus)["kv-cache"] for gpus in (2, 4, 8)] == [
        whole / 2,
        whole / 4,
        whole / 4,
    ]


def test_each_of_several_gpus_holds_all_of_a_layers_input() -> None:
    """Reducing Activation Recomputation, section 4.2.1: what is outside of attention and MLP is not cut."""
    model = Model(7e9, layers=32, width=4096)
    assert terms(model)["activations"] == 6 * 4096 * 4096 * 2
    assert terms(model, tensor_parallel=4)["activations"] == (2 + 1) * 4096 * 4096 * 2


def test_training_adapters_in_32_bit_takes_activations_of_32_bit() -> None:
    model = Model(7e9, layers=32, width=4096)
    half, full = terms(model, mode="lora"), terms(model, mode="lora", precision="fp32")
    assert full["activations"] == 2 * half["activations"]
    adapters = 32 * 18 * 4096 * 16  # LoRA: r * (in + out) of four matrices of attention and two of the MLP
    assert half["adapters"] == 2 * adapters
    for found in (half, full):  # ZeRO's 16 bytes a weight
        assert found["adapters"] + found["gradients"] + found["optimizer"] == 16 * adapters


@pytest.mark.parametrize(
    ("shared", "factor"),
    [(1, 34 + 5 * 96 * 2048 / 12288), (8, 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8))],
)
def test_activations_are_those_of_the_papers_equations(shared: int, factor: float) -> None:
    """Reducing Activation Recomputation, equations 1 and 2, GPT-3: 96 layers, 96 heads, 2048 tokens."""
    gpt3 = Model(175e9, layers=96, width=12288)
    found = terms(gpt3, mode="train", context=2048, checkpoint="none", tensor_parallel=shared)
    assert found["activations"] == pytest.approx(96 * 2048 * 12288 * factor)
    less = terms(gpt3, mode="train", context=2048, checkpoint="selective", tensor_parallel=shared)
    least = terms(gpt3, mode="train", context=2048, checkpoint="full", tensor_parallel=shared)
    assert least["activations"] < less["activations"] < found["activations"]


def test_qlora_keeps_its_frozen_weights_in_half_a_byte() -> None:
    """QLoRA, section 1: 65 billion weights on one GPU of 48 GB, which 16 bit does not allow (780 GB)."""
    found = size(Model(65e9, layers=80, width=8192), ModelRun("lora", "int4", context=512, checkpoint="full"))
    assert found.per_gpu_mib < 48 * 1024
    whole = terms(Model(65e9, layers=80, width=8192), mode="train", context=512)
    assert whole["weights"] + whole["gradients"] + whole["optimizer"] > 780e9


def test_what_nobody_said_is_estimated_and_told() -> None:
    found = size(Model(7e9), ModelRun())
    assert (found.model.layers, found.model.width) == (33, 4224)  # Llama 7B: 32 and 4096
    assert any("12 * layers * width^2" in text for text in found.assumed)
    assert size(Model(7e9, 32, 4096, 1024), ModelRun()).assumed == ()
    for model, told in (
        (Model(7e9, layers=32, kv_width=1024), "width 4224"),
        (Model(7e9, width=4096, kv_width=1024), "35 layers"),
    ):
        [assumed] = size(model, ModelRun()).assumed
        assert assumed.startswith(told)


@pytest.mark.parametrize("mode", MODES)
def test_more_weights_never_take_less_where_all_else_is_estimated(mode: str) -> None:
    sizes = [size(Model(1e6 * 1.01**step), ModelRun(mode, batch=64)).per_gpu_mib for step in range(1400)]  # type: ignore[arg-type]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("seed", range(60))
def test_more_of_anything_never_takes_less(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - so that a failure comes back
    weights, mode, precision = 10 ** chance.uniform(6, 12), chance.choice(MODES), chance.choice(TRAINED_IN)
    batch, context, shared = chance.randint(1, 64), chance.randint(1, 32768), chance.choice([1, 2, 4, 8])

    def needs(**more: object) -> int:
        values = {
            "mode": mode,
            "precision": precision,
            "batch": batch,
            "context": context,
            "tensor_parallel": shared,
            **more,
        }
        return size(Model(weights, 12, 4096), ModelRun(**values)).per_gpu_mib  # type: ignore[arg-type]

    def shaped(rank: int = 16, **more: int) -> int:
        shape = {"layers": 12, "width": 4096, "kv_width": 1024, "vocabulary": 32000, **more}
        run = ModelRun(mode, precision, batch, context, shared, rank=rank)  # type: ignore[arg-type]
        return size(Model(weights, **shape), run).per_gpu_mib

    plain = shaped()
    for larger in ({"layers": 13}, {"width": 4224}, {"kv_width": 1152}, {"vocabulary": 32001}):
        assert plain <= shaped(**larger)
    assert plain <= shaped(rank=17)
    here = needs()
    assert here <= needs(batch=batch + 1)
    assert here <= needs(context=context + 1)
    assert here >= needs(tensor_parallel=shared * 2)
    assert here <= needs(precision="fp32")
    found = size(Model(weights, 12, 4096), ModelRun(mode, precision, batch, context, shared))  # type: ignore[arg-type]
    assert found.total_bytes == sum(one.bytes for one in found.terms) * shared


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"mode": "tune"}, "unknown --mode 'tune'"),
        ({"precision": "fp4"}, "unknown --precision 'fp4'"),
        ({"mode": "train", "precision": "int8"}, "--mode train in int8"),
        ({"batch": 0}, "--batch is 0, wanted 1 or more"),
        ({"context": 10**400}, "wanted at most 1000000000"),
        ({"rank": 0}, "--rank is 0, wanted 1 or more"),
        ({"optimizer": "adam"}, "unknown --optimizer"),
        ({"kv_precision": "4"}, "unknown --kv-precision"),
    ],
)
def test_what_can_not_be_is_told(run: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        size(Model(7e9), ModelRun(**run))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["layers", "width", "kv_width", "vocabulary"])
def test_a_shape_below_nothing_is_refused(shape: str) -> None:
    with pytest.raises(UsageError, match=f"--{shape.replace('_', '-')} is -1"):
        size(Model(7e9, **{shape: -1}), ModelRun())


def test_a_number_of_weights_may_have_its_letter() -> None:
    numbers = [parameters(text) for text in ("7e9", "7e+9", "7B", "0.5b", "350M")]
    assert numbers == [7e9, 7e9, 7e9, 5e8, 350e6]
    for text in ("", "seven", "7", "1.2.3B", "-7B", "7e99"):
        with pytest.raises(UsageError, match="is no number of weights"):
            parameters(text)
    assert BYTES["int4"] > 0.5  # its scales count


def test_a_request_asks_each_gpu_for_its_share() -> None:
    found = size(Model(70e9, 80, 8192, 1024), ModelRun(tensor_parallel=8))
    wanted = to_request(found, Request(vcpu=8))
    assert (wanted.vcpu, wanted.count, wanted.gpu_memory_mib) == (8, Span(8), Span(found.per_gpu_mib))
