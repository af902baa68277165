"""Folders whose weights do not fit: told apart by their files, refused by every loader, never drawn at random."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from corpus.cleaning.people.toxicity_scorers import ClassifierScorer
from corpus.model_folders.folder import folder_problems
from corpus.model_folders.pretrained import load_pretrained_model, weights_problems
from evaluation.generation.language_model import load_model
from flows.config.graph import graph
from flows.config.read import load
from flows.planning.needs import model_folder_problems
from infra.errors import ConfigError, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run, open_journal, read_journal
from tasks.building.payloads import check_payload
from tests.corpus.model_folders.damage import CPU, Weights, adopted, config, deepseek, edit, rewrite, without
from training.adopt import import_model
from training.config import BaseModelConfig
from training.train_modules.scorer import load_scorer


def classifier(folder: Path) -> None:
    without("lm_head")(folder)
    rewrite(folder, lambda weights: weights | {"score.weight": torch.zeros(1, 8)})


def bare_trunk(folder: Path) -> None:
    without("lm_head")(folder)
    rewrite(folder, lambda weights: {name.removeprefix("model."): one for name, one in weights.items()})


def not_a_number(folder: Path) -> None:
    def poisoned(weights: Weights) -> Weights:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
        return weights

    rewrite(folder, poisoned)


def quantized(method: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, quantization_config={"quant_method": method})


def pointer(name: str) -> Callable[[Path], None]:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"

    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    LlamaForCausalLM(config(tie_word_embeddings=False)).save_pretrained(folder, max_shard_size="1KB")


def lacks_a_shard(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-00002-of-*"))[0].unlink()


def lacks_the_index(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").unlink()


def lacks_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


BY_FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "fp8": (quantized("fp8"), "quantized_model", "quantized by FP8"),
    "gptq": (quantized("gptq"), "quantized_model", "quantized by GPTQ"),
    "awq": (quantized("awq"), "quantized_model", "quantized by AWQ"),
    "bitsandbytes": (quantized("bitsandbytes"), "quantized_model", "quantized by bitsandbytes"),
    "compressed-tensors": (quantized("compressed-tensors"), "quantized_model", "quantized by compressed-tensors"),
    "mxfp4": (quantized("mxfp4"), "quantized_model", "quantized by MXFP4"),
    "a pointer of git-LFS": (pointer("model.safetensors"), "lfs_pointer", "a pointer of git-LFS"),
    "a tokenizer that is one": (pointer("tokenizer.json"), "lfs_pointer", "tokenizer.json is a pointer of git-LFS"),
    "cut short": (cut_short, "bad_model", "cut short or damaged"),
    "a missing shard": (lacks_a_shard, "missing_shard", "model-00002-of-"),
    "no index": (lacks_the_index, "no_index", "expected model.safetensors or model.safetensors.index.json"),
    "no tokenizer": (lacks_the_tokenizer, "no_tokenizer", "expected the model's tokenizer"),
}

BY_WEIGHTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no output layer": (without("lm_head"), "weights_do_not_fit", r"; missing: lm_head.weight \(correct"),
    "a missing layer": (
        without("layers.1.mlp"),
        "weights_do_not_fit",
        "; missing: model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate",
    ),
    "more layers": (
        lambda folder: edit(folder, num_hidden_layers=3),
        "weights_do_not_fit",
        r"; missing: model.layers.2.*up_proj.weight, .* and 4 more \(correct",
    ),
    "fewer layers": (
        lambda folder: edit(folder, num_hidden_layers=1),
        "weights_do_not_fit",
        "; left over: model.layers.1.input",
    ),
    "a classifier": (classifier, "weights_do_not_fit", r"; missing: lm_head.weight; left over: score.weight \(correct"),
    "a bare trunk": (bare_trunk, "weights_do_not_fit", r"; missing: lm_head.weight \(correct"),
    "other vocabulary": (
        lambda folder: edit(folder, vocab_size=9),
        "weights_do_not_fit",
        r"; of another shape: lm_head.weight is \[6, 8\], not \[9, 8\]",
    ),
    "other width": (lambda folder: edit(folder, intermediate_size=16), "weights_do_not_fit", r"and 1 more \(correct"),
    "a head that config.json ties": (
        lambda folder: edit(folder, tie_word_embeddings=True),
        "head_not_tied",
        "config.json ties lm_head.weight to model.embed_tokens.weight, .* other numbers",
    ),
}


@pytest.mark.parametrize("name", BY_FILES)
def test_files_tell_what_a_folder_is(folder: Path, tmp_path: Path, name: str) -> None:
    damage, code, message = BY_FILES[name]
    damage(folder)
    [problem] = folder_problems(folder, "base_model.path", tokenizer=True)
    assert (problem.code, problem.path) == (code, "base_model.path")
    assert message in problem.message and problem.fix
    with pytest.raises(StageError) as refused:
        adopted(folder, tmp_path / "out")
    assert refused.value.problems == (problem,)


@pytest.mark.parametrize("name", BY_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_by_their_headers_and_by_loading(
    folder: Path, tmp_path: Path, name: str
) -> None:
    damage, code, message = BY_WEIGHTS[name]
    damage(folder)
    assert folder_problems(folder, "base_model.path", tokenizer=True) == []
    [problem] = weights_problems(AutoModelForCausalLM, folder, "base_model.path")
    assert (problem.code, problem.path) == (code, "base_model.path") and problem.fix
    for loader in (lambda: adopted(folder, tmp_path / "out"), lambda: load_model(folder, run(tmp_path))):
        with pytest.raises(StageError, match=message) as refused:
            loader()
        assert refused.value.problems[0].message == problem.message


def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "work", LaunchConfig(device="cpu"))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed_and_reported(whole: Path, folder: Path, tmp_path: Path, prefix: str) -> None:
    rewrite(folder, lambda weights: {prefix + name: one for name, one in weights.items()})
    messages: list[str] = []
    assert weights_problems(AutoModelForCausalLM, folder, "") == []
    ours = load_pretrained_model(AutoModelForCausalLM, folder, say=messages.append).state_dict()
    theirs = load_pretrained_model(AutoModelForCausalLM, whole).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    [message] = messages
    assert message.endswith("removed from the names of weights") and prefix.partition(".")[0] in message
    kept = load_file(adopted(folder, tmp_path / "out") / "model.safetensors")
    assert all(torch.equal(kept[name][:2], theirs[name][:2]) for name in theirs)


def test_a_prefix_within_a_name_is_removed_too(folder: Path) -> None:
    rewrite(folder, lambda weights: {name.replace(".mlp.", "._orig_mod.mlp."): one for name, one in weights.items()})
    assert weights_problems(AutoModelForCausalLM, folder, "") == []


def test_a_tied_head_is_whole_with_its_copy_and_without(tmp_path: Path) -> None:
    model = LlamaForCausalLM(config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    for _ in range(2):
        assert weights_problems(AutoModelForCausalLM, tmp_path, "") == []
        loaded = load_pretrained_model(AutoModelForCausalLM, tmp_path)
        assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)
        rewrite(tmp_path, lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


ATTENTION = "transformer.h.0.attn"


@pytest.fixture
def gptj(folder: Path) -> Path:
    """A folder with the masks of GPT-J 6B's."""
    GPTJForCausalLM(
        GPTJConfig(vocab_size=6, n_positions=16, n_embd=8, n_layer=1, n_head=2, rotary_dim=4)
    ).save_pretrained(folder)
    masks = {f"{ATTENTION}.bias": torch.ones(1, 1, 16, 16), f"{ATTENTION}.masked_bias": torch.tensor(-1e9)}
    rewrite(folder, lambda weights: weights | masks)
    return folder


