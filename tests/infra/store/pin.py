"""Writes down the names that sample configs have today, and the defaults that are left out of them.

python -m tests.infra.store.pin
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from flows.config.graph import graph
from flows.config.read import parse, section_classes
from infra.fingerprint import bears_on_result, canonical, fingerprint
from tasks.stages import STAGES

PINNED = Path(__file__).with_name("pinned.json")

SAMPLE = {
    "name": "pinned",
    "ingest": {"read": [{"kind": "files", "paths": ["/data/a.txt"], "text_field": "body"}]},
    "validate": None,
    "clean": {"min_characters": 50},
    "dedupe": None,
    "decontaminate": None,
    "mix": None,
    "tokenizer": {"vocab_size": 512},
    "shard": {"sequence_length": 128},
    "pretrain": {"model": {"preset": "llama-4m"}, "duration": "250 batches", "global_batch_tokens": 4096},
    "instructions": {"read": [{"kind": "docstrings", "limit": 8000}]},
    "preferences": {"read": [{"kind": "docstrings", "limit": 8000}]},
    "sft": None,
    "reward_model": None,
    "rlhf": None,
    "benchmarks": None,
    "safety": None,
    "register": None,
}


def current() -> dict[str, Any]:
    """{"names": {node: fingerprint}, "versions": {stage: version}, "defaults": {config class: {key: default}}}."""
    nodes = graph(parse(SAMPLE))
    names = {
        node.id: fingerprint(
            node.folder,
            node.stage.version,
            canonical(node.config, measuring=node.measures),
            {key: f"digest of {up}" for key, up in node.inputs.items()},
            {"source": "digest of its bytes"},
        )
        for node in nodes.values()
    }
    versions = {node.stage.name: node.stage.version for node in nodes.values()}
    defaults: dict[str, dict[str, Any]] = {}
    for config in {**section_classes(), **{stage.name: stage.config for stage in STAGES.values()}}.values():
        for found in _with_nested(config):
            defaults[f"{found.__module__}.{found.__name__}"] = _defaults(found)
    return {"names": names, "versions": versions, "defaults": defaults}


def _with_nested(config: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield config
    for field in config.model_fields.values():
        yield from _models(field.annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _with_nested(annotation)
    for argument in get_args(annotation):
        yield from _models(argument)


def _defaults(config: type[BaseModel]) -> dict[str, Any]:
    """Only keys that bear on the result; required ones have no default to pin."""
    bearing = {name: field for name, field in config.model_fields.items() if bears_on_result(field, measuring=True)}
    return {
        name: json.loads(json.dumps(field.get_default(call_default_factory=True, validated_data={}), default=_plain))
        for name, field in bearing.items()
        if not field.is_required()
    }


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else list(value)


if __name__ == "__main__":
    PINNED.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n", encoding="utf8")
