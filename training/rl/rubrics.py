"""Rewards by a rubric: a judge model scores each answer by each criterion, from 0 to 1.

The judge is an endpoint of OpenAI's protocol, which replies with a number, or a model of ours, whose probability of
`Yes` against `No` is read from one forward pass. One request has one criterion, so that the judgements are independent.

Shapes: B answers, C criteria.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.endpoint import Endpoint, EndpointFailure, Request
from infra.errors import stage_error
from infra.run import Run
from training.chat.base import Chat
from training.config.alignment.rubrics import JUDGE, RubricConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.model.attention import choose_attention
from training.model.models import limit_length, load
from training.rl.prompts import Prompt

_BEST = 10
_NUMBER = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)(?:\s*/\s*10\b)?")
_BATCH = 16
_LONGEST = 4096


class CriteriaJudge(Protocol):
    """A judge of answers by single criteria."""

    def scores(self, questions: Sequence[str]) -> list[float]:
        """Return a score between 0 and 1 for each question; nan where the judge gave none."""

    def close(self) -> None: ...


class Rubric:
    """The scores of answers by the criteria of a config. Every rank must call `of`, and all get all."""

    def __init__(self, config: RubricConfig, judge: CriteriaJudge) -> None:
        self.config = config
        self._judge = judge
        self._ending = _of_number if config.endpoint is not None else _of_words

    def of(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Tensor:
        """Return the scores (B, C) of answers to prompts, nan where the judge gave none. Each rank asks for its part.

        Raises StageError `rubric_unscored` where more judgements than `max_unscored_share` have no number.
        """
        rows = ranks.own_part(len(texts))
        questions = [
            question(criterion.text, prompt, text, self._ending, show_response=self.config.show_response)
            for prompt, text in zip(prompts[rows], texts[rows], strict=True)
            for criterion in self.config.criteria.values()
        ]
        scored = torch.tensor(self._judge.scores(questions) if questions else [], dtype=torch.float64)
        scores = ranks.join_parts(scored.view(-1, len(self.config.criteria)))
        unscored = float(scores.isnan().double().mean()) if scores.numel() else 0.0
        if unscored > self.config.max_unscored_share:
            message = (
                f"the judge gave no number from 0 to {_BEST} in {unscored:.0%} of its judgements; "
                f"max_unscored_share allows {self.config.max_unscored_share:.0%}"
            )
            fix = "use a model that follows instructions, or raise sampling.max_tokens for one that reasons first"
            raise stage_error("rubric_unscored", "rlhf.rubric", message, fix)
        return scores

    def means(self, scores: Tensor) -> Tensor:
        """Return the weighted means (B,) over the criteria that have a score; 0 where none has."""
        weights = torch.tensor([criterion.weight for criterion in self.config.criteria.values()], dtype=scores.dtype)
        known = (~scores.isnan()) * weights
        return (scores.nan_to_num(0.0) * known).sum(1) / known.sum(1).clamp(min=1e-12)

    def metrics(self, scores: Tensor) -> dict[str, float]:
        """Return the mean score by each criterion and of the rubric, and the share of judgements without a number."""
        of_each = {
            f"rlhf/rubric/{name}": float(column.nanmean())
            for name, column in zip(self.config.criteria, scores.unbind(1), strict=True)
            if not bool(column.isnan().all())
        }
        share = float(scores.isnan().double().mean())
        return {**of_each, "rlhf/rubric": float(self.means(scores).mean()), "rlhf/rubric_unscored": share}

    def close(self) -> None:
        self._judge.close()


def rubric_of(config: RubricConfig | None, inputs: Mapping[str, Path], hardware: Hardware, run: Run) -> Rubric | None:
    """Return the rubric of a config with its judge; None without one.

    Raises StageError `no_rubric_judge` where neither an endpoint nor the input `rubric_judge` is given.
    """
    if config is None:
        return None
    if config.endpoint is not None:
        return Rubric(config, _EndpointJudge(config, run))
    if JUDGE not in inputs:
        message = f"expected a judge: an endpoint, or the input {JUDGE}"
        fix = f"set rubric.endpoint, or give a model that follows instructions as the input {JUDGE}"
        raise stage_error("no_rubric_judge", "rlhf.rubric", message, fix)
    return Rubric(config, _ModelJudge(inputs[JUDGE], hardware))


_of_number = f"Reply with a whole number from 0 (not at all) to {_BEST} (completely), and nothing else."
_of_words = "Does the answer meet the criterion? Reply with Yes or No."


def question(criterion: str, prompt: Prompt, answer: str, ending: str, *, show_response: bool) -> str:
    """Return the judge's question about one answer by one criterion."""
    turns = [f"{turn['role']}: {turn['content']}" for turn in prompt.history if turn.get("content")]
    parts = [
        "You judge an answer by one criterion.",
        *(["The conversation so far:\n" + "\n".join(turns)] if turns else []),
        f"The request:\n{prompt.text}",
        *([f"A reference answer:\n{prompt.response}"] if show_response and prompt.response else []),
        f"The answer to judge:\n{answer}",
        f"The criterion:\n{criterion}",
        ending,
    ]
    return "\n\n".join(parts)


