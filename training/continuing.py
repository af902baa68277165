"""The model of another step, taken as the beginning of a further pretraining."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corpus.pretrained import load_pretrained_tokenizer
from infra.errors import Problem, StageError
from training.config import PretrainConfig
from training.families import documents_problem, experts_problem
from training.models import load


def load_known(
    folder: Path, config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, length: int
) -> PreTrainedModel:
    """The model of a Hugging Face folder, to be trained on sequences of `length` tokens by `tokenizer`.

    Raises StageError where the shards were made by another tokenizer than the model's, whose ids would mean other text
    to it, where it has too few positions, and where nobody has proven that its family can be trained so.
    """
    torch.manual_seed(config.seed)
    model = load(folder)
    problems = []
    theirs, ours = load_pretrained_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        differ = len(theirs.items() ^ ours.items())
        problems.append(
            Problem(
                "other_tokenizer",
                "pretrain.inputs.tokenizer",
                f"expected the tokenizer of the model that it goes on from; {differ:,} entries of them differ",
                "shard the text with the model itself as the input tokenizer, or with the tokenizer that it came from",
            )
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < length:
        problems.append(
            Problem(
                "too_few_positions",
                "pretrain.inputs.shards",
                f"expected sequences of at most the model's {positions} tokens, not {length}",
                "shorten sequence_length of the shards",
            )
        )
    family = model.config.model_type
    masked = config.objective == "prefix" or config.within_documents(family)
    problems += [problem] if masked and (problem := documents_problem(family)) else []
    experts = experts_problem(family, model.config.to_dict(), "pretrain.inputs.model")
    problems += [experts] if experts else []
    if problems:
        raise StageError(*problems)
    return model
