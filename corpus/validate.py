"""Checks data with a Great Expectations suite before money is spent on it.

python -m corpus.validate --config validate.yaml --input data=DIR --out DIR
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus.config import ValidateConfig
from corpus.documents import count_documents, read_documents
from corpus.suites import Suite, suite_of
from corpus.validation_page import render
from infra.errors import stage_error
from infra.run import Result, Run

if TYPE_CHECKING:
    from great_expectations.core import ExpectationValidationResult
    from pandas import DataFrame

ROWS_SHOWN = 20
CHARACTERS_SHOWN = 500


def validate(config: ValidateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes verdict.json, aux/validation.html and aux/failing_rows.jsonl.

    The kind of data is seen from the artifact: documents/, or train.jsonl with responses or with chosen and rejected.
    Raises StageError: `unknown_data`; `validation_failed` with each failing expectation in plain words.
    """
    kind, rows, total = _load(inputs["data"], config.max_rows)
    run.progress(0, total, "rows", kind)
    suite = suite_of(kind, config)
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
    (out_dir / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf8")
    with (aux / "failing_rows.jsonl").open("w", encoding="utf8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in failing)
    (aux / "validation.html").write_text(render(verdict, failing), encoding="utf8")
    run.progress(total, total, "rows", kind)
    failed = [outcome for outcome in outcomes if not outcome["success"]]
    if failed:
        words = "; ".join(f"expected: {outcome['sentence']}, found: {outcome['observed']}" for outcome in failed)
        message = f"{len(failed)} of {len(outcomes)} expectations of the {suite.name} failed: {words}"
        raise stage_error("validation_failed", f"validate.{kind}", message, "mend the data, or move the limit")
    figures = {"rows": total, "expectations": len(outcomes), "failed_expectations": 0}
    return Result(figures, f"{len(outcomes)} expectations hold of {total:,} rows")


def _load(data: Path, max_rows: int) -> tuple[str, DataFrame, int]:
    """(kind, rows, how many there are in all); of more than `max_rows` an even sample by id."""
    import pandas as pd

    if (data / "documents").is_dir():
        total = count_documents(data)
        documents = (d for d in read_documents(data) if _is_sampled(d.id, max_rows, total))
        rows = pd.DataFrame(((d.id, d.text, d.source) for d in documents), columns=["id", "text", "source"])
        return "documents", rows.assign(rows=total), total
    sides: dict[str, list[dict[str, Any]]] = {}
    for name in ("train", "heldout"):
        path = data / f"{name}.jsonl"
        if not path.is_file():
            raise stage_error("unknown_data", str(data), "expected documents/, or train.jsonl and heldout.jsonl")
        with path.open(encoding="utf8") as lines:
            sides[name] = [json.loads(line) for line in lines]
    pairs = [*sides["train"], *sides["heldout"]]
    kind = "preferences" if any("chosen" in pair for pair in pairs) else "instructions"
    rows = pd.DataFrame([pair for pair in pairs if _is_sampled(pair["id"], max_rows, len(pairs))])
    return kind, rows.assign(train_rows=len(sides["train"]), heldout_rows=len(sides["heldout"])), len(pairs)


def _is_sampled(identity: str, max_rows: int, total: int) -> bool:
    return total <= max_rows or int(identity, 16) < max_rows / total * 2**64


def _run(suite: Suite, rows: DataFrame) -> list[dict[str, Any]]:
    """One row an expectation: its sentence, whether it holds, what was observed, the failing rows' positions."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    frame = rows.assign(**{name: derive(rows) for name, derive in suite.derived.items()})
    asset = context.data_sources.add_pandas("data").add_dataframe_asset("rows")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    for check in suite.checks:
        check.expectation.meta = {"sentence": check.sentence}
    validated = batch.validate(
        gx.ExpectationSuite(name=suite.name, expectations=[check.expectation for check in suite.checks]),
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": ROWS_SHOWN},
    )
    # The results come in an order of their own.
    by_sentence = {_config(found).meta["sentence"]: found for found in validated.results}
    return [_outcome(check.sentence, by_sentence[check.sentence]) for check in suite.checks]


def _outcome(sentence: str, found: ExpectationValidationResult) -> dict[str, Any]:
    if not found.result:
        raise RuntimeError(f"Great Expectations could not evaluate: {sentence}: {found.exception_info}")
    return {
        "expectation": _config(found).type,
        "column": _config(found).kwargs["column"],
        "sentence": sentence,
        "success": bool(found.success),
        "observed": _observed(found.result),
        "failing": found.result.get("partial_unexpected_index_list") or [],
    }


def _config(found: ExpectationValidationResult) -> Any:
    return found.expectation_config


def _observed(result: Mapping[str, Any]) -> str:
    if "observed_value" in result:
        return f"{result['observed_value']:,.6g}"
    checked = result["element_count"] - result.get("missing_count", 0)
    missing = f", {result['missing_count']:,} without a value" if result.get("missing_count") else ""
    return f"{result['unexpected_count']:,} of {checked:,} are otherwise{missing}"


def _failing_row(rows: DataFrame, outcome: Mapping[str, Any], index: int) -> dict[str, Any]:
    row = rows.iloc[index]
    shown = {
        name: row[name] for name in ("id", "source", "text", "prompt", "response", "chosen", "rejected") if name in row
    }
    texts = {name: value[:CHARACTERS_SHOWN] if isinstance(value, str) else None for name, value in shown.items()}
    return {"sentence": outcome["sentence"], "success": outcome["success"], **texts}


if __name__ == "__main__":
    from infra.alone import main

    main(validate, ValidateConfig)
