"""A sampler process: it has a copy of the policy, takes weights by their files, and answers the prompts it is sent.

python -m training.rl.rollouts.sampler    serves the process that started it: the first line of JSON names the
                                          model, each further one asks for answers, and each gets one line back
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from infra.errors import StageError
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from infra.process.lifetime import serve_parent
from training.chat.base import Chat
from training.config import RlhfConfig
from training.core.hardware import Hardware, prepare
from training.core.measuring import measuring
from training.generation.completions import AnswerBatch, Completions, generate
from training.model.attention import choose_attention
from training.model.models import load
from training.model.new_tokens import forget_untrained
from training.rl.environments.episodes import Episodes, Task
from training.rl.environments.pool import EnvironmentPool
from training.rl.rollouts.schedule import PartAnswers, RoundPart
from training.train_modules.answer_logprobs import logprobs_and_entropies

_BATCH = 64
"""Answers of one forward pass without gradients."""


class Sampler:
    """A policy that answers by the weights that it is given, or plays episodes in the environment of the config."""

    def __init__(
        self, source: Path, config: RlhfConfig, launch: LaunchConfig, longest: int, documents: Path | None = None
    ) -> None:
        """Load a model's folder.

        Args:
            longest: tokens of the longest prompt with its answer.
            documents: file of the text that the environment searches.
        """
        self._config = config
        self._hardware: Hardware = prepare(launch)
        self._chat = Chat.load(source, config.chat_template_kwargs, "rlhf")
        self._policy: PreTrainedModel = load(source)
        forget_untrained(self._policy)
        choose_attention(self._policy, self._hardware, longest)
        self._policy.eval().requires_grad_(False).to(self._hardware.device)
        self._version: int | None = None
        self._episodes: Episodes | None = None
        if config.environment is not None:
            environments = EnvironmentPool(config.environment, launch.sandbox, documents)
            self._episodes = Episodes(config, self._chat, self._hardware, environments)

    def answer(
        self,
        number: int,
        version: int,
        weights: Path,
        prompts: Sequence[list[int]],
        tasks: Sequence[tuple[dict[str, Any], int]],
        first: int,
        seed: int,
        scored: bool,
    ) -> dict[str, Any]:
        """Return the answer to each prompt, or an episode of each task, as JSON of `PartAnswers`.

        Args:
            number: of the part.
            version: of the weights in the file `weights`.
            first: number of the first prompt or task in its round, which with the seed decides its draws.
            scored: with the log-probabilities of what was sampled.
        """
        if version != self._version:
            load_weights(self._policy, weights)
            self._version = version
        began = time.perf_counter()
        if self._episodes is not None:
            group = self._config.answers_per_prompt
            answers = self._episodes.play(self._policy, [Task(*task) for task in tasks], seed, group, first)
        else:
            only = slice(first, first + len(prompts))
            numbered = [*([] for _ in range(first)), *prompts]
            answers = generate(self._policy, numbered, self._chat, self._config, self._hardware, seed, only=only)
        logprobs = self._logprobs(answers) if scored else None
        answers, part = replace(answers, logprobs=logprobs), RoundPart(number, version)
        return PartAnswers.of(part, answers, time.perf_counter() - began).as_json()

    def _logprobs(self, answers: Completions) -> list[list[float]]:
        batch = AnswerBatch.of(answers, self._chat.pad)
        rows: list[list[float]] = []
        with measuring(self._policy):
            for part in torch.arange(len(batch.ids)).split(_BATCH):
                ids, positions, tokens, mask = (
                    column[part].to(self._hardware.device)
                    for column in (batch.ids, batch.places, batch.tokens, batch.mask)
                )
                logprobs, _ = logprobs_and_entropies(
                    self._policy, ids, positions, tokens, mask, self._hardware, self._config.temperature
                )
                lengths = mask.sum(1).long().tolist()
                rows += [row[:length] for row, length in zip(logprobs.tolist(), lengths, strict=True)]
        return rows


def load_weights(policy: PreTrainedModel, path: Path) -> None:
    """Give a policy the weights of a file that `pool.write_weights` wrote: tied ones are in it once."""
    state = policy.state_dict()
    given = load_file(path)
    pointers = {state[name].data_ptr() for name in given}
    missing = [name for name, value in state.items() if name not in given and value.data_ptr() not in pointers]
    if missing:
        raise ValueError(f"{path} has no weights for {', '.join(missing)}")
    with torch.no_grad():
        for name, value in given.items():
            state[name].copy_(value)


def serve(of: Callable[..., Sampler] = Sampler) -> None:
    """Answer incoming questions until the parent process closes the pipe."""
    questions, replies = serve_parent()

    def reply(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        setup = parse_own_json(questions.readline())
        config, launch = RlhfConfig.model_validate(setup["config"]), LaunchConfig.model_validate(setup["launch"])
        documents = Path(setup["documents"]) if setup["documents"] else None
        sampler = of(Path(setup["source"]), config, launch, setup["longest"], documents)
        reply({})
        for line in questions:
            question = parse_own_json(line)
            reply(sampler.answer(**{**question, "weights": Path(question["weights"])}))
    except StageError as error:
        reply({"problems": [problem.as_json() for problem in error.problems]})


if __name__ == "__main__":
    serve()
