"""Rounds of sampled answers, with everything that an algorithm learns from, as a data set.

Each rank samples and scores its part of a round. Then every rank gets the whole round, so that advantages and the KL
coefficient equal those of one process, and learns from its part of each minibatch.
Shapes: B answers, K of them used for learning, P prompt tokens and T answer tokens after padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from infra.run import Run
from training.chat.base import Chat
from training.config import RlhfConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.core.train_state import TrainState
from training.generation.completions import AnswerBatch, Completions, generate
from training.generation.vllm_sampler import VllmSampler
from training.rl.algorithms import Algorithm, Sampled
from training.rl.overoptimisation import DivergenceWatch, Round
from training.rl.rewards import Prompt, Rewards, RewardScale
from training.train_modules.answer_logprobs import logprobs_and_entropies
from training.train_modules.kl import adapted_kl_coef, kl_k1
from training.train_modules.policy_losses import masked_mean

_BATCH = 64
_FILE = "round.safetensors"

Beside = Callable[[Mapping[str, Tensor], int, int], dict[str, Tensor]]
"""(a whole minibatch, its round, its number in the round) → further columns to learn from."""


class RoundTimes(Callback):
    """Generation speed, and the share of the rounds' time that generation takes.

    A round lasts from its prompts to the end of its last batch. A round that an earlier process began is not counted.
    """

    def __init__(self, run: Run, batches: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """batches: per round."""
        self._run = run
        self._batches = batches
        self._clock = clock
        self._began: float | None = None
        self._generating_s = 0.0
        self._tokens = 0
        self._whole_s = self._whole_generating_s = self._whole_tokens = 0.0

    def begin(self) -> None:
        """Start the clock of a round."""
        self._began = self._clock()

    def generate(self, answer: Callable[[], Completions], step: int) -> Completions:
        """Return the result of `answer`, timed over all ranks; the speed is recorded at this step."""
        began = self._clock()
        answers = answer()
        self._generating_s = max(self._clock() - began, 1e-9)
        self._tokens = sum(map(len, answers.ids))
        self._run.metric("rlhf/generated_tokens_per_s", self._tokens / self._generating_s, step)
        return answers

    def batch_end(self, state: TrainState) -> None:
        if self._began is None or state.clock.batch % self._batches:
            return
        took, self._began = self._clock() - self._began, None
        self._whole_s += took
        self._whole_generating_s += self._generating_s
        self._whole_tokens += self._tokens
        self._run.metric("rlhf/generating_share", self._generating_s / took, state.clock.batch)

    def figures(self) -> dict[str, float]:
        """Return figures over all complete rounds of this process; nothing without any."""
        if not self._whole_s:
            return {}
        return {
            "generated_tokens_per_s": self._whole_tokens / self._whole_generating_s,
            "generating_share": self._whole_generating_s / self._whole_s,
        }


class Rollouts(IterableDataset[dict[str, Tensor]]):
    """An epoch is one round: answers sampled from the current policy, then this rank's part of their minibatches.

    Round r draws prompts and tokens from (seed, r) alone. The sampled answers are saved in the checkpoints of their
    round, since the policy that sampled them no longer exists on resuming: a run continues within a round as if never
    stopped, on any number of ranks.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        values: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
        rewards: Rewards,
        algorithm: Algorithm,
        scale: RewardScale,
        prompts: Sequence[Prompt],
        chat: Chat,
        config: RlhfConfig,
        hardware: Hardware,
        run: Run,
        *,
        refresh: Callable[[], None] = lambda: None,
        beside: Beside = lambda minibatch, round_number, number: {},
        vllm: VllmSampler | None = None,
    ) -> None:
        """policy: whole on this rank. values: of the value function; None where the algorithm has none.

        refresh: updates policy and value function to the trained weights, before a round; every rank calls it.
        vllm: samples the answers instead of our own sampler.
        """
        self._vllm = vllm
        self._refresh = refresh
        self._beside = beside
        self._policy = policy
        self._reference = reference
        self._values = values
        self._rewards = rewards
        self._algorithm = algorithm
        self._scale = scale
        self._prompts = prompts
        self._chat = chat
        self._config = config
        self._hardware = hardware
        self._run = run
        self._watch = DivergenceWatch(config.stop_on_divergence, run)
        self._batches = config.round_batches
        self.times = RoundTimes(run, self._batches)
        self._round = 0
        self._rows: dict[str, Tensor] | None = None
        self._read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        config = self._config
        random = np.random.default_rng([config.seed, self._round])
        enough = len(self._prompts) >= config.rollout_prompts // config.answers_per_prompt
        chosen = random.choice(
            len(self._prompts), config.rollout_prompts // config.answers_per_prompt, replace=not enough
        )
        prompts = [self._prompts[number] for number in chosen.repeat(config.answers_per_prompt).tolist()]
        seed = int(random.integers(2**62))
        parts = [part for _ in range(config.epochs) for part in minibatches(config, random)]
        if self._rows is None:
            self._rows = self._sampled(prompts, seed)
        elif len(self._rows["ids"]) != config.learnt_answers:
            parts = []  # the training that this one continues had rounds of another size, and this was its last round
        first, self._read = self._read // config.minibatch_answers, 0
        for number, part in list(enumerate(parts))[first:]:
            whole = _without_padding({name: value[torch.from_numpy(part)] for name, value in self._rows.items()})
            whole |= self._beside(whole, self._round, number)
            yield {name: value[ranks.rank() :: ranks.world_size()] for name, value in whole.items()}
        self._round += 1
        self._rows = None

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the state of training: the round, the number of its answers that all ranks have learnt from, counted
        again in each epoch; and the watch's record of earlier rounds."""
        watched = {"watched": [list(one) for one in self._watch.seen]} if self._watch.is_on else {}
        return {"round": self._round, "read": num_samples, **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, also from checkpoints of earlier versions, which were taken at a round's start."""
        self._round, self._read, self._rows = state["round"], state.get("read", 0), None
        self._watch.seen = [Round(*one) for one in state.get("watched", ())]

    def write(self, folder: Path) -> list[Path]:
        """Write the current round to a checkpoint's folder."""
        if self._rows is None:
            return []
        save_file({name: value.contiguous() for name, value in self._rows.items()}, folder / _FILE)
        return [folder / _FILE]

    def read(self, folder: Path) -> None:
        """Read the round from a checkpoint."""
        if self._read:
            self._rows = load_file(folder / _FILE)

    def _sampled(self, prompts: Sequence[Prompt], seed: int) -> dict[str, Tensor]:
        """Sample a round's answers and compute everything that is learnt from."""
        self.times.begin()
        self._refresh()
        ids, step = [one.ids for one in prompts], self._round * self._batches
        if self._vllm is not None:
            self._vllm.update(step)
        answers = self.times.generate(lambda: self._answers(ids, seed), step)
        # A run that receives a stop request meanwhile stops after the first batch: its checkpoint holds these answers.
        return self._experience(answers, prompts, self._round)

    def _answers(self, prompts: Sequence[list[int]], seed: int) -> Completions:
        if self._vllm is not None:
            return self._vllm.sample(prompts, seed)
        return generate(self._policy, prompts, self._chat, self._config, self._hardware, seed, in_ranks=True)

    def _experience(self, answers: Completions, prompts: Sequence[Prompt], round_number: int) -> dict[str, Tensor]:
        """Return all that the loss needs of the answers used for learning, by name, each (K, …) on the CPU."""
        config, batch = self._config, AnswerBatch.of(answers, self._chat.pad)
        rewarded = self._rewards.of(answers, prompts)
        told = rewarded.metrics
        logprobs, reference, entropies, values = self._look(batch)
        if self._vllm is not None:
            self._vllm.check(answers, logprobs, batch.mask, round_number * self._batches)
        coefficient = float(self._scale.kl_coef)
        sampled = Sampled(rewarded.scores, logprobs, reference, batch.mask, values, coefficient)
        learning, kept = self._algorithm.learn(sampled), self._algorithm.kept(sampled)
        if len(kept) < len(sampled.scores):
            told = {**told, "rlhf/kept_reward": float(sampled.scores[kept].mean())}
        kl = float((kl_k1(logprobs, reference) * batch.mask).sum(1).mean())
        if config.kl_target is not None:
            adapted = adapted_kl_coef(coefficient, kl, config.kl_target, config.rollout_prompts)
            self._scale.kl_coef.fill_(adapted)
        self._run.metrics(
            {
                **told,
                "rlhf/kl": kl,
                "rlhf/kl_coef": coefficient,
                "rlhf/entropy": float(masked_mean(entropies, batch.mask)),
                "rlhf/answer_tokens": float(batch.mask.sum(1).mean()),
                "rlhf/ends_share": float(answers.finished.float().mean()),
            },
            round_number * self._batches,
        )
        if "rlhf/judge" in told and "rlhf/reward" in told:
            self._watch.look(round_number, told["rlhf/reward"], told["rlhf/judge"], rewarded.judge_error)
        columns = {
            "ids": batch.ids,
            "places": batch.places,
            "tokens": batch.tokens,
            "mask": batch.mask,
            "logprobs": logprobs,
            **learning,
        }
        return {name: value[kept] for name, value in columns.items()}

    def _look(self, batch: AnswerBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return log-probabilities under policy and reference, the policy's entropies, and values if any, each (B,
        T)."""
        pieces: list[tuple[Tensor, ...]] = []
        mine = torch.arange(len(batch.ids))[ranks.own_part(len(batch.ids))]
        with measuring(self._policy), measuring(self._reference):
            for rows in mine.split(_BATCH):
                ids, places, mask, tokens = (
                    value[rows].to(self._hardware.device)
                    for value in (batch.ids, batch.places, batch.mask, batch.tokens)
                )
                (ours, entropies), (theirs, _) = (
                    logprobs_and_entropies(one, ids, places, tokens, mask, self._hardware, self._config.temperature)
                    for one in (self._policy, self._reference)
                )
                found = [ours, theirs, entropies]
                if self._values is not None:
                    found.append(self._values(ids, places, mask))
                pieces.append(tuple(value.cpu() for value in found))
        columns = (torch.cat(column) for column in zip(*pieces, strict=True))
        first, second, third, *values = (ranks.join_parts(column) for column in columns)
        return first, second, third, values[0] * batch.mask if values else None


def minibatches(config: RlhfConfig, random: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the indices of the answers of each minibatch of one pass over a round."""
    together, learnt = config.answers_per_prompt if config.whole_groups else 1, config.learnt_answers
    dealt = random.permutation(learnt // together)[:, None] * together + np.arange(together)
    return np.split(dealt.flatten(), learnt // config.minibatch_answers)


def _without_padding(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the columns of a minibatch that are padding in all of its rows."""
    answer = int(rows["mask"].sum(1).max())
    whole = int((rows["places"][:, 0] + rows["mask"].sum(1)).max()) + 1
    shorter = {name: value[:, : whole if name == "ids" else answer] for name, value in rows.items()}
    return shorter | {"places": shorter["places"].clamp(max=whole - 1)}
