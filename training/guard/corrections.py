"""Corrections of one training: their effect on every batch, and their log in the work folder.

A training is determined by its config, data, seed and this list, which itself depends only on the first three: each
correction only changes batches from `back_to` on, so continuing from any earlier point results in the same weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.io.json import parse_own_json
from infra.run import json_number
from training.config.guard import GuardConfig
from training.core import ranks

FILE = "corrections.json"


@dataclass(frozen=True)
class Alarm:
    """Finding of the guard.

    batch: the batch of the alarm, first: the first suspicious batch of the sequence; both count from 0.
    cause: loss, gradient norm, activation norm, loss scale.
    """

    batch: int
    first: int
    cause: str
    value: float
    usual: float

    def __str__(self) -> str:
        usual = f", usually {self.usual:.3g}" if self.usual == self.usual else ""
        return f"{self.cause} {self.value:.3g} at batch {self.batch:,}{usual}"


@dataclass(frozen=True)
class Correction:
    """Response to an alarm: from batch `back_to` on the learning rate is `factor` times the schedule's, and the batches
    from `skip_first` to `skip_end` (not included) are skipped without an update. From there on the rate rises to
    `heals_to` times the schedule's, over `recover` batches; if the two are equal, the cut is permanent.
    """

    alarm: Alarm
    back_to: int
    factor: float
    heals_to: float
    recover: int
    skip_first: int
    skip_end: int
    attempt: int

    def lr_multiplier(self, batch: int) -> float:
        """Factor on a batch's learning rate."""
        if batch < self.back_to:
            return 1.0
        climbed = min(1.0, max(0, batch - self.skip_end + 1) / self.recover) if self.recover else 0.0
        return self.factor + (self.heals_to - self.factor) * climbed

    def as_json(self) -> dict[str, Any]:
        alarm = {**asdict(self.alarm), "value": json_number(self.alarm.value), "usual": json_number(self.alarm.usual)}
        return {**asdict(self), "alarm": alarm}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Correction:
        alarm = fields["alarm"]
        read = {**alarm, "value": float(alarm["value"]), "usual": float(alarm["usual"])}
        return cls(**{**fields, "alarm": Alarm(**read)})

    def __str__(self) -> str:
        skipped = "leaving out none"
        if self.skip_first < self.skip_end:
            skipped = f"leaving out batches {self.skip_first:,} to {self.skip_end - 1:,}"
        healed = f"back to × {self.heals_to:.3g} over {self.recover:,} batches" if self.recover else "for good"
        return (
            f"{self.alarm}: back to batch {self.back_to:,}, learning rate × {self.factor:.3g} ({healed}), {skipped} "
            f"(try {self.attempt})"
        )


class Corrections:
    """Corrections so far, in `folder`/corrections.json.

    inherited: corrections of the training from which this one continues.
    unfinished: True while later checkpoints must still be removed for the last correction.
    """

    def __init__(self, folder: Path, config: GuardConfig, inherited: Sequence[Correction] = ()) -> None:
        self._path = folder / FILE
        self._config = config
        self._inherited = list(inherited)
        self.made, self.unfinished = self._read(self._path)

    def adopt(self, path: Path, batch: int) -> bool:
        """Adopt the corrections in `path`, which came with a checkpoint of `batch` batches from another machine; every
        rank must call. Return False, and adopt nothing, if this machine's corrections of those batches differ: then the
        checkpoint belongs to an abandoned branch."""
        stored, _ = self._read(path)
        if ranks.from_first(self._path.exists()):
            made = [correction for correction in self.made if correction.back_to < batch]
            return made == [correction for correction in stored if correction.back_to < batch]
        self.made = stored
        if stored != self._inherited:
            self._write(unfinished=False)
        return True

    def lr_multiplier(self, batch: int) -> float:
        """Factor on a batch's learning rate: the lowest factor of all corrections, not their product."""
        return min((correction.lr_multiplier(batch) for correction in self.made), default=1.0)

    @property
    def healed(self) -> float:
        """Final factor on the learning rate: below 1 it was cut permanently."""
        return min((correction.heals_to for correction in self.made), default=1.0)

    def before(self, batch: int) -> int:
        """Number of corrections that affect the first `batch` batches."""
        return sum(correction.back_to < batch for correction in self.made)

    def skips(self, batch: int) -> bool:
        """Return True if a batch is skipped."""
        return any(correction.skip_first <= batch < correction.skip_end for correction in self.made)

    def skipped(self, total: int) -> int:
        """Number of skipped batches among the first `total`."""
        return len(
            {
                batch
                for correction in self.made
                for batch in range(correction.skip_first, min(correction.skip_end, total))
            }
        )

    def answer(self, alarm: Alarm) -> Correction:
        """Return the next correction, and write it to the log first; call `finish` once it is applied.

        Raises StageError `diverged` when no attempts are left.
        """
        config = self._config
        before = self.made[-1] if self.made else None
        if before is not None and alarm.first > before.skip_end + before.recover + config.healthy_after:
            before = None  # healed since
        attempt = before.attempt + 1 if before is not None else 1
        if attempt > config.tries or len(self.made) >= config.corrections:
            raise stage_error(
                "diverged",
                "guard",
                f"{alarm}, after {len(self.made)} corrections ({attempt - 1} of them here)",
                "lower optimizer.learning_rate, lengthen schedule.warmup, or inspect the data of these batches",
            )
        back_to = max(0, alarm.first - config.healthy_after) // config.rollback_every * config.rollback_every
        skip_first = max(back_to, alarm.first - config.skip_before)
        skip_end = max(skip_first, alarm.first + config.skip_after * 2 ** (attempt - 1))
        recover = config.recover if before is None or before.recover else 0
        # At this multiple of the schedule's rate the training was healthy.
        healed = before.heals_to if before is not None and before.recover else self.healed
        if alarm.first < config.window_least:
            # Training never started to learn: the rate is far off. The first attempt keeps the whole warm-up.
            recover = 0
            factor = before.factor * math.sqrt(config.cut_at_start) if before else config.cut_at_start
            skip_end = skip_end if before else skip_first
        else:
            factor = before.factor * config.cut ** (2 ** (attempt - 2)) if before else healed * config.cut
        correction = Correction(
            alarm, back_to, factor, healed if recover else factor, recover, skip_first, skip_end, attempt
        )
        self.made.append(correction)
        self._write(unfinished=True)
        return correction

    def finish(self) -> None:
        """Record that everything reverted by the last correction is removed."""
        self._write(unfinished=False)

    def as_json(self) -> list[dict[str, Any]]:
        """Corrections in JSON-compatible form: NaN and infinity as text."""
        return [correction.as_json() for correction in self.made]

    def _read(self, path: Path) -> tuple[list[Correction], bool]:
        text = ranks.from_first(path.read_text(encoding="utf8") if path.exists() else "")
        if not text:
            return list(self._inherited), False
        state = parse_own_json(text)
        return [Correction.from_json(item) for item in state["made"]], state["unfinished"]

    def _write(self, *, unfinished: bool) -> None:
        self.unfinished = unfinished
        if not ranks.is_first():
            return
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf8") as file:
            json.dump({"made": self.as_json(), "unfinished": unfinished}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def write_log(made: Sequence[Correction], out_dir: Path) -> None:
    """Write the corrections of a finished training to aux/corrections.json; nothing if there were none."""
    if made:
        path = out_dir / "aux" / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([correction.as_json() for correction in made], indent=1) + "\n", encoding="utf8")