def test_masks_that_earlier_versions_stored_are_no_weights(gptj: Path, tmp_path: Path) -> None:
    assert weights_problems(AutoModelForCausalLM, gptj, "") == []
    messages: list[str] = []
    loaded = load_pretrained_model(AutoModelForCausalLM, gptj, say=messages.append)
    assert torch.equal(loaded.lm_head.weight, load_file(gptj / "model.safetensors")["lm_head.weight"])
    [message] = messages
    assert message.endswith(
        f"earlier versions of transformers left out, since a GPTJForCausalLM does not read them: {ATTENTION}.bias, "
        f"{ATTENTION}.masked_bias"
    )
    journal = tmp_path / "journal.jsonl"
    with open_journal(journal) as opened:
        import_model(BaseModelConfig(path=str(gptj)), {}, tmp_path / "out", Run(tmp_path / "work", journal=opened))
    assert any(one["kind"] == "event" and f"{ATTENTION}.masked_bias" in one["message"] for one in read_journal(journal))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("transformer.h.0.attn.bias", torch.ones(8)),
        ("transformer.h.0.attn.bias", torch.ones(1, 2, 16, 16)),
        ("transformer.h.0.attn.bias", torch.ones(1, 1, 8, 16)),
        ("transformer.h.0.attn.masked_bias", torch.ones(8)),
        ("transformer.h.0.attn.bias_k", torch.ones(8, 8)),
        ("transformer.h.0.attn.masked_bias.weight", torch.ones(8, 8)),
        ("transformer.h.0.ln_2.bias", torch.ones(8)),
    ],
)
def test_weights_left_over_by_a_name_that_transformers_ignores_are_refused(
    gptj: Path, name: str, tensor: torch.Tensor
) -> None:
    rewrite(gptj, lambda weights: weights | {name: tensor})
    [problem] = weights_problems(AutoModelForCausalLM, gptj, "")
    assert f"; left over: {name} (" in f"{problem.message} ("
    with pytest.raises(StageError, match=re.escape(f"left over: {name}")):
        load_pretrained_model(AutoModelForCausalLM, gptj)


