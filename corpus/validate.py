"""Checks data with a Great Expectations suite before money is spent on it.

python -m corpus.validate --config validate.yaml --input data=DIR --out DIR
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus.config import ValidateConfig
from corpus.validation.drift import MUCH, compare, profile
from corpus.validation.page import render
from corpus.validation.rows import kind_of, load_rows
from corpus.validation.suites import Suite
from infra.errors import stage_error
from infra.io.json import read_own_json
from infra.run import Result, Run

if TYPE_CHECKING:
    from great_expectations.core import ExpectationValidationResult
    from pandas import DataFrame

ROWS_SHOWN = 20
SAMPLE_ROWS = 6
CHARACTERS_SHOWN = 500
PROFILE = Path("aux") / "profile.json"


def validate(config: ValidateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write verdict.json, aux/validation.html, aux/failing_rows.jsonl and aux/profile.json: the distributions of
    lengths, languages and sources.

    The event `drift` reports a large drift. The results are in `out_dir` then, too.

    Args:
        inputs: `data`; `previous`, where there is one, is the artifact of the last validation of this kind; the
            page shows the drift from its profile. It affects only the page.

    Raises StageError: `unknown_data`; those of `read_suite`; `validation_failed` with each failing expectation in plain
    words.
    """
    kind = config.kind or kind_of(inputs["data"])
    suite = config.read(kind)
    run.progress(0, None, "rows", f"reading {kind}")
    rows, total = load_rows(kind, inputs["data"], config.max_rows)
    run.progress(0, total, "rows", kind)
    outcomes = _run(suite, rows)
    verdict = {
        "success": all(outcome["success"] for outcome in outcomes),
        "suite": suite.name,
        "rows": total,
        "rows_checked": len(rows),
        "expectations": [{key: value for key, value in o.items() if key != "failing"} for o in outcomes],
    }
    aux = out_dir / "aux"
    aux.mkdir(parents=True, exist_ok=True)
    failing = [_failing_row(rows, outcome, index) for outcome in outcomes for index in outcome["failing"]]
    distributions = profile(kind, rows, inputs["data"])
    drift = compare(_previous(inputs), distributions)
    (out_dir / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf8")
    (out_dir / PROFILE).write_text(json.dumps(distributions, indent=1) + "\n", encoding="utf8")
    with (aux / "failing_rows.jsonl").open("w", encoding="utf8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in failing)
    (aux / "validation.html").write_text(render(verdict, failing, drift, _sample(rows)), encoding="utf8")
    run.progress(total, total, "rows", kind)
    largest = max(drift, key=lambda drifted: drifted.psi, default=None)
    if largest is not None and largest.psi > MUCH:
        moved, before, now = largest.moved
        changed = f"the share of {moved} went from {before:.1%} to {now:.1%}"
        message = f"{kind} drifted since the last validation: by {largest.name}, {changed}"
        run.event("drift", message, distribution=largest.name, psi=round(largest.psi, 6))
    failed = [outcome for outcome in outcomes if not outcome["success"]]
    if failed:
        words = "; ".join(f"expected: {outcome['sentence']}, found: {outcome['observed']}" for outcome in failed)
        message = f"{len(failed)} of {len(outcomes)} expectations of the suite {suite.name} failed: {words}"
        fix = f"correct the data, or change the limit; the rows are in {aux}/validation.html and failing_rows.jsonl"
        raise stage_error("validation_failed", f"validate.{kind}", message, fix)
    figures: dict[str, float] = {"rows": total, "expectations": len(outcomes), "failed_expectations": 0}
    if largest is not None:
        figures["largest_psi"] = round(largest.psi, 6)
    return Result(figures, f"{len(outcomes)} expectations hold of {total:,} rows")


def _previous(inputs: Mapping[str, Path]) -> dict[str, dict[str, float]] | None:
    file = inputs["previous"] / PROFILE if "previous" in inputs else None
    return read_own_json(file) if file and file.exists() else None


def _run(suite: Suite, rows: DataFrame) -> list[dict[str, Any]]:
    """One row an expectation: its sentence, whether it holds, what was observed, the failing rows' positions."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("data").add_dataframe_asset("rows")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": rows})
    validated = batch.validate(
        gx.ExpectationSuite(
            name=suite.name, expectations=[check.expectation(number) for number, check in enumerate(suite.checks)]
        ),
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": ROWS_SHOWN},
    )
    # The results have another order, and two expectations may have one sentence.
    by_number = {_config(result).meta["number"]: result for result in validated.results}
    return [_outcome(check.sentence, by_number[number]) for number, check in enumerate(suite.checks)]


def _outcome(sentence: str, result: ExpectationValidationResult) -> dict[str, Any]:
    if not result.result:
        raised = next(iter(result.exception_info.values()), result.exception_info)
        reason = raised.get("exception_message") if isinstance(raised, Mapping) else raised
        raise stage_error("bad_suite", _config(result).type, f"Great Expectations could not evaluate it: {reason}")
    return {
        "expectation": _config(result).type,
        "column": _config(result).kwargs.get("column", ""),
        "sentence": sentence,
        "success": bool(result.success),
        "observed": _observed(result.result),
        "failing": result.result.get("partial_unexpected_index_list") or [],
    }


def _config(result: ExpectationValidationResult) -> Any:
    return result.expectation_config


def _observed(result: Mapping[str, Any]) -> str:
    if "observed_value" in result:
        value = result["observed_value"]
        return f"{value:,.6g}" if isinstance(value, int | float) else str(value)[:200]
    checked = result["element_count"] - result.get("missing_count", 0)
    missing = f", {result['missing_count']:,} without a value" if result.get("missing_count") else ""
    return f"{result['unexpected_count']:,} of {checked:,} are otherwise{missing}"


SHOWN = ("id", "source", "language", "side", "sequence", "smallest_id", "largest_id", "text", "prompt", "response")
SHOWN_PAIRS = ("chosen", "rejected")


def _failing_row(rows: DataFrame, outcome: Mapping[str, Any], index: int) -> dict[str, Any]:
    shown = _row(rows, index, (*SHOWN, *SHOWN_PAIRS, outcome["column"]))
    return {"sentence": outcome["sentence"], "success": outcome["success"], **shown}


def _sample(rows: DataFrame) -> list[dict[str, Any]]:
    """Some rows at equal distances, for a person to look at."""
    chosen = sorted({number * len(rows) // SAMPLE_ROWS for number in range(SAMPLE_ROWS)}) if len(rows) else []
    return [_row(rows, index, (*SHOWN, *SHOWN_PAIRS)) for index in chosen]


def _row(rows: DataFrame, index: int, names: Sequence[str]) -> dict[str, Any]:
    row = rows.iloc[index]
    shown = {name: row[name] for name in names if name in row}
    return {
        name: value[:CHARACTERS_SHOWN] if isinstance(value, str) else _plain(value) for name, value in shown.items()
    }


def _plain(value: Any) -> Any:
    """A cell as JSON has it."""
    value = value.item() if hasattr(value, "item") else value
    return None if value != value else value


if __name__ == "__main__":
    from infra.alone import main

    main(validate, ValidateConfig)
