"""lm-eval's Hugging Face model, which reports to our run and scores the choices of one question together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from evaluation.choice_scoring import ChoiceScorer, Request, TokenCache, rows_of
from infra.run import Run


class ReportingHFLM(HFLM):
    """Reports each batch to the run instead of drawing bars.

    share: whether choices that follow one context are scored with it read once; the rest is lm-eval's own way, to the
    last bit.
    """

    def __init__(self, run: Run, model: Any, tokenizer: Any, batch_size: int, share: bool = True) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self._run, self._done, self._requests = run, 0, 0
        self._scorer = ChoiceScorer(self.model, self.device, self.softmax_dtype) if share else None
        self._tokens = TokenCache(self)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._done, self._requests = 0, len(requests)
        self._tokens.fill(requests)
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._tokens.clear()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        if add_special_tokens is None and not options and (known := self._tokens.get(string)) is not None:
            return known
        return list(super().tok_encode(string, add_special_tokens, **options))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self._scorer is None or override_bs is not None:  # the latter are windows of whole documents
            return list(super()._loglikelihood_tokens(list(requests), True, override_bs))
        rows, alone = rows_of(requests, min(self.max_length, self._scorer.longest))
        if rows and not self._scorer.usable(min(rows, key=lambda row: row.length)):
            self._run.event("plain_scoring", "this model cannot be asked all choices of a question at once")
            rows, alone = [], list(range(len(requests)))
        found: dict[int, tuple[float, bool]] = {}
        if alone:
            scored = super()._loglikelihood_tokens([requests[number] for number in alone], True)
            found.update(zip(alone, scored, strict=True))
        for batch, answers in self._scorer.score(rows):
            self._count(sum(len(numbers) for row in batch for numbers in row.requests))
            asked = (numbers for row in batch for numbers in row.requests)
            for numbers, answer in zip(asked, answers, strict=True):
                for number in numbers:
                    found[number] = answer
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        return [found[number] for number in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        self._done, self._requests = 0, len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
        self._count(inps.shape[0])
        return super()._model_call(inps, *args, **kwargs)

    def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
        self._count(context.shape[0])
        return super()._model_generate(context, *args, **kwargs)

    def _count(self, requests: int) -> None:
        self._run.stop_if_cancelled()
        # Requests that share a context may be answered by one, so that the last batches may come early.
        self._done = min(self._requests, self._done + requests)
        self._run.progress(self._done, self._requests, "requests")
