"""An exported model is a folder that transformers loads, or it is not there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from corpus.model_folders.folder import folder_problems
from corpus.model_folders.inputs import name_model_inputs
from corpus.tokens.chat_template import CHAT_TEMPLATE
from evaluation.release.export import card_of, check_elsewhere, export
from evaluation.release.quantized import written_here
from evaluation.results.artifacts import Artifact
from infra.errors import StageError


@pytest.fixture
def artifact(model_dir: Path, tmp_path: Path) -> Artifact:
    """A model of an earlier version: its tokenizer does not name the model's inputs."""
    folder = tmp_path / "sft" / "0123456789abcdef"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("model_input_names", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "aux").mkdir(exist_ok=True)
    (folder / "aux" / "metrics.jsonl").write_text("{}")
    (folder / "trained_sequences.json").write_text("{}")
    return Artifact("sft", folder, None)


def test_what_is_exported_loads_and_has_its_card(
    artifact: Artifact, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card, card_from = card_of(artifact, None)
    loaded = export(artifact, card, tmp_path / "my hub")
    assert "not a valid Python identifier" not in capfd.readouterr().err
    # transformers 4 returned token_type_ids too, which generate rejects.
    assert set(AutoTokenizer.from_pretrained(tmp_path / "my hub")("Why?")) == {"input_ids", "attention_mask"}
    assert (loaded.architecture, card_from) == ("LlamaForCausalLM", "") and loaded.tokens >= 1
    assert loaded.chat_template and loaded.checks[-1] == 'pipeline("text-generation", model=folder)'
    assert run_card(tmp_path / "my hub", monkeypatch)["output"].shape[1] > 1
    names = {path.name for path in (tmp_path / "my hub").rglob("*")}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not {"aux", "trained_sequences.json"} & names
    assert (tmp_path / "my hub" / "README.md").read_text().startswith("---\n")


def run_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the snippet of a model's card in its folder, and return its variables."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        exec(snippet, variables)
    return variables


@pytest.mark.usefixtures("loaded_by_a_fork")
def test_a_reward_model_fills_an_empty_folder_that_is_there(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory, say: `stemma export reward_model .`"""
    AutoModelForSequenceClassification.from_pretrained(artifact.folder, num_labels=1).save_pretrained(artifact.folder)
    model = Artifact("reward_model", artifact.folder, None)
    here = tmp_path / "here"
    (here / ".here.unfinished" / "of a kill").mkdir(parents=True)
    monkeypatch.chdir(here)
    before = here.stat().st_ino
    loaded = export(model, card_of(model, None)[0], Path())
    assert here.stat().st_ino == before and not [path for path in here.iterdir() if path.name.startswith(".")]
    assert (loaded.architecture, loaded.tokens) == ("LlamaForSequenceClassification", 0)
    assert loaded.checks[-1] == 'pipeline("text-classification", model=folder)'
    assert "pipeline_tag: text-classification" in (here / "README.md").read_text()
    assert run_card(here, monkeypatch)["model"].num_labels == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_weights_load_in_a_process_that_knows_nothing_of_them(
    kind: Literal["int8", "fp8"], artifact: Artifact, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "fp8":
        request.getfixturevalue("loaded_by_a_fork")
    loaded = export(artifact, "# card", tmp_path / "hub", kind)
    assert 0 < loaded.deviation < loaded.largest_logit
    assert loaded.checks[-1] == 'pipeline("text-generation", model=folder)'
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("# card\n\n## Quantized weights") and f"{loaded.deviation:.3g}" in card
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "torchao"
    before, after = (folder / "model.safetensors" for folder in (artifact.folder, tmp_path / "hub"))
    assert after.stat().st_size < 0.8 * before.stat().st_size
    # Half of a step of 1/127 of a row's largest weight, and of E4M3's 3 bits of a weight.
    original = dict(AutoModelForCausalLM.from_pretrained(artifact.folder).named_parameters())
    rounded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hub").named_parameters())
    for name in (name for name in original if name.endswith("proj.weight")):
        weight, largest = original[name], original[name].abs().amax(1, keepdim=True)
        step = largest / 127 if kind == "int8" else (weight.abs() / 8).clamp(min=largest / 448 / 512)
        error = (rounded[name].dequantize() - weight).abs()
        assert float(error.detach().max()) > 0 and bool((error <= 0.51 * step + 1e-7).all()), name
    assert not any(folder_problems(artifact.folder, "model")) and any(folder_problems(tmp_path / "hub", "model"))


def test_without_llama_cpp_or_linear_layers_there_is_a_reason(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(StageError, match=r"no_converter|convert_hf_to_gguf\.py in .*LLAMA_CPP") as caught:
        export(artifact, "# card", tmp_path / "hub", "gguf")
    assert "clone https://github.com/ggml-org/llama.cpp" in caught.value.problems[0].fix
    shape = GPT2Config(
        vocab_size=AutoConfig.from_pretrained(artifact.folder).vocab_size, n_embd=32, n_layer=1, n_head=2
    )
    GPT2LMHeadModel(shape).save_pretrained(artifact.folder)
    with pytest.raises(StageError, match="GPT2LMHeadModel has no linear layers"):
        export(artifact, "# card", tmp_path / "hub", "int8")
    assert not (tmp_path / "hub").exists()


def test_a_format_that_no_tool_writes_here_is_refused_with_the_one_that_does() -> None:
    assert written_here("gguf") == "gguf"
    for kind, modifier in (("awq", "AWQModifier"), ("gptq", "GPTQModifier")):
        with pytest.raises(StageError, match=f"{kind.upper()} is not written here") as caught:
            written_here(kind)
        assert "pip install llmcompressor" in caught.value.problems[0].fix and modifier in caught.value.problems[0].fix


@pytest.mark.usefixtures("loaded_by_a_fork")
def test_other_logits_than_the_model_s_are_no_export(artifact: Artifact, tmp_path: Path) -> None:
    """As of a config.json whose keys another version of transformers reads otherwise."""
    served = tmp_path / "served"
    shutil.copytree(artifact.folder, served)
    name_model_inputs(served)
    model = AutoModelForCausalLM.from_pretrained(served)
    model.get_output_embeddings().weight.data.mul_(1.5)
    model.save_pretrained(served)
    with pytest.raises(StageError, match="differ from the model's by up to") as caught:
        check_elsewhere(served, artifact.folder)
    assert [problem.code for problem in caught.value.problems] == ["other_logits"]


@pytest.mark.parametrize(
    ("config", "settings", "names"),
    [
        ({"model_type": "gpt2"}, {}, ["input_ids", "attention_mask"]),
        ({}, {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}, ["input_ids", "attention_mask"]),
        ({"type_vocab_size": 2}, {}, None),
    ],
)
def test_a_tokenizer_names_the_inputs_that_its_model_takes(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], names: list[str] | None
) -> None:
    """GPT-2 accepts token_type_ids in silence, and adds the embedding of token 0 to each of a text."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **settings}))
    name_model_inputs(tmp_path)
    found = json.loads(path.read_text())
    assert (found.get("model_input_names"), found["tokenizer_class"]) == (names, "PreTrainedTokenizerFast")
    written = path.stat()
    name_model_inputs(tmp_path)
    assert path.stat().st_mtime_ns == written.st_mtime_ns


@pytest.mark.usefixtures("loaded_by_a_fork")
def test_what_does_not_load_leaves_nothing(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(StageError) as caught:
        export(artifact, "# card", tmp_path / "hub")
    assert caught.value.problems[0].code == "not_loadable"
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_a_model_s_own_code_is_refused_before_the_folder_is_tried(artifact: Artifact, tmp_path: Path) -> None:
    config = artifact.folder / "config.json"
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **code}))
    with pytest.raises(StageError) as caught:
        export(artifact, "# card", tmp_path / "hub")
    assert [problem.code for problem in caught.value.problems] == ["foreign_code"]


def test_a_folder_with_something_in_it_is_left_alone(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        export(artifact, "# card", tmp_path / "sft")
    assert caught.value.problems[0].code == "not_empty"
