"""Adapters alone, as PEFT takes them: beside the base model they are the merged model."""

from __future__ import annotations

import contextlib
import json
import runpy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.release import adapters
from evaluation.release.adapters import export_adapters
from evaluation.release.export import card_of
from evaluation.results.artifacts import Artifact
from infra.errors import StageError
from infra.io.foreign import check_model
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.training.adapters.test_lora import SETTINGS
from tests.training.model.test_open_families import download
from training.adopt import import_model
from training.config import BaseModelConfig, SftConfig
from training.sft import sft

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="the adapters are tried with PEFT"),
    pytest.mark.usefixtures("loaded_by_a_fork"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported Qwen3, whose output layer is tied, without its chat template: it gets chat tokens that no text has
    trained."""
    folder = tmp_path_factory.mktemp("qwen3")
    download("qwen3", folder / "downloaded")
    run = Run(folder / "base.work", LaunchConfig(device="cpu", threads=1))
    (folder / "base").mkdir()
    config = BaseModelConfig(path=str(folder / "downloaded"), chat_template="stemma")
    import_model(config, {}, folder / "base", run)
    return folder / "base"


def tuned(base: Path, instructions: Path, out: Path, **changes: Any) -> Artifact:
    run = Run(out.parent / f"{out.name}.work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    config = SftConfig.model_validate(SETTINGS | {"duration": "2 batches"} | changes)
    out.mkdir()
    sft(config, {"model": base, "instructions": instructions}, out, run)
    return Artifact("sft", out, None)


def in_this_process(program: Path, *arguments: str) -> tuple[dict[str, Any], Any]:
    """The result of `run_elsewhere`, without the imports of a new process."""
    try_snippets = runpy.run_path(str(program))["try_snippets"]
    findings: dict[str, Any] = {}
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        try_snippets(*arguments, torch.get_num_threads(), findings)
        return findings, np.load("logits.npy")


@pytest.mark.parametrize("where", ["here", pytest.param("elsewhere", marks=pytest.mark.long)])
def test_peft_loads_them_beside_the_base_model(
    base: Path, instructions_dir: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "here":
        monkeypatch.setattr(adapters, "run_elsewhere", in_this_process)
    model = tuned(base, instructions_dir, tmp_path / "sft", start_share=0.25, lora={"rank": 3, "alpha": 9.0})
    loaded = export_adapters(model, card_of(model, None)[0], tmp_path / "adapters", str(base))
    assert loaded.checks[-1] == "merge_and_unload()" and loaded.base == str(base) and loaded.rows == 3
    # Adapters without an effect would pass too.
    with pytest.raises(StageError, match=r"other_logits|differ from the merged model's"):
        other = Artifact("sft", model.folder, None)
        (model.folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
        export_adapters(other, "", tmp_path / "wrong", str(base))
    assert not (tmp_path / "wrong").exists()
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "LICENSE", "README.md"} <= names
    assert "chat_template.jinja" in names and not {"config.json", "model.safetensors", "aux"} & names
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert f'base_model: "{base}"' in card or f"base_model: {base}" in card
    assert "PeftModel.from_pretrained(AutoModelForCausalLM" in card
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert list(config["trainable_token_indices"]) == ["embed_tokens"] and config["r"] == 3
    with pytest.raises(StageError, match=r"adapters of .*not a model") as caught:
        check_model(tmp_path / "adapters", "base_model.path")
    assert caught.value.problems[0].code == "adapter" and "merge_and_unload" in caught.value.problems[0].fix


def test_without_adapters_there_are_none_to_export(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="has no adapters") as caught:
        export_adapters(Artifact("base_model", base, None), "", tmp_path / "out", str(base))
    assert caught.value.problems[0].code == "no_adapters" and not (tmp_path / "out").exists()
