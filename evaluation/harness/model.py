"""lm-eval's Hugging Face model, which reports to this project's run, scores the choices of one question together, and
writes many answers at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import LogitsProcessorList

from evaluation.generation.chat_prompts import bounded
from evaluation.generation.choice_rows import Request, rows_of
from evaluation.generation.choice_scoring import ChoiceScorer, TokenCache
from evaluation.generation.decoding import Decoder
from evaluation.generation.language_model import end_ids
from evaluation.harness.generation import (
    SLOTS,
    TOGETHER,
    BenchmarkAnswer,
    NotANumber,
    StopText,
    is_plain,
    supports,
    watch_numbers,
)
from evaluation.harness.integrity import AnswerLog
from infra.run import Run

NO_SYSTEM = "the model's chat template refuses a system message: system_instruction was left out, as by lm-eval"


class ReportingHFLM(HFLM):
    """lm-eval's Hugging Face model that reports each batch to the run instead of drawing progress bars.

    share: score choices that follow one context while reading it once, and write answers with
    `evaluation/generation/decoding.py`; everything else is lm-eval's own method, bit for bit.
    """

    def __init__(self, run: Run, model: Any, tokenizer: Any, batch_size: int, share: bool = True) -> None:
        self._together, self.leaves_out_system = False, False
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self._run, self._done, self._requests = run, 0, 0
        self._scorer = ChoiceScorer(self.model, self.device, self.softmax_dtype) if share else None
        self._tokens = TokenCache(self)
        self.answers = AnswerLog()
        self._likelihoods: list[Instance] = []
        """Requests that `_loglikelihood_tokens` receives, in order; empty for windows of whole documents."""
        self._prompts: list[str] = []
        """Prompts of the batch being answered."""
        self._unfinished: set[str] = set()
        """Prompts whose answers reached their length limit."""
        self._without_numbers: set[str] = set()
        """Prompts whose answers came from NaN logits."""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Apply the template as lm-eval does, but in a process with bounds, as it comes with the model.

        Raises StageError `bad_template` for a template that takes too much memory or time.
        """
        with bounded(
            self._without_system if any(message["role"] == "system" for message in chat_history) else lambda: None
        ):
            return str(super().apply_chat_template(chat_history, add_generation_prompt))

    def _without_system(self) -> None:
        """Record once that lm-eval omits the system message because the template refuses a conversation with one."""
        if not self.leaves_out_system:
            self.leaves_out_system = True
            self._run.event("no_system_message", NO_SYSTEM)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._done, self._requests = 0, len(requests)
        self._tokens.fill(requests)
        self._likelihoods = requests
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._tokens.clear()
            self._likelihoods = []

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        if add_special_tokens is None and not options and (tokens := self._tokens.get(string)) is not None:
            return tokens
        return list(super().tok_encode(string, add_special_tokens, **options))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        self._log_truncated(requests)
        if self._scorer is None or override_bs is not None:  # override_bs is set for windows of whole documents
            return list(super()._loglikelihood_tokens(list(requests), True, override_bs))
        rows, alone = rows_of(requests, min(self.max_length, self._scorer.longest))
        if rows and not self._scorer.usable(min(rows, key=lambda row: row.length)):
            self._run.event("plain_scoring", "this model cannot score all choices of a question at once")
            rows, alone = [], list(range(len(requests)))
        results: dict[int, tuple[float, bool]] = {}
        if alone:
            scored = super()._loglikelihood_tokens([requests[number] for number in alone], True)
            results.update(zip(alone, scored, strict=True))
        for batch, answers in self._scorer.score(rows):
            self._count(sum(len(numbers) for row in batch for numbers in row.requests))
            request_numbers = (numbers for row in batch for numbers in row.requests)
            for numbers, answer in zip(request_numbers, answers, strict=True):
                for number in numbers:
                    results[number] = answer
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        # Rows of a batch share places, so NaN in one row may spread to others that are finite on their own.
        if retried := [number for number, answer in results.items() if math.isnan(answer[0])]:
            scored = super()._loglikelihood_tokens([requests[number] for number in retried], True)
            results.update(zip(retried, scored, strict=True))
        return [results[number] for number in range(len(requests))]

    def _log_truncated(self, requests: Sequence[Request]) -> None:
        """Record the items whose prompts are cut on the left.

        Args:
            requests: those of `loglikelihood`, as tokens.
        """
        if self.backend == "causal":
            for instance, (_, context, continuation) in zip(self._likelihoods, requests, strict=False):
                if len(context) + len(continuation) > self.max_length + 1:
                    self.answers.add("truncated", instance)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        self._done, self._requests = 0, len(requests)
        self._together = self._scorer is not None and self.backend == "causal"
        # Group requests with the same options, as lm-eval does; a record of a prompt then has one length limit.
        groups: dict[str, list[int]] = {}
        for number, instance in enumerate(requests):
            groups.setdefault(repr(instance.args[1]), []).append(number)
        texts: dict[int, str] = {}
        try:
            for numbers in groups.values():
                self._unfinished, self._without_numbers = set(), set()
                group = [requests[number] for number in numbers]
                texts.update(zip(numbers, super().generate_until(group, disable_tqdm=True), strict=True))
                self._log_written(group)
        finally:
            self._together = False
        return [texts[number] for number in range(len(requests))]

    def _log_written(self, requests: Sequence[Instance]) -> None:
        """Record items whose prompt was cut on the left, whose answer has no end, or whose logits were NaN."""
        longest = self.max_length
        if self.backend == "causal":
            longest -= normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)["max_gen_toks"]
        for instance in requests:
            prompt = instance.args[0]
            if prompt in self._unfinished or len(self.tok_encode(prompt)) > longest:
                self.answers.add("truncated", instance)
            if prompt in self._without_numbers:
                self.answers.add("failed", instance)

    @property
    def batch_size(self) -> int:
        return max(TOGETHER, self.batch_size_per_gpu) if self._together else self.batch_size_per_gpu

    def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode a batch with the result of encoding each text alone: lm-eval decides by the first text of a batch if
        all of them get a start token."""
        self._prompts = list(strings)
        if not self._together or len(strings) == 1:
            encoded: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(strings, *args, **options)
            return encoded
        rows = [super(ReportingHFLM, self).tok_batch_encode([string], *args, **options) for string in strings]
        width = max(ids.shape[1] for ids, _ in rows)
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, (row_ids, row_mask) in enumerate(rows):
            ids[number, width - row_ids.shape[1] :], mask[number, width - row_ids.shape[1] :] = row_ids[0], row_mask[0]
        return ids, mask

    def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
        self._count(inps.shape[0])
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        if not self._together:
            self._count(context.shape[0])
            watch = NotANumber()
            written = super()._model_generate(
                context, max_length, stop, **kwargs, logits_processor=LogitsProcessorList([watch])
            )
            skipped = context.shape[1] if self.backend == "causal" else 0
            self._log_ends(written[:, skipped:].tolist(), max_length - skipped, stop, watch.rows)
            return written
        mask, width = kwargs.pop("attention_mask"), context.shape[1]
        prompts = [row[row_mask.bool()].tolist() for row, row_mask in zip(context, mask, strict=True)]
        new_tokens = max_length - width
        answers: list[list[int]] = []
        wrong: set[int] = set()
        if is_plain(self.model, kwargs) and supports(self.model, prompts, new_tokens):
            before = self._done

            def report_progress(done: int) -> None:
                self._count(before + done - self._done)

            text, ends = StopText(self.tokenizer, stop), end_ids(self.model)
            written_to = [BenchmarkAnswer(prompt, new_tokens, ends, text) for prompt in prompts]
            Decoder(self.model, SLOTS).answer(written_to, report_progress, watch_numbers)
            report_progress(len(prompts))
            answers = [answer.new for answer in written_to]
            wrong = {row for row, answer in enumerate(written_to) if not answer.is_a_number}
        else:
            for start in range(0, len(prompts), self.batch_size_per_gpu):
                part = slice(start, start + self.batch_size_per_gpu)
                self._count(len(prompts[part]))
                padding = width - max(map(len, prompts[part]))
                watch = NotANumber()
                out = super()._model_generate(
                    context[part, padding:],
                    max_length - padding,
                    stop,
                    attention_mask=mask[part, padding:],
                    **kwargs,
                    logits_processor=LogitsProcessorList([watch]),
                )
                answers += out[:, width - padding :].tolist()
                wrong |= {start + row for row in watch.rows}
        self._log_ends(answers, new_tokens, stop, wrong)
        longest = max(map(len, answers), default=0)
        written = torch.full((len(answers), longest), self.tokenizer.pad_token_id)
        for number, answer in enumerate(answers):
            written[number, : len(answer)] = torch.tensor(answer, dtype=torch.long)
        return torch.cat([context.cpu(), written], 1)

    def _log_ends(self, answers: Sequence[Sequence[int]], limit: int, stops: Sequence[str], wrong: set[int]) -> None:
        """Record the prompts of the batch whose answers have `limit` tokens and no end.

        Args:
            wrong: rows with NaN logits.
        """
        ends = end_ids(self.model)
        for row, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            if row in wrong:
                self._without_numbers.add(prompt)
            elif len(answer) >= limit and ends.isdisjoint(answer):
                text = self.tokenizer.decode(answer, skip_special_tokens=False)
                if not any(stop in text for stop in stops if stop):
                    self._unfinished.add(prompt)

    def _count(self, requests: int) -> None:
        self._run.stop_if_cancelled()
        # Requests with a shared context may be answered by one row, so the last batches may come early.
        self._done = min(self._requests, self._done + requests)
        self._run.progress(self._done, self._requests, "requests")
