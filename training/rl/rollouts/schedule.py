"""Schedule of sampling: the weights that write each part of a round, and the answers that a round learns from.

Round r's prompts are split into parts, numbered through: part u belongs to round u // parts. Version v of the weights
are those that round v begins with. The schedule counts and orders; it knows neither processes nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from training.config import AsyncConfig
from training.generation.completions import Completions, Episode


@dataclass(frozen=True)
class RoundPart:
    """A part of a round to sample, and the version of the weights that are to write it."""

    number: int
    version: int


@dataclass(frozen=True)
class PartAnswers:
    """A part's sampled answers.

    ids: tokens of each answer. versions: of the weights that wrote each token that was sampled. logprobs: of these
    tokens under those weights, in nats; None if no correction needs them. seconds: that sampling took. episodes: of
    each row, where these are not single answers but conversations with an environment; openings: their prompts.
    """

    number: int
    ids: Sequence[Sequence[int]]
    versions: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None
    seconds: float
    episodes: Sequence[Episode] | None = None
    openings: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, part: RoundPart, answers: Completions, seconds: float) -> Self:
        """Return the answers to a part by weights of one version."""
        ids, logprobs = answers.ids, answers.logprobs
        if answers.episodes is None:
            return cls(part.number, ids, [[part.version] * len(answer) for answer in ids], logprobs, seconds)
        versions = [[part.version] * sum(episode.sampled) for episode in answers.episodes]
        return cls(part.number, ids, versions, logprobs, seconds, answers.episodes, answers.prompts)

    @property
    def oldest(self) -> int:
        """Version of the oldest weights that wrote one of its tokens."""
        return min(min(versions) for versions in self.versions if versions)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        episodes = saved.get("episodes")
        return cls(**saved | {"episodes": episodes and [Episode(**episode) for episode in episodes]})


class RolloutSchedule:
    """Parts in progress, answers that are ready, and the rounds that use them. Used by one thread at a time."""

    def __init__(self, config: AsyncConfig, rounds: int) -> None:
        """Create the schedule of a training.

        Args:
            rounds: of the whole training.
        """
        self._config = config
        self._rounds = rounds
        self._ready: list[PartAnswers] = []
        """In the order of their arrival."""
        self._in_progress: dict[int, RoundPart] = {}
        self._abandoned: dict[int, RoundPart] = {}
        """In progress, and too old before they are complete."""
        self._given_back: list[int] = []
        self._next = 0
        self._round = 0
        """The next round that takes answers."""
        self._first: int | None = None
        """The first version: earlier rounds were learnt before this training had samplers."""
        self._newest = -1
        self.dropped = 0
        """Answers that were too old to learn from."""

    def update(self, version: int) -> None:
        """Have the weights with which round `version` begins from now on."""
        if self._first is None:
            self._first = self._round = version
            self._next = max(self._next, version * self._config.parts)
        self._newest = version
        self._round = max(self._round, version)

    def next(self) -> RoundPart | None:
        """Return the next part to sample, which is then in progress; None if none may begin yet."""
        number = min(self._given_back, default=self._next)
        version = self._version_of(number)
        if version is None:
            return None
        if number in self._given_back:
            self._given_back.remove(number)
        else:
            self._next += 1
        part = self._in_progress[number] = RoundPart(number, version)
        return part

    def give_back(self, part: RoundPart) -> None:
        """Have a part sampled again whose sampler died."""
        self._abandoned.pop(part.number, None)
        if self._in_progress.pop(part.number, None) is not None:
            self._given_back.append(part.number)

    def finish(self, answers: PartAnswers) -> None:
        """Take the answers of a part; those that became too old meanwhile are dropped."""
        self._abandoned.pop(answers.number, None)
        if self._in_progress.pop(answers.number, None) is None or self._is_stale(answers.oldest):
            self.dropped += len(answers.ids)
        else:
            self._ready.append(answers)

    def take(self, number: int) -> list[PartAnswers] | None:
        """Return the answers that round `number` learns from, in order of parts; None while they are not complete."""
        parts = self._config.parts
        if self._config.order == "fixed":
            chosen = [answers for answers in self._ready if answers.number // parts == number]
        else:
            stale = [answers for answers in self._ready if self._is_stale(answers.oldest)]
            self.dropped += sum(len(answers.ids) for answers in stale)
            self._ready = [answers for answers in self._ready if answers not in stale]
            for part in [part for part in self._in_progress.values() if self._is_stale(part.version)]:
                self._abandoned[part.number] = self._in_progress.pop(part.number)  # `finish` will drop it
            chosen = self._ready[:parts]
        if len(chosen) < parts:
            return None
        self._ready = [answers for answers in self._ready if answers not in chosen]
        self._round = number + 1
        return sorted(chosen, key=lambda answers: answers.number)

    def repeat(self, number: int, parts: Sequence[int]) -> None:
        """Count recorded answers as those of round `number`; their parts are sampled no more."""
        self._ready = [answers for answers in self._ready if answers.number not in parts]
        self._given_back = [part for part in self._given_back if part not in parts]
        self._next = max(self._next, *(part + 1 for part in parts))
        self._round = number + 1

    @property
    def is_complete(self) -> bool:
        """True if no further part will be sampled."""
        parts = self._config.parts
        if self._given_back:
            return False
        if self._config.order == "fixed":
            return self._next >= self._rounds * parts
        return self._round * parts + self._outstanding() >= self._rounds * parts

    def needed(self) -> set[int]:
        """Versions of the weights that parts in progress and parts of the next rounds are written by."""
        versions = {part.version for part in (*self._in_progress.values(), *self._abandoned.values())}
        if self._newest < 0:
            return versions
        if self._config.order == "free" or self._first is None:
            return versions | {self._newest}
        parts = self._config.parts
        last = min(self._newest + self._config.max_staleness, self._rounds - 1)
        later = {*self._given_back, *range(self._next, (last + 1) * parts)}
        return versions | {version for number in later if (version := self._fixed_version(number)) <= self._newest}

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON: parts in progress are sampled again."""
        return {
            "config": self._config.model_dump(mode="json"),
            "ready": [answers.as_json() for answers in self._ready],
            "again": sorted([*self._in_progress, *self._given_back]),
            "next": self._next,
            "round": self._round,
            "first": self._first,
            "newest": self._newest,
            "dropped": self.dropped,
        }

    def load_state(self, saved: dict[str, Any]) -> bool:
        """Load a state; return False for one of other settings, which changes nothing."""
        if saved["config"] != self._config.model_dump(mode="json"):
            return False
        self._ready = [PartAnswers.from_json(answers) for answers in saved["ready"]]
        self._given_back = list(saved["again"])
        self._next, self._round, self._first = saved["next"], saved["round"], saved["first"]
        self._newest, self.dropped = saved["newest"], saved["dropped"]
        return True

    def _version_of(self, number: int) -> int | None:
        """Return the version that may write a part now; None if it has to wait, or is not needed."""
        config = self._config
        if self._newest < 0 or (self.is_complete and number not in self._given_back):
            return None
        if config.order == "fixed":
            version = self._fixed_version(number)
            return version if version <= self._newest else None
        # Free: the newest weights, if the round that would use the part is not too far from them.
        using = self._round + self._outstanding() // config.parts
        return self._newest if using - self._newest <= config.max_staleness else None

    def _fixed_version(self, number: int) -> int:
        return max(self._first or 0, number // self._config.parts - self._config.max_staleness)

    def _outstanding(self) -> int:
        """Parts that are ready or in progress, and will not be too old."""
        living = [part for part in self._in_progress.values() if not self._is_stale(part.version)]
        return len(self._ready) + len(living)

    def _is_stale(self, version: int) -> bool:
        return self._config.order == "free" and self._round - version > self._config.max_staleness


def staleness(versions: Sequence[Sequence[int]], number: int) -> float:
    """Return the mean number of rounds by which round `number` is later than the weights that wrote its tokens."""
    ages = [number - version for answer in versions for version in answer]
    return sum(ages) / max(1, len(ages))


def joined(parts: Sequence[PartAnswers]) -> PartAnswers:
    """Return the answers of several parts as those of one, numbered as the first."""
    logprobs = [row for part in parts for row in part.logprobs or ()] if parts[0].logprobs is not None else None
    return replace(
        parts[0],
        ids=[ids for part in parts for ids in part.ids],
        versions=[versions for part in parts for versions in part.versions],
        logprobs=logprobs,
        seconds=sum(part.seconds for part in parts),
        episodes=None if parts[0].episodes is None else [episode for part in parts for episode in part.episodes or ()],
        openings=[opening for part in parts for opening in part.openings],
    )
