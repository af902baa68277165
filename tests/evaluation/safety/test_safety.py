"""Toxicity, bias and memorisation agree with independent references and repeat themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from corpus.tokens.trained import TrainedSequences, split_fingerprint
from evaluation.config import BenchmarksConfig, BiasConfig, GeneratedPersonalDataConfig, SafetyConfig, ToxicityConfig
from evaluation.safety.stage import safety
from infra.errors import Cancelled, StageError
from infra.run import Run
from tests.support.chat_templates import CHATML, tokenizer_in
from tests.support.open_models import save_model

SMALL: dict[str, Any] = {
    "toxicity": {"limit": 6, "samples_per_prompt": 3, "max_new_tokens": 8},
    "bias": {"limit": 20},
    "memorisation": {"sequences": 6, "prefix_tokens": 8, "continuation_tokens": 8},
}


def load(folder: Path, run: Run) -> Any:
    from evaluation.generation.language_model import load_model

    return load_model(folder, run)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MDS shards of random tokens, some sequences too short to use."""
    from streaming import MDSWriter

    folder = tmp_path_factory.mktemp("shards")
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        with MDSWriter(out=str(folder / split), columns={"tokens": "ndarray:uint16"}) as writer:
            for number in range(24):
                length = 5 if number % 4 == 0 else 40
                writer.write({"tokens": generator.integers(5, 300, length).astype(np.uint16)})
    return folder


def trained_on(model_dir: Path, shards: Path, folder: Path) -> Path:
    """A copy of the model that says that it was trained on all of the shards."""
    shutil.copytree(model_dir, folder / "trained")
    TrainedSequences(split_fingerprint(shards / "train"), np.ones(24, bool)).write(folder / "trained")
    return folder / "trained"


def test_the_stage_repeats_itself(model_dir: Path, shards: Path, tmp_path: Path) -> None:
    config = SafetyConfig.model_validate(SMALL)
    model_dir = trained_on(model_dir, shards, tmp_path)
    outs = []
    for name in ("first", "second"):
        out = tmp_path / name
        out.mkdir()
        result = safety(config, {"model": model_dir, "shards": shards}, out, Run(tmp_path / f"{name}.work"))
        outs.append(out)
    assert (outs[0] / "results.json").read_bytes() == (outs[1] / "results.json").read_bytes()
    generations = [(out / "aux/generations.jsonl").read_text() for out in outs]
    assert generations[0] == generations[1] and len(generations[0].splitlines()) == 6
    results = json.loads((outs[0] / "results.json").read_text())
    assert result.figures["stereotype_score"] == results["bias"]["overall"]["stereotype_score"]["value"]
    assert {"expected_max_toxicity_low", "memorised_share_control", "stereotype_score_shared"} <= set(result.figures)
    text = results["toxicity"]["text"]["expected_max_toxicity"]
    assert result.figures["expected_max_toxicity_of_text"] == text["value"] > 0


def test_held_out_text_is_scored_in_pieces_as_long_as_a_continuation(
    model_dir: Path, shards: Path, tmp_path: Path
) -> None:
    from evaluation.safety.packed_documents import PackedDocuments
    from evaluation.safety.toxicity import toxicity_of_text

    class Remembers:
        """Holds the second piece of every three to be toxic."""

        name = limits = ""

        def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
            self.texts = list(texts)
            return np.array([float(number % 3 == 1) for number in range(len(texts))])

    run, scorer = Run(tmp_path), Remembers()
    lm = load(model_dir, run)
    config = ToxicityConfig(samples_per_prompt=3, max_new_tokens=8, limit=60)
    found = toxicity_of_text(lm, config, scorer, shards, run, seed=1, confidence=0.95)
    assert found is not None
    long = [
        tokens
        for tokens, _ in PackedDocuments(shards / "validation", tmp_path).read(np.arange(24))
        if len(tokens) == 40
    ]
    assert len(long) == 18 and found["prompts"] == 6, "text for six groups of three, whatever the number of prompts"
    assert sorted(scorer.texts) == sorted(lm.tokenizer.decode(tokens[8:16].tolist()) for tokens in long)
    assert found["expected_max_toxicity"]["value"] == 1 and found["toxic_continuations"]["value"] == pytest.approx(
        1 / 3
    )
    none = toxicity_of_text(lm, ToxicityConfig(max_new_tokens=21), scorer, shards, run, seed=1, confidence=0.95)
    assert none is None, "no document has two such pieces"


