"""Failure classes: cases from templates, what counts as a failure, rates of a real model, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarks import benchmarks
from evaluation.config import FAILURE_CLASSES, FAILURE_CLASSES_DIR, BenchmarksConfig, FailureClassesConfig
from evaluation.failures.classes import answer_given, failed_by_likelihood, measure_failures
from evaluation.failures.templates import Case, draw_cases, read_failure_class
from infra.errors import StageError
from infra.io.template_process import in_words
from infra.run import Run

MINE = """
name: mine
about: Counts.
fill:
  a: {numbers: [1, 5]}
tests:
  - name: next
    kind: minimum_functionality
    where: a > 2
    prompt: "{{ a }},"
    right: " {{ a + 1 }}"
    wrong: [" {{ a }}"]
"""


def test_every_shipped_class_has_right_cases_of_its_tests_and_the_config_names_them_all() -> None:
    assert sorted(path.stem for path in FAILURE_CLASSES_DIR.glob("*.yaml")) == sorted(FAILURE_CLASSES)
    kinds = set()
    for name in FAILURE_CLASSES:
        found = read_failure_class(FAILURE_CLASSES_DIR / f"{name}.yaml")
        cases = draw_cases(found, 30, 17)
        assert found.name == name and {case.test for case in cases} == {test.name for test in found.tests}
        assert len(set(cases)) == len(cases) and cases == draw_cases(found, 30, 17) != draw_cases(found, 30, 18)
        kinds |= {case.kind for case in cases}
    assert kinds == {"minimum_functionality", "invariance", "direction"}


def test_arithmetic_is_right_in_digits_and_in_words() -> None:
    digits = read_failure_class(FAILURE_CLASSES_DIR / "arithmetic_digits.yaml")
    for case in draw_cases(digits, 20, 1):
        if case.test in ("sums", "differences"):
            assert eval(case.prompt.rstrip("= ")) == int(case.choices[0])
    spelled = {in_words(number): number for number in range(100)}
    assert spelled["twenty-one"] == 21 and len(spelled) == 100
    words = read_failure_class(FAILURE_CLASSES_DIR / "arithmetic_words.yaml")
    for case in draw_cases(words, 20, 1):
        if case.test in ("sums", "differences"):
            first, sign, second, _ = case.prompt.lower().split()
            result = spelled[first] + (1 if sign == "plus" else -1) * spelled[second]
            assert spelled[case.choices[0].strip()] == result


def test_a_limit_takes_the_first_cases_of_each_test_in_turn(model_dir: Path, run: Run) -> None:
    from evaluation.generation.language_model import load_model

    found = read_failure_class(FAILURE_CLASSES_DIR / "negation.yaml")
    every, few = draw_cases(found, 5, 17), draw_cases(found, 5, 17, len(found.tests) + 1)
    assert [case for case in every if case in few] == few
    counted = [sum(case.test == test.name for case in few) for test in found.tests]
    assert counted == [2] + [1] * (len(found.tests) - 1)
    assert draw_cases(found, 5, 17, 1000) == every
    # With fewer cases than tests, those without any are no rows.
    asked = FailureClassesConfig(classes=("negation",), cases=5)
    rates, rows = measure_failures(load_model(model_dir, run), asked, run, seed=17, confidence=0.95, limit=1)
    assert len(rows) == 1 == rates["classes"]["negation"]["n"]
    assert list(rates["classes"]["negation"]["tests"]) == [found.tests[0].name]


def _case(kind: Any, expect: str | None = None) -> Case:
    changed = None if kind == "minimum_functionality" else "after"
    return Case("c", "t", kind, "before", changed, (" a", " b"), 0, expect)


@pytest.mark.parametrize(
    ("case", "scores", "failed"),
    [
        (_case("minimum_functionality"), [[-1.0, -2.0]], False),
        (_case("minimum_functionality"), [[-2.0, -1.0]], True),
        (_case("minimum_functionality"), [[-1.0, -1.0]], True),
        (_case("invariance"), [[-1.0, -2.0], [-5.0, -6.0]], False),
        (_case("invariance"), [[-1.0, -2.0], [-6.0, -5.0]], True),
        # a falls from -1 to -9, and its share of both rises from 1/2 to 1/(1 + 1/e).
        (_case("direction", "more"), [[-1.0, -1.0], [-9.0, -10.0]], False),
        (_case("direction", "less"), [[-1.0, -1.0], [-9.0, -10.0]], True),
        (_case("direction", "less"), [[-1.0, -1.0], [-1.0, -1.0]], True),
    ],
)
def test_what_counts_as_a_failure(case: Case, scores: list[list[float]], failed: bool) -> None:
    assert failed_by_likelihood(case, scores) is failed


def test_a_written_answer_is_a_choice_only_as_whole_words() -> None:
    assert answer_given(" 14, because", [" 1", " 14"]) == 1
    assert answer_given("140", [" 14", " 15"]) == "140"
    assert answer_given("Twelve apples", [" twelve", " ten"]) == 0


def test_a_class_of_ones_own_and_a_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    cases = draw_cases(read_failure_class(tmp_path / "mine.yaml"), 30, 17)
    assert sorted(case.prompt for case in cases) == ["3,", "4,", "5,"]
    for wrong, said in (
        (MINE.replace("a > 2", "a > 9"), "no filling satisfies"),
        (MINE.replace("{{ a }},", "{{ b }},"), "'b' is undefined"),
        (MINE.replace("kind: minimum", "kind: maximum"), "tests.0.kind"),
        (MINE.replace("wrong:", "worng:"), "tests.0"),
    ):
        (tmp_path / "mine.yaml").write_text(wrong)
        with pytest.raises(StageError, match=said):
            draw_cases(read_failure_class(tmp_path / "mine.yaml"), 30, 17)


def test_two_classes_of_one_name_are_not_counted_as_one(model_dir: Path, tmp_path: Path, run: Run) -> None:
    from cli.models.eval import _failure_classes
    from evaluation.generation.language_model import load_model
    from infra.errors import Problem

    for name in ("mine", "copying", "counts"):
        (tmp_path / f"{name}.yaml").write_text(MINE)
    config = FailureClassesConfig(classes=(), files=(f"{tmp_path}/mine.yaml", f"{tmp_path}/counts.yaml"))
    with pytest.raises(StageError, match="each needs a unique `name`; given twice: mine"):
        measure_failures(load_model(model_dir, run), config, run, seed=17, confidence=0.95)
    problems: list[Problem] = []
    assert _failure_classes(("copying", f"{tmp_path}/copying.yaml"), problems) is None
    assert "given twice: copying" in problems[0].message


def test_rates_of_a_model_are_those_of_its_own_likelihoods(model_dir: Path, tmp_path: Path, run: Run) -> None:
    """In the stage, with figures for gates; and by answers that the model writes."""
    from evaluation.generation.language_model import load_model, token_log_likelihoods

    (tmp_path / "mine.yaml").write_text(MINE)
    config = {"classes": ["number_agreement"], "files": [str(tmp_path / "mine.yaml")], "cases": 6}
    options = BenchmarksConfig.model_validate({"limit": 2, "tasks": ["cloze"], "failure_classes": config})
    assert [path.name for path in options.sources()[-1].paths] == ["number_agreement.yaml", "mine.yaml"]
    out = tmp_path / "out"
    out.mkdir()
    figures = benchmarks(options, {"model": model_dir}, out, run).figures
    found = json.loads((out / "results.json").read_text())["failure_classes"]["classes"]
    assert set(found) == {"number_agreement", "mine"} and found["mine"]["n"] == 3
    assert figures["mine_failure_rate"] == found["mine"]["value"] and found["mine"]["chance"] == 0.5
    assert set(found["number_agreement"]["tests"]) >= {"one", "plural_is_likelier"}
    lm = load_model(model_dir, run)
    rows = [json.loads(line) for line in (out / "aux/failure_cases.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] != "minimum_functionality":
            continue
        # Each choice alone, by a scorer that knows nothing of lm-eval; this tokenizer adds no first token.
        scores = []
        for choice in row["choices"]:
            ids = lm.tokenizer.encode(row["prompt"] + choice)
            given = len(lm.tokenizer.encode(row["prompt"]))
            ((likelihoods, _),) = token_log_likelihoods(lm, [ids], run)
            scores.append(float(likelihoods[given - 1 :].sum()))
        assert row["failed"] is not (scores[0] > scores[1])
        assert row["answer"] == row["choices"][scores.index(max(scores))].strip()
    failed = sum(row["failed"] for row in rows if row["class"] == "mine")
    assert found["mine"]["value"] == pytest.approx(failed / 3, abs=1e-6)

    written, cases = measure_failures(
        lm, FailureClassesConfig.model_validate({**config, "by": "answer"}), run, seed=17, confidence=0.95
    )
    assert written["by"] == "answer" and "chance" not in written["classes"]["mine"]
    assert all(isinstance(row["answer"], str) for row in cases)


def test_the_report_shows_each_class_before_and_after_alignment_with_failures_to_read(tmp_path: Path) -> None:
    from evaluation.config import ReportConfig
    from evaluation.report import render
    from tests.evaluation.pipeline import write_pipeline

    folders = write_pipeline(tmp_path)
    for model, failed in (("base", 20), ("sft", 20), ("rlhf", 5)):
        rows = [
            {
                "case": n, "class": "negation", "test": "opposite", "kind": "minimum_functionality",
                "prompt": f"<b>{n}</b> is not wet. It is", "choices": [" dry", " wet"], "about": " dry",
                "failed": n < failed, "answer": "wet" if n < failed else "dry",
            }
            for n in range(40)
        ]  # fmt: skip
        rate = {"value": failed / 40, "low": 0.1, "high": 0.6, "n": 40, "chance": 0.5}
        tests = {"opposite": {"kind": "minimum_functionality", **rate}}
        classes = {"negation": {"about": "Knows not.", **rate, "tests": tests}}
        folder = folders[f"benchmarks_{model}"]
        results = json.loads((folder / "results.json").read_text())
        results["shots"] = {"0": results["tasks"], "5": {"cloze": {"acc": {"value": 0.123, "low": 0.1, "high": 0.2}}}}
        (folder / "results.json").write_text(
            json.dumps(results | {"failure_classes": {"by": "likelihood", "classes": classes}})
        )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "aux/failure_cases.jsonl").write_text(lines)
    page, _ = render(ReportConfig(), folders)
    assert "Failure classes" in page and "Before and after alignment" in page
    assert "−37.5 points" in page and "50 %" in page
    assert "Alignment tax" in page and "rlhf − base" in page
    assert "By number of shots" in page and "rlhf, 5 shots" in page and "12.3 % (10.0 to 20.0)" in page
    # 15 cases got better and none worse: McNemar's exact test gives 2 / 2^15.
    assert "&lt;b&gt;0&lt;/b&gt; is not wet. It is ▸ wet (right: dry)" in page and "<b>0</b>" not in page
