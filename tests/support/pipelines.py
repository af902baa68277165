"""Tiny pipelines for tests: real text, real stages, as little of each as still works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Docstrings are short and full of code; the papers' limits are for web text.
DOCSTRING_RULES: dict[str, Any] = {
    "gopher_quality": {"min_words": 15, "min_alphabetic_word_share": 0.3, "min_stop_words": 1},
    "gopher_repetition": {"most_common_ngrams": [], "repeated_ngrams": []},
}

SENTENCES = (
    "The quiet river of the north bends twice before it reaches the old mill and the fields that belong to it.",
    "A careful reader will have noticed that the second letter was written with another pen, and in haste.",
    "They kept the records of the parish in a chest with three locks, and each of the keys had its own keeper.",
    "When the lamp went out, nobody in the room could say with certainty which of the two had spoken first.",
    "It is one thing to copy a text, and another to understand what the copyist of the text had in mind.",
)


def data_config(folder: Path, documents: int = 60) -> dict[str, Any]:
    """Text from one JSON Lines file to a tokenizer; writes the file if it is not there.

    Its first document is too short to survive cleaning.
    """
    source = folder / "text.jsonl"
    if not source.exists():
        lines = ['{"text": "Too short to keep."}']
        for number in range(documents):
            body = " ".join(SENTENCES[(number + turn) % len(SENTENCES)] for turn in range(4))
            lines.append(f'{{"text": "Chapter {number} of the chronicle. {body}"}}')
        source.write_text("\n".join(lines) + "\n", encoding="utf8")
    return {
        "name": "chronicle",
        "ingest": {"read": [{"kind": "files", "paths": [str(source)]}]},
        "validate": {"documents": {"min_language_like_share": 0.5}, "clean": None},
        "clean": {},
        "tokenizer": {"vocab_size": 400},
    }


def short_config(folder: Path) -> dict[str, Any]:
    """`data_config` without its validation, which takes half of its time, for a test that builds from nothing."""
    return {key: value for key, value in data_config(folder).items() if key != "validate"}


def trained_config(folder: Path, batches: int, **launch: Any) -> dict[str, Any]:
    """`short_config` up to a pretraining of seconds, with compressed shards and many checkpoints, for a test that has
    it train on machines of some kind."""
    return {
        **short_config(folder),
        "shard": {"sequence_length": 64, "compression": "zstd", "shard_mb": 0.05},
        "pretrain": {
            "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
            "duration": f"{batches} batches",
            "global_batch_tokens": 512,
            "checkpoint_every": "20 batches",
            "evaluate_every": "100000 batches",
        },
        "launch": {"device": "cpu", "threads": 1, "precision": "fp32", "retry_wait_s": 0, **launch},
    }


BIAS_ROWS = Path(__file__).parents[1] / "bias_rows"
"""Rows of our own in the files of published bias sets."""


def bias_sets() -> list[dict[str, Any]]:
    """Every kind of bias set, on a few rows."""
    kinds = {"winobias": "winobias", "winogender": "winogender", "bbq": "bbq.jsonl", "stereoset": "stereoset.json"}
    return [
        *({"kind": kind, "path": str(BIAS_ROWS / name)} for kind, name in kinds.items()),
        {
            "kind": "honest",
            "path": str(BIAS_ROWS / "honest.tsv"),
            "lexicon": str(BIAS_ROWS / "lexicon.tsv"),
            "top_k": 2,
        },
        {"kind": "bec_pro", "path": str(BIAS_ROWS / "bec_pro.tsv")},
    ]


def full_config(docstring_packages: tuple[str, ...] = ("numpy", "scipy")) -> dict[str, Any]:
    """Every stage of the DAG, each as small as it can be and still be itself.

    The reward model's duration is left at its default, which is spelled otherwise than its normal form.
    """
    small = {"kind": "docstrings", "packages": list(docstring_packages)}
    return {
        "name": "tiny",
        "ingest": {"read": [{**small, "limit_mb": 0.6}]},
        "validate": {},
        "clean": DOCSTRING_RULES,
        "dedupe": {},
        "decontaminate": {},
        "mix": {},
        "tokenizer": {"vocab_size": 600},
        "shard": {"sequence_length": 64},
        "pretrain": {
            "model": {"preset": "llama-nano"},
            "duration": "30 batches",
            "global_batch_tokens": 1024,
            "optimizer": {"learning_rate": 3.0e-3},
            "evaluate_every": "15 batches",
        },
        "instructions": {"read": [{**small, "limit": 400}]},
        "preferences": {"read": [{**small, "limit": 400}]},
        "sft": {
            "duration": "10 batches",
            "global_batch_examples": 8,
            "max_length": 128,
            "answer_max_tokens": 12,
            "heldout_limit": 16,
            "answers_limit": 8,
            "optimizer": {"learning_rate": 1.0e-3},
        },
        "reward_model": {
            "global_batch_pairs": 32,
            "max_length": 128,
            "heldout_limit": 16,
            "optimizer": {"learning_rate": 1.0e-3},
        },
        "rlhf": {
            "rollouts": 2,
            "rollout_prompts": 8,
            "minibatch_answers": 4,
            "max_prompt_tokens": 100,
            "answer_max_tokens": 8,
            "heldout_prompts": 8,
        },
        # All that can be asked of a model, of each as little as gives a figure.
        "benchmarks": {"limit": 8, "shots": [0, 1], "failure_classes": {"cases": 1}},
        "safety": {
            "toxicity": {"limit": 4, "samples_per_prompt": 2, "max_new_tokens": 8},
            "adversarial": {"limit": 1, "queries": 1, "samples": 1},
            "personal_data": {},
            "bias": {"limit": 20, "sets": bias_sets()},
            "memorisation": {
                "sequences": 8,
                "prefix_tokens": 16,
                "continuation_tokens": 16,
                "copies": True,
                "membership": True,
            },
        },
        "register": {"gates": [{"figure": "benchmarks_rlhf.cloze_accuracy", "at_least": 0.0}]},
        "report": {},
    }
