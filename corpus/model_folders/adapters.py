"""Adapters of a fine-tuning (LoRA), kept in aux/adapters of the model that they were merged into.

Weights and settings have the names of PEFT's files. The settings have another file name and no base model: transformers
loads a folder with adapter_config.json as an adapter of the model that this file names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.io.foreign import ADAPTERS
from infra.io.json import read_own_json
from infra.store.layout import AUX

FOLDER = f"{AUX}/adapters"
WEIGHTS, CONFIG = "adapter_model.safetensors", ADAPTERS
"""Names of PEFT's files."""
_SETTINGS = "settings.json"


def keep_adapters(out_dir: Path, weights: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write adapters to the artifact of the model that they were merged into.

    Args:
        out_dir: folder of the artifact.
        weights: tensors by the names that PEFT gives them.
        settings: keys of PEFT's LoraConfig.
    """
    from safetensors.torch import save_file

    folder = out_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf8")


def adapter_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the adapters of an artifact; None if it has none."""
    path = folder / FOLDER / _SETTINGS
    return read_own_json(path) if path.is_file() and (folder / FOLDER / WEIGHTS).is_file() else None
