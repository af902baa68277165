"""Differences between models over the same items, and calibration of their choices."""

from __future__ import annotations

import math
from typing import Any

import pytest


def test_differences_are_those_of_the_same_items_and_corrected_for_their_number() -> None:
    from evaluation.statistics.paired import compare_models, holm

    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    right = {"a": [0] * 20 + [1] * 20, "b": [1] * 40}
    models = []
    for name, scores in right.items():
        row = {"task": "t", "metric": "acc", "filter": "none", "num_fewshot": 0, "value": sum(scores) / 40}
        items = [{"doc_id": i, "filter": "none", "acc": float(score)} for i, score in enumerate(scores)]
        models.append((name, [{**row, "higher_is_better": True}], {("t", 0): items}))
    (found,) = compare_models(models, {})
    assert found["difference"] == 0.5 and found["test"] == "mcnemar" and found["significant"]
    assert found["p_value"] == pytest.approx(2 * 0.5**20)


def test_few_items_show_no_difference_whatever_the_metric() -> None:
    """Of three items one in four draws by chance is as far apart; of twelve that all say so, hardly one."""
    from lm_eval.api.metrics import perplexity

    from evaluation.statistics.paired import compare_models

    row = {"task": "t", "metric": "perplexity", "filter": "none", "num_fewshot": 0, "value": 1.0}

    def compared(n: int) -> dict[str, Any]:
        models = [
            (
                name,
                [{**row, "higher_is_better": False}],
                {("t", 0): [{"doc_id": i, "perplexity": of(i)} for i in range(n)]},
            )
            for name, of in (("a", lambda i: -3.0 - 0.1 * i), ("b", lambda i: -2.5 - 0.08 * i))
        ]
        (found,) = compare_models(models, {"t": {"perplexity": perplexity}})
        return found

    few, many = compared(3), compared(12)
    assert few["difference"] == pytest.approx(math.exp(2.58) - math.exp(3.1)) and few["high"] < 0
    assert few["p_value"] == pytest.approx(0.25, abs=0.05) and not few["significant"]
    assert many["p_value"] < 0.01 and many["significant"] and many["test"] == "swap permutation"


def test_calibration_of_choices_by_hand() -> None:
    from math import log

    from evaluation.statistics.calibration import calibration

    items = [{"filtered_resps": [(log(0.8), False), (log(0.2), False)], "target": target} for target in (0, 0, 0, 1)]
    found = calibration(items)
    assert found and found["accuracy"] == 0.75 and found["mean_confidence"] == pytest.approx(0.8)
    assert found["brier"] == pytest.approx((3 * 2 * 0.2**2 + 2 * 0.8**2) / 4)
    # CrowS-Pairs has no right choice: its target is the stereotype.
    assert calibration([{**item, "likelihood_diff": 1.0, "pct_stereotype": 1} for item in items]) is None
