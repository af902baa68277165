"""Samplers beside the trainer: weights are handed over in files, answers come back, and checkpoints keep both.

<work folder>/rollouts/policy-<version>.safetensors    weights that are still needed; checkpoints link them
<work folder>/rollouts/order/<round>.json              with `order: free` and with vLLM, the answers that a round uses
<work folder>/rollouts/sampler-<number>.log            output of the sampler processes
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from infra.errors import stage_error
from infra.io.files import link_or_copy, write_whole
from infra.io.json import read_own_json
from infra.run import Run
from training.config import RlhfConfig
from training.rl.rollouts.processes import PartPrompts, SamplerDied, SamplerHandle
from training.rl.rollouts.schedule import PartAnswers, RolloutSchedule, RoundPart, staleness

STATE = "rollouts.json"
"""The schedule's state, in a checkpoint."""
_DEATHS = 3
"""Deaths of the samplers of one part after which training stops: a fourth would follow."""


class SamplerPool:
    """Samplers, each fed by a separate thread, and the trainer's side of them: `update`, `take`, checkpoints.

    Figures of time are those of whole rounds of this process, from the second on: until then samplers start.
    """

    def __init__(
        self,
        config: RlhfConfig,
        run: Run,
        weights: Callable[[], Mapping[str, Tensor]],
        questions: Callable[[int], PartPrompts],
        samplers: Callable[[Path], Sequence[SamplerHandle]],
    ) -> None:
        """Start the samplers.

        Args:
            weights: returns the policy's current weights.
            questions: returns the prompts of a part by its number.
            samplers: starts the samplers, with a folder for their logs.
        """
        assert config.async_ is not None
        self._config, self._run = config, run
        self._weights, self._questions = weights, questions
        self._is_exact = config.sampler == "own"
        self._schedule = RolloutSchedule(config.async_, config.rollouts)
        self._folder = run.work_dir / "rollouts"
        self._order = self._folder / "order"
        self._order.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.safetensors"):
            path.unlink()
        self._recorded = {int(path.stem): path for path in self._order.glob("*.json")}
        self._is_begun = False
        self._checkpointed: list[int] = []
        # What the threads share, under `_changed`.
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._deaths: dict[int, int] = {}
        self._replaced = 0
        self._idle_since: dict[int, float] = {}
        self._idle_s = 0.0
        # Times of the rounds that have ended.
        self._taken_at: float | None = None
        self._idle_before = 0.0
        self._waited_s = self._rounds_s = self._sampler_idle_s = self._sampling_s = 0.0
        self._tokens = 0
        self._ages: list[float] = []
        self._samplers = samplers(self._folder)
        self._threads = [
            threading.Thread(target=self._feed, args=(number, sampler), daemon=True, name=f"sampler {number}")
            for number, sampler in enumerate(self._samplers)
        ]
        for thread in self._threads:
            thread.start()

    # The trainer's side.

    def update(self, number: int) -> None:
        """Hand over the current weights, with which round `number` begins."""
        began = time.perf_counter()
        unnamed = self._folder / "half-written.safetensors"
        write_weights(self._weights(), unnamed)
        self._run.metric("rlhf/weights_handover_s", time.perf_counter() - began, number * self._config.round_batches)
        with self._changed:
            # Named and scheduled at once: a sampler's thread removes every named version that the schedule lacks.
            unnamed.replace(self._path(number))
            self._schedule.update(number)
            if not self._is_begun:
                self._repeat()
            self._remove_unneeded()
            self._changed.notify_all()

    def take(self, number: int) -> list[PartAnswers]:
        """Wait for the answers that round `number` learns from, and return them in order of parts.

        Raises StageError where a sampler failed, and `sampler_died` where those of one part died again and again.
        """
        began = time.perf_counter()
        if (path := self._recorded.get(number)) is not None:
            answers = [PartAnswers.from_json(saved) for saved in read_own_json(path)]
        else:
            answers = self._awaited(number)
            if self._config.async_ and (self._config.async_.order == "free" or not self._is_exact):
                path = self._order / f"{number}.json"
                write_whole(path, json.dumps([part.as_json() for part in answers]))
        self._log(number, answers, began)
        return answers

    def _awaited(self, number: int) -> list[PartAnswers]:
        began, patience_s = time.perf_counter(), self._run.launch.hang_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if (answers := self._schedule.take(number)) is not None:
                    self._changed.notify_all()  # a round taken makes room for a part of a later one
                    return answers
                if not self._changed.wait(patience_s):
                    waited = f"{time.perf_counter() - began:.0f} s"
                    self._run.event(
                        "samplers_slow",
                        f"rlhf: round {number} has waited {waited} for answers; see the logs in {self._folder}",
                    )

    def _log(self, number: int, answers: Sequence[PartAnswers], began: float) -> None:
        """Record the figures of a round as its answers are taken."""
        now = time.perf_counter()
        tokens = sum(len(row) for part in answers for row in part.versions)
        seconds = sum(part.seconds for part in answers)
        versions = [row for part in answers for row in part.versions]
        with self._changed:
            idle_s = self._idle_until(now)
            figures = {
                "rlhf/staleness": staleness(versions, number),
                "rlhf/answers_dropped": float(self._schedule.dropped),
                "rlhf/samplers_replaced": float(self._replaced),
                "rlhf/generated_tokens_per_s": tokens / max(seconds, 1e-9),
            }
        self._ages.append(figures["rlhf/staleness"])
        self._sampling_s += seconds
        self._tokens += tokens
        if self._taken_at is not None:
            took, waited = now - self._taken_at, now - began
            sampler_idle_s = (idle_s - self._idle_before) / len(self._samplers)
            figures |= {"rlhf/trainer_idle_share": waited / took, "rlhf/sampler_idle_share": sampler_idle_s / took}
            self._rounds_s += took
            self._waited_s += waited
            self._sampler_idle_s += sampler_idle_s
        self._taken_at, self._idle_before = now, idle_s
        self._run.metrics(figures, number * self._config.round_batches)

    def figures(self) -> dict[str, float]:
        """Return the figures of the rounds of this process; nothing without any."""
        if not self._ages:
            return {}
        figures = {
            "generated_tokens_per_s": self._tokens / max(self._sampling_s, 1e-9),
            "staleness": sum(self._ages) / len(self._ages),
            "answers_dropped": float(self._schedule.dropped),
            "samplers_replaced": float(self._replaced),
        }
        if self._rounds_s:
            figures["trainer_idle_share"] = self._waited_s / self._rounds_s
            figures["sampler_idle_share"] = self._sampler_idle_s / self._rounds_s
        return figures

    def close(self) -> None:
        """End the samplers and remove the weights that were handed over."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for sampler in self._samplers:
            sampler.close()
        for thread in self._threads:
            thread.join()
        for path in self._folder.glob("policy-*"):
            path.unlink()

    # Checkpoints.

    def write(self, folder: Path) -> list[Path]:
        """Write the schedule, the answers that are ready and the weights that are still needed to a checkpoint."""
        with self._changed:
            state, needed = self._schedule.state(), self._schedule.needed()
            paths = [self._path(version) for version in sorted(needed)]
            for path in paths:
                link_or_copy(path, folder / path.name)
        (folder / STATE).write_text(json.dumps(state), encoding="utf8")
        self._forget_order(state["round"])
        return [folder / STATE, *(folder / path.name for path in paths)]

    def read(self, folder: Path, number: int) -> None:
        """Continue from a checkpoint that was written in round `number`, if it was with these settings.

        Parts that were in progress are sampled again. Recorded rounds after it are learnt again as they were.
        """
        ahead = {later: path for later, path in self._recorded.items() if later > number}
        self._recorded = ahead
        path = folder / STATE
        with self._changed:
            if path.exists() and self._schedule.load_state(read_own_json(path)):
                for version in self._schedule.needed():
                    link_or_copy(folder / self._path(version).name, self._path(version))
            self._repeat()
            self._changed.notify_all()
        if not self._is_exact:
            message = "vLLM's answers cannot be reproduced bit for bit: from here on the run differs"
        elif self._config.async_ and self._config.async_.order == "free":
            message = "with order: free, later rounds use answers as they arrive: from here on the run differs"
        else:
            return
        known = f"{len(ahead)} recorded rounds are repeated, and then " if ahead else ""
        self._run.event("approximate", f"rlhf continues approximately: {known}{message}")

    def _repeat(self) -> None:
        """Have the schedule count the rounds that are recorded, once, before samplers begin."""
        self._is_begun = True
        for number, path in sorted(self._recorded.items()):
            self._schedule.repeat(number, [saved["number"] for saved in read_own_json(path)])

    def _forget_order(self, number: int) -> None:
        """Remove the record of rounds that no checkpoint goes back to."""
        self._checkpointed.append(number)
        if self._config.keep_checkpoints_hours or len(self._checkpointed) <= self._config.keep_checkpoints:
            return
        oldest = self._checkpointed[-self._config.keep_checkpoints - 1]
        for path in self._order.glob("*.json"):
            if int(path.stem) < oldest:
                path.unlink()

    # A sampler's side.

    def _feed(self, number: int, sampler: SamplerHandle) -> None:
        """Give a sampler parts to answer, until the pool is closed or one fails."""
        try:
            while (part := self._next_part(number)) is not None:
                try:
                    answers = sampler.answer(part, self._questions(part.number), self._path(part.version))
                except SamplerDied as death:
                    self._replace(number, sampler, part, death)
                    continue
                with self._changed:
                    self._schedule.finish(answers)
                    self._remove_unneeded()
                    self._changed.notify_all()
        except BaseException as error:  # the trainer raises it where it waits
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next_part(self, number: int) -> RoundPart | None:
        """Wait for a part that may begin; None once the pool is closed."""
        with self._changed:
            self._idle_since[number] = time.perf_counter()
            try:
                while not self._is_closed and self._failure is None:
                    if (part := self._schedule.next()) is not None:
                        return part
                    self._changed.wait()
                return None
            finally:
                self._idle_s += time.perf_counter() - self._idle_since.pop(number)

    def _idle_until(self, now: float) -> float:
        """Return the seconds that samplers have waited for weights or for room, all of them together."""
        return self._idle_s + sum(now - since for since in self._idle_since.values())

    def _replace(self, number: int, sampler: SamplerHandle, part: RoundPart, death: SamplerDied) -> None:
        with self._changed:
            self._schedule.give_back(part)
            if self._is_closed:
                return
            deaths = self._deaths[part.number] = self._deaths.get(part.number, 0) + 1
            if deaths > _DEATHS:
                raise stage_error(
                    "sampler_died",
                    "rlhf.async",
                    f"{deaths} samplers died in a row at the same answers, the last one by {death}",
                    f"read {self._folder / f'sampler-{number}.log'}; lack of memory ends them with SIGKILL",
                )
            self._replaced += 1
        self._run.event("sampler_replaced", f"rlhf: sampler {number} died ({death}) and is replaced")
        sampler.restart()
        with self._changed:
            self._changed.notify_all()

    def _path(self, version: int) -> Path:
        return self._folder / f"policy-{version:08}.safetensors"

    def _remove_unneeded(self) -> None:
        needed = {self._path(version) for version in self._schedule.needed()}
        for path in self._folder.glob("policy-*.safetensors"):
            if path not in needed:
                path.unlink()


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights to a file, tied ones once."""
    distinct: dict[int, str] = {}
    for name, value in weights.items():
        distinct.setdefault(value.data_ptr(), name)
    save_file({name: weights[name].contiguous() for name in distinct.values()}, path)
