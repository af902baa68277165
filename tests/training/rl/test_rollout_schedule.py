"""The schedule of sampling beside training, importance weights, and the pool that feeds samplers: without models."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.process.lifetime import signal_group
from infra.run import Run
from training.config import AsyncConfig, RlhfConfig
from training.config.alignment import samplers_problem
from training.rl.rollouts.correction import importance
from training.rl.rollouts.pool import SamplerPool
from training.rl.rollouts.processes import OwnSampler, PartPrompts, SamplerDied, SamplerHandle
from training.rl.rollouts.schedule import PartAnswers, RolloutSchedule, RoundPart

ROUNDS = 6
RLHF: dict[str, Any] = {
    "algorithm": "grpo", "answers_per_prompt": 2, "rollouts": ROUNDS, "rollout_prompts": 4, "minibatch_answers": 4,
    "reward_functions": {"package.module:function": 1.0},
}  # fmt: skip


def _answers(part: RoundPart, count: int = 4) -> PartAnswers:
    """Answers whose tokens name their part and the weights that wrote them."""
    ids = [[part.number, part.version]] * count
    return PartAnswers(part.number, ids, [[part.version] * 2] * count, [[-1.0, -2.0]] * count, 0.5)


@pytest.mark.parametrize("order", ["fixed", "free"])
@pytest.mark.parametrize(("staleness", "parts", "samplers"), [(0, 1, 1), (1, 1, 2), (1, 2, 2), (3, 2, 3)])
def test_no_order_of_arrival_breaks_the_bound_and_the_fixed_order_depends_on_none(
    order: str, staleness: int, parts: int, samplers: int
) -> None:
    """Samplers that finish at random, some of which die, and a checkpoint in every round, from which all goes on."""
    config = AsyncConfig.model_validate({"max_staleness": staleness, "parts": parts, "order": order})
    for seed in range(20):
        chance = random.Random(seed)
        schedule, busy, kept = RolloutSchedule(config, ROUNDS), list[RoundPart](), set[int]()
        for number in range(ROUNDS):
            schedule.update(number)
            kept = (kept | {number}) & schedule.needed()
            while (taken := schedule.take(number)) is None:
                while len(busy) < samplers and (part := schedule.next()) is not None:
                    busy.append(part)
                    assert part.version in kept, "its weights are removed already"
                assert busy, "nothing is sampled, and the trainer waits"
                part = busy.pop(chance.randrange(len(busy)))
                if chance.random() < 0.2:
                    schedule.give_back(part)
                else:
                    schedule.finish(_answers(part))
                kept &= schedule.needed()
            assert len(taken) == parts
            assert all(0 <= number - answers.oldest <= staleness for answers in taken)
            if order == "fixed":
                assert [answers.number for answers in taken] == list(range(number * parts, (number + 1) * parts))
                assert {answers.oldest for answers in taken} == {max(0, number - staleness)}
            if chance.random() < 0.5:  # killed: what was in progress is lost, and weights that are not needed too
                saved, kept = schedule.state(), kept & schedule.needed()
                schedule, busy = RolloutSchedule(config, ROUNDS), []
                assert schedule.load_state(saved)
        assert schedule.next() is None or order == "free"
        assert not schedule.dropped or order == "free"


def test_answers_of_a_slow_sampler_are_dropped_and_counted_and_nobody_waits_for_them() -> None:
    schedule = RolloutSchedule(AsyncConfig.model_validate({"max_staleness": 1, "order": "free"}), ROUNDS)
    schedule.update(0)
    slow, quick = schedule.next(), schedule.next()
    assert slow is not None and quick is not None and slow.version == quick.version == 0
    assert schedule.next() is None, "a third part would be learnt two rounds after its weights"
    for number in range(3):
        schedule.finish(_answers(quick))
        taken = schedule.take(number)
        assert taken is not None and [answers.number for answers in taken] == [number + 1]
        assert schedule.take(number + 1) is None
        schedule.update(number + 1)
        quick = schedule.next()
        assert quick is not None and quick.version == number + 1
    assert 0 in schedule.needed(), "the slow sampler may not have read its weights yet"
    schedule.finish(_answers(slow))
    assert schedule.dropped == 4 and 0 not in schedule.needed()


def test_a_state_of_other_settings_is_left_alone() -> None:
    schedule = RolloutSchedule(AsyncConfig(max_staleness=1), ROUNDS)
    schedule.update(0)
    other = RolloutSchedule(AsyncConfig(max_staleness=2), ROUNDS)
    assert not other.load_state(schedule.state())
    other.update(4)  # it begins there, whatever came before
    part = other.next()
    assert part == RoundPart(4, 4)


@pytest.mark.parametrize("kind", ["token", "sequence", "none"])
def test_importance_weights_are_truncated_ratios(kind: str) -> None:
    chance = np.random.default_rng(7)
    lengths = [5, 2, 4]
    policy = np.log(chance.uniform(0.1, 0.9, (3, 5)))
    written = [np.log(chance.uniform(0.1, 0.9, length)) for length in lengths]
    mask = np.arange(5) < np.array(lengths)[:, None]
    expected, ratios = np.ones((3, 5)), []
    for row, length in enumerate(lengths):
        log_ratio = policy[row, :length] - written[row]
        if kind == "sequence":
            log_ratio = np.full(length, log_ratio.mean())
        ratio = np.exp(log_ratio) if kind != "none" else np.ones(length)
        expected[row, :length] = np.minimum(ratio, 1.5)
        ratios += ratio.tolist()
    config = AsyncConfig.model_validate({"correction": kind, "correction_cap": 1.5})
    real, rows = torch.tensor(mask).float(), [row.tolist() for row in written]
    correction = importance(torch.tensor(policy).float() * real, rows, real, config)
    np.testing.assert_allclose(correction.weights.numpy(), expected, rtol=1e-5)
    assert correction.mean == pytest.approx(np.mean(ratios), rel=1e-5)
    assert correction.truncated == pytest.approx(np.mean(np.array(ratios) > 1.5))


class Fake:
    """A sampler in this process. deaths: how many of its next answers it dies at; `held`: what each one waits for."""

    def __init__(self, deaths: int = 0) -> None:
        self.deaths = deaths
        self.asked: list[RoundPart] = []
        self.began = threading.Event()
        self.restarts = 0
        self.held: threading.Event | None = None

    def answer(self, part: RoundPart, questions: PartPrompts, weights: Path) -> PartAnswers:
        assert weights.exists() and questions.first == part.number
        self.asked.append(part)
        self.began.set()
        if self.held is not None:
            self.held.wait(60)
        if self.deaths:
            self.deaths -= 1
            raise SamplerDied("SIGKILL")
        return _answers(part)

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None:
        if self.held is not None:
            self.held.set()


@contextmanager
def _pool(run: Run, fakes: Sequence[SamplerHandle], **settings: Any) -> Iterator[SamplerPool]:
    config = RlhfConfig.model_validate(RLHF | {"async": settings})

    def samplers(logs: Path) -> Sequence[SamplerHandle]:
        return fakes

    pool = SamplerPool(
        config, run, lambda: {"weight": torch.zeros(2)}, lambda number: PartPrompts([], number, 0), samplers
    )
    try:
        yield pool
    finally:
        pool.close()


def _used(pool: SamplerPool, number: int) -> list[int]:
    pool.update(number)
    return [answers.number for answers in pool.take(number)]


def test_a_sampler_that_dies_is_replaced_and_counted_and_its_answers_are_written_again(run: Run, journal: Any) -> None:
    fake = Fake(deaths=2)
    with _pool(run, [fake], max_staleness=1) as pool:
        assert [_used(pool, number) for number in range(ROUNDS)] == [[number] for number in range(ROUNDS)]
        assert pool.figures()["samplers_replaced"] == fake.restarts == 2
    assert fake.asked[:3] == [RoundPart(0, 0)] * 3
    assert sum("sampler 0 died (SIGKILL) and is replaced" in message for message in journal.events()) == 2
    assert not list(run.work_dir.rglob("*.safetensors")), "weights are left behind"
    with _pool(run, [Fake(deaths=9)], max_staleness=1) as pool, pytest.raises(StageError, match="4 samplers died"):
        _used(pool, 0)


def test_weights_outlive_answers_that_arrive_while_they_are_handed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As answers arrive, weights that nothing needs are removed; those of the next round are written just then."""
    written, later = threading.Event(), threading.Event()

    class Timed(Fake):
        """Finishes the third part once the weights of round 1 are written."""

        def answer(self, part: RoundPart, questions: PartPrompts, weights: Path) -> PartAnswers:
            if part.number == 2:
                assert written.wait(60)
            if part.number == 3:
                later.set()
            return super().answer(part, questions, weights)

    def metric(name: str, value: float, step: int | None = None) -> None:
        if step:
            written.set()
            assert later.wait(60), "the third part did not arrive"

    monkeypatch.setattr(run, "metric", metric)
    with _pool(run, [Timed()], max_staleness=1, parts=2) as pool:
        assert [_used(pool, number) for number in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_what_a_round_used_in_free_order_is_used_again_after_a_kill(run: Run, tmp_path: Path, journal: Any) -> None:
    """A checkpoint in round 1, then two more rounds, then a kill. The first sampler is so slow that its answers come
    too late, so that rounds use other parts than their own."""
    free: dict[str, Any] = {"max_staleness": 1, "order": "free"}
    slow, quick = Fake(), Fake()
    slow.held, quick.held = threading.Event(), slow.began
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with _pool(run, [slow, quick], **free) as pool:
        used = {number: _used(pool, number) for number in (0, 1)}
        names = {path.name for path in pool.write(checkpoint)}
        used |= {number: _used(pool, number) for number in (2, 3)}
    late = slow.asked[0].number
    assert [late] not in used.values() and used[3] != [3]
    assert "rollouts.json" in names and any(name.startswith("policy-") for name in names)
    again = Fake()
    with _pool(run, [again], **free) as pool:
        pool.read(checkpoint, 1)
        assert {number: _used(pool, number) for number in (2, 3)} == {2: used[2], 3: used[3]}
        later = [_used(pool, number) for number in (4, 5)]
    known = {number for numbers in used.values() for number in numbers}
    assert not known & {number for numbers in later for number in numbers}
    assert any("2 recorded rounds are repeated" in message for message in journal.events())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async": {"parts": 3}}, "async.parts: expected a divisor of the 2 prompts"),
        ({"async": {}, "refill_groups": 1}, "refill_groups: expected 0 with async"),
        ({"async": {}, "lora": {"quantize": "nf4"}}, "lora.quantize: expected null with async"),
        ({"async": {}, "algorithm": "raft", "minibatch_answers": 2}, "expected 0 for raft"),
    ],
)
def test_what_samplers_cannot_serve_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RlhfConfig.model_validate(RLHF | settings)


