"""An untrained model of the same shape as a given one: the floor of its scores.

A score is worth its distance from the floor. Guessing at random is not always the floor: where the choices of a
question have different lengths, a model that knows nothing prefers the shorter one, which is right more often.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from evaluation.generation.language_model import LoadedModel
from evaluation.generation.random_state import seeded
from infra.io.files import write_whole
from infra.io.json import read_own_json

LARGEST = 1_000_000_000
"""Parameters of the largest model of which an untrained one is made: it needs as much memory again."""
_UNRELATED = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
_CACHE = Path.home() / ".cache" / "stemma" / "untrained"


def untrained_like(lm: LoadedModel, seed: int) -> LoadedModel | None:
    """Return a freshly initialised model of the same shape, with the same tokenizer, on the same device; None for a
    model of more than `LARGEST` parameters."""
    if lm.model.num_parameters() > LARGEST:
        return None
    with seeded(seed, torch.device("cpu")):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(lm.model.config), dtype=lm.model.dtype)
    model.generation_config = copy.deepcopy(lm.model.generation_config)
    return LoadedModel(model.to(lm.device).eval(), lm.tokenizer, lm.device)


def floor_of(lm: LoadedModel, options: Mapping[str, Any], seed: int, measure: Callable[[LoadedModel], Any]) -> Any:
    """Return what `measure` finds of an untrained model like `lm`, None if there is none; each shape is measured once
    per machine.

    Args:
        options: everything else that affects the result, as JSON. measure: returns JSON.
    """
    shape = {key: value for key, value in lm.model.config.to_dict().items() if key not in _UNRELATED}
    key = {
        "shape": shape,
        "dtype": str(lm.model.dtype),
        "device": lm.device.type,
        "tokenizer": hashlib.sha256(json.dumps(lm.tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest(),
        "template": str(lm.tokenizer.chat_template),
        "options": dict(options),
        "seed": seed,
        "versions": [torch.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    file = _CACHE / f"{digest}.json"
    if file.is_file():
        return read_own_json(file)
    untrained = untrained_like(lm, seed)
    if untrained is None:
        return None
    result = measure(untrained)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(result))
    except OSError as error:
        # The scores are right without a cache, but every stage measures them again.
        warnings.warn(f"scores of the untrained model are not kept: {file}: {error}", stacklevel=2)
    return result
