"""Pretraining text among the examples of a fine-tuning: what is still read is not forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infra.errors import stage_error
from infra.run import Run
from training.chat import Conversation
from training.language_model import LanguageModel
from training.loaders import open_in_order, unpacked_bytes
from training.loss import IGNORE
from training.scratch import node_scratch
from training.shared_memory import own_shared_memory

_LEAST = 2
"""Tokens of a document that can be an example: one that is read, one that follows."""


class Text(Conversation):
    """The beginning of a document, as if all but its first token were a response."""


def as_long_as_the_others(examples: Sequence[Conversation]) -> list[Conversation]:
    """The examples of a batch, text cut to the longest conversation: else all would be padded to its length."""
    longest = max((len(one.ids) for one in examples if not isinstance(one, Text)), default=None)
    return [
        Text(one.prompt, one.response[: longest and longest - 1]) if isinstance(one, Text) else one for one in examples
    ]


class TextBeside:
    """Texts for the minibatches of a policy's learning, as many as a minibatch has answers, in columns of their own.

    text_ids and text_labels (B, T) are as wide as the minibatch's `ids`, `text_unit` (B,) is what makes a part's summed
    loss its share of the mean over all text tokens; see `loss_of_text`. Which texts those are follows from seed, round
    and the minibatch's number.
    weight: what the parts of a minibatch are weighed by.
    """

    def __init__(
        self,
        texts: Sequence[Text],
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
        text = self._batch([Text(one.prompt, one.response[: width - 1]) for one in chosen])
        unit = self._weight(minibatch) / max(1, int((text["labels"] != IGNORE).sum()))
        return {
            "text_ids": text["input_ids"],
            "text_labels": text["labels"],
            "text_unit": torch.full((rows,), unit),
        }


def loss_of_text(model: LanguageModel, batch: Mapping[str, Tensor], weight: int) -> Tensor:
    """The mean loss over the text tokens of a minibatch, as far as this part of it goes. weight: of the part."""
    text = {"input_ids": batch["text_ids"], "labels": batch["text_labels"]}
    labelled = (text["labels"] != IGNORE).sum()
    return model.loss(model(text), text) * labelled * batch["text_unit"][0] / weight


def text_examples(shards: Path, count: int, longest: int, seed: int, run: Run) -> list[Text]:
    """Beginnings of `count` documents of the training split, each of at most `longest` tokens: the loss is on every
    token but the first, as in pretraining. Every rank must call, and gets the same.

    Which documents those are follows from `seed`; one comes twice only where there are too few. Raises StageError where
    no document is long enough.
    """
    random = np.random.default_rng(seed)
    examples: list[Text] = []
    limit = run.launch.shard_cache_gb
    with node_scratch(run, unpacked_bytes(shards, limit)) as cache, own_shared_memory(run.work_dir):
        sequences = open_in_order(shards / "train", cache, limit)
        while len(examples) < count:
            before = len(examples)
            for number in random.permutation(sequences.size)[: count - before]:
                tokens, starts, _ = sequences[int(number)]
                documents = [piece for piece in np.split(tokens, starts[1:]) if len(piece) >= _LEAST]
                if documents:
                    ids = documents[random.integers(len(documents))][:longest].tolist()
                    examples.append(Text(ids[:1], ids[1:]))
            if len(examples) == before:
                raise stage_error(
                    "no_documents",
                    str(shards),
                    f"expected documents of at least {_LEAST} tokens",
                    "give shard more text",
                )
    return examples