def score_in(text: str) -> float:
    """Return the last number from 0 to 10 in a judgement, as a share of 10; nan where there is none."""
    numbers = [float(number) for number in _NUMBER.findall(text)]
    return numbers[-1] / _BEST if numbers and 0 <= numbers[-1] <= _BEST else float("nan")


class _EndpointJudge:
    """An endpoint that replies with a number; its answers are kept by request, beside the run."""

    def __init__(self, config: RubricConfig, run: Run) -> None:
        assert config.endpoint is not None
        self._endpoint, self._sampling, self._run = config.endpoint, config.sampling, run
        self._answers = AnswerStore(run.answers_dir)

    def scores(self, questions: Sequence[str]) -> list[float]:
        return asyncio.run(self._ask(questions))

    async def _ask(self, questions: Sequence[str]) -> list[float]:
        endpoint = Endpoint(self._endpoint, self._sampling, self._answers, "rlhf.rubric.endpoint")

        async def score(text: str) -> float:
            answer: EndpointAnswer | EndpointFailure = await endpoint.ask(Request([{"role": "user", "content": text}]))
            self._run.stop_if_cancelled()
            return score_in(answer.text) if isinstance(answer, EndpointAnswer) and not answer.fault else float("nan")

        try:
            return list(await asyncio.gather(*map(score, questions)))
        finally:
            await endpoint.close()

    def close(self) -> None:
        self._answers.close()


class _ModelJudge:
    """A model of another step: the probability of `Yes` against `No` as the first token of its answer.

    Raises StageError `no_verdict_tokens` for a tokenizer in which both begin alike.
    """

    def __init__(self, folder: Path, hardware: Hardware) -> None:
        self._hardware, self._chat = hardware, Chat.load(folder)
        self._model: PreTrainedModel = load(folder).eval().requires_grad_(False)
        self._longest = limit_length(self._model, _LONGEST)
        choose_attention(self._model, hardware, self._longest)
        self._model.to(hardware.device)
        words = [self._chat.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
        if words[0] == words[1]:
            message = "expected a tokenizer in which Yes and No begin with different tokens"
            raise stage_error("no_verdict_tokens", f"rlhf.inputs.{JUDGE}", message, "use another judge or an endpoint")
        self._words = torch.tensor(words, device=hardware.device)

    def scores(self, questions: Sequence[str]) -> list[float]:
        prompts = self._chat.prompts(list(questions), self._longest)
        scores = [0.0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        with measuring(self._model):
            for start in range(0, len(order), _BATCH):
                numbers = order[start : start + _BATCH]
                lengths = torch.tensor([len(prompts[number]) for number in numbers])
                ids = torch.full((len(numbers), int(lengths.max())), self._chat.pad)
                for row, number in enumerate(numbers):
                    ids[row, : len(prompts[number])] = torch.tensor(prompts[number])
                # Padding is on the right, which causal attention never reads.
                with self._hardware.autocast():
                    logits = self._model(ids.to(self._hardware.device), use_cache=False).logits
                last = logits[torch.arange(len(numbers)), (lengths - 1).to(logits.device)][:, self._words]
                for number, share in zip(numbers, last.double().softmax(-1)[:, 0].tolist(), strict=True):
                    scores[number] = share
        return scores

    def close(self) -> None: ...
