"""Rules that tell right answers from wrong ones: numbers, forms, JSON, and code that has to pass tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from corpus.config import InstructionsConfig
from corpus.instructions import instructions
from infra.errors import StageError
from infra.run import Run
from training.rl.grading import Graders
from training.rl.verify import Rule, right_answers, rules_of


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("It makes 16 - 3 - 4 = 9 eggs, $9 * 2 = $18.", "She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18"),
        ("#### 1,234.50 of 99", "1234.5"),
        ("so −7 degrees", "-7"),
        ("-$5", "$-5"),
        ("5-3", "3"),
        ("9 - 5", "5"),
        ("x=-.5.", "-0.5"),
        ("6.02e23", "602e21"),
        ("1,000,000 dollars", "1000000"),
    ],
)
def test_answers_that_end_with_the_same_number_are_right(answer: str, reference: str) -> None:
    assert Rule("number", reference).allows(answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("18 at first, then 19", "#### 18"),
        ("18 before, #### none", "18"),
        ("nothing", "0"),
        ("-5", "5"),
        ("1.5", "15"),
        ("7e23", "6e23"),
        ("1,8", "18"),
    ],
)
def test_answers_that_end_with_another_number_or_none_are_wrong(answer: str, reference: str) -> None:
    assert not Rule("number", reference).allows(answer)


@pytest.mark.parametrize(
    ("rule", "reference", "right", "wrong"),
    [
        ("json", '{"a": 1, "b": []}', ' {"b": null, "a": 2, "c": 3}\n', '{"a": 1}'),
        ("json", "{}", "{}", "[1]"),
        ("json", "[1]", "3", "NaN"),
        ("json", "1", '"text"', "```json\n1\n```"),
        ("json", "1", "[]", "[" * 100_000),
        ("format:\\w+: \\d+( and \\d+)*", "any: 1", "sums: 3 and 4\n", "sums: 3 and 4, I think"),
        ("format:(?s)<think>.*</think>.*", "<think></think>", "<think>\n3\n</think> 4", "4"),
    ],
)
def test_forms_are_checked_as_a_whole(rule: str, reference: str, right: str, wrong: str) -> None:
    assert Rule(rule, reference).allows(right) and not Rule(rule, reference).allows(wrong)


CODE, TESTS = "def twice(x):\n    return 2 * x\n", "assert twice(2) == 4\nassert twice('a') == 'aa'"


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (CODE, True),
        (f"Here it is:\n```python\n{CODE}```\nIt doubles.", True),
        (f"Here it is:\n```python3\n{CODE}```\nIt doubles:\n```\ntwice(2)\n```", True),
        (f"Run this:\n```bash\npython twice.py\n```\nof\n```Python\n{CODE}```", True),
        (f"```py3\n{CODE}```", True),
        ("def twice(x):\n    return x + 2\n", False),
        ("import sys\nsys.exit(0)", False),
        ("import os\nos._exit(0)", False),
        ("print('all passed')\nraise SystemExit", False),
        ("def twice(x):", False),
        (f"everything = bytearray(2**32)\n{CODE}", False),
        # It must find an empty folder, no environment of ours, and nothing of this project.
        (f"import os\nassert not os.listdir() and 'PYTEST_CURRENT_TEST' not in os.environ\n{CODE}", True),
        (f"import training\n{CODE}", False),
    ],
)
def test_code_is_right_if_it_and_its_tests_run_to_their_end(answer: str, is_right: bool) -> None:
    assert right_answers([answer], [Rule("tests", TESTS)], Graders()).tolist() == [is_right]


def test_rules_without_a_use_for_their_reference_are_named() -> None:
    for rule, reference in (
        ("number", "none"),
        ("json", "{"),
        ("tests", "twice(2) == 4"),
        ("tests", "assert"),
        ("??", "1"),
    ):
        with pytest.raises(StageError, match="pairs:1: "):
            rules_of([{"response": reference, "verify": rule}], "pairs")
    with pytest.raises(ValidationError, match="expected a regular expression after format"):
        InstructionsConfig.model_validate({"read": [{"kind": "files", "paths": ["a"], "verify": "format:("}]})
    with pytest.raises(ValidationError, match="expected a rule"):
        InstructionsConfig.model_validate({"read": [{"kind": "files", "paths": ["a"], "reference_field": "tests"}]})


def test_a_reference_may_stand_beside_the_response_and_what_is_none_is_put_aside(tmp_path: Path, run: Run) -> None:
    rows = [
        {"text": f"Double {n}.", "code": CODE, "test_list": [f"assert twice({n}) == {2 * n}", "assert twice(0) == 0"]}
        for n in range(40)
    ]
    rows[3] |= {"test_list": ["twice(3)"]}
    del rows[5]["test_list"]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"kind": "files", "paths": [str(path)]}
    source |= {"prompt_field": "text", "response_field": "code", "reference_field": "test_list", "verify": "tests"}
    config = {"read": [source], "heldout_share": 0.3, "max_quarantine_share": 0.1}
    instructions(InstructionsConfig.model_validate(config), {}, tmp_path, run)
    pairs = _pairs(tmp_path)
    assert len(pairs) == 38 and all(pair["response"] == CODE.strip() for pair in pairs)
    reasons = [row["reason"] for row in _lines(tmp_path / "aux" / "quarantine.jsonl")]
    assert ["there is no assert in it" in why or "there is no test_list" in why for why in reasons] == [True, True]
    rules = rules_of(pairs[:2], "pairs")
    assert right_answers([CODE, "def twice(x): return 0"], rules, Graders()).tolist() == [1.0, 0.0]


def test_an_empty_reference_is_none_and_the_response_does_not_take_its_place(tmp_path: Path, run: Run) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Double {n}.", "response": f"In 3 steps it is {n}.", "final": str(2 * n)} for n in range(40)
    ]
    rows[3]["final"], rows[5]["final"] = " ", []
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "files", "paths": [str(tmp_path / "sums.jsonl")], "verify": "number", "reference_field": "final"}
    config = {"read": [source], "heldout_share": 0.3, "max_quarantine_share": 0.1}
    instructions(InstructionsConfig.model_validate(config), {}, tmp_path, run)
    assert len(pairs := _pairs(tmp_path)) == 38 and all(pair["reference"] for pair in pairs)
    reasons = [row["reason"] for row in _lines(tmp_path / "aux" / "quarantine.jsonl")]
    assert ["there is no text to compare answers with" in why for why in reasons] == [True, True]


def test_worked_answers_of_gsm8k_are_read_and_verified_by_their_last_number(
    shared_data: Path, tmp_path: Path, run: Run
) -> None:
    source = {"kind": "files", "paths": [str(shared_data / "gsm8k" / "test.jsonl")], "verify": "number"}
    config = InstructionsConfig.model_validate({"read": [source], "heldout_share": 0.2})
    figures = instructions(config, {}, tmp_path, run).figures
    assert figures["quarantined"] == 0 and figures["train_pairs"] + figures["heldout_pairs"] == 1319
    pairs = _pairs(tmp_path)
    rules = rules_of(pairs, "pairs")
    finals = [pair["response"].rpartition("#### ")[2] for pair in pairs]
    assert right_answers([pair["response"] for pair in pairs], rules, Graders()).all()
    assert right_answers([f"So it is ${final}.00!" for final in finals], rules, Graders()).all()
    assert not right_answers([f"{final}1" for final in finals], rules, Graders()).any()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _pairs(folder: Path) -> list[dict[str, Any]]:
    return [pair for side in ("train", "heldout") for pair in _lines(folder / f"{side}.jsonl")]
