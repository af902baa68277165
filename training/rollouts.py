"""Rounds of sampled answers with everything that an algorithm learns from, as a data set.

Shapes: B answers, P prompt tokens and T answer tokens after padding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from infra.run import Run
from training.algorithms import Algorithm, Sampled
from training.chat import Chat
from training.completions import Batch, Completions, answer_logits, generate, token_logprobs
from training.config import RlhfConfig
from training.evaluate import measuring
from training.hardware import Hardware
from training.ppo import adapted_kl_coef, entropy, kl_k1, masked_mean
from training.rewards import Asked, Rewards, RewardScale

_BATCH = 64


class Rollouts(IterableDataset[dict[str, Tensor]]):
    """An epoch is one round: answers sampled from the policy as it is now, then minibatches of them.

    Round r draws prompts and tokens from (seed, r) alone, so a run continues at a round's start as if never stopped.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        values: Callable[[Tensor], Tensor] | None,
        rewards: Rewards,
        algorithm: Algorithm,
        scale: RewardScale,
        prompts: Sequence[Asked],
        chat: Chat,
        config: RlhfConfig,
        hardware: Hardware,
        run: Run,
    ) -> None:
        """values: of the value function; None where the algorithm has none."""
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
        self._round = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        config, round_number = self._config, self._round
        self._round += 1
        random = np.random.default_rng([config.seed, round_number])
        enough = len(self._prompts) >= config.rollout_prompts // config.answers_per_prompt
        chosen = random.choice(
            len(self._prompts), config.rollout_prompts // config.answers_per_prompt, replace=not enough
        )
        asked = [self._prompts[number] for number in chosen.repeat(config.answers_per_prompt)]
        answers = generate(
            self._policy,
            [one.ids for one in asked],
            self._chat,
            config,
            self._hardware,
            seed=int(random.integers(2**62)),
        )
        self._run.stop_if_cancelled()
        rows = self._experience(answers, asked, round_number)
        for _ in range(config.epochs):
            for part in np.split(random.permutation(len(asked)), len(asked) // config.minibatch_answers):
                yield _without_padding({name: value[torch.from_numpy(part)] for name, value in rows.items()})

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"round": self._round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._round = state["round"]

    def _experience(self, answers: Completions, asked: Sequence[Asked], round_number: int) -> dict[str, Tensor]:
        """Everything the loss needs, by name, each (B, …) on the CPU."""
        config, batch = self._config, Batch.of(answers, self._chat.pad)
        rewarded = self._rewards.of(answers, asked)
        logprobs, reference, entropies, values = self._look(batch)
        coefficient = float(self._scale.kl_coef)
        sampled = Sampled(rewarded.scores, logprobs, reference, batch.mask, values, coefficient)
        learning = self._algorithm.learn(sampled)
        kl = float((kl_k1(logprobs, reference) * batch.mask).sum(1).mean())
        if config.kl_target is not None:
            adapted = adapted_kl_coef(coefficient, kl, config.kl_target, config.rollout_prompts)
            self._scale.kl_coef.fill_(adapted)
        self._run.metrics(
            {
                **rewarded.metrics,
                "rlhf/kl": kl,
                "rlhf/kl_coef": coefficient,
                "rlhf/entropy": float(masked_mean(entropies, batch.mask)),
                "rlhf/answer_tokens": float(batch.mask.sum(1).mean()),
                "rlhf/ends_share": float(answers.finished.float().mean()),
            },
            round_number * config.epochs * (config.rollout_prompts // config.minibatch_answers),
        )
        return {
            "ids": batch.ids,
            "places": batch.places,
            "tokens": batch.tokens,
            "mask": batch.mask,
            "logprobs": logprobs,
            **learning,
        }

    def _look(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Log-probabilities under policy and reference, the policy's entropies, and values if any, each (B, T)."""
        pieces: list[tuple[Tensor, ...]] = []
        with measuring(self._policy), measuring(self._reference):
            for rows in torch.arange(len(batch.ids)).split(_BATCH):
                ids, places, tokens = (
                    value[rows].to(self._hardware.device) for value in (batch.ids, batch.places, batch.tokens)
                )
                ours, theirs = (
                    answer_logits(one, ids, places, self._hardware, self._config.temperature)
                    for one in (self._policy, self._reference)
                )
                found = [token_logprobs(ours, tokens), token_logprobs(theirs, tokens), entropy(ours)]
                if self._values is not None:
                    found.append(self._values(ids).gather(1, places))
                pieces.append(tuple(value.cpu() for value in found))
        first, second, third, *values = (torch.cat(column) for column in zip(*pieces, strict=True))
        return first, second, third, values[0] * batch.mask if values else None


def _without_padding(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """A minibatch without the columns that are padding in all of its rows."""
    answer = int(rows["mask"].sum(1).max())
    whole = int((rows["places"][:, 0] + rows["mask"].sum(1)).max()) + 1
    shorter = {name: value[:, : whole if name == "ids" else answer] for name, value in rows.items()}
    return shorter | {"places": shorter["places"].clamp(max=whole - 1)}