def test_a_stage_that_broke_off_goes_on_from_what_it_kept(
    model_dir: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scorer that fails once, then a cancellation behind the pairs of sentences; in the end the unbroken bytes."""
    from corpus.cleaning.people.toxicity_scorers import LexiconScorer

    (tmp_path / "words.txt").write_text("e\nfile\n")
    scorers = [{"kind": "svm"}, {"kind": "lexicon", "path": str(tmp_path / "words.txt")}]
    asked = {**SMALL, "toxicity": {**SMALL["toxicity"], "scorers": scorers}, "personal_data": {}}
    config = SafetyConfig.model_validate(asked)
    inputs = {"model": trained_on(model_dir, shards, tmp_path), "shards": shards}
    work, parts = tmp_path / "work", tmp_path / "work" / "parts"

    def build(name: str, **options: Any) -> list[dict[str, Any]]:
        out = tmp_path / name
        out.mkdir()
        with (tmp_path / "journal").open("w+") as journal:
            try:
                safety(config, inputs, out, Run(options.pop("work", work), journal=journal, **options))
            finally:
                journal.seek(0)
                told = [json.loads(line) for line in journal]
                assert (out / "results.json").is_file() or not list(out.iterdir())
        return told

    score, left = LexiconScorer.__call__, [1]

    def fails_once(self: LexiconScorer, texts: Sequence[str]) -> np.ndarray:
        if left:
            left.pop()
            raise RuntimeError("out of memory")
        return score(self, texts)

    monkeypatch.setattr(LexiconScorer, "__call__", fails_once)
    with pytest.raises(
        StageError, match=r"lexicon words.txt .*failed at one of the texts 1 to 18 of 18.*out of memory"
    ):
        build("failed")
    assert {path.stem for path in parts.glob("*.json")} == {"continuations", "scores_0_0"}
    with pytest.raises(Cancelled):
        build("cancelled", is_cancelled=lambda: (parts / "bias.json").exists())
    told = build("whole")
    (resumed,) = [line["message"] for line in told if line.get("name") == "resumed"]
    assert resumed == "continuing with what is done: bias, continuations, scores_0_0, scores_1_0"
    assert {line["note"] for line in told if line["kind"] == "progress"} == {"memorisation"}, "nothing is drawn again"
    assert not parts.exists()
    build("unbroken", work=tmp_path / "other.work")
    for name in ("results.json", "aux/generations.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_parts_of_another_question_are_not_taken(tmp_path: Path) -> None:
    from evaluation.results.kept_parts import KeptParts

    kept = KeptParts(tmp_path / "parts", "one")
    assert kept("a", lambda: {1: (0.1 + 0.2, "ä")}) == {"1": [0.30000000000000004, "ä"]} == kept("a", lambda: 1 / 0)
    assert KeptParts(tmp_path / "parts", "one").found == ("a",)
    other = KeptParts(tmp_path / "parts", "another")
    assert other.found == () and other("a", lambda: 5) == 5


def test_the_stage_tells_copies_membership_and_a_search(
    model_dir: Path, shards: Path, tmp_path: Path, run: Run
) -> None:
    asked = {
        **SMALL,
        "adversarial": {"limit": 1, "queries": 1, "samples": 1},
        "memorisation": {**SMALL["memorisation"], "copies": True, "membership": True},
    }
    out = tmp_path / "out"
    out.mkdir()
    model = trained_on(model_dir, shards, tmp_path)
    figures = safety(SafetyConfig.model_validate(asked), {"model": model, "shards": shards}, out, run).figures
    found = json.loads((out / "results.json").read_text())
    # Random tokens: no document is there twice, and those too short for prefix and continuation are left out.
    (once,) = found["memorisation"]["by_copies"]
    assert (once["at_least"], once["at_most"], once["documents"], once["sequences"]) == (1, 1, 18, 6)
    told = found["memorisation"]["membership_inference"]
    assert figures["membership_auc"] == told["value"] and 0 <= told["low"] <= told["value"] <= told["high"] <= 1
    assert figures["adversarial_broken"] == found["adversarial"]["broken"]["value"]
    assert found["adversarial"]["prompts"] == 1 and (out / "aux/adversarial.jsonl").is_file()


def test_another_seed_draws_other_continuations(model_dir: Path, tmp_path: Path, run: Run) -> None:
    texts = []
    for seed in (1, 2):
        out = tmp_path / str(seed)
        out.mkdir()
        config = SafetyConfig.model_validate({**SMALL, "bias": None, "memorisation": None, "seed": seed})
        safety(config, {"model": model_dir}, out, run)
        texts.append((out / "aux/generations.jsonl").read_text())
    assert texts[0] != texts[1]


def test_prompts_by_a_models_template_are_transformers_ids(tmp_path: Path, run: Run) -> None:
    from evaluation.generation.chat_prompts import ChatPrompt
    from evaluation.generation.decoding import generate
    from evaluation.generation.language_model import end_ids, sample_continuations
    from evaluation.generation.token_choice import SamplingOptions

    tokenizer = tokenizer_in("llama3")
    lm = load(save_model(tmp_path / "model", tokenizer), run)
    prompts, sampling = ["The cat saw", "the old man took the"], SamplingOptions(8, top_p=0.9, seed=3)
    found = sample_continuations(lm, prompts, 2, sampling, run, ChatPrompt("Be kind."))
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": prompt}],
            add_generation_prompt=True, return_dict=False,
        )
        for prompt in prompts
    ]  # fmt: skip
    options = replace(sampling, stop_ids=end_ids(lm.model))
    written = generate(lm.model, [ids for ids in asked for _ in range(2)], options)
    texts = lm.tokenizer.batch_decode(written, skip_special_tokens=True)
    assert found == [texts[:2], texts[2:]] != sample_continuations(lm, prompts, 2, sampling, run)
    with pytest.raises(StageError, match=r"safety\.chat_template_kwargs\.thinking.*does not read"):
        ChatPrompt(values={"thinking": False}).ids(tokenizer, prompts)
    qwen = tokenizer_in("qwen3")
    [ids] = ChatPrompt(values={"enable_thinking": False}).ids(qwen, prompts[:1])
    assert qwen.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(StageError, match="the model's context has 256"):
        sample_continuations(lm, ["cat " * 250], 2, sampling, run, ChatPrompt())


def test_the_stage_asks_by_the_template_where_it_is_told_to(model_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(CHATML)
    part = {"bias": None, "memorisation": None, "toxicity": {**SMALL["toxicity"], "limit": 2}}
    part["adversarial"] = {"limit": 1, "queries": 2, "samples": 1}
    texts = []
    for number, chat in enumerate(({}, {"chat_template": True}, {"chat_template": True, "system_instruction": "Hm."})):
        out = tmp_path / str(number)
        out.mkdir()
        safety(SafetyConfig.model_validate({**part, **chat}), {"model": model}, out, Run(tmp_path / f"work{number}"))
        texts.append((out / "aux/generations.jsonl").read_text())
    assert len(set(texts)) == 3
    with pytest.raises(StageError, match="expected a chat template"):
        safety(
            SafetyConfig.model_validate({**part, "chat_template": True}), {"model": model_dir}, tmp_path,
            Run(tmp_path / "work"),
        )  # fmt: skip
    for alone in ({"system_instruction": "Hm."}, {"chat_template_kwargs": {"thinking": True}}):
        for config in (SafetyConfig, BenchmarksConfig) if "chat_template_kwargs" in alone else (SafetyConfig,):
            with pytest.raises(ValidationError, match="expected `chat_template: true` too"):
                config.model_validate(alone)


def test_without_shards_memorisation_says_why_it_is_missing(model_dir: Path, tmp_path: Path) -> None:
    config = SafetyConfig.model_validate({**SMALL, "toxicity": None, "bias": None})
    with (tmp_path / "journal").open("w+") as journal:
        result = safety(config, {"model": model_dir}, tmp_path, Run(tmp_path / "work", journal=journal))
        journal.seek(0)
        events = [line for line in map(json.loads, journal) if line["kind"] == "event"]
    assert "not part of this pipeline" in json.loads((tmp_path / "results.json").read_text())["memorisation"]["skipped"]
    assert events[0]["name"] == "skipped" and result.headline == "nothing measured"


def test_cancelling_stops_the_stage(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        safety(SafetyConfig(), {"model": model_dir}, tmp_path, Run(tmp_path / "work", is_cancelled=lambda: True))


def silent(folder: Path) -> Path:
    """Changes a model so that it ends whatever it is given at once: all it sees is the same to it."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[0] = 10.0
    model.save_pretrained(folder)
    return folder


def test_a_model_that_says_nothing_is_measured_and_its_silence_told(
    new_model: Any, model_dir: Path, tmp_path: Path, run: Run
) -> None:
    from evaluation.config import FailureClassesConfig
    from evaluation.config.mitigations import MitigationsConfig
    from evaluation.failures.classes import measure_failures
    from evaluation.mitigations import mitigations
    from tests.evaluation.safety.test_toxicity_scorers import classifier_in

    folder = silent(new_model(tmp_path / "model", seed=0))
    (tmp_path / "words.txt").write_text("bad\n")
    classifier = {"kind": "classifier", "path": str(classifier_in(tmp_path / "classifier", model_dir))}
    scorers = [{"kind": "svm"}, {"kind": "lexicon", "path": str(tmp_path / "words.txt")}, classifier]
    toxicity = {"limit": 3, "samples_per_prompt": 2, "max_new_tokens": 4, "scorers": scorers}
    asked = {
        "toxicity": toxicity, "adversarial": {"limit": 2, "queries": 2, "samples": 2}, "bias": {"limit": 4},
        "memorisation": None, "personal_data": {},
    }  # fmt: skip
    result = safety(SafetyConfig.model_validate(asked), {"model": folder}, tmp_path, run)
    rows = [json.loads(line) for line in (tmp_path / "aux/generations.jsonl").read_text().splitlines()]
    assert {one["text"] for row in rows for one in row["continuations"]} == {""}
    assert result.figures["empty_continuations"] == 1 and result.figures["toxic_continuations"] == 0
    assert result.figures["personal_data"] == 0 and result.figures["adversarial_broken"] == 0
    assert all(np.isfinite(value) for value in result.figures.values())
    refused = {"parse_constant": lambda name: pytest.fail(f"{name} in the results")}
    json.loads((tmp_path / "results.json").read_text(), **refused)

    failures, _ = measure_failures(
        load(folder, run), FailureClassesConfig(classes=("copying",), cases=3, by="answer"), run, seed=1, confidence=0.9
    )
    assert failures["classes"]["copying"]["tests"]["name_again"]["value"] == 1
    tried = [{"kind": "prefix", "text": "Kindly. "}, {"kind": "rerank", "candidates": 2, "scorer": classifier}]
    config = MitigationsConfig.model_validate({"toxicity": toxicity, "tried": tried, "tasks": ["cloze"], "limit": 2})
    (tmp_path / "mitigated").mkdir()
    mitigated = mitigations(config, {"model": folder}, tmp_path / "mitigated", run)
    assert all(np.isfinite(value) for value in mitigated.figures.values())
    json.loads((tmp_path / "mitigated/results.json").read_text(), **refused)


def test_personal_data_in_what_is_written_is_counted_by_kind(new_model: Any, tmp_path: Path, run: Run) -> None:
    """A model that has learnt one line of contact details by heart, asked by `safety` through its own sampling."""
    import torch

    folder = new_model(tmp_path / "model", seed=0)
    lm = load(folder, run)
    line = "Write to anna.k@mail.org or call (212) 664-7665 for the list."
    ids = torch.tensor([[0, *lm.tokenizer.encode(line, add_special_tokens=False), 0]])
    optimizer = torch.optim.Adam(lm.model.parameters(), 0.01)
    for _ in range(60):
        loss = lm.model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    lm.model.save_pretrained(folder)
    (tmp_path / "prompts.txt").write_text("Write to\nReturn\n")
    toxicity = {
        "prompts": str(tmp_path / "prompts.txt"), "samples_per_prompt": 4, "max_new_tokens": 70, "top_p": 1e-6,
    }  # fmt: skip
    asked = {"toxicity": toxicity, "bias": None, "memorisation": None, "personal_data": {}}
    result = safety(SafetyConfig.model_validate(asked), {"model": folder}, tmp_path, run)
    found = json.loads((tmp_path / "results.json").read_text())["personal_data"]
    rows = [json.loads(row) for row in (tmp_path / "aux/generations.jsonl").read_text().splitlines()]
    marked = [one.get("personal_data") for one in rows[0]["continuations"]]
    assert marked == [["email", "phone"]] * 4, rows[0]
    asked_again = sum("personal_data" in one for row in rows for one in row["continuations"])
    assert found["overall"]["value"] == result.figures["personal_data"] == asked_again / 8
    assert found["by_kind"]["email"]["found"] >= 4 and found["by_kind"]["ip"]["value"] == 0
    assert result.figures["personal_data_ip_high"] > 0, "none of eight is no proof"
    with pytest.raises(ValidationError, match="personal_data: expected `toxicity` too"):
        SafetyConfig.model_validate({"toxicity": None, "personal_data": {}})


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Mail a.b@mail.org from 8.8.8.8", ["email", "ip"]),
        ("Mail me@example.com, you@docs.example.org, root@host.test or email@example.com", []),
        ("From 192.0.2.1 call 555-0100 with 0000 0000 0000 0000", []),
        ("Mail me@myexample.com", ["email"]),
        ("", []),
    ],
)
def test_what_belongs_to_nobody_is_no_personal_data(text: str, kinds: list[str]) -> None:
    from evaluation.safety.generated_data import personal_kinds

    assert personal_kinds(text, GeneratedPersonalDataConfig()) == kinds


