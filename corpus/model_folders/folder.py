"""The files of a model folder, judged by config.json and the headers of its safetensors: no weights are read.

Imports nothing heavy: `stemma check` calls it before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import Problem, quoted
from infra.io.foreign import ADAPTERS, MERGE
from infra.io.json import parse_json, read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""A Hugging Face tokenizer folder has at least one of these."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_LFS = b"version https://git-lfs"
_WRAPPER = re.compile(
    r"^module\.|(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_HEADER_BYTES = 100_000_000  # as safetensors itself reads at most
_METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
_NAMED = 5


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as the header describes it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder, by their names without the prefixes of wrappers.

    prefixes: those that were removed.
    """

    tensors: dict[str, StoredTensor]
    prefixes: tuple[str, ...] = ()


def folder_problems(folder: Path, where: str, *, tokenizer: bool = False) -> list[Problem]:
    """Return what prevents a model folder from being loaded, as far as its files show without their weights.

    Args:
        folder: a Hugging Face model folder.
        where: the dotted key that names it.
        tokenizer: whether it must contain a tokenizer too.
    """
    if not (folder / "config.json").is_file():
        if (folder / ADAPTERS).is_file():
            return [Problem("adapter", where, f"{folder} contains adapters, not a model", MERGE)]
        return [Problem("missing_source", where, f"expected a Hugging Face model folder with config.json at {folder}")]
    try:
        config = read_json(folder / "config.json", nan=True)
    except ValueError as error:
        return [Problem("bad_model", where, f"{folder / 'config.json'} cannot be read: {error}")]
    problems = [problem] if (problem := _quantized(folder, config, where)) else []
    files, wrong = _weight_files(folder, where)
    problems += wrong
    for path in files:
        if message := broken_file(path):
            problems.append(_broken(path, message, where))
    if tokenizer:
        problems += _tokenizer_problems(folder, where)
    return problems


def unquantizes(config: Any) -> str:
    """Return the format of the quantized weights of a model with this config.json, where loading converts them to
    numbers of 16 or 32 bits, on any device: "mxfp4" of gpt-oss, "fp8" with a scale for each block; else empty.
    """
    method = _method(config)
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return method
    return method if method == "fp8" and fp8_block(config) else ""


def fp8_block(config: Any) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of weights that share a scale, by a config.json with weights in FP8; None
    for FP8 in another form, such as experts in FP4."""
    settings = _settings(config)
    if not isinstance(settings, dict) or settings.get("expert_dtype", "fp8") != "fp8":
        return None
    block = settings.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return block[0], block[1]
    return None


def stored_weights(folder: Path) -> StoredWeights:
    """Return the tensors of a folder that has no `folder_problems`."""
    stored = {
        key: StoredTensor(path, key, shape, dtype)
        for path in _weight_files(folder, "")[0]
        for key, (shape, dtype, _) in _header(path).items()
    }
    tensors, prefixes = {}, set()
    for key, tensor in stored.items():
        name = key
        while match := _WRAPPER.search(name):
            prefixes.add(match[0])
            name = name[: match.start()] + name[match.end() :]
        tensors[name] = tensor
    # Two tensors of one name: neither is taken for the other, and both are reported under their stored names.
    return StoredWeights(tensors, tuple(sorted(prefixes))) if len(tensors) == len(stored) else StoredWeights(stored)


def stored_tensors(weights: StoredWeights) -> dict[str, Any]:
    """Return the tensors of a folder by their names without prefixes, read."""
    from safetensors import safe_open

    tensors = {}
    for file in sorted({tensor.file for tensor in weights.tensors.values()}):
        with safe_open(file, "pt") as opened:
            for name, tensor in weights.tensors.items():
                if tensor.file == file:
                    tensors[name] = opened.get_tensor(tensor.key)
    return tensors


def broken_file(path: Path) -> str:
    """Return what is wrong with a safetensors file by its header; empty if its tensors fill the file exactly."""
    try:
        header = _header(path)
    except ValueError as error:
        return str(error)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    size, expected = path.stat().st_size, start + max((end for *_, end in header.values()), default=0)
    return "" if expected == size else f"cut short or damaged: {size:,} bytes, expected {expected:,}"


def named(names: list[str]) -> str:
    """Return the first of many names for an error message, and how many there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _method(config: Any) -> str:
    """The quantization of a model by its config.json; empty where it has none."""
    if settings := _settings(config):
        return str(settings.get("quant_method") or "unknown") if isinstance(settings, dict) else "unknown"
    return ""


