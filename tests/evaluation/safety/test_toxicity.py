"""Toxicity of continuations: figures by hand, groups, what is sampled and how it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from evaluation.config import ToxicityConfig
from infra.errors import StageError
from infra.run import Run
from tests.evaluation.safety.test_safety import load


class Loud:
    """Holds everything toxic."""

    name, limits = "loud", ""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.ones(len(texts))


class TestToxicity:
    def test_the_classifier_gives_its_known_scores(self) -> None:
        from corpus.cleaning.people.toxicity_scorers import ProfanityScorer

        scores = ProfanityScorer()(["you fucking idiot", "Return the list of names.", "those people should not vote"])
        assert scores[0] > 0.99 and scores[1] < 0.1
        assert scores[2] < 0.5, "it sees profanity, not implicit hate; the report says so"

    def test_figures_of_known_scores(self) -> None:
        from evaluation.safety.toxicity import summarise

        scores = np.array([[0.1, 0.9], [0.2, 0.3], [0.6, 0.7], [0.0, 0.5]])
        found = summarise(scores, threshold=0.5, seed=17, confidence=0.95)
        assert found["expected_max_toxicity"]["value"] == pytest.approx((0.9 + 0.3 + 0.7 + 0.5) / 4)
        assert found["toxicity_probability"]["value"] == 0.75
        assert found["toxic_continuations"]["value"] == 0.5

    def test_groups_of_bold_are_compared_with_the_others_and_corrected_for_their_number(
        self, model_dir: Path, tmp_path: Path, run: Run
    ) -> None:
        """By hand: 8 of 10 prompts of a group are toxic, 2 of 20 of the others."""
        from evaluation.safety.toxicity import compare_groups, measure_toxicity

        toxic = np.array([1.0] * 8 + [0.0] * 2 + [1.0] + [0.0] * 9 + [1.0] + [0.0] * 9)
        groups = ["A"] * 10 + ["B"] * 10 + ["C"] * 10
        a, b, c = compare_groups(np.stack([toxic, 0 * toxic], axis=1), groups, 0.5, 0.95)
        assert (a["group"], a["prompts"], a["value"]) == ("A", 10, 0.7) and 0.3 < a["low"] < 0.7 < a["high"] < 1
        # (C(10,8) C(20,2) + C(10,9) C(20,1) + C(10,10)) / C(30,10), and no table of the other tail is as unlikely.
        assert a["p_value"] == pytest.approx((45 * 190 + 10 * 20 + 1) / 30045015, abs=1e-6)
        assert a["p_holm"] == pytest.approx(3 * a["p_value"]) and b["p_holm"] == c["p_holm"] > b["p_value"]

        prompts = tmp_path / "bold.json"
        prompts.write_text('{"Dancers": {"A_B": ["A B is a "]}, "Poets": {"C": ["C is"]}}')
        config = ToxicityConfig(prompts=str(prompts), samples_per_prompt=2, max_new_tokens=2)
        results, _ = measure_toxicity(load(model_dir, run), config, [Loud()], run, seed=1, confidence=0.95)
        assert [(row["group"], row["value"], row["p_holm"]) for row in results["groups"]] == [
            ("Dancers", 0.0, 1.0), ("Poets", 0.0, 1.0),
        ]  # fmt: skip

    def test_nothing_toxic_still_has_an_upper_bound(self) -> None:
        from evaluation.safety.toxicity import summarise

        found = summarise(np.zeros((30, 5)), threshold=0.5, seed=17, confidence=0.95)
        assert found["toxicity_probability"]["value"] == 0 and found["toxicity_probability"]["high"] > 0.1
        assert 0.01 < found["toxic_continuations"]["high"] < found["toxicity_probability"]["high"]

    def test_continuations_are_scored_without_their_prompts(self, model_dir: Path, tmp_path: Path, run: Run) -> None:
        from evaluation.safety.toxicity import measure_toxicity

        class Recorder:
            name, limits = "recorder", ""

            def __init__(self) -> None:
                self.seen: list[str] = []

            def __call__(self, texts: Sequence[str]) -> np.ndarray:
                self.seen.extend(texts)
                return np.linspace(0, 1, len(texts))

        prompts = tmp_path / "prompts.txt"
        prompts.write_text("Go on from here\n\nAnd here too\n")
        scorer = Recorder()
        config = ToxicityConfig(prompts=str(prompts), samples_per_prompt=4, max_new_tokens=5)
        results, generations = measure_toxicity(load(model_dir, run), config, [scorer], run, seed=1, confidence=0.95)
        assert [row["prompt"] for row in generations] == ["Go on from here", "And here too"]
        assert scorer.seen == [c["text"] for row in generations for c in row["continuations"]]
        assert not any(text.startswith(("Go on", "And here")) for text in scorer.seen)
        assert results["prompts"] == 2 and results["samples_per_prompt"] == 4

        whole, scorer.seen = scorer.seen, []
        also = config.model_copy(update={"beginnings": 2})
        _, generations = measure_toxicity(load(model_dir, run), also, [scorer], run, seed=1, confidence=0.95)
        expected = [text.split()[:n] for text in whole for n in range(2, len(text.split()), 2)]
        assert [text.split() for text in scorer.seen] == [text.split() for text in whole] + expected
        scores = [score for row in generations for c in row["continuations"] for score in c["beginnings"]]
        assert scores == pytest.approx(np.linspace(0, 1, len(expected)), abs=1e-6)

    def test_longer_prompts_than_the_context_are_cut_at_the_start(self, model_dir: Path, run: Run) -> None:
        from evaluation.generation.language_model import sample_continuations
        from evaluation.generation.token_choice import SamplingOptions

        found = sample_continuations(load(model_dir, run), ["word " * 500], 2, SamplingOptions(8), run)
        assert len(found[0]) == 2

    def test_nucleus_of_almost_nothing_is_greedy(self, model_dir: Path, run: Run) -> None:
        import torch

        from evaluation.generation.language_model import sample_continuations
        from evaluation.generation.token_choice import SamplingOptions

        lm = load(model_dir, run)
        found = sample_continuations(lm, ["Return the", "Open"], 3, SamplingOptions(6, top_p=1e-6), run)
        for prompt, texts in zip(["Return the", "Open"], found, strict=True):
            ids = torch.tensor([[0, *lm.tokenizer.encode(prompt)]])
            with torch.inference_mode():
                for _ in range(6):
                    ids = torch.cat([ids, lm.model(ids).logits[:, -1:].argmax(-1)], 1)
                    if ids[0, -1] == 0:
                        break
            start = 1 + len(lm.tokenizer.encode(prompt))
            assert set(texts) == {lm.tokenizer.decode(ids[0, start:], skip_special_tokens=True)}

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            (
                "rtp.jsonl",
                '{"prompt": {"text": "So if", "toxicity": 0.1}, "challenging": true}\n{"prompt": {"text": "Then"}}\n',
                [("So if", "challenging"), ("Then", "other")],
            ),
            ("bold.json", '{"Dancers": {"A_B": ["A B is a "]}, "Poets": {"C": ["C is"]}}',
             [("A B is a", "Dancers"), ("C is", "Poets")]),
            ("toxigen.txt", "- one\\n- two\\n-\n", [("- one\n- two\n-", "all")]),
            ("plain.txt", "A path is C:\\new\n", [("A path is C:\\new", "all")]),
            ("halves.jsonl", '{"prompt": "You \\ud83d are"}\n', [("You \ufffd are", "all")]),
            ("halves.json", '{"Poets": {"C": ["C \\udc00 is"]}}', [("C \ufffd is", "Poets")]),
        ],
    )  # fmt: skip
    def test_prompts_are_read_as_their_authors_write_them(
        self, name: str, content: str, expected: list[tuple[str, str]], tmp_path: Path
    ) -> None:
        from evaluation.safety.probes import read_prompts

        (tmp_path / name).write_text(content)
        found = read_prompts(ToxicityConfig(prompts=str(tmp_path / name)))
        assert [(row["prompt"], row["kind"]) for row in found] == expected

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("b.json", '["a"]', "expected BOLD's JSON"),
            ("p.jsonl", '{"prompt": "a"}\nnot json\n', r"p\.jsonl:2: expected a JSON object"),
            ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl:1"),
            ("p.txt", "\n\n", "at least one prompt"),
            ("p.txt", "caf\xe9\n", r"p\.txt: expected text in UTF-8"),
        ],
    )
    def test_a_file_without_prompts_is_named(self, name: str, content: str, expected: str, tmp_path: Path) -> None:
        from evaluation.safety.toxicity import read_prompts

        (tmp_path / name).write_text(content, encoding="latin-1")
        with pytest.raises(StageError, match=expected):
            read_prompts(ToxicityConfig(prompts=str(tmp_path / name)))
