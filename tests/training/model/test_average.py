"""The mean of models and of checkpoints: the reference's numbers, a soup that is never worse, refusals by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from infra.store.states import kept_states
from training.average import average
from training.config import AverageConfig, PretrainConfig
from training.pretrain import train

LAUNCH = LaunchConfig(device="cpu", threads=1, precision="fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base_dir: Path, shards_dir: Path) -> Path:
    """A continued pretraining that keeps a state after every second batch."""
    out = tmp_path_factory.mktemp("trained")
    settings = {
        "duration": "6 batches", "global_batch_tokens": 256, "keep_state": {"every": "2 batches"},
        "optimizer": {"learning_rate": 3.0e-3}, "attention": "sequence",
    }  # fmt: skip
    inputs = {"model": base_dir, "shards": shards_dir, "tokenizer": base_dir}
    train(PretrainConfig.model_validate(settings), inputs, out, Run(out / "work", LAUNCH))
    return out


def moved(source: Path, out: Path, by: float) -> Path:
    """A model of the same shapes, each weight off by normal noise."""
    shutil.copytree(source, out)
    generator = torch.Generator().manual_seed(round(100 * by))
    weights = load_file(out / "model.safetensors")
    noisy = {name: value + by * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(noisy, out / "model.safetensors", {"format": "pt"})
    return out


def test_the_mean_of_states_is_torch_s_and_that_of_one_training(
    trained: Path, shards_dir: Path, tmp_path: Path
) -> None:
    from torch.optim.swa_utils import get_swa_avg_fn

    assert [state.batch for state in kept_states(trained)] == [2, 4, 6]
    inputs = {"model": trained, "shards": shards_dir}
    result = average(AverageConfig(states=3), inputs, tmp_path / "uniform", Run(tmp_path / "work", LAUNCH))
    average(
        AverageConfig(states=3, method="ema", decay=0.5), {"model": trained}, tmp_path / "ema", Run(tmp_path, LAUNCH)
    )
    last = load_file(trained / "model.safetensors")
    states = []
    for batch in (2, 4, 6):
        alone = tmp_path / f"{batch}"
        # A mean of two equal halves of weight 1 and nearly 0 is that state.
        few = AverageConfig(states=2 + (6 - batch) // 2, method="ema", decay=1e-9)
        if batch == 6:
            average(few, {"model": trained}, alone, Run(tmp_path, LAUNCH))
            torch.testing.assert_close(load_file(alone / "model.safetensors"), last)
        folder = next(state.folder for state in kept_states(trained) if state.batch == batch)
        held = load_file(folder / "rank0.safetensors")
        states.append(
            {name: next(held[key] for key in held if key.endswith(f".{name}") and "weights/" in key) for name in last}
        )
    running, mean = {name: value.clone() for name, value in states[0].items()}, get_swa_avg_fn()
    for count, state in enumerate(states[1:], 1):
        running = {name: mean(running[name], state[name], torch.tensor(count)) for name in running}
    torch.testing.assert_close(load_file(tmp_path / "uniform" / "model.safetensors"), running)
    expected = {name: (states[0][name] + 2 * states[1][name] + 4 * states[2][name]) / 7 for name in last}
    torch.testing.assert_close(load_file(tmp_path / "ema" / "model.safetensors"), expected)
    figures = result.figures
    assert figures["averaged"] == 3 and figures["validation_loss_best"] == pytest.approx(
        figures["validation_loss_batch_6"]
    )
    assert figures["validation_loss_batch_6"] < figures["validation_loss"] < figures["validation_loss_batch_2"]


def test_a_greedy_soup_leaves_out_what_would_spoil_it(trained: Path, shards_dir: Path, tmp_path: Path) -> None:
    inputs = {"model": moved(trained, tmp_path / "near", 1e-4), "spoilt": moved(trained, tmp_path / "far", 0.5)}
    inputs |= {"twin": trained, "shards": shards_dir}
    result = average(AverageConfig(method="greedy"), inputs, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
    figures = result.figures
    assert figures["members"] == 3 and 1 <= figures["averaged"] < 3
    assert figures["validation_loss"] <= figures["validation_loss_best"] < figures["validation_loss_spoilt"] - 0.05
    plain = average(AverageConfig(), inputs, tmp_path / "plain", Run(tmp_path / "work", LAUNCH)).figures
    assert plain["averaged"] == 3 and plain["validation_loss"] > figures["validation_loss"]


def test_other_shapes_and_tokenizers_are_refused_by_name(trained: Path, tmp_path: Path) -> None:
    shape = shutil.copytree(trained, tmp_path / "shape")
    weights = load_file(shape / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    sizes = {key: value[:64] if "up_proj" in key or "gate_proj" in key else value for key, value in weights.items()}
    sizes = {key: value[:, :64].contiguous() if "down_proj" in key else value for key, value in sizes.items()}
    save_file({key: value.contiguous() for key, value in sizes.items()}, shape / "model.safetensors", {"format": "pt"})
    settings = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(settings | {"intermediate_size": 64}))
    words = shutil.copytree(trained, tmp_path / "words")
    text = json.loads((words / "tokenizer.json").read_text())
    ids = text["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (words / "tokenizer.json").write_text(json.dumps(text))
    inputs = {"model": trained, "smaller": shape, "other": words}
    with pytest.raises(StageError) as caught:
        average(AverageConfig(), inputs, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
    problems = {problem.path: (problem.code, problem.message) for problem in caught.value.problems}
    assert (
        problems["average.inputs.smaller"][0] == "other_shapes"
        and name.split(".")[-1] in problems["average.inputs.smaller"][1]
    )
    assert (
        problems["average.inputs.other"][0] == "other_tokenizer" and "4 entries" in problems["average.inputs.other"][1]
    )
    for given, code in (({"model": trained}, "nothing_to_average"), (inputs | {"smaller": trained}, "other_tokenizer")):
        with pytest.raises(StageError) as caught:
            average(AverageConfig(), given, tmp_path / "out", Run(tmp_path / "work", LAUNCH))
        assert [problem.code for problem in caught.value.problems] == [code]
