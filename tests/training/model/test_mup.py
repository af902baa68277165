"""µP: rates and spreads by width, and what they are for: steps of the same size in what a model says, at any width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from training.config import ModelConfig, OptimizerConfig, PretrainConfig
from training.model.models import build, hf_config
from training.trainer.optimizers import optimizer_of

BASE, HEAD = 32, 16
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _model(width: int, base_width: int | None, **config: Any) -> PreTrainedModel:
    sizes = {"layers": 2, "width": width, "heads": width // HEAD, "positions": 64, "tie_embeddings": False}
    model = ModelConfig.model_validate({"family": "llama", "init_std": 0.1} | sizes | config)
    return build(hf_config(model, 256, SPECIAL), 17, model.init, model.init_std, base_width=base_width)


def _optimizer(**keys: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"learning_rate": 0.01, **keys})


def _groups(model: PreTrainedModel, config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """(rate as a multiple, decay a step as a multiple of the rate) of each weight by name."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        names[id(weight)]: (group["scale"], group["scale"] * group["weight_decay"])
        for group in optimizer_of(model, config).param_groups
        for weight in group["params"]
    }


def test_rates_and_spreads_are_those_of_table_3() -> None:
    wide, base = _model(4 * BASE, BASE), _model(BASE, BASE)
    plain = _model(BASE, None)
    assert all(torch.equal(a, b) for a, b in zip(base.parameters(), plain.parameters(), strict=True))
    config = _optimizer(mup_base_width=BASE, embedding_scale=5, head_scale=2, decayed=["matrices", "embeddings"])
    ours, theirs = _groups(wide, config), _groups(base, config)
    shrinks = {"model.embed_tokens.weight": 1.0, "model.norm.weight": 1.0, "lm_head.weight": 4.0}
    shrinks["model.layers.0.mlp.down_proj.weight"] = shrinks["model.layers.1.self_attn.q_proj.weight"] = 4.0
    for name, by in shrinks.items():
        assert ours[name][0] == pytest.approx(theirs[name][0] / by)
        assert ours[name][1] == pytest.approx(theirs[name][1]), "decay a step"
    assert theirs["lm_head.weight"][0] == 2 and theirs["model.embed_tokens.weight"][0] == 5
    no_head = _groups(wide, _optimizer(mup_base_width=BASE, embedding_scale=5))
    assert no_head["lm_head.weight"][0] == pytest.approx(5 / 4) and no_head["model.embed_tokens.weight"][0] == 5
    spreads = {"model.embed_tokens.weight": 0.1, "lm_head.weight": 0.1 / 4}
    spreads |= {"model.layers.0.mlp.up_proj.weight": 0.05, "model.layers.0.mlp.down_proj.weight": 0.05 / math.sqrt(4)}
    for name, spread in spreads.items():
        assert float(wide.get_parameter(name).detach().std()) == pytest.approx(spread, rel=0.03)


def _moved(width: int, config: OptimizerConfig) -> float:
    """How far the logits of a fresh model move in four steps on one batch, root mean square."""
    # With an output layer that begins at zero (appendix D.2) no random part of it covers what is learnt.
    model = _model(width, config.mup_base_width, init="fan_in")
    optimizer = optimizer_of(model, config)
    for group in optimizer.param_groups:
        group["lr"] *= group["scale"]
    ids = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids).logits
    for _ in range(4):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(ids).logits - before).pow(2).mean().sqrt())


def test_what_a_model_says_moves_alike_at_any_width() -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1; without µP wider models move further."""
    mup, plain = _optimizer(mup_base_width=BASE, learning_rate=4e-3), _optimizer(learning_rate=4e-3)
    small, large = 2 * BASE, 16 * BASE
    assert 0.7 < _moved(large, mup) / _moved(small, mup) < 1.4
    assert _moved(large, plain) / _moved(small, plain) > 3


def test_what_mup_cannot_have_is_refused() -> None:
    for model, message in (
        ({"preset": "llama-nano", "tie_embeddings": True}, "tie_embeddings: false"),
        ({"preset": "llama-nano", "tie_embeddings": False, "init": "small"}, "expected model.init"),
    ):
        with pytest.raises(ValidationError, match=message):
            PretrainConfig.model_validate({"model": model, "optimizer": {"mup_base_width": 32}})
