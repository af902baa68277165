"""One round of RLHF, from top to bottom: sample, score, advantages, update.

    1. prompts     drawn from the training prompts, each of them once for every answer to it
    2. sample      an answer to each, from the policy at the start of the round (`training.generation`)
    3. score       a reward for each answer (`training.rl.rewards`)
    4. logprobs    of the answers' tokens under policy and reference, and the value function's values
    5. advantages  by the algorithm: PPO, RLOO, GRPO, REINFORCE++ or RAFT (a file each in `training.rl.algorithms`)
    6. update      an optimizer step on each minibatch, `epochs` times over the round; its loss is the algorithm's

`Rollouts` is the data set of the training and does steps 1 to 5: an epoch of it is a round. `training.trainer.fit`
takes its minibatches, and for each one a step on the loss of `training.rl.policy_and_value`. Before the first round
`training.rlhf` loads models and prompts; after the last it measures.

With `async` other processes answer later rounds meanwhile (`training.rl.rollouts`): step 2 hands over the
weights and takes the answers of this round, and their advantages are corrected for the weights that wrote them.

Each rank samples and scores its part of a round. Then every rank gets the whole round, so that advantages and the KL
coefficient equal those of one process, and learns from its part of each minibatch.

Shapes: B answers of a round, K of them that are learnt from, P prompt tokens and T answer tokens after padding. Tensors
of a round stay on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from infra.run import Run
from training.chat.base import Chat, pad
from training.config import RlhfConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.generation.completions import AnswerBatch, Completions, generate
from training.generation.vllm_sampler import VllmSampler
from training.rl.algorithms import Algorithm, Sampled
from training.rl.environments.episodes import Episodes, Task
from training.rl.overoptimisation import DivergenceWatch, Round
from training.rl.prompts import Prompt, draw, equal_groups, minibatches, without_padding
from training.rl.rewards import Rewards, RewardScale
from training.rl.rollouts.correction import importance
from training.rl.rollouts.pool import SamplerPool
from training.rl.rollouts.processes import questions
from training.rl.rollouts.schedule import joined
from training.rl.round_times import RoundTimes
from training.train_modules.answer_logprobs import logprobs_and_entropies
from training.train_modules.kl import adapted_kl_coef, kl_k1
from training.train_modules.policy_losses import masked_mean

_BATCH = 64
"""Answers of one forward pass without gradients."""
_FILE = "round.safetensors"
_REFILL = 0x5EF1
"""Separates the random numbers of refilled groups from those of the round."""

Beside = Callable[[Mapping[str, Tensor], int, int], dict[str, Tensor]]
"""(a whole minibatch, its round, its number in the round) → further columns to learn from."""


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
        pool: SamplerPool | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """Create the data set.

        Args:
            policy: Whole on this rank.
            reference: The model that the KL penalty keeps the policy near.
            values: Of the value function; None where the algorithm has none.
            refresh: Updates policy and value function to the trained weights, before a round; every rank calls it.
            beside: Adds columns to a minibatch, such as pretraining text.
            vllm: Samples the answers instead of our own sampler.
            pool: Samples them in other processes, while this one learns.
            episodes: Plays an episode of an environment in place of each answer.
        """
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
        self._refresh = refresh
        self._beside = beside
        self._vllm = vllm
        self._pool = pool
        self._episodes = episodes
        self._watch = DivergenceWatch(config.stop_on_divergence, run)
        self._batches = config.round_batches
        self.times = RoundTimes(run, self._batches)
        self._round = 0
        self._rows: dict[str, Tensor] | None = None
        self._read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        config = self._config

        # 1. Prompts, the answers to one of them side by side. A round without enough prompts draws some again.
        random, prompts, seed = draw(config, self._prompts, self._round)
        parts = [part for _ in range(config.epochs) for part in minibatches(config, random)]

        # 2. to 5. What is learnt from, or what a checkpoint within the round kept of it.
        if self._rows is None:
            self._rows = self._experience(prompts, seed)
        elif len(self._rows["ids"]) != config.learnt_answers:
            parts = []  # the training that this one continues had rounds of another size, and this was its last round

        # 6. Update: one step per minibatch, of which each rank takes its part. See PolicyAndValue.
        first, self._read = self._read // config.minibatch_answers, 0
        for number, part in list(enumerate(parts))[first:]:
            minibatch = without_padding({name: value[torch.from_numpy(part)] for name, value in self._rows.items()})
            minibatch |= self._beside(minibatch, self._round, number)
            yield {name: value[ranks.rank() :: ranks.world_size()] for name, value in minibatch.items()}
        self._round += 1
        self._rows = None

    def _experience(self, prompts: Sequence[Prompt], seed: int) -> dict[str, Tensor]:
        """Do steps 2 to 5: return all that the loss needs of the answers that are learnt from, by name, each (K, …)."""
        config, step = self._config, self._round * self._batches

        # 2. Sample an answer to each prompt from the policy of this round. With `async` other processes have done so, a
        # round ahead or more; `versions` are those of the weights that wrote each token.
        if self._pool is None:
            answers, versions = self._sampled(prompts, seed), None
        else:
            answers, prompts, versions = self._received(self._pool)

        # 3. Score: rewards (B,), of reward models, rules and functions. Groups of equal rewards make room for others.
        rewarded = self._rewards.of(answers, prompts)
        metrics, scores = dict(rewarded.metrics), rewarded.scores
        if config.refill_groups:
            answers, scores, refilled = self._refilled(answers, prompts, scores)
            metrics |= refilled
        batch = AnswerBatch.of(answers, self._chat.pad)

        # 4. Log-probabilities, entropies and values (B, T) before the update. What vLLM reports is compared.
        logprobs, reference, entropies, values = self._logprobs(batch)
        is_current = versions is None or all(version == self._round for row in versions for version in row)
        if self._vllm is not None and is_current:
            self._vllm.check(answers, logprobs, batch.mask, step)

        # 5. Advantages, and the answers that are kept: of RAFT the best of each prompt, else all.
        kl_coef = float(self._scale.kl_coef)
        sampled = Sampled(scores, logprobs, reference, batch.mask, values, kl_coef)
        learning, kept = self._algorithm.learn(sampled), self._algorithm.kept(sampled)
        if len(kept) < len(sampled.scores):
            metrics["rlhf/kept_reward"] = float(sampled.scores[kept].mean())

        # Answers that earlier weights wrote count by how likely these weights are to write them.
        if versions is not None and config.async_ and config.async_.max_staleness:
            assert answers.logprobs is not None
            correction = importance(logprobs, answers.logprobs, batch.mask, config.async_)
            learning["advantages"] = learning["advantages"] * correction.weights
            learning["versions"] = pad([list(row) for row in versions], -1)
            metrics |= {"rlhf/importance": correction.mean, "rlhf/importance_truncated": correction.truncated}

        # The KL coefficient of the next round, where a target is given (Ziegler et al. 2019, section 2.2).
        kl = float((kl_k1(logprobs, reference) * batch.mask).sum(1).mean())
        if config.kl_target is not None:
            self._scale.kl_coef.fill_(adapted_kl_coef(kl_coef, kl, config.kl_target, config.rollout_prompts))

        # Curves of the round, at the step before its first update; then the end where reward and judge part.
        metrics |= {
            "rlhf/kl": kl,
            "rlhf/kl_coef": kl_coef,
            "rlhf/entropy": float(masked_mean(entropies, batch.mask)),
            "rlhf/answer_tokens": float(batch.mask.sum(1).mean()),
            "rlhf/ends_share": float(answers.finished.float().mean()),
        }
        self._run.metrics(metrics, step)
        if "rlhf/judge" in metrics and "rlhf/reward" in metrics:
            self._watch.look(self._round, metrics["rlhf/reward"], metrics["rlhf/judge"], rewarded.judge_error)

        columns = {
            "ids": batch.ids,
            "places": batch.places,
            "tokens": batch.tokens,
            "mask": batch.mask,
            "logprobs": logprobs,
            **learning,
        }
        return {name: value[kept] for name, value in columns.items()}

    def _sampled(self, prompts: Sequence[Prompt], seed: int) -> Completions:
        """Return an answer to each prompt, once our own sampler or vLLM has the trained weights.

        A run that receives a stop request meanwhile stops after the first batch: its checkpoint holds these answers.
        """
        self.times.begin()
        self._refresh()
        step = self._round * self._batches
        if self._vllm is not None:
            self._vllm.update(step)
        return self.times.generate(lambda: self._generated(prompts, seed), step)

    def _generated(self, prompts: Sequence[Prompt], seed: int) -> Completions:
        """Return an answer to each prompt, by a sampler that has the policy of this round."""
        policy, chat, config, hardware = self._policy, self._chat, self._config, self._hardware
        if self._episodes is not None:
            tasks = list(map(Task.of, prompts))
            return self._episodes.play(self._vllm or policy, tasks, seed, config.answers_per_prompt)
        ids = [prompt.ids for prompt in prompts]
        if self._vllm is not None:
            return self._vllm.sample(ids, seed)
        return generate(policy, ids, chat, config, hardware, seed, in_ranks=True)

    def _received(self, pool: SamplerPool) -> tuple[Completions, list[Prompt], Sequence[Sequence[int]]]:
        """Return answers by other processes, once these have the trained weights: with their prompts, and for each
        token the version of the weights that wrote it."""
        self._refresh()
        pool.update(self._round)
        parts = pool.take(self._round)
        drawn = [questions(self._config, self._prompts, part.number) for part in parts]
        prompts = [prompt for part in drawn for prompt in part.prompts]
        written = joined(parts)
        ids = [list(answer) for answer in written.ids]
        logprobs = None if written.logprobs is None else [list(row) for row in written.logprobs]
        if written.episodes is not None:
            openings = [list(opening) for opening in written.openings]
            answers = Completions.of_episodes(openings, ids, list(written.episodes), logprobs)
        else:
            ended = torch.tensor([self._chat.has_ended(answer) for answer in ids])
            answers = Completions([prompt.ids for prompt in prompts], ids, ended, logprobs)
        return answers, prompts, written.versions

    def _refilled(
        self, answers: Completions, prompts: Sequence[Prompt], scores: Tensor
    ) -> tuple[Completions, Tensor, dict[str, float]]:
        """Return answers and scores in which groups of equal scores are replaced by answers to other prompts, at most
        `refill_groups` times, and the round's figures: how many groups were left out, and how many equal ones remain.

        Every rank must call.
        """
        config, prompts, scores = self._config, list(prompts), scores.clone()
        left_out = 0
        for attempt in range(config.refill_groups):
            equal = equal_groups(scores, config.answers_per_prompt)
            if not len(equal):
                break
            random = np.random.default_rng([config.seed, self._round, _REFILL, attempt])
            chosen = random.choice(len(self._prompts), len(equal), replace=len(self._prompts) < len(equal))
            others = [self._prompts[number] for number in chosen.repeat(config.answers_per_prompt).tolist()]
            seed = int(random.integers(2**62))
            further = self.times.generate_more(partial(self._generated, others, seed))
            rows = torch.arange(len(scores)).view(-1, config.answers_per_prompt)[equal].flatten()
            answers = answers.replaced(rows.tolist(), further)
            scores[rows] = self._rewards.of(further, others).scores
            left_out += len(equal)
        remaining = len(equal_groups(scores, config.answers_per_prompt))
        figures = {"rlhf/groups_left_out": float(left_out), "rlhf/groups_equal": float(remaining)}
        return answers, scores, figures

    def _logprobs(self, batch: AnswerBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return log-probabilities under policy and reference, the policy's entropies, and values if any, each (B,
        T)."""
        pieces: list[tuple[Tensor, ...]] = []
        own_rows = torch.arange(len(batch.ids))[ranks.own_part(len(batch.ids))]
        with measuring(self._policy), measuring(self._reference):
            for rows in own_rows.split(_BATCH):
                ids, positions, mask, tokens = (
                    value[rows].to(self._hardware.device)
                    for value in (batch.ids, batch.places, batch.mask, batch.tokens)
                )
                (policy, entropies), (reference, _) = (
                    logprobs_and_entropies(
                        model, ids, positions, tokens, mask, self._hardware, self._config.temperature
                    )
                    for model in (self._policy, self._reference)
                )
                columns = [policy, reference, entropies]
                if self._values is not None:
                    columns.append(self._values(ids, positions, mask))
                pieces.append(tuple(value.cpu() for value in columns))
        joined = (ranks.join_parts(torch.cat(column)) for column in zip(*pieces, strict=True))
        policy, reference, entropies, *values = joined
        return policy, reference, entropies, values[0] * batch.mask if values else None

    # Checkpoints within a round.

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Return the state of training: the round, the number of its answers that all ranks have learnt from, counted
        again in each epoch; and the watch's record of earlier rounds."""
        watched = {"watched": [list(seen) for seen in self._watch.seen]} if self._watch.is_on else {}
        return {"round": self._round, "read": num_samples, **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state, also from checkpoints of earlier versions, which were taken at a round's start."""
        self._round, self._read, self._rows = state["round"], state.get("read", 0), None
        self._watch.seen = [Round(*values) for values in state.get("watched", ())]

    def write(self, folder: Path) -> list[Path]:
        """Write the current round to a checkpoint's folder."""
        files = self._pool.write(folder) if self._pool else []
        if self._rows is None:
            return files
        save_file({name: value.contiguous() for name, value in self._rows.items()}, folder / _FILE)
        return [*files, folder / _FILE]

    def read(self, folder: Path) -> None:
        """Read the round from a checkpoint."""
        if self._read:
            self._rows = load_file(folder / _FILE)
        if self._pool:
            self._pool.read(folder, self._round)
