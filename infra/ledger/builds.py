"""Cost of artifacts: the account of each, from the record in its aux/, and of all that it descends from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.io.json import read_own_json
from infra.ledger.account import KINDS, Account, add
from infra.ledger.attempts import times_of
from infra.ledger.record import TIMES, read_lines

RECORD = f"aux/{TIMES}"
PLANNED = "aux/planned.json"
FILES = (RECORD, PLANNED)
"""Files of an artifact that its cost is read from."""


EFFECTIVE_TIME = "effective time (ETTR)"
EFFECTIVE_TIME_MEANS = "the share of device time spent on work that counts, not on waiting, redoing or losing work"
"""ETTR: effective training time ratio."""


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
        (EFFECTIVE_TIME, "unknown" if account.ettr is None else f"{100 * account.ettr:.1f} %"),
        ("device time", hours(account.device_s)),
        ("money", _known(f"{money(account.usd)} USD (estimated)", account.usd, account.unpriced_s)),
        ("energy", _known(f"{energy(account.energy_j)}{estimated}", account.energy_j, account.unmetered_s)),
        (
            "emissions",
            _known(f"{mass(account.carbon_kg)} CO2e (estimated)", account.energy_j, account.unmetered_s),
        ),
        ("tokens trained on", f"{account.tokens:,.0f}"),
        ("restarts", str(account.restarts)),
    ]
    if account.recoveries:
        rows.append(("mean time to recover", "unknown" if account.mttr_s is None else f"{account.mttr_s:.1f} s"))
    return rows


def card_section(cost: CostOfAll) -> str:
    """Return the section of a model card about the cost of the model and all that it descends from."""
    lines = ["## What it cost", ""]
    if not cost.is_known:
        return "\n".join([*lines, "Unknown: no record of its time was kept."])
    lines += ["| with all ancestors | |", "|---|---:|"]
    lines += [f"| {subject} | {value} |" for subject, value in summary(cost.account)]
    account = cost.account
    shares = {kind: account.total(kind) / account.device_s for kind in KINDS} if account.device_s else {}
    shown = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.items())
    lines += ["", f"Device time: {shown}.", "", f"{EFFECTIVE_TIME}: {EFFECTIVE_TIME_MEANS}."]
    if unknown := [each.step or each.artifact for each in cost.unknown]:
        lines += ["", f"Not included, since unknown: {', '.join(unknown)}."]
    return "\n".join(lines)


def tags(account: Account) -> dict[str, str]:
    """Return an account as tags of a run or a model in MLflow."""
    values = {
        "device_s": f"{account.device_s:.1f}",
        "ettr": "" if account.ettr is None else f"{account.ettr:.4f}",
        "usd": "" if account.usd == 0 < account.unpriced_s else f"{account.usd:.4g}",
        "kwh": "" if account.energy_j == 0 < account.unmetered_s else f"{account.energy_j / 3.6e6:.4g}",
        "co2e_kg": "" if account.energy_j == 0 < account.unmetered_s else f"{account.carbon_kg:.4g}",
        "tokens": f"{account.tokens:.0f}",
        "restarts": str(account.restarts),
        "mttr_s": "" if account.mttr_s is None else f"{account.mttr_s:.1f}",
    }
    return {f"stemma.cost.{name}": value for name, value in values.items() if value}


def parts(account: Account) -> Iterable[tuple[str, str, float]]:
    """Yield (kind, cause, device-seconds) of every part of an account, the kinds in order, the largest causes first."""
    for kind in KINDS:
        for cause, seconds in account.by_cause(kind).items():
            yield kind, cause, seconds


def hours(device_s: float) -> str:
    """Return device-seconds as text: 12.0 s, or 3.42 h from an hour on."""
    return f"{device_s:,.1f} s" if device_s < 3600 else f"{device_s / 3600:,.2f} h"


def _known(text: str, value: float, unknown_s: float) -> str:
    """Return a value in words, with the device time that it leaves out because a rate of its device is unknown."""
    if not unknown_s:
        return text
    return f"{text}, without {hours(unknown_s)} of unknown devices" if value else "unknown: set launch.cost"


def money(usd: float) -> str:
    """Return an amount of US dollars as text: 12.34, or <0.01."""
    return "<0.01" if 0 < usd < 0.005 else f"{usd:,.2f}"


def energy(joules: float) -> str:
    """Return an amount of energy in the unit that fits: 4.19 Wh, 52.9 mWh."""
    watt_hours = joules / 3600
    return _scaled(watt_hours, ((1000, "kWh"), (1, "Wh"), (0.001, "mWh")))


def mass(kilograms: float) -> str:
    """Return a mass in the unit that fits: 2.01 g, 1.2 kg."""
    return _scaled(kilograms, ((1, "kg"), (0.001, "g"), (1e-6, "mg")))


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    scale, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    return f"{_short(value / scale)} {unit}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
