"""Multiple choice with each context read once: the choices of a question lie in one row, and see only their own.

    row        context c₁ … cₙ | choice A: a₁ … aᵢ | what choice B has after its first k tokens, if those are A's too
    position           0 … n-1 |            n …    | n + k …
    sees       itself and before | the context and its own choice up to itself

The logits of a choice are those that it would have alone, but for rounding. Only the tokens before a choice's own are
put through the output layer, rows of like length share a batch, texts are tokenised together, and on a CPU a Llama's
layers are those of `evaluation/llama_trunk.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import has_bos_prefix
from torch import Tensor

from evaluation.llama_trunk import LlamaTrunk

Way = Literal["untried", "own", "hidden", "logits", "plain"]
"""Through layers of our own, transformers' layers, its whole model, or lm-eval's way."""
Request = tuple[tuple[str, str], list[int], list[int]]
"""What lm-eval asks: (context, continuation) as text, then as tokens."""

SHORTEST_SHARED = 4
"""Tokens of a context below which its choices are scored one by one: an empty one is the same for all questions."""
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens of a forward pass: what stays in a processor's cache (4,096 took a quarter longer), and what fills a GPU."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far a choice's log-likelihood may lie from what it is alone, as a share of itself plus one."""


@dataclass
class Row:
    """A context with its different continuations, and which requests each answers."""

    context: list[int]
    choices: list[list[int]] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the row: beginnings that choices have in common are there once, and no choice's last token."""
        return len(self.context) + sum(len(choice) - 1 - shared for _, choice, shared in self.in_order())

    def in_order(self) -> Iterator[tuple[int, list[int], int]]:
        """(number, choice, how many of its tokens but the last the choice before has too), sorted by their tokens: so
        the choice before has as many as any."""
        before: list[int] = []
        for number in sorted(range(len(self.choices)), key=self.choices.__getitem__):
            choice = self.choices[number]
            most = max(0, min(len(before), len(choice)) - 1)
            shared = next((i for i in range(most) if before[i] != choice[i]), most)
            yield number, choice, shared
            before = choice


