"""Likelihoods of choices and sequences: scored together as alone, by our own layers as by the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.run import Run


def test_choices_scored_together_are_scored_as_alone(model_dir: Path, run: Run) -> None:
    """Also where choices are one token long, alike, begin alike, or are too long for one row, and where questions begin
    alike: what they begin with is computed once."""
    import torch

    from evaluation.generation.choice_rows import lay, rows_of
    from evaluation.generation.choice_scoring import ChoiceScorer, Way
    from evaluation.generation.language_model import load_model

    lm = load_model(model_dir, run)
    draw = torch.Generator().manual_seed(0)

    def words(n: int) -> list[int]:
        return torch.randint(5, 300, (n,), generator=draw).tolist()

    contexts = [words(length) for length in (9, 30, 5, 60)]
    contexts.append([*contexts[1][:20], *words(8)])
    contexts.append([*contexts[0], *words(3)])
    requests = [(("", ""), context, words(size)) for context in contexts for size in (1, 1, 4, 7, 25)]
    requests.append(requests[3])
    # One is the beginning of others, two part at their last token, one goes another way early, one begins as another
    # context goes on.
    stem = words(6)
    endings = [stem, [*stem, 7], [*stem, 8], [*stem, *words(5)], [*stem[:2], *words(9)], stem[:1]]
    endings.append([*contexts[-1][len(contexts[0]) :], *words(2)])
    requests += [(("", ""), contexts[0], ending) for ending in endings]
    rows, alone = rows_of(requests, 90)
    alike = next(row for row in rows if stem in row.choices)
    assert alike.length < len(alike.context) + sum(len(choice) - 1 for choice in alike.choices)
    assert len(rows) > len(contexts) - 1 and not [row for row in rows if row.length > 90]
    batch, size = lay(rows)
    assert size == len(rows) and len(batch.tokens) <= sum(row.length for row in rows) - 20 - len(contexts[0])
    scorer = ChoiceScorer(lm.model, lm.device)
    assert scorer.usable(rows[0]) and scorer.way == "own"
    ways: tuple[tuple[Way, int], ...] = (("own", 1024), ("own", 100), ("hidden", 100), ("logits", 1024))
    for scorer.way, scorer.batch_tokens in ways:
        assert len(list(scorer.score(rows))) > 1 or scorer.batch_tokens == 1024
        found: dict[int, float] = {}
        for batch, answers in scorer.score(rows):
            for numbers, (score, _) in zip((n for row in batch for n in row.requests), answers, strict=True):
                found |= dict.fromkeys(numbers, score)
        assert sorted([*found, *alone]) == list(range(len(requests)))
        for number, score in found.items():
            _, context, choice = requests[number]
            assert score == pytest.approx(scorer._score_alone(context, choice), abs=2e-4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"num_hidden_layers": 3, "num_key_value_heads": 2}),
        ("Llama", {"num_hidden_layers": 1, "num_key_value_heads": 4, "tie_word_embeddings": True}),
        (
            "Llama",
            {
                "num_hidden_layers": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        ("Qwen3", {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}),
    ],
    ids=["shared keys", "one layer", "scaled positions", "normed keys"],
)
def test_layers_of_our_own_are_those_of_the_model(family: str, settings: dict[str, Any]) -> None:
    """With weights of norms that are not one, choices of one token (causal attention) and of several (a mask)."""
    import torch
    import transformers

    from evaluation.generation.choice_rows import ChoiceRow
    from evaluation.generation.choice_scoring import ChoiceScorer

    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.2, **settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data.uniform_(0.5, 1.5)

    def words(n: int) -> list[int]:
        return torch.randint(0, 300, (n,), generator=draw).tolist()

    for choices in ((1, 1, 1), (3, 5, 8, 1)):
        rows = [ChoiceRow(words(length), [words(size) for size in choices]) for length in (5, 9, 30, 12)]
        scorer = ChoiceScorer(model, torch.device("cpu"))
        assert scorer.usable(rows[0]) and scorer.way == "own"
        found = scorer._score(rows)
        wanted = [scorer._score_alone(row.context, choice) for row in rows for choice in row.choices]
        assert [score for score, _ in found] == pytest.approx(wanted, abs=1e-4)
        scorer.way = "hidden"
        assert [greedy for _, greedy in scorer._score(rows)] == [greedy for _, greedy in found]
        # What the layers do not know is left to transformers'.
        hook = model.model.layers[0].register_forward_hook(lambda *_: None)
        hooked = ChoiceScorer(model, torch.device("cpu"))
        assert hooked.usable(rows[0]) and hooked.way == "hidden"
        hook.remove()


def test_tokens_of_sequences_are_scored_by_layers_of_our_own_as_by_the_models(
    model_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pairs that begin alike, one twice, and sequences without a token to score or with one."""
    import torch

    from evaluation.generation import language_model
    from evaluation.generation.language_model import load_model, token_log_likelihoods
    from evaluation.generation.llama_trunk import LlamaTrunk

    lm = load_model(model_dir, run)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, lm.rows, (40,), generator=draw).tolist()
    sequences = [ids[:30], ids[:12] + ids[30:], ids[:30], ids[:1], ids[:2], ids[5:9]]
    assert LlamaTrunk.fits(lm.model)
    own = token_log_likelihoods(lm, sequences, run)
    monkeypatch.setattr(language_model, "_by_own_layers", None)  # would fail if it were called
    monkeypatch.setattr(LlamaTrunk, "fits", lambda model: False)
    theirs = token_log_likelihoods(lm, sequences, run)
    for found, wanted, given in zip(own, theirs, sequences, strict=True):
        assert len(found[0]) == len(found[1]) == len(given) - 1 and found[0].dtype == torch.float32
        torch.testing.assert_close(found[0], wanted[0], atol=1e-4, rtol=0)
        assert torch.equal(found[1], wanted[1])
