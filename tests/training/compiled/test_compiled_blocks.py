"""Models that ranks share out, compiled block by block: nothing changes but by rounding."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.utils import counters

from infra.launch.config import LaunchConfig
from tests.support.programs.ranked import Prepare, pretrain_in_ranks, training_process
from tests.training.distributed.layouts import assert_close, assert_goes_on, values_of
from tests.training.distributed.test_groups_of_ranks import SETTINGS
from tests.training.model.test_families import LENGTH, SPECIAL, values_of_family

ALONE = {"device": "cpu", "threads": 1, "precision": "fp32", "sharding": "fsdp", "offload": True}
"""One process that is sharded nevertheless."""
Recompute = Literal["none", "selective", "full"]


def _pair(values: dict[str, Any], recompute: Recompute, kernel: str) -> tuple[Any, Any]:
    """The same model twice, its weights sharded: as it is, and compiled block by block."""
    from training.config import ModelConfig
    from training.core.hardware import prepare
    from training.distributed.parallel import parallelize
    from training.model.blocks import checkpoint_activations, compile_blocks
    from training.model.models import build, hf_config
    from training.train_modules.language_model import LanguageModel

    launch = LaunchConfig.model_validate(ALONE)
    hardware = prepare(launch)
    found = []
    for compiled in (False, True):
        network = build(hf_config(ModelConfig(transformers=values), 320, SPECIAL), 1, "plain", 0.2)
        network.set_attn_implementation(kernel)
        model = LanguageModel(network, hardware)
        checkpoint_activations(model, recompute)
        if compiled:
            compile_blocks(model)
        parallelize(model, launch, hardware)
        found.append(model)
    return found[0], found[1]


def _batch(rows: int = 3, length: int = LENGTH) -> dict[str, torch.Tensor]:
    from training.model.documents import positions_within

    ids = torch.randint(4, 320, (rows, length))
    documents = torch.stack([(torch.arange(length) >= begin).int() for begin in (5, 8, 17)[:rows]])
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "documents": documents,
        "position_ids": positions_within(documents),
    }


def _gradient(weight: Any) -> torch.Tensor:
    """Nothing where no token came to an expert."""
    return torch.zeros(weight.shape) if weight.grad is None else weight.grad.full_tensor()


def _hold(plain: Any, compiled: Any, shapes: Sequence[tuple[int, int]] = ((3, LENGTH),) * 2) -> None:
    """Batches of these shapes: losses and gradients of one are those of the other."""
    for shape in shapes:
        batch = _batch(*shape)
        losses = []
        for model in (plain, compiled):
            model.zero_grad()
            losses.append(model.loss(model(batch), batch))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled.losses(batch), plain.losses(batch), rtol=1e-5, atol=1e-5)
        ours, theirs = dict(compiled.named_parameters()), dict(plain.named_parameters())
        assert [*ours] == [*theirs], "weights keep their names"
        for name, weight in ours.items():
            found, expected = (_gradient(one) for one in (weight, theirs[name]))
            torch.testing.assert_close(
                found, expected, rtol=1e-3, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
            )


def _run_graphs_as_they_are(rank: int = 0) -> None:
    """From now on graphs are found, shared and differentiated as for any backend, but no kernel is made of them: that
    takes most of the time."""
    compiler = torch.compile
    torch.compile = lambda function: compiler(function, backend="aot_eager")  # type: ignore[assignment]


def _in_process(families: list[str], recompute: Recompute, kernel: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """What differs, and how many graphs were compiled of each family, and what broke them."""
    found = {}
    family = ""
    _run_graphs_as_they_are()
    try:
        for family in families:
            counters.clear()
            torch._dynamo.reset()
            _hold(*_pair(values_of_family(family), recompute, kernel))
            found[family] = (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    except BaseException:
        return f"{family}: {traceback.format_exc()}", found
    return "", found


ODD = [(3, 31), (2, 17), (1, 29), (3, 23), (2, 11), (1, 19)]
"""Rows and lengths."""


def _odd_shapes() -> tuple[str, list[int]]:
    """What differs, and the graphs, of blocks and loss, that were compiled until each shape."""
    graphs: list[int] = []
    _run_graphs_as_they_are()
    counters.clear()
    try:
        plain, compiled = _pair(values_of_family("llama"), "none", "sdpa")
        compiled.compiles_blocks = True  # the loss too
        for shape in ODD:
            _hold(plain, compiled, [shape])
            graphs.append(counters["stats"]["unique_graphs"])
    except BaseException:
        return traceback.format_exc(), graphs
    return "", graphs


def _graphs(families: list[str], recompute: Recompute = "none", kernel: str = "sdpa") -> dict[str, tuple[int, int]]:
    """`_in_process` in a process of its own: a group of ranks is there for as long as a process is."""
    found: dict[str, tuple[int, int]] = _returned(_in_process, families, recompute, kernel)
    return found


def _returned(function: Callable[..., tuple[str, Any]], *arguments: Any) -> Any:
    process = training_process(function, *arguments)
    try:
        assert process.wait() is not None, "no answer"
        wrong, found = process.returned()
    finally:
        process.kill()
    assert not wrong, wrong
    return found


@pytest.mark.long
@pytest.mark.slow
def test_odd_shapes_are_not_compiled_again_and_again() -> None:
    """As at the end of a batch that microbatches do not divide: a graph for the first shape, for any other, and for one
    row, of blocks and of the loss each."""
    graphs = _returned(_odd_shapes)
    assert graphs[-1] <= 6 and graphs[2:] == [graphs[-1]] * 4


def test_layers_of_one_kind_share_one_graph() -> None:
    """Gemma 3's two layers look back differently far, and rotate positions differently; both are handed to them."""
    assert _graphs(["llama", "gemma3_text"]) == {"llama": (1, 0), "gemma3_text": (1, 0)}


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"sharding": "fsdp", "trainer": "native"}),
    "fsdp, composer": (2, {"sharding": "fsdp"}),
    "zero2": (2, {"sharding": "zero2", "recompute": "selective"}),
    "zero1": (2, {"sharding": "zero1"}),
    "hsdp": (4, {"sharding": "hsdp", "shard_ranks": 2, "trainer": "native"}),
    "offload": (2, {"sharding": "fsdp", "offload": True, "recompute": "full"}),
}
"""Ranks, and their launch section beside `compile`."""
Weights = Callable[[Path], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _train(
    way: str, choice: str, inputs: dict[str, Path], out: Path, prepare: Prepare | None = None, **launch: Any
) -> list[dict[str, Any]]:
    count, given = WAYS[way]
    given = {**given, "compile": choice, **launch}
    return pretrain_in_ranks(count, SETTINGS, inputs, out, launch=given, prepare=prepare)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "precision"),
    [("fsdp", "fp32"), ("fsdp", "bf16"), ("fsdp", "fp16"), ("zero2", "fp16"), ("hsdp", "bf16"), ("offload", "bf16")],
)
def test_compiled_ranks_train_as_uncompiled_ones(
    way: str, precision: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: a layer whose weights are gathered outside of what is compiled computes with what was there before."""
    told = {
        choice: _train(way, choice, inputs, tmp_path / choice, prepare=_run_graphs_as_they_are, precision=precision)
        for choice in ("off", "on")
    }
    for name, close in (("train/loss", 1e-3), ("train/grad_norm", 2e-2), ("validation/sample_loss", 1e-3)):
        close = close if precision != "fp32" else 1e-3
        assert values_of(told["on"], name) == pytest.approx(values_of(told["off"], name), rel=close), name
    assert any("compiling" in line.get("message", "") for line in told["on"])
    if precision == "fp32":
        assert_close(weights(tmp_path / "on"), weights(tmp_path / "off"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other"),
    [
        ("fsdp", "fsdp, composer"),
        ("zero2", "hsdp"),
        ("zero1", "fsdp"),
        ("hsdp", "zero1"),
        ("offload", "zero2"),
    ],
)
def test_each_compiled_way_goes_on_to_the_bit_and_into_any_other_uncompiled(
    way: str, other: str, inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The risk: what is compiled when a training goes on rounds otherwise than what was compiled when it began."""

    def train(name: str, out: Path) -> list[dict[str, Any]]:
        return _train(name, "off" if name == other else "on", inputs, out)

    one = tmp_path / "one", pretrain_in_ranks(1, SETTINGS, inputs, tmp_path / "one", launch={"compile": "off"})
    assert_goes_on(train, way, other, one, tmp_path / "model", weights)
