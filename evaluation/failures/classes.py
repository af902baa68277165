"""Failure rates of a model by class: templated tests asked by likelihood of the choices or by generated answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance

from evaluation.config import FailureClassesConfig
from evaluation.failures.templates import Case, draw_cases, read_failure_class
from evaluation.generation.language_model import LoadedModel, check_numbers
from evaluation.generation.random_state import seeded
from evaluation.harness.model import ReportingHFLM
from evaluation.harness.tasks import quiet
from evaluation.statistics.clustered import clustered_share, number_clusters
from evaluation.statistics.intervals import wilson
from infra.errors import stage_error
from infra.run import Run


@dataclass(frozen=True)
class CaseOutcome:
    """One case and its outcome. before, after: the model's answers to the prompt and to the changed prompt."""

    case: Case
    failed: bool
    before: str
    after: str = ""


def measure_failures(
    lm: LoadedModel,
    config: FailureClassesConfig,
    run: Run,
    *,
    seed: int,
    confidence: float,
    limit: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return failure rates with their intervals by class and test, and one row per case with the answers.

    Each test is one template: the interval of a class is clustered by template, that of a test is over its fillings.

    Args:
        limit: maximum number of cases of each class, spread evenly over its tests; a test without any case is left
            out.

    Raises StageError `bad_failure_class` naming the file, before the model is asked.
    """
    classes = [read_failure_class(path) for path in config.paths()]
    names = [failure_class.name for failure_class in classes]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        files = ", ".join(str(path) for path, name in zip(config.paths(), names, strict=True) if name in repeated)
        message = f"each needs a unique `name`; given twice: {', '.join(repeated)}"
        raise stage_error("bad_failure_class", files, message)
    cases = [case for failure_class in classes for case in draw_cases(failure_class, config.cases, seed, limit)]
    with quiet(run.event), seeded(seed, lm.device):
        model = ReportingHFLM(run, lm.model, lm.tokenizer, config.batch_size)
        outcomes = by_likelihood([case for case in cases if _by_likelihood(case, config)], model)
        outcomes += by_answer([case for case in cases if not _by_likelihood(case, config)], model, config)
    order = {case: number for number, case in enumerate(cases)}
    used_tests = {(case.failure_class, case.test) for case in cases}
    outcomes.sort(key=lambda outcome: order[outcome.case])
    rates = {
        failure_class.name: {
            "about": failure_class.about,
            **_rate(class_outcomes := [o for o in outcomes if o.case.failure_class == failure_class.name], config),
            **clustered_share(
                [o.failed for o in class_outcomes], number_clusters(o.case.test for o in class_outcomes), confidence
            ).as_json(),
            "tests": {
                test.name: {"kind": test.kind}
                | _rate(of_test := [o for o in class_outcomes if o.case.test == test.name], config)
                | wilson(sum(o.failed for o in of_test), len(of_test), confidence).as_json()
                for test in failure_class.tests
                if (failure_class.name, test.name) in used_tests
            },
        }
        for failure_class in classes
    }
    return {"by": config.by, "classes": rates}, [_row(number, outcome) for number, outcome in enumerate(outcomes)]


def _by_likelihood(case: Case, config: FailureClassesConfig) -> bool:
    return config.by == "likelihood" or case.kind == "direction"


def by_likelihood(cases: Sequence[Case], model: ReportingHFLM) -> list[CaseOutcome]:
    """Judge each case by the log likelihoods of its choices after the prompt, and after the changed one."""
    case_prompts = [(case, prompt) for case in cases for prompt in _prompts(case)]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(prompt, choice), idx=number)
        for case, prompt in case_prompts
        for number, choice in enumerate(case.choices)
    ]
    scored = model.loglikelihood(requests) if requests else []
    check_numbers((likelihood for likelihood, _ in scored), "failure_classes")
    scores = iter(scored)
    outcomes = []
    for case in cases:
        choice_scores = [[next(scores)[0] for _ in case.choices] for _ in _prompts(case)]
        likeliest = [case.choices[_likeliest(prompt_scores)].strip() for prompt_scores in choice_scores]
        outcomes.append(CaseOutcome(case, failed_by_likelihood(case, choice_scores), *likeliest))
    return outcomes


def failed_by_likelihood(case: Case, scores: Sequence[Sequence[float]]) -> bool:
    """Return True if a case failed.

    A tie is a failure if one answer is right, and if a change had to move an answer.

    Args:
        scores: the choices' log likelihoods, for the prompt and the changed prompt.
    """
    if case.kind == "minimum_functionality":
        right = scores[0][case.answer]
        return any(score >= right for number, score in enumerate(scores[0]) if number != case.answer)
    if case.kind == "invariance":
        return _likeliest(scores[0]) != _likeliest(scores[1])
    before, after = (_share(prompt_scores, case.answer) for prompt_scores in scores)
    return after <= before if case.expect == "more" else after >= before


def by_answer(cases: Sequence[Case], model: ReportingHFLM, config: FailureClassesConfig) -> list[CaseOutcome]:
    """Judge each case by the first line that the model writes, greedily."""
    prompts = [prompt for case in cases for prompt in _prompts(case)]
    options = {"until": ["\n"], "max_gen_toks": config.max_new_tokens, "do_sample": False}
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, dict(options)), idx=0) for prompt in prompts
    ]
    written = iter(model.generate_until(requests) if requests else [])
    if model.answers.as_results().get("", {}).get("failed"):
        message = "answers came from logits that are not numbers (NaN): the model overflows"
        raise stage_error("bad_answers", "failure_classes", message, "score it in fp32, or retrain it")
    outcomes = []
    for case in cases:
        answers = [next(written).strip() for _ in _prompts(case)]
        parsed = [answer_given(text, case.choices) for text in answers]
        failed = parsed[0] != case.answer if case.kind == "minimum_functionality" else parsed[0] != parsed[1]
        outcomes.append(CaseOutcome(case, failed, *answers))
    return outcomes


def answer_given(text: str, choices: Sequence[str]) -> int | str:
    """Return the number of the choice that a text begins with, as whole words in any case; else the text itself."""
    normalized = text.strip().casefold()
    fits = [
        number
        for number, choice in enumerate(raw_choice.strip().casefold() for raw_choice in choices)
        if normalized.startswith(choice) and not normalized[len(choice) : len(choice) + 1].isalnum()
    ]
    return max(fits, key=lambda number: len(choices[number])) if fits else normalized


def guessing_fails(case: Case) -> float | None:
    """Return the failure rate of guessing; None for invariance, which a model with a constant answer never fails."""
    if case.kind == "minimum_functionality":
        return 1 - 1 / len(case.choices)
    return 0.5 if case.kind == "direction" else None


def _prompts(case: Case) -> list[str]:
    return [case.prompt] if case.changed is None else [case.prompt, case.changed]


def _likeliest(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda number: scores[number])


def _share(scores: Sequence[float], answer: int) -> float:
    """Return the answer's share of the choices' likelihoods."""
    highest = max(scores)
    return math.exp(scores[answer] - highest) / math.fsum(math.exp(score - highest) for score in scores)


def _rate(outcomes: Sequence[CaseOutcome], config: FailureClassesConfig) -> dict[str, float]:
    """Return the number of cases and the rate at which guessing fails them."""
    guessing = [
        guess
        for outcome in outcomes
        # Guessing is undefined for a written answer.
        if _by_likelihood(outcome.case, config) and (guess := guessing_fails(outcome.case)) is not None
    ]
    rate: dict[str, float] = {"n": len(outcomes)}
    if len(guessing) == len(outcomes):
        rate["chance"] = round(math.fsum(guessing) / len(guessing), 6)
    return rate


def _row(number: int, outcome: CaseOutcome) -> dict[str, Any]:
    case = outcome.case
    row: dict[str, Any] = {
        "case": number,
        "class": case.failure_class,
        "test": case.test,
        "kind": case.kind,
        "prompt": case.prompt,
        "choices": list(case.choices),
        "failed": outcome.failed,
        "answer": outcome.before,
    }
    if case.kind != "invariance":
        row["about"] = case.choices[case.answer]
    if case.changed is not None:
        row |= {"changed": case.changed, "answer_after": outcome.after}
    if case.expect:
        row["expect"] = case.expect
    return row
