"""BLEU, chrF and TER over chosen items: what each sentence adds is counted once, not for each draw of a bootstrap.

Of 40 short sentences sacrebleu makes a BLEU in 3 ms and a TER in 11; from the counts both take a fiftieth of a ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.api import metrics
from sacrebleu.metrics import BLEU, CHRF, TER

_COUNTED: dict[Callable[..., Any], Callable[[], Any]] = {
    metrics.bleu: BLEU,
    metrics.chrf: CHRF,
    metrics.chrfpp: partial(CHRF, word_order=2),
    metrics.ter: TER,
}
"""sacrebleu's metrics as lm-eval's aggregations call them."""


def over(aggregate: Callable[[list[Any]], float], items: Sequence[Any]) -> Callable[[Sequence[int]], float]:
    """What a task's aggregation makes of chosen items, by their numbers, which may repeat. items: as it takes them, of
    the metrics here pairs of reference (or several) and what the model wrote."""
    if aggregate not in _COUNTED:
        return lambda chosen: float(aggregate([items[number] for number in chosen]))
    metric = _COUNTED[aggregate]()
    references, written = metrics._sacreformat(*zip(*items, strict=True))
    counts = np.array(metric._extract_corpus_statistics(written, references))  # (N, counts of the metric)
    return lambda chosen: float(metric._compute_score_from_stats(counts[list(chosen)].sum(axis=0)).score)