def test_machines_that_samplers_cannot_serve_are_refused() -> None:
    config = RlhfConfig.model_validate(RLHF | {"async": {}})
    served = RlhfConfig.model_validate(RLHF | {"async": {}, "sampler": "vllm"})
    two: dict[str, Callable[[], LaunchConfig]] = {
        "rlhf.async": lambda: LaunchConfig(processes=2),
        "launch.samplers.count": lambda: LaunchConfig.model_validate(
            {"samplers": {"count": 2}, "vllm": {"gpus": "5,6,7"}}
        ),
    }
    for path, launch in two.items():
        problem = samplers_problem(served, launch())
        assert problem is not None and problem.path == path and problem.fix
    assert samplers_problem(config, two["launch.samplers.count"]()) is None
    assert samplers_problem(RlhfConfig.model_validate(RLHF), LaunchConfig(processes=2)) is None


def test_a_long_wait_for_answers_is_reported_with_the_folder_of_the_logs(tmp_path: Path, journal: Any) -> None:
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", hang_s=0.05), journal=journal)
    fake = Fake()
    fake.held = threading.Event()
    with _pool(run, [fake], max_staleness=1) as pool:
        threading.Timer(0.3, fake.held.set).start()
        assert _used(pool, 0) == [0]
    assert any("round 0 has waited" in message and "rollouts" in message for message in journal.events())


def test_a_dead_sampler_is_noticed_where_a_process_that_it_forked_keeps_its_pipe(tmp_path: Path) -> None:
    sampler = object.__new__(OwnSampler)
    program = "import os, signal, time\nif os.fork():\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    sampler._process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        with pytest.raises(SamplerDied, match="SIGKILL"):
            sampler._hear()
    finally:
        signal_group(sampler._process.pid, signal.SIGKILL)
        assert sampler._process.stdout is not None
        sampler._process.stdout.close()
