"""Muon against its published algorithm in NumPy, and which weights it steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from training.config import ModelConfig, MuonConfig, OptimizerConfig
from training.model.models import build, hf_config
from training.trainer.muon import orthogonal
from training.trainer.optimizers import optimizer_of

Matrix = NDArray[np.float64]
WITH_MUON = OptimizerConfig(
    learning_rate=1e-3,
    weight_decay=0.1,
    embedding_scale=20,
    head_scale=4,
    muon=MuonConfig(learning_rate=0.05, momentum=0.9),
)


def _newton_schulz(matrix: Matrix, steps: int) -> Matrix:
    """Jordan et al. 2024, listing 1."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _published(weight: Matrix, gradients: list[Matrix], lr: float, decay: float, momentum: float) -> Matrix:
    """The weight after some steps, as torch.optim.Muon (2.9) writes the algorithm."""
    buffer = np.zeros_like(weight)
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        step = _newton_schulz(momentum * buffer + (1 - momentum) * gradient, 5)
        rows, columns = weight.shape
        weight = weight * (1 - lr * decay) - lr * max(1, rows / columns) ** 0.5 * step
    return weight


def _model(**config: Any) -> nn.Module:
    sizes = {"layers": 2, "width": 16, "heads": 2, "positions": 8, "mlp_width": 40, "tie_embeddings": False}
    return build(hf_config(ModelConfig(**{**sizes, **config}), 32, {}), seed=1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_matrices_of_blocks_step_as_published_and_the_rest_as_by_adamw(family: str) -> None:
    model, apart = _model(family=family), _model(family=family)
    ours = optimizer_of(model, WITH_MUON)
    adamw = optimizer_of(apart, WITH_MUON.model_copy(update={"muon": None}))
    begun = {name: weight.detach().double().numpy().copy() for name, weight in model.named_parameters()}
    random = np.random.default_rng(3)
    gradients = {name: [random.normal(size=one.shape) for _ in range(3)] for name, one in begun.items()}
    for group in (*ours.param_groups, *adamw.param_groups):
        group["lr"] *= group["scale"]  # as the schedule sets it at its peak
    for step in range(3):
        for optimizer, network in ((ours, model), (adamw, apart)):
            for name, weight in network.named_parameters():
                weight.grad = torch.tensor(gradients[name][step], dtype=torch.float32)
            assert optimizer.step(lambda: 5.0) == 5.0
    of_adamw = dict(apart.named_parameters())
    stepped = 0
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and (".layers." in name or ".h." in name):
            # GPT-2's weights have their inputs first.
            turn = np.transpose if family == "gpt2" else np.asarray
            expected = _published(turn(begun[name]), [turn(one) for one in gradients[name]], 0.05, 0.1, 0.9)
            np.testing.assert_allclose(turn(weight.detach().numpy()), expected, atol=2e-4)
            stepped += 1
        else:
            assert torch.equal(weight, of_adamw[name]), name
    assert stepped == (14 if family == "llama" else 8)


def test_wide_and_tall_matrices_come_out_nearly_orthogonal_in_bf16_too() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 60), (3, 60, 24)):
        for compute in (torch.float32, torch.bfloat16):
            values = torch.linalg.svdvals(orthogonal(torch.randn(shape), 5, compute).float())
            assert values.shape == (3, 24)
            assert values.min() > 0.6
            assert values.max() < 1.3


def test_a_step_calls_its_closure_with_gradients_on_and_leaves_alone_what_has_none() -> None:
    model = _model(family="llama")
    frozen = model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    unseen = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = optimizer_of(model, WITH_MUON)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss
        loss.backward()
        unseen.grad = None
        return loss

    assert float(optimizer.step(closure)) > 0
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still == {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"}
    assert all(one is not frozen for group in optimizer.param_groups for one in group["params"])


def _scales(model: nn.Module) -> dict[int, float]:
    """The learning rate of each weight, by its id, as a multiple of the config's."""
    groups = optimizer_of(model, WITH_MUON).param_groups
    return {
        id(weight): group["lr"] * group["scale"] / WITH_MUON.learning_rate
        for group in groups
        for weight in group["params"]
    }


def test_embedding_head_and_matrices_have_rates_of_their_own() -> None:
    model = _model(family="llama")
    scales = _scales(model)
    assert scales[id(model.get_parameter("model.embed_tokens.weight"))] == 20
    assert scales[id(model.get_parameter("lm_head.weight"))] == 4
    assert scales[id(model.get_parameter("model.norm.weight"))] == 1
    assert scales[id(model.get_parameter("model.layers.0.mlp.up_proj.weight"))] == pytest.approx(50)
    tied = _model(family="llama", tie_embeddings=True)
    scales = _scales(tied)
    assert scales[id(tied.get_parameter("lm_head.weight"))] == 20, "one weight, one rate: the embedding's"
