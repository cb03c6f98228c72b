"""The memory of a model: figures that the papers give themselves, and what must hold for every model."""

import random

import pytest

from gpukiln.errors import UsageError
from gpukiln.offers.size import BYTES, MODES, TRAINED_IN, Model, Run, parameters, size


def terms(model: Model, **run: object) -> dict[str, int]:
    return {one.name: one.bytes for one in size(model, Run(**run)).terms}  # type: ignore[arg-type]


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
    found = size(Model(65e9, layers=80, width=8192), Run("lora", "int4", context=512, checkpoint="full"))
    assert found.per_gpu_mib < 48 * 1024
    whole = terms(Model(65e9, layers=80, width=8192), mode="train", context=512)
    assert whole["weights"] + whole["gradients"] + whole["optimizer"] > 780e9


def test_what_nobody_said_is_estimated_and_told() -> None:
    found = size(Model(7e9), Run())
    assert (found.model.layers, found.model.width) == (33, 4224)  # Llama 7B: 32 and 4096
    assert any("12 * layers * width^2" in text for text in found.assumed)
    assert size(Model(7e9, 32, 4096, 1024), Run()).assumed == ()


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
        return size(Model(weights, 12, 4096), Run(**values)).per_gpu_mib  # type: ignore[arg-type]

    here = needs()
    assert here <= needs(batch=batch + 1)
    assert here <= needs(context=context + 1)
    assert here >= needs(tensor_parallel=shared * 2)
    assert here <= needs(precision="fp32")
    found = size(Model(weights, 12, 4096), Run(mode, precision, batch, context, shared))  # type: ignore[arg-type]
    assert found.total_bytes == sum(one.bytes for one in found.terms) * shared


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"mode": "tune"}, "unknown --mode 'tune'"),
        ({"precision": "fp4"}, "unknown --precision 'fp4'"),
        ({"mode": "train", "precision": "int8"}, "--mode train in int8"),
        ({"batch": 0}, "--batch is 0, wanted 1 or more"),
        ({"optimizer": "adam"}, "unknown --optimizer"),
        ({"kv_precision": "4"}, "unknown --kv-precision"),
    ],
)
def test_what_can_not_be_is_told(run: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        size(Model(7e9), Run(**run))  # type: ignore[arg-type]


def test_a_number_of_weights_may_have_its_letter() -> None:
    assert [parameters(text) for text in ("7e9", "7B", "0.5b", "350M")] == [7e9, 7e9, 5e8, 350e6]
    for text in ("", "seven", "7", "1.2.3B", "-7B", "7e99"):
        with pytest.raises(UsageError, match="is no number of weights"):
            parameters(text)
    assert BYTES["int4"] > 0.5  # its scales count