class TestBias:
    def test_whole_sentences_are_scored_as_lm_eval_does(self, model_dir: Path, run: Run) -> None:
        """lm-eval's crows_pairs: log likelihood of each sentence after an empty context."""
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        from evaluation.safety.bias.pairs import read_pairs, score_pairs

        lm = load(model_dir, run)
        pairs = read_pairs(BiasConfig(limit=12))
        requests = [
            Instance("loglikelihood", {}, ("", pair[side]), i)
            for i, pair in enumerate(pairs)
            for side in ("sent_more", "sent_less")
        ]
        theirs = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=4).loglikelihood(
            requests, disable_tqdm=True
        )
        ours = [value for score in score_pairs(lm, pairs, run) for value in score.all_tokens]
        assert ours == pytest.approx([value for value, _ in theirs], abs=1e-3)

    @pytest.mark.parametrize(
        ("first", "second", "expected"),
        [
            ([1, 2, 3, 4], [1, 9, 3, 4], ([0, 2, 3], [0, 2, 3])),
            ([1, 2, 3, 4], [1, 8, 9, 3, 4], ([0, 2, 3], [0, 3, 4])),
            ([1, 2], [3, 4], ([], [])),
        ],
    )
    def test_shared_tokens(self, first: list[int], second: list[int], expected: tuple) -> None:
        from evaluation.safety.bias.pairs import shared_positions

        assert shared_positions(first, second) == expected

    def test_a_model_that_only_prefers_a_term_is_at_fifty(self) -> None:
        """Half the probes of a category are about each group, so that such a model gets half of them."""
        from evaluation.safety.bias.pairs import PairScore, read_pairs, summarise

        scores = []
        for pair in read_pairs(BiasConfig()):
            direction = pair["stereo_antistereo"]
            prefers_first = (-1.0, -2.0) if direction == "stereo" else (-2.0, -1.0)
            scores.append(PairScore(pair["bias_type"], direction, prefers_first, (-1.0, -1.0), pair["sent_more"]))
        found = summarise(scores, 0.95)
        assert found["stereotype_score"]["value"] == 50 and found["stereotype_score"]["p_value"] == 1
        assert found["stereotype_score_shared"]["n"] == 0, "ties prefer neither"

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("sent_more,sent_less\na,b\n", "missing: stereo_antistereo, bias_type"),
            ("sent_more,sent_less,stereo_antistereo,bias_type\na,b,stereo,age\n,b,stereo,age\n", ":3: expected two"),
            ("sent_more,sent_less,stereo_antistereo,bias_type\n", "at least one pair"),
        ],
    )
    def test_a_file_that_holds_no_pairs_is_named(self, content: str, expected: str, tmp_path: Path) -> None:
        from evaluation.safety.bias.pairs import read_pairs

        (tmp_path / "pairs.csv").write_text(content)
        with pytest.raises(StageError, match=expected):
            read_pairs(BiasConfig(pairs=str(tmp_path / "pairs.csv")))


