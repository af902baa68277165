"""Architecture of the model that a training step trains, as far as its config gives it."""

from __future__ import annotations

from pathlib import Path

from corpus.config import TokenizerConfig
from flows.config.graph import Graph, first_model
from infra.io.json import read_json
from training.config import BaseModelConfig, PretrainConfig
from training.planner.architecture import Architecture, of_transformers
from training.planner.stages import of_model


def architecture_of(nodes: Graph, name: str) -> Architecture | None:
    """Architecture of the model that a training step trains; None if the config does not give its sizes."""
    first = first_model(nodes, name) if "model" in nodes[name].inputs else nodes[name]
    if first is None:
        return None
    if isinstance(first.config, PretrainConfig):
        shards = nodes.get(first.inputs.get("shards", ""))
        tokenizer = nodes.get(shards.inputs.get("tokenizer", "")) if shards else None
        vocabulary = None
        if tokenizer and isinstance(tokenizer.config, TokenizerConfig) and not tokenizer.config.pretrained:
            vocabulary = tokenizer.config.vocab_size
        return of_model(first.config.model, vocabulary)
    if isinstance(first.config, BaseModelConfig):
        try:
            return of_transformers(read_json(Path(first.config.path) / "config.json", nan=True), None)
        except (OSError, ValueError):
            return None  # the folder's own stage reports what is wrong with it
    return None
