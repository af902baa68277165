"""Memorisation: given the start of a document that was trained on, does greedy decoding recite the rest? (Carlini et
al. 2022)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.tokens.remote import location_of
from corpus.tokens.trained import TrainedSequences, split_fingerprint
from evaluation.config import MemorisationConfig
from evaluation.generation.language_model import LoadedModel, token_log_likelihoods
from evaluation.safety.duplicates import recited_by_copies
from evaluation.safety.packed_documents import read_documents, recited_tokens
from evaluation.statistics.intervals import Interval, bootstrap, difference_of_proportions, wilson
from infra.run import Run


def measure_memorisation(
    lm: LoadedModel,
    config: MemorisationConfig,
    shards: Path,
    trained: TrainedSequences | None,
    run: Run,
    *,
    seed: int,
    confidence: float,
) -> dict[str, Any]:
    """Measure the shares of documents recited exactly: of text that the model was trained on and, as a control, of
    validation text.

    Returns {"skipped": reason} if these are unknown or only from other shards, and if no document is as long as prefix
    and continuation together.

    Args:
        trained: the sequences on which the model, or the base model it was made from, was pretrained.
    """
    # Reasons to skip the measurement.
    length = config.prefix_tokens + config.continuation_tokens
    if length > lm.max_tokens:
        return {"skipped": f"prefix and continuation need {length} tokens, the model reads {lm.max_tokens}"}
    if trained is None:
        return {"skipped": "the model does not say which sequences it was trained on; pretraining writes that down now"}
    is_trained = trained.of(split_fingerprint(shards / "train"))
    if is_trained is None:
        return {"skipped": "the model was trained on other shards than those given"}
    if location_of(shards / "train"):
        return {"skipped": "the shards lie on S3, and memorisation reads those on a disk alone"}
    results: dict[str, Any] = {
        "prefix_tokens": config.prefix_tokens,
        "continuation_tokens": config.continuation_tokens,
        "trained_sequences": int(is_trained.sum()),
        "training_sequences": len(is_trained),
    }
    # Recitation of trained sequences and, as control, of validation sequences.
    exact, losses = {}, {}
    for split, mask in (("train", is_trained), ("validation", None)):
        sequences = read_documents(shards / split, config.sequences, length, seed, run.work_dir, mask)
        if not sequences:
            message = "trained" if split == "train" else split
            reason = f"no sequence of the shards contains that many tokens of one document of {message} text"
            return {"skipped": f"prefix and continuation need {length} tokens, {reason}"}
        scored = token_log_likelihoods(lm, sequences, run, "memorisation")
        losses[split] = np.array([-float(scores.double().mean()) for scores, _ in scored])
        recited = recited_tokens([hits for _, hits in scored], config.prefix_tokens)
        exact[split] = int((recited == config.continuation_tokens).sum())
        results[split] = {
            "sequences": len(sequences),
            "exact_match": wilson(exact[split], len(sequences), confidence).as_json(),
            "recited_tokens": bootstrap(recited, confidence=confidence, seed=seed).as_json(),
        }
    # Comparisons of the two, by copies, and by a threshold on the loss.
    counts = [results[split]["sequences"] for split in ("train", "validation")]
    difference = difference_of_proportions(exact["train"], counts[0], exact["validation"], counts[1], confidence)
    results["exact_match_difference"] = difference.as_json()
    if config.copies:
        results["by_copies"] = recited_by_copies(
            lm, config, shards / "train", is_trained, run, seed=seed, confidence=confidence
        )
    if config.membership:
        results["membership_inference"] = membership_auc(losses["train"], losses["validation"], seed, confidence)
    return results


def membership_auc(
    members: NDArray[np.float64], others: NDArray[np.float64], seed: int, confidence: float
) -> dict[str, float]:
    """Return the area under the ROC curve of a loss threshold that separates members from others (Yeom et al. 2018), by
    scikit-learn, with the bootstrap over documents of each side; 0.5 is no separation.

    Args:
        members, others: mean loss per token of each document (N,), (M,).
    """
    from scipy import stats
    from sklearn.metrics import roc_auc_score

    def auc(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
        return float(roc_auc_score([1] * len(first) + [0] * len(second), [*-first, *-second]))

    value = auc(members, others)
    if min(len(members), len(others)) < 2:
        return Interval(value, 0.0, 1.0).as_json()
    result = stats.bootstrap(
        (members, others), auc, vectorized=False, paired=False, n_resamples=1000, confidence_level=confidence,
        method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(value, float(result.low), float(result.high)).as_json()
