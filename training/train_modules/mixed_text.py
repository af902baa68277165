"""Pretraining text among the examples of a fine-tuning, to prevent forgetting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corpus.documents.source_names import unknown_source
from infra.errors import StageError, stage_error
from infra.run import Run
from training.chat.base import Conversation
from training.data.open_shards import OpenShards
from training.model.loss import IGNORE
from training.train_modules.language_model import LanguageModel

TEXT_BY_MODEL = "shard the text with the model itself as the input tokenizer, or with the tokenizer that it came from"
_LEAST = 2
"""Minimum number of tokens of a document that can be an example: one that is read, one that follows."""


class TextExample(Conversation):
    """The beginning of a document, as if all but its first token were a response."""


def as_long_as_the_others(examples: Sequence[Conversation]) -> list[Conversation]:
    """Return the examples of a batch with text cut to the longest conversation: otherwise all would be padded to its
    length."""
    longest = max((len(one.ids) for one in examples if not isinstance(one, TextExample)), default=None)
    return [
        TextExample(one.prompt, one.response[: longest and longest - 1]) if isinstance(one, TextExample) else one
        for one in examples
    ]


class TextBeside:
    """Texts for the minibatches of a policy's learning, as many as a minibatch has answers, in separate columns.

    text_ids and text_labels (B, T) are as wide as the minibatch's `ids`, `text_unit` (B,) is the factor that turns a
    part's summed loss into its share of the mean over all text tokens; see `loss_of_text`. Which texts those are
    follows from seed, round and the minibatch's number.
    weight: returns the weight of a part of a minibatch.
    """

    def __init__(
        self,
        texts: Sequence[TextExample],
        batch: Callable[[Sequence[Conversation]], dict[str, Tensor]],
        weight: Callable[[Mapping[str, Tensor]], int],
        seed: int,
    ) -> None:
        self._texts = texts
        self._batch = batch
        self._weight = weight
        self._seed = seed

    def __call__(self, minibatch: Mapping[str, Tensor], round_number: int, number: int) -> dict[str, Tensor]:
        """The columns of a whole minibatch."""
        rows, width = minibatch["ids"].shape
        random = np.random.default_rng([self._seed, round_number, number])
        chosen = [self._texts[place] for place in random.integers(len(self._texts), size=rows)]
        text = self._batch([TextExample(one.prompt, one.response[: width - 1]) for one in chosen])
        unit = self._weight(minibatch) / max(1, int((text["labels"] != IGNORE).sum()))
        return {
            "text_ids": text["input_ids"],
            "text_labels": text["labels"],
            "text_unit": torch.full((rows,), unit),
        }


def loss_of_text(model: LanguageModel, batch: Mapping[str, Tensor], weight: int) -> Tensor:
    """Return this part's share of the mean loss over the text tokens of a minibatch. weight: of the part."""
    text = {"input_ids": batch["text_ids"], "labels": batch["text_labels"]}
    labelled = (text["labels"] != IGNORE).sum()
    return model.loss(model(text), text) * labelled * batch["text_unit"][0] / weight


def text_examples(
    shards: Path,
    count: int,
    longest: int,
    seed: int,
    run: Run,
    *,
    sources: Sequence[str] = (),
    key: str = "",
    tokenizer: Any = None,
) -> list[TextExample]:
    """Return beginnings of `count` documents of the training split, each of at most `longest` tokens: the loss is on
    every token but the first, as in pretraining. Every rank must call, and gets the same.

    Which documents those are follows from `seed`; a document repeats only where there are too few. sources: the sources
    of the shards whose documents are used; (): all. key: of the sources in the config. tokenizer: of the model; if
    given, it must be that of the shards. Raises StageError: `unknown_source`; `other_tokenizer`; `no_documents` where
    none is long enough.
    """
    text = OpenShards(shards, run)
    if tokenizer is not None and "end_of_text_id" in text.meta:
        text.check_tokenizer(tokenizer, f"{key.partition('.')[0]}.inputs.shards", TEXT_BY_MODEL)
    wanted = _numbers(text.meta, sources, key)
    begin = text.meta.get("begin_of_text_id")  # an example begins with it where every document does
    random = np.random.default_rng(seed)
    examples: list[TextExample] = []
    with text:
        sequences = text.in_order(text.train)
        while len(examples) < count:
            before = len(examples)
            for number in random.permutation(sequences.size):
                tokens, starts, _ = sequences[int(number)]
                pieces = np.split(tokens, starts[1:] - (begin is not None))
                if begin is not None and pieces[-1][-1] == begin:  # of a document whose text is in the next sequence
                    pieces[-1] = pieces[-1][:-1]
                if sources:
                    of_source = np.isin(sequences.sources(int(number)), wanted)
                    pieces = [piece for piece, is_wanted in zip(pieces, of_source, strict=True) if is_wanted]
                if documents := [piece for piece in pieces if len(piece) >= _LEAST]:
                    ids = documents[random.integers(len(documents))][:longest].tolist()
                    examples.append(TextExample(ids[:1], ids[1:]))
                if len(examples) == count:
                    break
            if len(examples) == before:
                of = f" of {', '.join(sources)}" if sources else ""
                raise stage_error(
                    "no_documents",
                    str(shards),
                    f"expected documents{of} with at least {_LEAST} tokens",
                    "provide more text for shard",
                )
    return examples


def _numbers(meta: Mapping[str, Any], sources: Sequence[str], key: str) -> list[int]:
    """The numbers of these sources in the shards with this meta.json."""
    known = meta.get("sources", {}) if sources else {}
    if problems := [problem for name in sources for problem in unknown_source(key, name, known)]:
        raise StageError(*problems)
    return [known[name]["id"] for name in sources]
