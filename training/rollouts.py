"""Rounds of sampled answers with everything that PPO learns from, as a data set.

Shapes: B answers, P prompt tokens and T answer tokens after padding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from infra.run import Run
from training.chat import Chat, pad
from training.config import RlhfConfig
from training.evaluate import measuring
from training.hardware import Hardware
from training.ppo import (
    adapted_kl_coef,
    advantages_and_returns,
    entropy,
    exact_kl,
    kl_k1,
    leave_one_out,
    masked_mean,
    token_rewards,
    whiten,
)
from training.reward_model import Scorer
from training.sampling import sample
from training.verify import Rule, right_answers

_BATCH = 64


@dataclass(frozen=True)
class Completions:
    """Sampled answers: their prompts and new ids, and whether each emitted `<|end|>`."""

    prompts: list[list[int]]
    ids: list[list[int]]
    finished: Tensor


@dataclass
class Batch:
    """Prompts and answers side by side, padded on the right.

    ids (B, P + T), places (B, T): the position whose logits predict each answer token, tokens (B, T), mask (B, T).
    """

    ids: Tensor
    places: Tensor
    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, answers: Completions, fill: int) -> Batch:
        ids = pad([[*prompt, *answer] for prompt, answer in zip(answers.prompts, answers.ids, strict=True)], fill)
        lengths = torch.tensor([len(answer) for answer in answers.ids])
        starts = torch.tensor([len(prompt) for prompt in answers.prompts])
        steps = torch.arange(int(lengths.max()))
        mask = (steps < lengths[:, None]).float()
        places = (starts[:, None] - 1 + steps).clamp(max=ids.shape[1] - 1)
        tokens = ids.gather(1, (places + 1).clamp(max=ids.shape[1] - 1))
        return cls(ids, places, tokens, mask)

    def last(self) -> Tensor:
        """Position (B,) of each answer's last token."""
        return self.places[:, 0] + self.mask.sum(1).long()


def answer_logits(
    model: PreTrainedModel, ids: Tensor, places: Tensor, hardware: Hardware, temperature: float = 1.0
) -> Tensor:
    """Logits (B, T, V) in fp32, over the temperature, at the places that predict the answer's tokens."""
    with hardware.autocast():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return model.get_output_embeddings()(chosen).float() / temperature


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, T) of tokens under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


class Answering(Protocol):
    """How answers are sampled, as a stage's config says it."""

    @property
    def answer_max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...


def generate(
    model: PreTrainedModel, prompts: Sequence[list[int]], chat: Chat, config: Answering, hardware: Hardware, seed: int
) -> Completions:
    """One sampled answer to each prompt."""
    ids = sample(
        model,
        prompts,
        max_new_tokens=config.answer_max_tokens,
        temperature=config.temperature,
        stops=chat.stops,
        hardware=hardware,
        seed=seed,
        batch_size=128,
    )
    return Completions(list(prompts), ids, torch.tensor([answer[-1:] == [chat.end] for answer in ids]))


def scores_of(scorer: Scorer, answers: Completions, chat: Chat, hardware: Hardware) -> Tensor:
    """The reward model's raw scores (B,), read at each answer's last token."""
    batch = Batch.of(answers, chat.pad)
    with measuring(scorer):
        return torch.cat(
            [
                scorer(ids.to(hardware.device), last.to(hardware.device)).cpu()
                for ids, last in zip(batch.ids.split(_BATCH), batch.last().split(_BATCH), strict=True)
            ]
        )


