"""lm-eval's questions, answered by a vLLM server as lm-eval's Hugging Face model would answer them.

The same code turns texts into tokens; only the computation on them is vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers import AutoModelForCausalLM

from corpus.model_folders.pretrained import load_pretrained_shape, load_pretrained_tokenizer
from evaluation.generation.choice_rows import Request
from evaluation.generation.language_model import dtype_of
from evaluation.harness.model import ReportingHFLM
from infra.errors import stage_error
from infra.run import Run
from infra.servers.vllm import AT_ONCE, Vllm

LOG = "vllm.log"
_TAKEN = {"do_sample", "temperature", "top_p", "top_k"}


class VllmLM(ReportingHFLM):
    """lm-eval's model for a folder that a server has loaded. Its longest input is two tokens shorter than that of the
    Hugging Face model: vLLM always writes one token, and accepts no more tokens than the model has positions."""

    def __init__(self, run: Run, server: Vllm, model: Any, tokenizer: Any) -> None:
        """model: without weights, used only for its config."""
        super().__init__(run, model, tokenizer, 1, share=False)
        self._server = server
        unused = getattr(model.generation_config, "suppress_tokens", None)
        self._bias = {str(token): -100.0 for token in unused or ()} or None

    @property
    def max_length(self) -> int:
        return int(super().max_length) - 2

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        sequences = [[*(context or ()), *continuation][-self.max_length - 1 :] for _, context, continuation in requests]
        questions = [{"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0} for ids in sequences]
        self._log_truncated(requests)
        answers = []
        for number, choice in enumerate(self._answered(questions)):
            logprobs = choice["prompt_logprobs"][-len(requests[number][2]) :]
            ids = sequences[number][-len(logprobs) :]
            entries = [(entry or {}).get(str(token), {}) for entry, token in zip(logprobs, ids, strict=True)]
            # A likelihood that is NaN is sent as null.
            numbers = [math.nan if (value := entry.get("logprob")) is None else value for entry in entries]
            answer = sum(numbers), all(entry.get("rank") == 1 for entry in entries)
            self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
            answers.append(answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        self._done, self._requests = 0, len(requests)
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        questions, stops = [], []
        for instance in requests:
            context, generation_kwargs = instance.args
            kwargs = normalize_gen_kwargs(generation_kwargs, self.max_gen_toks)
            stop = handle_stop_sequences(kwargs.pop("until", None), eos=end)
            max_new_tokens = kwargs.pop("max_gen_toks")
            if unknown := sorted(kwargs.keys() - _TAKEN):
                message = f"a task asks for {', '.join(unknown)}, which is not passed to vLLM here"
                raise stage_error("not_by_vllm", "engine", message, "use the built-in engine")
            ids, _ = self.tok_batch_encode([context], left_truncate_len=self.max_length - max_new_tokens)
            if len(self.tok_encode(context)) > self.max_length - max_new_tokens:
                self.answers.add("truncated", instance)
            sampled = {name: kwargs[name] for name in ("temperature", "top_p", "top_k") if name in kwargs}
            questions.append({
                "prompt": ids[0].tolist(), "max_tokens": max_new_tokens, "stop": stop,
                "logit_bias": self._bias, "seed": 0,
                "return_token_ids": True,
                **(sampled if kwargs.get("do_sample") else {"temperature": 0.0}),
            })  # fmt: skip
            stops.append(stop)
        texts = []
        for number, choice in enumerate(self._answered(questions)):
            if choice.get("finish_reason") == "length":
                self.answers.add("truncated", requests[number])
            # vLLM's text lacks the bytes of a character that was not completed.
            text = postprocess_generated_text(self.tok_decode(choice["token_ids"]), stops[number], None)
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
            texts.append(text)
        return texts

    def _answered(self, questions: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for start in range(0, len(questions), 4 * AT_ONCE):
            answers = self._server.complete(questions[start : start + 4 * AT_ONCE])
            self._count(len(answers))
            yield from answers


@contextmanager
def served(folder: Path, run: Run) -> Iterator[VllmLM]:
    """Yield lm-eval's model for a folder, with a vLLM server (`launch.vllm`) that ends with the block: in fp32 on a
    CPU, otherwise as `launch` specifies. Raises StageError as `infra.servers.vllm.Vllm` does."""
    tokenizer = load_pretrained_tokenizer(folder)
    model = load_pretrained_shape(AutoModelForCausalLM, folder)
    dtype = dtype_of(run)
    arguments = ("--dtype", str(dtype).removeprefix("torch."), "--generation-config", "vllm")
    server = Vllm(run.launch.vllm, folder, run.work_dir / LOG, arguments, stop=lambda: run.cancelled)
    try:
        yield VllmLM(run, server, model, tokenizer)
    finally:
        server.close()
