"""Configs that are shipped, run through all of their stages: what they say, but for how long they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY, Answer

SHORT = {
    # 1 MB of docstrings in place of 4 GB of one's own text.
    "ingest": {"read": "[{kind: docstrings, packages: [numpy, scipy], limit_mb: 1}]"},
    "instructions": {
        "read": "[{kind: docstrings, packages: [numpy, scipy], limit: 200}, "
        "{kind: lengths, packages: [numpy, scipy], limit: 100}]"
    },
    "preferences": {"read": "[{kind: docstrings, packages: [numpy, scipy], limit: 200}]"},
    # Fitting the embeddings to bigrams costs the vocabulary squared.
    "tokenizer": {"vocab_size": 2048},
    "pretrain": {"duration": "3 batches", "global_batch_tokens": 8192},
    "sft": {
        "duration": "2 batches",
        "global_batch_examples": 16,
        "answers_limit": 8,
        "answer_max_tokens": 16,
        "heldout_limit": 16,
    },
    "rlhf": {
        "rollouts": 1,
        "rollout_prompts": 8,
        "minibatch_answers": 8,
        "answer_max_tokens": 16,
        "heldout_prompts": 16,
    },
    "reward_model": {"duration": "2 batches", "global_batch_pairs": 16},
    "judge": {"duration": "2 batches", "global_batch_pairs": 16},
    "benchmarks": {"limit": 8},
    "safety": {"toxicity.samples_per_prompt": 2},
}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_alternatives_share_what_they_have_in_common(run: Callable[..., Answer], tmp_path: Path) -> None:
    answer = run("run", REPOSITORY / "configs" / "alternatives.yaml", "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]
    assert set(answer.statuses().values()) == {"built"}
    again = run(
        "run", REPOSITORY / "configs" / "alternatives.yaml", "--root", tmp_path / "store", "--set", "gentle.kl_coef=0.5"
    )
    assert again.with_status("built") == {"gentle", "measure_gentle", "benchmarks_gentle", "report"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_config_for_one_s_own_text_goes_through_every_stage(run: Callable[..., Answer], tmp_path: Path) -> None:
    """Its layers and sequences of 1,024 tokens, in a few batches of fewer tokens."""
    settings = [f"{stage}.{key}={value}" for stage, given in SHORT.items() for key, value in given.items()]
    chosen = [word for setting in settings for word in ("--set", setting)]
    answer = run("run", REPOSITORY / "configs" / "small.yaml", "--root", tmp_path / "store", *chosen)
    assert answer.code == 0, answer.document["errors"]
    assert set(answer.statuses().values()) == {"built"}