class TestMemorisation:
    def test_one_forward_pass_finds_what_greedy_decoding_recites(self, model_dir: Path, run: Run) -> None:
        import torch

        from evaluation.generation.language_model import token_log_likelihoods
        from evaluation.safety.packed_documents import recited_tokens

        lm = load(model_dir, run)
        generator = np.random.default_rng(0)
        sequences = []
        for keep in (0, 1, 5, 10):
            prefix = torch.tensor([generator.integers(5, 300, 12).tolist()])
            greedy = lm.model.generate(
                prefix, attention_mask=torch.ones_like(prefix), do_sample=False, min_new_tokens=10, max_new_tokens=10
            )[0].tolist()
            # What greedy decoding says, wrong from `keep` on.
            sequences.append(greedy[: 12 + keep] + [(token + 1) % 300 for token in greedy[12 + keep :]])
        hits = [likeliest for _, likeliest in token_log_likelihoods(lm, sequences, run)]
        assert recited_tokens(hits, 12).tolist() == [0, 1, 5, 10]

    def test_recitation_is_told_by_the_number_of_copies_that_were_trained_on(
        self, model_dir: Path, tmp_path: Path, run: Run
    ) -> None:
        """What the model says greedily stands there three times, and once more in a sequence that it never saw."""
        import torch
        from streaming import MDSWriter

        from evaluation.config import MemorisationConfig
        from evaluation.safety.duplicates import recited_by_copies

        lm = load(model_dir, run)
        prefix = torch.tensor([[7, 8, 9, 10]])
        greedy = lm.model.generate(
            prefix, attention_mask=torch.ones_like(prefix), do_sample=False, min_new_tokens=6, max_new_tokens=6
        )[0].tolist()
        others = np.random.default_rng(0).integers(5, 300, (5, 10)).tolist()
        # Two documents lie in each packed sequence; `starts` are the places of their second tokens.
        packed = [greedy + others[0], others[1] + greedy, greedy + others[2], greedy + others[3], others[4] + greedy]
        columns = {"tokens": "ndarray:uint16", "starts": "ndarray:uint16"}
        with MDSWriter(out=str(tmp_path / "train"), columns=columns) as writer:
            for tokens in packed:
                writer.write({"tokens": np.array(tokens, np.uint16), "starts": np.array([1, 11], np.uint16)})
        seen = np.array([True, True, True, False, False])
        config = MemorisationConfig(prefix_tokens=4, continuation_tokens=6)
        once, thrice = recited_by_copies(lm, config, tmp_path / "train", seen, run, seed=1, confidence=0.95)
        assert (once["at_least"], once["at_most"], once["documents"]) == (1, 1, 3)
        assert (thrice["at_least"], thrice["at_most"], thrice["documents"]) == (2, 3, 1)
        assert once["exact_match"]["value"] == 0 and thrice["exact_match"]["value"] == 1

    def test_membership_is_told_by_the_loss_as_often_as_pairs_are_in_order(self, run: Run) -> None:
        """AUC: of the six pairs of a member and another, five have the smaller loss on the member's side."""
        from evaluation.safety.memorisation import membership_auc

        found = membership_auc(np.array([1.0, 2.0, 3.5]), np.array([3.0, 4.0]), 17, 0.95)
        assert found["value"] == pytest.approx(5 / 6, abs=1e-6) and found["low"] <= found["value"] <= found["high"]
        alike = membership_auc(np.arange(60.0), np.arange(60.0), 17, 0.95)
        assert alike["value"] == 0.5 and alike["low"] < 0.45 and alike["high"] > 0.55

    def test_sequences_are_drawn_under_the_seed_and_short_ones_passed_over(self, shards: Path) -> None:
        from evaluation.safety.packed_documents import read_documents

        def read(count: int, seed: int) -> list[list[int]]:
            return read_documents(shards / "train", count, 16, seed, shards)

        drawn = read(6, 3)
        assert len(drawn) == 6 and {len(tokens) for tokens in drawn} == {16}
        assert drawn == read(6, 3) != read(6, 4)
        assert len(read(100, 3)) == 18

    @pytest.mark.parametrize(
        ("length", "who"), [(60, "that many tokens of one document of trained text"), (200, "the model reads 128")]
    )
    def test_too_long_a_continuation_is_skipped_with_a_reason(
        self, length: int, who: str, model_dir: Path, shards: Path, run: Run, tmp_path: Path
    ) -> None:
        from evaluation.config import MemorisationConfig
        from evaluation.safety.memorisation import measure_memorisation

        config = MemorisationConfig(prefix_tokens=8, continuation_tokens=length)
        trained = TrainedSequences.read(trained_on(model_dir, shards, tmp_path))
        found = measure_memorisation(load(model_dir, run), config, shards, trained, run, seed=1, confidence=0.95)
        assert who in found["skipped"]

    def test_a_folder_without_shards_is_named(self, tmp_path: Path) -> None:
        from evaluation.safety.packed_documents import read_documents

        with pytest.raises(StageError, match="expected a folder of MDS shards"):
            read_documents(tmp_path, 1, 1, 0, tmp_path)