def test_a_layer_that_predicts_a_further_token_is_left_out_and_one_of_the_trunk_refused(tmp_path: Path) -> None:
    deepseek(tmp_path, num_hidden_layers=3)
    edit(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=1)
    with pytest.raises(StageError, match=r"left over: model\.layers\.2\.input_layernorm"):
        load_pretrained_model(AutoModelForCausalLM, tmp_path)
    rewrite(tmp_path, lambda weights: weights | {"model.layers.2.eh_proj.weight": torch.ones(8, 16)})
    messages: list[str] = []
    assert weights_problems(AutoModelForCausalLM, tmp_path, "") == []
    load_pretrained_model(AutoModelForCausalLM, tmp_path, say=messages.append)
    assert "layers that predict several tokens at once left out" in messages[0]
    edit(tmp_path, num_nextn_predict_layers=0)
    assert weights_problems(AutoModelForCausalLM, tmp_path, "")


def test_a_family_may_lack_buffers_and_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As BART may lack its `final_logits_bias`, which transformers then has zeros for."""
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
    BartForConditionalGeneration(BartConfig(vocab_size=6, **sizes, **heads)).save_pretrained(tmp_path)
    without("final_logits_bias")(tmp_path)
    assert not load_pretrained_model(AutoModelForSeq2SeqLM, tmp_path).final_logits_bias.any()
    # No family of text ignores a weight that is missing; those of images do.
    monkeypatch.setattr(
        BartForConditionalGeneration, "_keys_to_ignore_on_load_missing", ["final_logits_bias", r"fc1\.bias"]
    )
    without("encoder.layers.0.fc1.bias")(tmp_path)
    with pytest.raises(StageError, match=r"missing: model\.encoder\.layers\.0\.fc1\.bias"):
        load_pretrained_model(AutoModelForSeq2SeqLM, tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    [problem] = folder_problems(tmp_path, "base_model.path")
    assert problem.code == "adapter" and problem.message.endswith("contains adapters, not a model")


def test_weights_that_are_not_finite_are_refused_by_every_loader(folder: Path, tmp_path: Path) -> None:
    not_a_number(folder)
    loaders: tuple[Callable[[], object], ...] = (
        lambda: adopted(folder, tmp_path / "out"),
        lambda: load_model(folder, run(tmp_path)),
        lambda: load_scorer(folder, CPU, seed=3),
    )
    with pytest.raises(ConfigError, match=r"found NaN or infinity in model.layers.1.mlp.up_proj.weight"):
        check_payload("sft", folder)
    for loader in loaders:
        with pytest.raises(StageError, match=r"found NaN or infinity in model.layers.1.mlp.up_proj.weight"):
            loader()


def test_a_reward_model_draws_its_output_layer_by_the_seed_alone(folder: Path) -> None:
    drawn = [load_scorer(folder, CPU, seed=seed).model.score.weight for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    without("layers.1.mlp")(folder)
    with pytest.raises(StageError, match=r"missing: model.layers.1.mlp.down_proj"):
        load_scorer(folder, CPU, seed=3)


def test_a_model_without_scores_is_no_reward_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"missing: score.weight; left over: lm_head.weight"):
        load_scorer(folder, CPU)
    LlamaForSequenceClassification(config(num_labels=1)).save_pretrained(tmp_path / "scores")
    load_scorer(tmp_path / "scores", CPU)


def test_an_encoder_without_a_classifier_scores_no_toxicity(folder: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=6, id2label={0: "fine", 1: "toxic"}, **sizes))
    model.save_pretrained(folder)
    ClassifierScorer(str(folder), "toxic")
    without("classifier")(folder)
    assert weights_problems(AutoModelForSequenceClassification, folder, "")
    with pytest.raises(StageError, match=r"missing: classifier.bias, classifier.weight"):
        ClassifierScorer(str(folder), "toxic")


@pytest.mark.parametrize(
    ("damage", "code"), [(quantized("gptq"), "quantized_model"), (classifier, "weights_do_not_fit")]
)
def test_check_refuses_a_base_model_before_anything_runs(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], code: str
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(f"name: adopted\nbase_model: {{path: {folder}}}\n")
    nodes = graph(load(path, {}, lambda: tmp_path))
    assert model_folder_problems(nodes, ["base_model"]) == []
    damage(folder)
    [problem] = model_folder_problems(nodes, ["base_model"])
    assert (problem.code, problem.path) == (code, "base_model.path")
    assert model_folder_problems(nodes, []) == []
