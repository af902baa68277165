"""The one place where a model's or tokenizer's folder is handed to transformers: as data, whoever made it.

Before anything is loaded, the folder is looked through: transformers would run code that it names (after a question on
the terminal, where `y` is enough), and open files wherever they lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.foreign import check_model


def load_pretrained_tokenizer(folder: Path, where: str = "") -> Any:
    """The tokenizer of a Hugging Face folder, a PreTrainedTokenizerBase.

    where: the dotted key that names the folder. Raises StageError: `foreign_code`, `unsafe_file`, `no_model` where
    there is no such folder. OSError, ValueError, KeyError or ImportError for one that transformers cannot read.
    """
    _check(folder, where)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_pretrained_model(auto: Any, folder: Path, where: str = "", **options: Any) -> Any:
    """The model of a Hugging Face folder from its safetensors.

    auto: the class of transformers for what the model shall do. options: as its from_pretrained takes them.
    Raises as `load_pretrained_tokenizer`, and SafetensorError.
    """
    _check(folder, where)
    return auto.from_pretrained(folder, **options, use_safetensors=True, local_files_only=True, trust_remote_code=False)


def load_pretrained_shape(auto: Any, folder: Path, where: str = "") -> Any:
    """The model of a Hugging Face folder without its weights, on torch's device `meta`: for its config and what it says
    of generating. auto: as of `load_pretrained_model`. Raises as `load_pretrained_tokenizer`."""
    _check(folder, where)
    import torch
    from transformers import AutoConfig, GenerationConfig

    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _check(folder: Path, where: str) -> None:
    """A name without a folder would be looked up in the hub's cache."""
    if not folder.is_dir():
        raise stage_error("no_model", where or str(folder), f"expected a Hugging Face folder, {folder} is none")
    check_model(folder, where)
