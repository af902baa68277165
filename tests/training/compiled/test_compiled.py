"""Compiled training: the same result to rounding, and bit-identical after it was interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from infra.errors import Cancelled
from infra.launch.config import LaunchConfig
from infra.run import Run, read_journal
from tests.support.programs.command import REPOSITORY
from tests.support.programs.ranked import pretrain_in_ranks
from training.config import PretrainConfig
from training.core.hardware import Hardware
from training.pretrain import pretrain
from training.trainer.compiling import _is_private, plain_compiler_paths, wants_compile

CONFIG = PretrainConfig.model_validate(
    {
        "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
        "duration": "8 batches",
        "global_batch_tokens": 256,
        "checkpoint_every": "3 batches",
    }
)


Train = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def train(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, weights: Callable[[Path], dict[str, torch.Tensor]]
) -> Train:
    """Pretrains into `tmp_path`/name and gives the weights; the same `work` continues what is there."""

    def train(name: str, work: str, choice: str, **surroundings: Any) -> dict[str, torch.Tensor]:
        launch = LaunchConfig(device="cpu", threads=1, precision="fp32", compile=choice)  # type: ignore[arg-type]
        inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
        pretrain(CONFIG, inputs, tmp_path / name, Run(tmp_path / work, launch, **surroundings))
        return weights(tmp_path / name)

    return train


@pytest.mark.long
def test_compiling_moves_weights_by_rounding(train: Train) -> None:
    """The risk: a whole training adds up what one compiled step does otherwise. Single steps are in `make test`."""
    plain, compiled = train("plain", "plain.work", "off"), train("compiled", "compiled.work", "on")
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_a_compiled_training_resumes_to_the_bit(train: Train, journal: Any) -> None:
    """The risk: kernels that were compiled for another start of the same training round otherwise."""
    compiled = train("compiled", "compiled.work", "on")

    def stopped() -> bool:
        return len(journal.metric("train/loss")) >= 5

    with pytest.raises(Cancelled):
        train("again", "again.work", "on", journal=journal, is_cancelled=stopped)
    again = train("again", "again.work", "on")
    assert all(torch.equal(again[name], tensor) for name, tensor in compiled.items())


@pytest.mark.long
def test_compiled_ranks_end_with_the_weights_of_one_process(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, weights: Callable[[Path], dict[str, Any]]
) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    settings = {"duration": "6 batches", "global_batch_tokens": 256, "model": CONFIG.model.model_dump()}
    for name, count, launch in (("one", 1, {"compile": "off"}), ("two", 2, {"compile": "on"})):
        pretrain_in_ranks(count, settings, inputs, tmp_path / name, launch=launch)
    expected = weights(tmp_path / "one")
    for name, tensor in weights(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


IN_A_FOLDER_WITH_A_SPACE = """
import sys, sysconfig
import torch
from training.trainer.compiling import plain_compiler_paths
from torch._inductor import cpu_vec_isa
assert " " in sys.prefix and " " in torch.__file__, (sys.prefix, torch.__file__)
cpu_vec_isa.supported_vec_isa_list[:] = [cpu_vec_isa.VecAVX2()]
assert plain_compiler_paths()
assert torch.equal(torch.compile(lambda x: (x * 2).relu() + 1)(torch.arange(-2.0, 2.0)), torch.tensor([1.0, 1, 1, 3]))
"""


def python_in(folder: Path, temporary: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with this environment under another name: everything in it is then found there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(sys.prefix)
    temporary.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    return subprocess.run(
        [str(folder / "bin" / "python"), "-c", code],
        env={**env, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_a_folder_whose_name_a_shell_would_take_apart_compiles(tmp_path: Path) -> None:
    """The risk: one of the compiler's commands takes a path apart in spite of the links, whose rules are below."""
    folder = tmp_path / "o'brien's  models & $HOME"
    done = python_in(folder / ".venv", folder / "temporary files", IN_A_FOLDER_WITH_A_SPACE)
    assert done.returncode == 0, done.stderr[-3000:]
    # The cache is where it was asked for, under whatever name.
    assert list((folder / "temporary files").rglob("*.so"))


@pytest.mark.long
def test_a_training_in_a_folder_with_a_space_is_compiled(shards_dir: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    """The risk: one of the many commands of a whole model that a small function does not need."""
    code = f"""
from pathlib import Path
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig
from training.pretrain import pretrain
config = PretrainConfig.model_validate({CONFIG.model_dump(mode="json")!r})
inputs = {{"shards": Path({str(shards_dir)!r}), "tokenizer": Path({str(tokenizer_dir)!r})}}
journal = open({str(tmp_path / "journal")!r}, "w")
launch = LaunchConfig(device="cpu", threads=1, precision="fp32", compile="on")
run = Run(Path({str(tmp_path / "work")!r}), launch, journal=journal)
pretrain(config, inputs, Path({str(tmp_path / "out")!r}), run)
"""
    done = python_in(tmp_path / "a folder" / ".venv", tmp_path / "temporary files", code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line["name"] for line in read_journal(tmp_path / "journal") if line["kind"] == "event"} >= {"compiling"}
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_without_a_place_for_links_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a cache"))
    monkeypatch.setattr("training.trainer.compiling._is_private", lambda folder: False)
    assert not plain_compiler_paths()


def test_links_are_put_only_where_nobody_else_can(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not _is_private(open_to_all)
    assert not _is_private(tmp_path / "link")
    assert not _is_private(tmp_path / "not there" / "names")
    assert _is_private(tmp_path / "names")
    assert _is_private(tmp_path / "names")


def test_auto_compiles_sharded_models_by_the_same_rule_but_not_where_nobody_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.trainer.compiling._has_compiler", lambda: True)
    cpu, gpu = (Hardware(torch.device(device), bf16=True) for device in ("cpu", "cuda"))
    sharded = LaunchConfig(sharding="fsdp", processes=2)
    for launch in (LaunchConfig(processes=2), sharded):
        assert wants_compile(launch, cpu, flops=1e18)
        assert not wants_compile(launch, cpu, flops=1e12)
    assert not wants_compile(sharded, gpu, flops=1e25)
    assert wants_compile(LaunchConfig(sharding="fsdp", processes=2, compile="on"), gpu, flops=1.0)
    # Four minutes on a GPU: 47M parameters and 80M tokens.
    assert wants_compile(LaunchConfig(), gpu, flops=2.8e16)
    assert not wants_compile(LaunchConfig(), gpu, flops=2.8e15)


def test_layers_that_ranks_share_are_not_compiled() -> None:
    with pytest.raises(ValidationError, match="compile: auto or off"):
        LaunchConfig(tensor_parallel=2, processes=2, trainer="native", compile="on")