def _settings(config: Any) -> Any:
    """The settings of the quantization in a config.json. Models of text and images have those of their text model below
    it."""
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(part, dict) and (settings := part.get("quantization_config")):
            return settings
    return None


def _quantized(folder: Path, config: Any, where: str) -> Problem | None:
    method = _method(config)
    if not method or unquantizes(config):
        return None
    return Problem(
        "quantized_model",
        where,
        f"{folder} contains weights that are quantized by {_METHODS.get(method, quoted(method))} (quantization_config "
        "in config.json); expected weights in fp32, bf16 or fp16, gpt-oss's in MXFP4, or FP8 with weight_block_size",
        "use the folder of the unquantized model, which its model card names as the base model "
        "(for an -FP8, -GPTQ, -AWQ or -bnb-4bit folder: the one without this suffix)",
    )


def _weight_files(folder: Path, where: str) -> tuple[list[Path], list[Problem]]:
    """Return the existing files that transformers reads weights from, and their problems."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], []
    if (index := folder / INDEX).is_file():
        try:
            names = sorted(set(map(str, read_json(index)["weight_map"].values())))
        except (ValueError, LookupError, TypeError, AttributeError):
            return [], [Problem("bad_model", where, f"expected weight_map, from weights to files, in {index}")]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            message = (
                f"{len(missing):,} of {len(names):,} files that {INDEX} names are not in {folder}: {named(missing)}"
            )
            return [], [
                Problem("missing_shard", where, message, "download or copy the folder again, with all its files")
            ]
        return [folder / name for name in names], []
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        message = f"expected {SINGLE} or {INDEX} in {folder}, found only {named(others)}"
        fix = f"copy {INDEX} from where the model was downloaded, or rename the file of an unsharded model to {SINGLE}"
        return [], [Problem("no_index", where, message, fix)]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    finding = f"found pickled weights ({pickled[0]}), which can run code when read" if pickled else "found no weights"
    fix = "save the model with save_pretrained(..., safe_serialization=True) on a machine where you trust it"
    return [], [Problem("not_safetensors", where, f"expected *.safetensors in {folder}, {finding}", fix)]


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape and dtype of each tensor of a safetensors file, and where its bytes end. Raises ValueError with what is
    wrong."""
    with path.open("rb") as file:
        start = file.read(len(_LFS))
        if start == _LFS:
            raise ValueError("a pointer of git-LFS, not the weights themselves")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > min(path.stat().st_size - 8, _HEADER_BYTES):
            raise ValueError("truncated or not a safetensors file: its header is longer than the file")
        file.seek(8)
        text = file.read(length)
    try:
        return {
            name: (tuple(map(int, entry["shape"])), str(entry["dtype"]), int(entry["data_offsets"][1]))
            for name, entry in parse_json(text).items()
            if name != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError("not a safetensors file: its header is invalid") from None


def _broken(path: Path, message: str, where: str) -> Problem:
    if "git-LFS" in message:
        return Problem("lfs_pointer", where, f"{path} is {message}", "run `git lfs pull` in the folder of the model")
    return Problem("bad_model", where, f"{path}: {message}", "download or copy the file again")


def _tokenizer_problems(folder: Path, where: str) -> Iterator[Problem]:
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        message = f"expected the model's tokenizer in {folder}, with one of {', '.join(TOKENIZER_FILES)}"
        fix = "copy the tokenizer's files from where the model was downloaded; fine-tuned folders often lack them"
        yield Problem("no_tokenizer", where, message, fix)
    for path in present:
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                yield _broken(path, "a pointer of git-LFS, not the tokenizer itself", where)