def test_a_search_over_changed_prompts_is_held_against_as_many_plain_tries(
    model_dir: Path, tmp_path: Path, run: Run
) -> None:
    """The word that the scorer calls toxic is in the word list; a changed prompt must not have it itself."""
    (tmp_path / "toxic.txt").write_text("e\nfile\nlist\n")
    (tmp_path / "words.txt").write_text("list\nReturn\nopened\n")
    (tmp_path / "prompts.txt").write_text("Return the number of\nThe list is\nShe opened the\n")
    config = SafetyConfig.model_validate(
        {
            "toxicity": {
                "limit": 2, "samples_per_prompt": 2, "max_new_tokens": 3,
                "scorers": [{"kind": "lexicon", "path": str(tmp_path / "toxic.txt")}],
            },
            "bias": None,
            "memorisation": None,
            "seed": 2**31 - 1,
            "adversarial": {
                "prompts": str(tmp_path / "prompts.txt"), "words": str(tmp_path / "words.txt"),
                "queries": 6, "samples": 2,
            },
        }
    )  # fmt: skip
    done = []
    for name in ("first", "second"):
        out = tmp_path / name
        out.mkdir()
        done.append(safety(config, {"model": model_dir}, out, run))
    assert (tmp_path / "first/results.json").read_bytes() == (tmp_path / "second/results.json").read_bytes()
    found = json.loads((tmp_path / "first/results.json").read_text())["adversarial"]
    assert (found["prompts"], found["left_out"]) == (2, 1), "a prompt that is toxic itself proves nothing"
    assert [row["queries"] for row in found["by_queries"]] == [1, 2, 4, 6]
    assert found["by_queries"][0]["changed"] == found["by_queries"][0]["plain"], "the first query changes nothing"
    lines = [json.loads(line) for line in (tmp_path / "first/aux/adversarial.jsonl").read_text().splitlines()]
    broken = [line for line in lines if line["queries"]]
    assert found["broken"]["value"] == len(broken) / 2 == found["by_queries"][-1]["changed"]
    assert all(1 <= line["queries"] <= 6 and line["toxicity"] == 1 for line in broken)
    assert not any(word in line["changed"].split() for line in lines for word in ("e", "file", "list"))
    assert done[0].figures["adversarial_broken"] == found["broken"]["value"]
    with pytest.raises(ValidationError, match="expected `toxicity` too"):
        SafetyConfig.model_validate({"toxicity": None, "adversarial": {}})


def test_a_search_that_has_no_harmless_prompt_to_begin_with_is_refused(model_dir: Path, run: Run) -> None:
    from evaluation.config import AdversarialConfig, ToxicityConfig
    from evaluation.safety.adversarial import measure_adversarial
    from tests.evaluation.safety.test_toxicity import Loud

    asked = load(model_dir, run), AdversarialConfig(), ToxicityConfig(), Loud(), run
    with pytest.raises(StageError, match="loud finds none of the 128 prompts harmless"):
        measure_adversarial(*asked, seed=1, confidence=0.95)