def kl_of(
    model: PreTrainedModel, reference: PreTrainedModel, answers: Completions, chat: Chat, hardware: Hardware
) -> tuple[Tensor, Tensor]:
    """KL(model ‖ reference) summed over each answer's tokens (B,), from whole distributions, and the token counts."""
    batch = Batch.of(answers, chat.pad)
    sums = []
    with measuring(model), measuring(reference):
        for rows in torch.arange(len(batch.ids)).split(_BATCH // 4):
            ids, places = batch.ids[rows].to(hardware.device), batch.places[rows].to(hardware.device)
            ours, theirs = (answer_logits(one, ids, places, hardware) for one in (model, reference))
            sums.append((exact_kl(ours, theirs).cpu() * batch.mask[rows]).sum(1))
    return torch.cat(sums), batch.mask.sum(1)


class RewardScale(nn.Module):
    """Mean and spread of the SFT model's scores on training prompts, and the KL coefficient, kept in checkpoints."""

    mean: Tensor
    spread: Tensor
    known: Tensor
    kl_coef: Tensor

    def __init__(self, kl_coef: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("known", torch.zeros((), dtype=torch.bool))
        self.register_buffer("kl_coef", torch.tensor(kl_coef, dtype=torch.float64))

    def learn(self, scores: Tensor) -> None:
        self.mean.copy_(scores.mean())
        self.spread.copy_(scores.std().clamp(min=1e-6))
        self.known.fill_(True)

    def forward(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.spread


class Rollouts(IterableDataset[dict[str, Tensor]]):
    """An epoch is one round: answers sampled from the policy as it is now, then minibatches of them.

    Round r draws prompts and tokens from (seed, r) alone, so a run continues at a round's start as if never stopped.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        reward: Scorer,
        values: Callable[[Tensor], Tensor] | None,
        scale: RewardScale,
        prompts: Sequence[list[int]],
        rules: Sequence[Rule | None],
        chat: Chat,
        config: RlhfConfig,
        hardware: Hardware,
        run: Run,
        judge: Scorer | None = None,
    ) -> None:
        """values: None where several answers to a prompt are held against each other.
        judge: scores each round's answers beside `reward`; nothing is learnt from what it says."""
        self._judge = judge
        self._policy = policy
        self._reference = reference
        self._reward = reward
        self._values = values
        self._scale = scale
        self._prompts = prompts
        self._rules = rules
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
        chosen = chosen.repeat(config.answers_per_prompt)
        answers = generate(
            self._policy,
            [self._prompts[number] for number in chosen],
            self._chat,
            config,
            self._hardware,
            seed=int(random.integers(2**62)),
        )
        self._run.stop_if_cancelled()
        rows = self._experience(answers, [self._rules[number] for number in chosen], round_number)
        for _ in range(config.epochs):
            for part in np.split(random.permutation(len(chosen)), len(chosen) // config.minibatch_answers):
                yield _without_padding({name: value[torch.from_numpy(part)] for name, value in rows.items()})

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"round": self._round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._round = state["round"]

    def _experience(self, answers: Completions, rules: Sequence[Rule | None], round_number: int) -> dict[str, Tensor]:
        """Everything the loss needs, by name, each (B, …) on the CPU.

        rules: what rewards in place of the reward model; None where that does.
        """
        config, batch = self._config, Batch.of(answers, self._chat.pad)
        raw = scores_of(self._reward, answers, self._chat, self._hardware)
        right = torch.from_numpy(right_answers([self._chat.decode(ids) for ids in answers.ids], rules)).float()
        ruled = ~right.isnan()
        learnt = raw[~ruled]
        if config.normalise_reward and not self._scale.known and len(learnt) > 1:
            self._scale.learn(learnt.to(self._scale.mean.device))
        scores = self._scale(raw.to(self._scale.mean.device)).cpu()
        shown = {"rlhf/verified": float(right[ruled].mean())} if ruled.any() else {}
        if len(learnt):
            shown |= {"rlhf/reward": float(learnt.mean()), "rlhf/reward_normalised": float(scores[~ruled].mean())}
            if self._judge is not None:
                judged = scores_of(self._judge, answers, self._chat, self._hardware)
                shown["rlhf/judge"] = float(judged[~ruled].mean())
        scores = torch.where(ruled, config.verified_reward * (2 * right - 1), scores)
        penalised = scores - config.unfinished_penalty * (~answers.finished).float()
        logprobs, reference, entropies, values = self._look(batch)
        coefficient = float(self._scale.kl_coef)
        learning: dict[str, Tensor] = {}
        if values is None:
            group = config.answers_per_prompt
            advantages = leave_one_out(penalised, logprobs, reference, batch.mask, coefficient, group)
        else:
            rewards = token_rewards(penalised, logprobs, reference, batch.mask, coefficient)
            advantages, returns = advantages_and_returns(rewards, values, batch.mask, config.gamma, config.gae_lambda)
            learning = {"values": values, "returns": returns}
        kl = float((kl_k1(logprobs, reference) * batch.mask).sum(1).mean())
        if config.kl_target is not None:
            adapted = adapted_kl_coef(coefficient, kl, config.kl_target, config.rollout_prompts)
            self._scale.kl_coef.fill_(adapted)
        self._run.metrics(
            {
                **shown,
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
            "advantages": whiten(advantages, batch.mask),
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
