"""Evaluation during training: benchmarks and sampled text, without an effect on the training."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.generation.random_state import kept_random_state
from infra.io.json import read_own_json_lines
from infra.run import Run
from training.config import PretrainConfig
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware
from training.core.measuring import measuring
from training.core.train_state import TrainState
from training.distributed.parallel import whole_weights
from training.generation.sampling import sample
from training.model.attention import answering

SAMPLES = "training_samples.jsonl"
_TEMPERATURE = 0.8


class InLoopEvaluator(Callback):
    """Records figures as `benchmarks/<task>/<metric>`, and appends samples to training_samples.jsonl in the work
    folder.

    Each evaluation draws the same random numbers, so that two of them differ by the model alone.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainConfig,
        every: int,
        hardware: Hardware,
        run: Run,
    ) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._config = config
        self._every = every
        self._hardware = hardware
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch
        if batch % self._every:
            return
        launch = self._run.launch
        shared = launch.shards_weights or max(*launch.shares_of_examples, launch.expert_parallel) > 1
        if shared and ranks.world_size() > 1 and not self._config.evaluate_tasks:
            return  # texts alone are not worth all weights on one device
        with _asked_alone(self._network, shared) as network:
            if network is None:
                return
            self._sample(network, batch)
            if self._config.evaluate_tasks:
                self._run.metrics(self._benchmarks(network), batch)

    def _sample(self, network: PreTrainedModel, batch: int) -> None:
        start, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        first = end if start is None else start
        prompts = [
            [first, *self._tokenizer.encode(text, add_special_tokens=False)] for text in self._config.sample_prompts
        ]
        if not prompts:
            return
        answers = sample(
            network,
            prompts,
            max_new_tokens=self._config.sample_tokens,
            temperature=_TEMPERATURE,
            stops={end},
            hardware=self._hardware,
            seed=self._config.seed,
        )
        with (self._run.work_dir / SAMPLES).open("a", encoding="utf8") as file:
            for prompt, answer in zip(self._config.sample_prompts, answers, strict=True):
                text = self._tokenizer.decode([token for token in answer if token != end])
                file.write(json.dumps({"batch": batch, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")

    def _benchmarks(self, network: PreTrainedModel) -> dict[str, float]:
        # lm-eval takes seconds to import.
        from evaluation.benchmarks import task_metrics
        from evaluation.config import BenchmarksConfig
        from evaluation.generation.language_model import LoadedModel
        from evaluation.harness.tasks import evaluate_model

        config = BenchmarksConfig(tasks=self._config.evaluate_tasks, limit=self._config.evaluate_limit)
        quiet = Run(self._run.work_dir, self._run.launch)
        results = evaluate_model(config, LoadedModel(network, self._tokenizer, self._hardware.device), quiet)
        return {
            f"benchmarks/{name}/{metric}": entry["value"]
            for name in results["results"]
            for metric, entry in task_metrics(results, name, config.confidence).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the samples file, after syncing it to disk."""
        path = self._run.work_dir / SAMPLES
        if not path.exists():
            return {"samples_bytes": 0}
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return {"samples_bytes": os.fstat(file.fileno()).st_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop the samples that will be drawn again."""
        path = self._run.work_dir / SAMPLES
        if path.exists() and path.stat().st_size > state.get("samples_bytes", math.inf):
            os.truncate(path, state["samples_bytes"])


@contextmanager
def _asked_alone(network: PreTrainedModel, shared: bool) -> Iterator[PreTrainedModel | None]:
    """Yield the model in a form that a single process can run; every rank must call. With several ranks, rank 0 has it,
    and the others wait with None.

    Args:
        shared: no rank can run its model without the others; rank 0 gets a copy with all weights on its device.
    """
    weights = whole_weights(network) if shared and ranks.world_size() > 1 else None
    try:
        if not ranks.is_first():
            yield None
            return
        if weights is None:
            with measuring(network), answering(network):
                yield network
            return
        with kept_random_state(network.device):  # it is drawn, and then replaced
            copied = type(network)(copy.deepcopy(network.config))
        # The ranks' own kernel may want all of them.
        copied.set_attn_implementation("sdpa")
        copied.load_state_dict(weights)
        copied.to(network.device, network.dtype)
        with measuring(copied):
            yield copied
    finally:
        ranks.wait_for_all()


class InLoopAnswers(Callback):
    """Appends the result of `answers` after some of the batches to training_samples.jsonl in the work folder: one line
    each, with its batch. A training that goes back writes a batch again; `kept_answers` takes the later lines."""

    def __init__(
        self,
        network: PreTrainedModel,
        answers: Callable[[], Sequence[Mapping[str, Any]]],
        at: Collection[int],
        run: Run,
    ) -> None:
        self._network = network
        self._answers = answers
        self._at = at
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        batch = state.clock.batch
        # A model that several ranks share cannot answer from one of them.
        if batch not in self._at or ranks.world_size() > 1:
            return
        with measuring(self._network), answering(self._network):
            rows = self._answers()
        with (self._run.work_dir / SAMPLES).open("a", encoding="utf8") as file:
            file.writelines(json.dumps({"batch": batch, **row}, ensure_ascii=False) + "\n" for row in rows)


def kept_answers(work_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of InLoopAnswers, by batch: the last line of each batch and prompt."""
    path = work_dir / SAMPLES
    if not path.exists():
        return []
    lines = list(read_own_json_lines(path))
    last = {(line["batch"], line["prompt"], json.dumps(line.get("history"))): line for line in lines}
    return sorted(last.values(), key=lambda line: line["batch"])


def keep_samples(work_dir: Path, out_dir: Path) -> None:
    """Copy the samples of a training to aux/, where the report finds them."""
    if ranks.is_first() and (work_dir / SAMPLES).exists():
        (out_dir / "aux").mkdir(exist_ok=True)
        shutil.copyfile(work_dir / SAMPLES, out_dir / "aux" / SAMPLES)