class ChoiceScorer:
    """Scores rows with a Hugging Face causal language model.

    Whether the model can be asked so is tried on the first row, against each choice alone: `usable` is False where its
    answers differ, as with models that know no positions or masks (ALiBi, recurrent layers).
    """

    def __init__(self, model: Any, device: torch.device, softmax_dtype: torch.dtype | None = None) -> None:
        self.model, self.device, self.softmax_dtype = model, device, softmax_dtype
        self.way: Way = "untried"
        self._trunk: LlamaTrunk | None = None
        self.batch_tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])
        accepted = inspect.signature(model.forward).parameters
        config = model.config
        if not {"position_ids", "attention_mask"} <= accepted.keys() or getattr(config, "is_encoder_decoder", False):
            self.way = "plain"
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
        self.longest = min((one for one in windows if isinstance(one, int) and one > 0), default=1 << 30)
        """A mask of our own takes the place of a window: rows must lie within one."""

    def usable(self, row: Row) -> bool:
        """Whether rows can be scored; tried on `row` the first time."""
        if self.way == "untried":
            alone = [self._alone(row.context, choice) for choice in row.choices]
            bound = TOLERANCE.get(self.model.dtype, 1e-3)
            self.way = "plain"
            ways: tuple[Way, ...] = ("hidden", "logits")
            if LlamaTrunk.fits(self.model):
                self._trunk = LlamaTrunk(self.model)
                ways = ("own", *ways)
            for self.way in ways:
                try:
                    found = self._score([row])
                except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
                    continue
                if all(abs(a - b) <= bound * (1 + abs(b)) for (a, _), b in zip(found, alone, strict=True)):
                    break
            else:
                self.way = "plain"
        return self.way != "plain"

    def score(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], list[tuple[float, bool]]]]:
        """(rows, log-likelihood and whether it is greedy of each of their choices in order) a batch, longest first."""
        left = sorted(rows, key=lambda row: -row.length)
        while left:
            size = max(1, self.batch_tokens // max(1, left[0].length))
            try:
                found = self._score(left[:size])
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                self.batch_tokens = max(1, size // 2) * left[0].length
                continue
            yield left[:size], found
            left = left[size:]

    @torch.inference_mode()
    def _score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        longest = max(row.length for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        positions = torch.arange(longest).repeat(len(rows), 1)
        branches = any(len(choice) > 1 for row in rows for choice in row.choices)
        blocked = torch.ones((len(rows), longest, longest), dtype=torch.bool).triu(1) if branches else None
        wanted: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        for number, row in enumerate(rows):
            start = at = len(row.context)
            tokens = list(row.context)
            places: dict[int, list[int]] = {}
            """Where the tokens of each choice stand in the row, but for its last."""
            path: list[int] = []
            for one, choice, shared in row.in_order():
                new = choice[shared:-1]
                path = [*path[:shared], *range(at, at + len(new))]
                if blocked is not None and new:
                    positions[number, at : at + len(new)] = torch.arange(start + shared, start + shared + len(new))
                    blocked[number, at : at + len(new), start:at] = True
                    blocked[number, at : at + len(new), path[:shared]] = False
                tokens += new
                places[one] = path
                at += len(new)
            for one, choice in enumerate(row.choices):
                wanted += [number * longest + place for place in (start - 1, *places[one])]
                targets += choice
                lengths.append(len(choice))
            ids[number, :at] = torch.tensor(tokens)
        mask = None
        if blocked is not None:
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros(blocked.shape, dtype=self.model.dtype).masked_fill_(blocked, lowest)[:, None]
            mask = mask.to(self.device)
        # Choices that begin alike ask the same places.
        asked, which = torch.tensor(wanted).unique(return_inverse=True)
        logits = self._logits(ids.to(self.device), positions.to(self.device), mask, asked)
        which, target = which.to(logits.device), torch.tensor(targets, device=logits.device)
        greedy = _greedy(logits, which, target)
        scores = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)[which, target].cpu()
        found, at = [], 0
        for part in torch.split(scores, lengths):
            found.append((float(part.sum()), all(greedy[at : at + len(part)])))
            at += len(part)
        return found

    def _logits(self, ids: Tensor, positions: Tensor, mask: Tensor | None, wanted: Tensor) -> Tensor:
        """(N, V) at the wanted places of the flattened batch. ids, positions (B, T); mask (B, 1, T, T) or None."""
        if self.way == "own" and self._trunk is not None:
            own: Tensor = self.model.lm_head(self._trunk.hidden(ids, positions, mask, wanted))
            return own
        asked = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        if self.way == "logits":
            logits = self.model(**asked).logits
            return logits.flatten(0, 1)[wanted.to(logits.device)]
        hidden = self.model.base_model(**asked).last_hidden_state
        found: Tensor = self.model.get_output_embeddings()(hidden.flatten(0, 1)[wanted.to(hidden.device)])
        return found

    @torch.inference_mode()
    def _alone(self, context: list[int], choice: list[int]) -> float:
        ids = torch.tensor([[*context, *choice]], device=self.device)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[0, -len(choice) :]
        scores = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return float(scores.gather(1, ids[0, -len(choice) :, None]).sum())


def _greedy(logits: Tensor, which: Tensor, target: Tensor) -> list[bool]:
    """Whether each target is the first of the likeliest. argmax takes as long as the softmax, and few can be it."""
    found = logits[which, target] == logits.amax(-1)[which]
    found[found.clone()] = logits[which[found]].argmax(-1) == target[found]
    answer: list[bool] = found.tolist()
    return answer


def rows_of(requests: Sequence[Request], max_length: int) -> tuple[list[Row], list[int]]:
    """Requests as rows, and the numbers of those that are scored alone: of a context that only one request has or that
    is too short to be worth it, and those that do not fit, which lm-eval cuts on the left."""
    rows: dict[tuple[int, ...], list[Row]] = {}
    alone = []
    for number, (_, context, continuation) in enumerate(requests):
        if len(context) < SHORTEST_SHARED or len(context) + len(continuation) > max_length:
            alone.append(number)
            continue
        same = rows.setdefault(tuple(context), [Row(context)])
        if continuation in same[-1].choices:
            same[-1].requests[same[-1].choices.index(continuation)].append(number)
            continue
        if same[-1].choices and same[-1].length + len(continuation) > max_length:
            same.append(Row(context))
        same[-1].choices.append(continuation)
        same[-1].requests.append([number])
    shared = []
    for row in (row for same in rows.values() for row in same):
        if len(row.choices) > 1:
            shared.append(row)
        else:
            alone += row.requests[0]
    return shared, sorted(alone)


class TokenCache:
    """Texts tokenised together, as lm-eval tokenises them one by one."""

    def __init__(self, harness_model: Any) -> None:
        self._model = harness_model
        self._known: dict[str, list[int]] = {}

    def fill(self, requests: Sequence[Instance]) -> None:
        """Contexts, and contexts with continuation; spaces at a context's end go to the continuation, as in lm-eval."""
        texts: dict[str, None] = {}
        for request in requests:
            context, continuation = request.args
            texts[context + continuation] = None
            texts[context.rstrip()] = None
        tokenizer, add_bos = self._model.tokenizer, self._model.add_bos_token
        start = tokenizer.decode(self._model.prefix_token_id)
        plain = [text for text in texts if text and not has_bos_prefix(text, start)]
        options = {} if add_bos is None else {"add_special_tokens": add_bos}
        if plain and getattr(tokenizer, "is_fast", False):
            self._known = dict(zip(plain, tokenizer(plain, **options)["input_ids"], strict=True))

    def get(self, text: str) -> list[int] | None:
        return self._known.get(text)

    def clear(self) -> None:
        self._known = {}
