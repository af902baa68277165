"""The corrections of one training: what they change in every batch, and their log in the work folder.

A training is determined by its config, data, seed and this list, which itself follows from the first three: each
correction only changes batches from `back_to` on, so that whoever continues from any earlier point comes to the same
weights.
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
    """What the guard saw.

    batch: the batch of the alarm, first: the first suspicious one of the row; both count from 0.
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
    """One answer to an alarm: from batch `back_to` on the learning rate is `factor` times the schedule's, and the
    batches from `skip_first` to `skip_end` (not included) are passed over without an update. From there on the rate
    climbs to `heals_to` times the schedule's, over `recover` batches; where the two are equal, the cut is for good.
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
        """What a batch's learning rate is multiplied by."""
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
    """The corrections so far, in `folder`/corrections.json.

    inherited: those of the training that this one goes on from.
    unfinished: whether the last one still waits for the checkpoints behind it to be dropped.
    """

    def __init__(self, folder: Path, config: GuardConfig, inherited: Sequence[Correction] = ()) -> None:
        self._path = folder / FILE
        self._config = config
        self._inherited = list(inherited)
        self.made, self.unfinished = self._read(self._path)

    def adopt(self, path: Path, batch: int) -> bool:
        """Takes over what stands in `path`, which came with a checkpoint of `batch` batches from another machine; every
        rank must call. False, and nothing is taken over, where this machine's corrections of those batches are others:
        then the checkpoint is of a branch that was given up."""
        theirs, _ = self._read(path)
        if ranks.from_first(self._path.exists()):
            ours = [one for one in self.made if one.back_to < batch]
            return ours == [one for one in theirs if one.back_to < batch]
        self.made = theirs
        if theirs != self._inherited:
            self._write(unfinished=False)
        return True

    def lr_multiplier(self, batch: int) -> float:
        """What a batch's learning rate is multiplied by: the lowest of what the corrections say, not their product."""
        return min((one.lr_multiplier(batch) for one in self.made), default=1.0)

    @property
    def healed(self) -> float:
        """What the learning rate is multiplied by in the end: below 1 it was cut for good."""
        return min((one.heals_to for one in self.made), default=1.0)

    def before(self, batch: int) -> int:
        """How many of them bear on the first `batch` batches."""
        return sum(one.back_to < batch for one in self.made)

    def skips(self, batch: int) -> bool:
        """Whether a batch is passed over."""
        return any(one.skip_first <= batch < one.skip_end for one in self.made)

    def skipped(self, total: int) -> int:
        """Batches of the first `total` that are passed over."""
        return len({batch for one in self.made for batch in range(one.skip_first, min(one.skip_end, total))})

    def answer(self, alarm: Alarm) -> Correction:
        """The next correction, written down before anything else happens; call `finish` once it is carried out.

        Raises StageError `diverged` when the tries are used up.
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
                "lower optimizer.learning_rate, lengthen schedule.warmup, or look at the data of these batches",
            )
        back_to = max(0, alarm.first - config.healthy_after) // config.rollback_every * config.rollback_every
        skip_first = max(back_to, alarm.first - config.skip_before)
        skip_end = max(skip_first, alarm.first + config.skip_after * 2 ** (attempt - 1))
        recover = config.recover if before is None or before.recover else 0
        # Beside this multiple of the schedule's rate the training was healthy.
        healed = before.heals_to if before is not None and before.recover else self.healed
        if alarm.first < config.window_least:
            # It never got going: the rate is wrong by far. The first try leaves the warm-up whole.
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
        """Notes that nothing of what the last correction took back is left."""
        self._write(unfinished=False)

    def as_json(self) -> list[dict[str, Any]]:
        """The corrections as JSON takes them: NaN and infinity as text."""
        return [one.as_json() for one in self.made]

    def _read(self, path: Path) -> tuple[list[Correction], bool]:
        text = ranks.from_first(path.read_text(encoding="utf8") if path.exists() else "")
        if not text:
            return list(self._inherited), False
        state = parse_own_json(text)
        return [Correction.from_json(one) for one in state["made"]], state["unfinished"]

    def _write(self, *, unfinished: bool) -> None:
        self.unfinished = unfinished
        if not ranks.is_first():
            return
        beside = self._path.with_suffix(".tmp")
        with beside.open("w", encoding="utf8") as file:
            json.dump({"made": self.as_json(), "unfinished": unfinished}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)


def write_log(made: Sequence[Correction], out_dir: Path) -> None:
    """Leaves the corrections of a finished training in aux/corrections.json; nothing if there were none."""
    if made:
        path = out_dir / "aux" / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([one.as_json() for one in made], indent=1) + "\n", encoding="utf8")
