"""Cost of artifacts in reports and cards: what is unknown is named, and never counted as zero."""

from __future__ import annotations

import json
from pathlib import Path

from evaluation.config import ReportConfig
from evaluation.report import render
from infra.ledger.account import Account
from infra.ledger.builds import Cost, CostOfAll, card_section, cost_of, summary
from tests.evaluation.pipeline import write_pipeline

RATES = {"watts": 10.0, "usd_per_hour": 3.6, "overhead": 1.0, "kg_per_kwh": 0.5}


def write_record(folder: Path, rates: dict[str, float] = RATES) -> None:
    """The record of a training of 100 s, half of them steps."""
    aux = folder / "aux"
    aux.mkdir(exist_ok=True, parents=True)
    stamp = {"time": 1.7e9, "boot": "b"}
    attempt = {"kind": "attempt", "id": "a", "stage": "pretrain", "trains": True, "devices": 2, "rates": rates}
    seconds = {"step": 50.0, "data": 10.0}
    spent = {"kind": "spent", "key": "k", "from": 0, "to": 5, "tokens": 640, "seconds": seconds}
    lines = [
        {**stamp, "ticks": 0.0, **attempt},
        {**stamp, "ticks": 30.0, "kind": "work"},
        {**stamp, "ticks": 40.0, "kind": "loop", "key": "k", "batch": 0},
        {**stamp, "ticks": 100.0, **spent},
        {**stamp, "ticks": 100.0, "kind": "end", "cause": ""},
    ]
    (aux / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_shows_what_was_spent_and_names_what_is_unknown(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    page, _ = render(ReportConfig(), folders)
    assert "ETTR" not in page
    write_record(folders["pretrain"])
    page, _ = render(ReportConfig(), folders)
    assert "effective time (ETTR)" in page
    assert "50.0 %" in page
    assert "start-up" in page
    assert "unknown" in page.partition('id="cost"')[2]


def test_an_unknown_price_is_unknown(tmp_path: Path) -> None:
    write_record(tmp_path, {})
    account = cost_of(tmp_path, "pretrain/f", "pretrain").account
    assert account is not None
    assert account.as_json()["usd"] is None
    assert dict(summary(account))["money"].startswith("unknown")
    write_record(tmp_path)
    priced = cost_of(tmp_path, "pretrain/f", "pretrain").account
    assert priced is not None
    assert priced.as_json()["usd"] == 0.2
    assert priced.tokens == 640


def test_a_card_names_the_ancestors_whose_cost_is_unknown(tmp_path: Path) -> None:
    write_record(tmp_path)
    known = cost_of(tmp_path, "pretrain/f", "pretrain")
    old = cost_of(tmp_path / "none", "shard/f", "shard")
    imported = cost_of(tmp_path / "none", "ingest/f", "ingest", is_imported=True)
    within = Cost("measurement/f", "measured", Account(), within="pretrain/f")
    card = card_section(CostOfAll([known, old, imported, within]))
    assert "| effective time (ETTR) | 50.0 % |" in card and "work that counts" in card
    assert "Not included, since unknown: shard, ingest." in card
    assert card_section(CostOfAll([old, within])).endswith("Unknown: no record of its time was kept.")
