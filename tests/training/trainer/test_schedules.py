"""Learning rates, weight-decay groups and fresh weights against the formulas of the papers that name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from training.config import ModelConfig, OptimizerConfig, ScheduleConfig
from training.model.initial.schemes import initialise
from training.model.models import build, hf_config
from training.trainer.optimizers import optimizer_of
from training.trainer.schedules import LearningRateSchedule

TOTAL, WARMUP = 100, 10


def _shares(**config: Any) -> list[float]:
    schedule = LearningRateSchedule.of(ScheduleConfig(warmup=f"{WARMUP} batches", **config), TOTAL, 1, 1)
    return [schedule.lr_multiplier(batch) for batch in range(TOTAL)]


def _theirs(make: Callable[..., Any], **settings: Any) -> list[float]:
    """transformers' factors; their warm-up begins with a batch at 0, and so is one batch behind."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL, **settings)
    return [scheduler.lr_lambdas[0](batch + (batch < WARMUP)) for batch in range(TOTAL)]


@pytest.mark.parametrize(
    ("decay", "theirs"),
    [
        ("cosine", get_cosine_schedule_with_warmup),
        ("linear", get_linear_schedule_with_warmup),
    ],
)
def test_cosine_and_linear_are_those_of_transformers(decay: str, theirs: Callable[..., Any]) -> None:
    assert _shares(decay=decay, final_share=0.0) == pytest.approx(_theirs(theirs), abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("total", [1, 2, 3, 20, 100])
def test_every_batch_learns_and_the_final_share_is_that_after_the_last(decay: str, final: float, total: int) -> None:
    given = {"decay": decay, "final_share": final, "warmup": "10 %", "decay_length": "10 %"}
    schedule = LearningRateSchedule.of(ScheduleConfig.model_validate(given), total, 1, 1)
    shares = [schedule.lr_multiplier(batch) for batch in range(total + 1)]
    assert all(share > 0 for share in shares[:-1])
    if decay in ("cosine", "linear", "wsd") and schedule.warmup < total:
        assert all(share > final for share in shares[schedule.warmup : -1])
        assert shares[-1] == pytest.approx(final, abs=1e-12)


def test_inverse_square_root_is_the_transformer_paper_s() -> None:
    for batch, share in enumerate(_shares(decay="inverse_sqrt", final_share=0.0), start=1):
        noam = min(batch**-0.5, batch * WARMUP**-1.5)
        assert share == pytest.approx(noam * WARMUP**0.5)


def test_warmup_stable_decay_falls_as_one_minus_the_root() -> None:
    shares = _shares(decay="wsd", decay_length="20 %", final_share=0.0)
    expected = _theirs(get_wsd_schedule, num_decay_steps=20, decay_type="1-sqrt", min_lr_ratio=0.0)
    assert shares == pytest.approx(expected, abs=1e-12)
    assert shares[WARMUP - 1 : 81] == [1.0] * (82 - WARMUP)


def test_warmup_stable_decay_falls_to_zero_unless_told_otherwise() -> None:
    assert ScheduleConfig(decay="wsd").final_share == 0
    assert ScheduleConfig(decay="wsd", final_share=0.2).final_share == 0.2
    assert ScheduleConfig(decay="cosine").final_share == 0.1
    for given in ({}, {"final_share": 0.1}):
        config = ScheduleConfig(decay="wsd", **given)
        assert ScheduleConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("decayed", "expected"),
    [
        ((), set()),
        (("matrices",), {"matrices"}),
        (("matrices", "embeddings", "norms", "biases"), {"matrices", "embeddings", "norms", "biases"}),
    ],
)
def test_weight_decay_keeps_to_its_groups(decayed: tuple[str, ...], expected: set[str]) -> None:
    model = build(hf_config(ModelConfig(family="gpt2", layers=1, width=8, heads=2, positions=8), 11, {}), seed=0)
    optimizer = optimizer_of(model, OptimizerConfig(weight_decay=0.3, decayed=decayed, embedding_scale=5.0))
    kinds = {}
    for name, weight in model.named_parameters():
        (group,) = [group for group in optimizer.param_groups if any(one is weight for one in group["params"])]
        kind = "embeddings" if name.startswith("transformer.wt") or "wpe" in name else "matrices"
        if weight.ndim == 1:
            kind = "biases" if name.endswith("bias") else "norms"
        assert group["weight_decay"] == (0.3 if kind in expected else 0.0), name
        assert group["scale"] == (5.0 if kind == "embeddings" else 1.0)
        kinds[kind] = True
    assert len(kinds) == 4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["gpt2", "plain", "small", "fan_in"])
def test_fresh_weights_have_the_spread_of_their_scheme(family: str, scheme: Any) -> None:
    layers, width, inner = 3, 128, 512
    config = ModelConfig(
        family=family, layers=layers, width=width, heads=4, mlp_width=inner, positions=64, tie_embeddings=False
    )
    model = build(hf_config(config, 1000, {}), seed=0)
    initialise(model, scheme, 0.006 if scheme == "plain" else 0.02)
    names = {
        "llama": ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens"),
        "gpt2": ("transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj", "transformer.wte"),
    }[family]
    found = [float(model.get_submodule(name).weight.std()) for name in (*names, "lm_head")]
    down = math.sqrt(2 * layers)
    expected = {
        "gpt2": (0.02, 0.02 / down, 0.02, 0.02),
        "plain": (0.006, 0.006, 0.006, 0.006),
        "small": (math.sqrt(2 / 5 / width), 2 / (layers * math.sqrt(width)), *[math.sqrt(2 / 5 / width)] * 2),
        "fan_in": (1 / math.sqrt(width), 1 / math.sqrt(inner) / down, 0.02, 0.0),
    }[scheme]
    assert found == pytest.approx(expected, rel=0.03)
    initialise(model, scheme, 0.006 if scheme == "plain" else 0.02, zero_residual=True)
    found = [float(model.get_submodule(name).weight.std()) for name in (*names, "lm_head")]
    assert found == pytest.approx((expected[0], 0.0, *expected[2:]), rel=0.03), "what adds to the residual stream"
    norms = [weight for name, weight in model.named_parameters() if weight.ndim == 1 and not name.endswith("bias")]
    assert all(bool((weight == 1).all()) for weight in norms)
