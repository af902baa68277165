"""Device-seconds by what they were spent on, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["useful", "recomputed", "waiting", "lost"]
KINDS: tuple[Kind, ...] = ("useful", "recomputed", "waiting", "lost")
"""useful: work that counts in the end. recomputed: steps that were done before, and again after a fault or a rollback.
waiting: for data, a lease, the queue, servers, labels, compilation, start-up, checkpoints, a retry, the store. lost:
work that was cut short or discarded, by the fault that caused it."""

WAITS = ("data", "lease", "queue", "servers", "labels", "compile", "start-up", "checkpoint", "retry", "store")
"""retry: the pause before another attempt. store: identifying, verifying, committing and uploading artifacts."""

Part = tuple[Kind, str]


@dataclass(frozen=True)
class Recovery:
    """A fault, and the seconds until there was new work: the first step that had not been done before, or, for a stage
    without steps, the next start of its work. None if there was none yet."""

    cause: str
    seconds: float | None
    stage: str = ""


@dataclass(frozen=True)
class Account:
    """The account of a build, a run, or several.

    parts: device-seconds by kind and cause. device_s: wall time times devices, measured apart from the parts, which add
    up to it. energy_j: of the devices; measured_j: the part of it that a driver reported. usd: price of the devices'
    time. carbon_kg: CO2 equivalent. tokens: trained on, those counted twice included only once. attempts: number of
    attempts; those after the first are restarts.
    """

    parts: Mapping[Part, float] = field(default_factory=dict)
    device_s: float = 0.0
    energy_j: float = 0.0
    measured_j: float = 0.0
    carbon_kg: float = 0.0
    usd: float = 0.0
    tokens: float = 0.0
    attempts: int = 0
    restarts: int = 0
    unpriced_s: float = 0.0
    """Device-seconds whose price is unknown, and which `usd` leaves out."""
    unmetered_s: float = 0.0
    """Device-seconds whose power is unknown, and which `energy_j` leaves out."""
    recoveries: tuple[Recovery, ...] = ()

    def total(self, kind: Kind) -> float:
        """Device-seconds of one kind."""
        return sum(seconds for (part, _), seconds in self.parts.items() if part == kind)

    def by_cause(self, kind: Kind) -> dict[str, float]:
        """Device-seconds of one kind by cause, the most first."""
        causes = {cause: seconds for (part, cause), seconds in self.parts.items() if part == kind and seconds > 0}
        return dict(sorted(causes.items(), key=lambda item: -item[1]))

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the useful share of all device-seconds; None without any."""
        return self.total("useful") / self.device_s if self.device_s else None

    @property
    def unaccounted_s(self) -> float:
        """Device-seconds that are under no kind; negative if some are under two."""
        return self.device_s - sum(self.parts.values())

    @property
    def is_estimated(self) -> bool:
        """True if a driver did not report all of the energy."""
        return self.measured_j < 0.999 * self.energy_j

    @property
    def mttr_s(self) -> float | None:
        """Mean seconds from a fault to new work; None without a fault from which a build recovered."""
        known = [recovery.seconds for recovery in self.recoveries if recovery.seconds is not None]
        return sum(known) / len(known) if known else None

    def mttr_by_cause(self) -> dict[str, tuple[int, float | None]]:
        """Number of faults and mean seconds to recover, by cause."""
        causes: dict[str, list[float | None]] = {}
        for recovery in self.recoveries:
            causes.setdefault(recovery.cause, []).append(recovery.seconds)
        means = {}
        for cause, times in sorted(causes.items()):
            known = [seconds for seconds in times if seconds is not None]
            means[cause] = (len(times), sum(known) / len(known) if known else None)
        return means

    def as_json(self) -> dict[str, Any]:
        return {
            "device_s": round(self.device_s, 3),
            "ettr": None if self.ettr is None else round(self.ettr, 4),
            **{f"{kind}_s": round(self.total(kind), 3) for kind in KINDS},
            "parts": {
                kind: {cause: round(seconds, 3) for cause, seconds in self.by_cause(kind).items()} for kind in KINDS
            },
            "unaccounted_s": round(self.unaccounted_s, 3),
            "usd": None if self.usd == 0 < self.unpriced_s else round(self.usd, 6),
            "kwh": None if self.energy_j == 0 < self.unmetered_s else round(self.energy_j / 3.6e6, 6),
            "kwh_measured": round(self.measured_j / 3.6e6, 6),
            "co2e_kg": None if self.energy_j == 0 < self.unmetered_s else round(self.carbon_kg, 6),
            "unpriced_s": round(self.unpriced_s, 3),
            "unmetered_s": round(self.unmetered_s, 3),
            "is_estimated": self.is_estimated,
            "tokens": round(self.tokens),
            "attempts": self.attempts,
            "restarts": self.restarts,
            "mttr_s": None if self.mttr_s is None else round(self.mttr_s, 3),
            "faults": {
                cause: {"count": count, "mttr_s": None if mean is None else round(mean, 3)}
                for cause, (count, mean) in self.mttr_by_cause().items()
            },
        }


def add(accounts: Iterable[Account]) -> Account:
    """Return the sum of accounts."""
    listed = list(accounts)
    parts: dict[Part, float] = {}
    for account in listed:
        for part, seconds in account.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds
    return Account(
        parts,
        sum(account.device_s for account in listed),
        sum(account.energy_j for account in listed),
        sum(account.measured_j for account in listed),
        sum(account.carbon_kg for account in listed),
        sum(account.usd for account in listed),
        sum(account.tokens for account in listed),
        sum(account.attempts for account in listed),
        sum(account.restarts for account in listed),
        sum(account.unpriced_s for account in listed),
        sum(account.unmetered_s for account in listed),
        tuple(recovery for account in listed for recovery in account.recoveries),
    )
