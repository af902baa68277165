"""Counts of the items behind a score: asked, answered, failed, truncated, empty and unparsable.

lm-eval counts missing answers, and answers that no filter could read, as wrong. A score of such answers does not
measure the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evaluation.config import ANSWER_FAULTS, AnswerLimits
from infra.errors import Problem, StageError
from infra.run import Run

COUNTS = ("asked", "answered", *ANSWER_FAULTS)
"""Fields next to each score. answered: items that did not fail, including truncated, empty and unparsable ones."""
NOTICED = 0.01
"""Share of items above which truncated, empty and unparsable answers are reported as a warning."""
_INVALID = "[invalid]"
"""Default result of lm-eval's filters that find nothing."""


class AnswerLog:
    """Items of each task whose prompt or answer was cut off, and those whose answer came from NaN logits.

    A model records them while it answers, because lm-eval's own records lack them.
    """

    def __init__(self) -> None:
        self._items: dict[str, dict[str, set[int]]] = {}

    def add(self, fault: str, instance: Any) -> None:
        """Record a fault: truncated or failed.

        Args:
            instance: lm-eval's request; one without a task counts for the task "".
        """
        faults = self._items.setdefault(instance.task_name or "", {})
        faults.setdefault(fault, set()).add(instance.doc_id or 0)

    def as_results(self) -> dict[str, dict[str, list[int]]]:
        """Return {task: {fault: doc_ids}}, for the key `answers` of lm-eval's results."""
        return {task: {fault: sorted(ids) for fault, ids in faults.items()} for task, faults in self._items.items()}


def answer_counts(results: Mapping[str, Any], name: str, part: str = "none") -> dict[str, int]:
    """Return the counts of a task, or of all tasks of a group, for one of its filters.

    Args:
        results: lm-eval's results, with `answers` of an `AnswerLog`.
        part: name of the filter, as in the keys of lm-eval's results.
    """
    all_samples = results.get("samples", {}).get(name, [])
    samples = {sample["doc_id"]: sample for sample in all_samples if sample.get("filter", "none") == part}
    if not all_samples:
        counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        for member in results.get("group_subtasks", {}).get(name, []):
            counts.update(answer_counts(results, member, part))
        return {field: counts[field] for field in COUNTS}
    if not samples:
        return dict.fromkeys(COUNTS, 0)
    logged = results.get("answers", {}).get(name, {})
    expected = int((results.get("n-samples", {}).get(name) or {}).get("effective") or len(samples))
    failed = {number for number, sample in samples.items() if _is_failed(sample)} | set(logged.get("failed", ()))
    succeeded = {number: sample for number, sample in samples.items() if number not in failed}
    empty = {number for number, sample in succeeded.items() if _is_empty(sample)}
    fallbacks = _fallbacks(results["configs"][name], part)
    unparsable = [number for number in succeeded.keys() - empty if _is_unparsable(succeeded[number], fallbacks)]
    missing = max(0, expected - len(samples))
    return {
        "asked": expected,
        "answered": len(succeeded),
        "failed": len(failed & samples.keys()) + missing,
        "truncated": len(set(logged.get("truncated", ())) & succeeded.keys()),
        "empty": len(empty),
        "unparsable": len(unparsable),
    }


def check_answers(
    results: Mapping[str, Any], limits: AnswerLimits, run: Run | None = None, where: str = "benchmarks"
) -> list[str]:
    """Refuse scores with too many items that failed, were truncated, empty or unparsable.

    Args:
        limits: largest share of each.
        run: receives an event for each notice that is allowed.
        where: key of the limits' section, for errors.

    Returns:
        A sentence for each task with more than 1 % of such items that are allowed.

    Raises:
        StageError: `bad_answers`, naming each task with its counts.
    """
    problems, notices = [], []
    for name, part, counts in _leaf_counts(results):
        task = name if part == "none" else f"{name} ({part})"
        for fault in ANSWER_FAULTS:
            share, limit = counts[fault] / max(1, counts["asked"]), getattr(limits, fault)
            description = f"{counts[fault]:,} of {counts['asked']:,} items {_WORDS[fault]} ({100 * share:.3g} %)"
            if share > limit:
                message = f"{task}: {description}; at most {100 * limit:.3g} % are allowed"
                problems.append(Problem("bad_answers", f"{where}.answer_limits.{fault}", message, _FIXES[fault]))
            elif share > NOTICED:
                notices.append(f"{task}: {description}")
    if problems:
        raise StageError(*problems)
    for notice in notices:
        if run is not None:
            run.event("answers", notice)
    return notices


def _leaf_counts(results: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, int]]]:
    for name, samples in sorted(results.get("samples", {}).items()):
        for part in dict.fromkeys(sample.get("filter", "none") for sample in samples):
            yield name, part, answer_counts(results, name, part)


_WORDS = {
    "failed": "failed: no answer, or a likelihood that is not a number",
    "truncated": "were truncated: the prompt does not fit the context, or the answer reached its length limit",
    "empty": "got an empty answer",
    "unparsable": "got an answer in which the task's filter finds nothing",
}
_FIXES = {
    "failed": "look for NaN in the model (its training may have diverged), or score it in fp32 (launch.precision)",
    "truncated": "use fewer shots, a longer max_gen_toks or a stop string (until) in the task, or a longer context",
    "empty": "check the task's stop strings (until), or use the model's chat template",
    "unparsable": "check the task's filter, or use shots that show the form of an answer",
}


def _is_failed(sample: Mapping[str, Any]) -> bool:
    """Return True if a request of the item has no answer, or a log likelihood that is not a finite number."""
    return any(
        not responses or any(not _is_valid(response) for response in responses) for responses in sample.get("resps", ())
    )


def _is_valid(response: Any) -> bool:
    # A log likelihood is paired with a flag for likeliest tokens; that of a whole document may come alone.
    value = response[0] if isinstance(response, Sequence) and not isinstance(response, str) else response
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def _is_empty(sample: Mapping[str, Any]) -> bool:
    written = [response for responses in sample.get("resps", ()) for response in responses if isinstance(response, str)]
    return bool(written) and not any(text.strip() for text in written)


def _is_unparsable(sample: Mapping[str, Any], fallbacks: Sequence[Any]) -> bool:
    values = list(_flat(sample["filtered_resps"]))
    return bool(fallbacks) and all(value is None or value == "" or value in fallbacks for value in values)


def _fallbacks(config: Mapping[str, Any], part: str) -> list[Any]:
    """Return a filter's results if it finds nothing; empty for a filter that accepts every answer unchanged."""
    for entry in config.get("filter_list") or ():
        if entry.get("name") == part:
            all_steps = entry.get("filter", ())
            steps = [step for step in all_steps if "regex" in str(step.get("function"))]
            maps = [step for step in all_steps if step.get("function") == "map"]
            defaults = [step.get("default_value") for step in maps]
            values = [value for step in maps for value in (step.get("mapping_dict") or {}).values()]
            not_mapped = [default for default in defaults if default not in values]
            return [step.get("fallback", _INVALID) for step in steps] + ["invalid"] * bool(steps) + not_mapped
    return []


def _flat(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    return (inner for element in value for inner in _flat(element))
