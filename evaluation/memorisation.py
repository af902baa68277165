"""Memorisation: given the start of a training sequence, does greedy decoding recite the rest? (Carlini et al. 2022)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.config import MemorisationConfig
from evaluation.language_model import LanguageModel, token_log_likelihoods
from evaluation.statistics import bootstrap, difference_of_proportions, wilson
from infra.errors import stage_error
from infra.run import Run


def measure_memorisation(
    lm: LanguageModel, config: MemorisationConfig, shards: Path, run: Run, *, seed: int, confidence: float
) -> dict[str, Any]:
    """Shares of sequences recited exactly, for training text and, as a control, for validation text.

    Returns {"skipped": why} where the sequences are shorter than prefix and continuation together.
    """
    length = config.prefix_tokens + config.continuation_tokens
    results: dict[str, Any] = {
        "prefix_tokens": config.prefix_tokens,
        "continuation_tokens": config.continuation_tokens,
    }
    if length > lm.max_tokens:
        return {"skipped": f"prefix and continuation need {length} tokens, the model reads {lm.max_tokens}"}
    exact = {}
    for split in ("train", "validation"):
        sequences = read_sequences(shards / split, config.sequences, length, seed)
        if not sequences:
            return {"skipped": f"prefix and continuation need {length} tokens, the {split} sequences are shorter"}
        recited = recited_tokens(lm, sequences, config.prefix_tokens, run)
        exact[split] = int((recited == config.continuation_tokens).sum())
        results[split] = {
            "sequences": len(sequences),
            "exact_match": wilson(exact[split], len(sequences), confidence).as_json(),
            "recited_tokens": bootstrap(recited, confidence=confidence, seed=seed).as_json(),
        }
    counts = [results[split]["sequences"] for split in ("train", "validation")]
    difference = difference_of_proportions(exact["train"], counts[0], exact["validation"], counts[1], confidence)
    return {**results, "exact_match_difference": difference.as_json()}


def recited_tokens(lm: LanguageModel, sequences: list[list[int]], prefix_tokens: int, run: Run) -> np.ndarray:
    """How many tokens after the prefix greedy decoding gets right before its first error, for each sequence (N,).

    Greedy decoding follows the true text exactly as far as each true token is the likeliest one given the true text
    before it, so one forward pass over the sequences answers it without generating anything.
    """
    hits = [likeliest for _, likeliest in token_log_likelihoods(lm, sequences, run, "memorisation")]
    # The first entry of `hits` is about token 1, so that about the first token after the prefix is at prefix - 1.
    return np.array([int(hit[prefix_tokens - 1 :].int().cumprod(0).sum()) for hit in hits])


def read_sequences(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    """The first `length` tokens of up to `count` sequences of an MDS folder, drawn under the seed, in stored order.

    Reads the shards as files: a StreamingDataset would need shared memory and a process group to do the same.
    Sequences that are shorter are passed over. Raises StageError if the folder is no MDS folder with a token column.
    """
    from streaming.base.format import reader_from_json

    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        readers = [reader_from_json(str(folder), "", shard) for shard in index["shards"]]
    except (OSError, KeyError, ValueError) as error:
        raise stage_error("bad_shards", str(folder), f"expected a folder of MDS shards: {error}") from error
    places = [(reader, row) for reader in readers for row in range(len(reader))]
    order = np.random.default_rng(seed).permutation(len(places))
    chosen: list[tuple[int, list[int]]] = []
    for place in order:
        reader, row = places[place]
        tokens = _token_column(reader[row], folder)
        if len(tokens) >= length:
            chosen.append((int(place), tokens[:length].tolist()))
        if len(chosen) == count:
            break
    return [tokens for _, tokens in sorted(chosen)]


def _token_column(sample: dict[str, Any], folder: Path) -> np.ndarray:
    tokens = sample.get("tokens")
    if not isinstance(tokens, np.ndarray):
        raise stage_error("bad_shards", str(folder), f"expected a column tokens, found {sorted(sample)}")
    return tokens
