"""Answers of a policy by vLLM: a server that rank 0 runs, which gets the policy's weights before each round.

Only the token ids are used for learning: the model that learns computes their log-probabilities itself. The
log-probabilities that vLLM reports are compared with those, so that a server that computes another model is detected.

Shapes: B answers.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from infra.errors import StageError, StemmaError, stage_error
from infra.run import Run
from infra.servers.vllm import AT_ONCE, Vllm
from training.chat.base import Chat
from training.checkpoint.export import copy_beside
from training.config import LoraConfig
from training.config.families import sampler_problems
from training.core import ranks
from training.core.hardware import Hardware
from training.distributed.parallel import whole_weights
from training.generation.completions import Answering, Completions
from training.model.lora import merged
from training.model.new_tokens import unused_ids

T = TypeVar("T")
LOG = "vllm.log"
NEVER = -100.0
"""Minimum value that vLLM adds to the logit of a token that must not be generated."""
_READ_AT_ONCE = 8192
"""Tokens of prompts in one pass on a CPU."""
_MOST_APART = {torch.float32: 0.01}
_MOST_APART_ROUNDED = 0.1
"""Mean nats per token by which two computations of one model may differ: in fp32 about 1e-6 were seen, under bf16 0.02,
the distance of ours from those in fp32."""


class VllmSampler:
    """Samples answers as `training.generation.completions.generate` does, each of which is drawn from (seed, its
    number) alone; every rank must call its methods, and all get all. Raises StageError as `infra.servers.vllm.Vllm`
    does, on every rank."""

    def __init__(
        self,
        policy: PreTrainedModel,
        source: Path,
        chat: Chat,
        config: Answering,
        longest: int,
        hardware: Hardware,
        run: Run,
        *,
        lora: LoraConfig | None = None,
        token_ids: Sequence[int] = (),
        number: int | None = None,
    ) -> None:
        """policy: whole on rank 0. source: the folder with its tokenizer. longest: tokens of prompt and answer.
        lora: the adapters of the policy, if it has any. token_ids: tokens whose rows learn next to them. number: of one
        of several servers (`launch.samplers.count`), each with its part of the GPUs."""
        if problems := [*sampler_problems(policy.config.model_type)]:
            raise StageError(*problems)
        self._policy = policy
        self._lora, self._token_ids = lora, token_ids
        self._chat = chat
        self._config = config
        self._dtype = hardware.compute
        self._run = run
        self._folder = run.work_dir / ("vllm" if number is None else f"vllm-{number}")
        self._server: Vllm | None = None
        log = run.work_dir / (LOG if number is None else f"vllm-{number}.log")
        machine = run.launch.vllm
        if number is not None and machine.gpus:
            gpus = machine.gpus.split(",")
            each = len(gpus) // run.launch.samplers.count
            machine = machine.model_copy(update={"gpus": ",".join(gpus[number * each : (number + 1) * each])})

        def start() -> None:
            self._write_weights()
            self._write_config(source)
            dtype = str(self._dtype).removeprefix("torch.")
            # Of the distribution that tokens are drawn from, or without what it changes in it: that of unused tokens.
            mode = "raw_logprobs" if config.temperature == 1 else "processed_logprobs"
            given = ["--dtype", dtype, "--max-model-len", str(longest), "--generation-config", "vllm",
                     "--logprobs-mode", mode]  # fmt: skip
            if hardware.device.type == "cpu":
                # vLLM 0.32 ends where a seeded prompt is read in parts: a CPU's generator cannot be set back.
                given += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(longest, _READ_AT_ONCE))]
            run.event("vllm", f"rlhf: vLLM starts, {dtype}; its log is {log}")
            began = time.monotonic()
            self._server = Vllm(
                machine,
                self._folder,
                log,
                given,
                self._cache_bytes(longest),
                lambda: run.cancelled,
            )
            run.event("vllm", f"rlhf: vLLM answers after {time.monotonic() - began:.0f} s")

        on_first(start)

    def update(self, step: int) -> None:
        """Send it the policy's current weights; the time that took is recorded at this step."""

        def reload() -> None:
            began = time.monotonic()
            self._write_weights()
            assert self._server is not None
            self._server.reload_weights()
            self._run.metric("rlhf/weights_to_vllm_s", time.monotonic() - began, step)

        on_first(reload)

    def sample(self, prompts: Sequence[list[int]], seed: int, first: int = 0) -> Completions:
        """Return an answer to each prompt, with the log-probabilities that vLLM reports; the first prompt has the
        number `first`."""
        sampled = on_first(lambda: self.written(prompts, seed, range(first, first + len(prompts))))
        ids = [answer for answer, _ in sampled]
        ended = torch.tensor([self._chat.has_ended(answer) for answer in ids])
        return Completions(list(prompts), ids, ended, [logprobs for _, logprobs in sampled])

    def written(
        self, prompts: Sequence[list[int]], seed: int, numbers: Sequence[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Return the ids of an answer to each prompt and their log-probabilities. Rank 0 calls this alone."""
        assert self._server is not None
        stops, config = sorted(self._chat.stops), self._config
        # `ignore_eos`: of the model's own; what ends an answer is in stop_token_ids, and stays a part of it.
        shared = {
            "max_tokens": config.answer_max_tokens, "temperature": config.temperature, "top_p": 1.0, "top_k": 0,
            "ignore_eos": True, "stop_token_ids": stops, "logprobs": 0, "return_token_ids": True,
            "logit_bias": {str(token): NEVER for token in unused_ids(self._policy)} or None,
        }  # fmt: skip

        questions = [
            {**shared, "prompt": list(prompt), "seed": seed_of(seed, number)}
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        choices = self._server.complete(questions)
        if any(choice.get("token_ids") is None for choice in choices):
            fix = "install a later version, or leave rlhf.sampler out to use the built-in sampler"
            raise stage_error(
                "vllm_too_old", "launch.vllm.program", "this version of vLLM does not report token ids", fix
            )
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def check(self, answers: Completions, logprobs: Tensor, mask: Tensor, step: int) -> None:
        """Record the mean difference of vLLM's log-probabilities from ours (B, T) of the same tokens, `mask (B, T)`.
        Raises StageError `vllm_differs` where that is more than rounding."""
        apart = float(differences(answers, logprobs, mask).mean())
        self._run.metric("rlhf/vllm_logprobs_apart", apart, step)
        most = _MOST_APART.get(self._dtype, _MOST_APART_ROUNDED)
        if not apart <= most:
            raise stage_error(
                "vllm_differs",
                "rlhf.sampler",
                f"vLLM's log-probabilities of its answers' tokens are {apart:.3g} nats from those of the policy in the "
                f"mean, and {most:g} is more than rounding: it computes another model",
                "leave rlhf.sampler out to use the built-in sampler, or try another version of vLLM",
            )

    def close(self) -> None:
        """End the server and remove its weights; does nothing on other ranks."""
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write_weights(self) -> None:
        weights: dict[str, Tensor] = {}
        known: set[int] = set()
        trained = whole_weights(self._policy)
        if self._lora is not None:
            trained = merged(trained, self._lora, self._token_ids)
        for name, value in trained.items():
            tensor = value.to(self._dtype).contiguous()
            weights[name] = tensor.clone() if tensor.data_ptr() in known else tensor
            known.add(tensor.data_ptr())
        self._folder.mkdir(parents=True, exist_ok=True)
        half = self._folder / "half_written"
        save_file(weights, half, metadata={"format": "pt"})
        half.replace(self._folder / "model.safetensors")

    def _write_config(self, source: Path) -> None:
        """Write the config with untied embeddings. vLLM would load an output layer that shares the input's memory once
        and leave the copy that its kernels use unchanged: so the two are written as two."""
        config = copy.deepcopy(self._policy.config)
        config.tie_word_embeddings = False
        config.architectures = [type(self._policy).__name__]
        config.save_pretrained(self._folder)
        copy_beside(source, self._folder)

    def _cache_bytes(self, longest: int) -> int:
        """Return the bytes of keys and values of the number of answers that vLLM computes at once."""
        config = self._policy.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * AT_ONCE * longest * config.num_hidden_layers * heads * width * self._dtype.itemsize


def differences(answers: Completions, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the differences of vLLM's log-probabilities of all tokens (N,) from these (B, T), `mask (B, T)`."""
    assert answers.logprobs is not None
    return (logprobs[mask.bool()] - torch.tensor([*chain(*answers.logprobs)])).abs()


def seed_of(seed: int, number: int) -> int:
    """Return the seed from which vLLM draws the tokens of the answer with this number."""
    return int(np.random.default_rng([seed % 2**64, number]).integers(2**63 - 1))


def on_first(work: Callable[[], T]) -> T:
    """Return the result of `work` on rank 0 to every rank; an error of it is raised on every rank."""
    outcome: T | StemmaError | None = None
    if ranks.is_first():
        try:
            outcome = work()
        except StemmaError as error:
            outcome = error
    outcome = ranks.from_first(outcome)
    if isinstance(outcome, StemmaError):
        raise outcome
    return outcome  # type: ignore[return-value]
