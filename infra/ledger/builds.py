"""Cost of artifacts: the account of each, from the record in its aux/, and of all that it descends from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.io.json import read_own_json
from infra.ledger.account import Account, add
from infra.ledger.attempts import times_of
from infra.ledger.record import TIMES, read_lines

RECORD = f"aux/{TIMES}"
PLANNED = "aux/planned.json"
FILES = (RECORD, PLANNED)
"""Files of an artifact that its cost is read from."""


@dataclass(frozen=True)
class Cost:
    """Cost of one artifact.

    account: None if it is unknown. why: the reason of that. within: the artifact whose account includes this one's,
    as the process of a training may measure its model; else "". planned_s: wall seconds of the training's steps that
    `stemma check` expected, with their range; None for what is not planned. measured_s: those that they took, those
    done again included.
    """

    artifact: str
    step: str
    account: Account | None
    why: str = ""
    within: str = ""
    planned_s: tuple[float, float, float] | None = None
    measured_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        planned = None
        if self.planned_s and self.measured_s is not None:
            low, middle, high = self.planned_s
            planned = {
                "planned_s": round(middle, 3),
                "planned_s_low": round(low, 3),
                "planned_s_high": round(high, 3),
                "measured_s": round(self.measured_s, 3),
            }
        return {
            "artifact": self.artifact,
            "step": self.step,
            "known": self.account is not None,
            "why": self.why,
            "within": self.within,
            "account": self.account.as_json() if self.account else None,
            "planned": planned,
        }


def cost_of(folder: Path, artifact: str, step: str, *, is_imported: bool = False) -> Cost:
    """Return the cost of an artifact.

    Args:
        folder: contains those of FILES that the artifact has.
        artifact: its address, <stage>/<fingerprint>.
        step: that built it.
        is_imported: True for an artifact that was made elsewhere.
    """
    lines = read_lines(folder / RECORD)
    if within := next((str(line["build"]) for line in lines if line["kind"] == "within"), ""):
        return Cost(artifact, step, Account(), within=within)
    times = times_of(lines)
    if times is None:
        why = "imported: it was made elsewhere" if is_imported else "built by a version that kept no record of time"
        return Cost(artifact, step, None, why)
    account = times.account()
    planned = _planned(folder)
    devices = times.attempts[-1].devices
    measured_s = (account.total("useful") + account.total("recomputed")) / devices if planned else None
    return Cost(artifact, step, account, planned_s=planned, measured_s=measured_s)


def _planned(folder: Path) -> tuple[float, float, float] | None:
    try:
        planned: Mapping[str, float] = read_own_json(folder / PLANNED)["planned"]
        steps = (planned["step_s_low"], planned["step_s"], planned["step_s_high"])
        low, middle, high = (float(step_s) * planned["batches"] for step_s in steps)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return low, middle, high


@dataclass(frozen=True)
class CostOfAll:
    """Cost of an artifact and all its ancestors. `account` is that of all whose cost is known."""

    costs: Sequence[Cost]

    @property
    def account(self) -> Account:
        return add(cost.account for cost in self.costs if cost.account)

    @property
    def unknown(self) -> list[Cost]:
        return [cost for cost in self.costs if cost.account is None]

    @property
    def is_known(self) -> bool:
        """True if anything at all is known."""
        return any(cost.account is not None and not cost.within for cost in self.costs)


def summary(account: Account) -> list[tuple[str, str]]:
    """Return an account in words: (subject, value) pairs for tables and pages."""
    estimated = " (estimated)" if account.is_estimated else ""
    rows = [
        ("ETTR", "unknown" if account.ettr is None else f"{100 * account.ettr:.1f} %"),
        ("device time", hours(account.device_s)),
        ("money", f"{account.usd:,.2f} USD" if account.usd >= 0.01 else f"{account.usd:.4f} USD"),
        ("energy", f"{_short(account.energy_j / 3.6e6)} kWh{estimated}"),
        ("emissions", f"{_short(account.carbon_kg)} kg CO2e (estimated)"),
        ("tokens trained on", f"{account.tokens:,.0f}"),
        ("restarts", str(account.restarts)),
    ]
    if account.recoveries:
        rows.append(("mean time to recover", "unknown" if account.mttr_s is None else f"{account.mttr_s:.1f} s"))
    return rows


def parts(account: Account) -> Iterable[tuple[str, str, float]]:
    """Yield (kind, cause, device-seconds) of every part of an account, the kinds in order, the largest causes first."""
    for kind in ("useful", "recomputed", "waiting", "lost"):
        for cause, seconds in account.by_cause(kind).items():
            yield kind, cause, seconds


def hours(device_s: float) -> str:
    """Return device-seconds as text: 12.0 s, or 3.42 h from an hour on."""
    return f"{device_s:,.1f} s" if device_s < 3600 else f"{device_s / 3600:,.2f} h"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
