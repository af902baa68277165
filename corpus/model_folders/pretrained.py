"""The one place where a model's or tokenizer's folder is passed to transformers: as data, regardless of its source.

Before anything is loaded, the folder is looked through: transformers would run code that it names (after a question on
the terminal, where `y` is enough), and open files wherever they lie. A weight that a folder lacks would be drawn at
random, one that the model has no place for dropped, both without an error: here they are refused.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from corpus.model_folders.float8 import fp8_numbers, fp8_problems, without_scales
from corpus.model_folders.folder import (
    StoredTensor,
    StoredWeights,
    folder_problems,
    fp8_block,
    named,
    stored_tensors,
    stored_weights,
    unquantizes,
)
from infra.errors import Problem, StageError, stage_error
from infra.io.foreign import check_model
from infra.io.json import read_json

_log = logging.getLogger(__name__)
_COMPARED = 1 << 22
_LOADING = Lock()

# Parts of a folder that a model of text does not run, by their names: they may remain unused where transformers also
# allows it for the family, and the user is informed.
_NOT_RUN = {
    "layers that predict several tokens at once": re.compile(r"(?:^|\.)mtp(?:_layers)?\."),
    "image and audio parts": re.compile(
        r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
    ),
    "keys and values of layers that use those of another layer": re.compile(r"\.self_attn\.[kv]_(?:proj|norm)(?:\.|$)"),
    "positions that config.json turns off": re.compile(r"\.embeddings\.position_embeddings\."),
}
_LAYER = re.compile(r"((?:.*\.)?layers\.(\d+))\.")


def load_pretrained_tokenizer(folder: Path, where: str = "") -> Any:
    """The tokenizer of a Hugging Face folder, a PreTrainedTokenizerBase.

    OSError, ValueError, KeyError or ImportError for one that transformers cannot read.

    Args:
        where: the dotted key that names the folder.

    Raises StageError: `foreign_code`, `unsafe_file`, `no_model` where there is no such folder.
    """
    _check(folder, where)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_pretrained_model(
    auto: Any,
    folder: Path,
    where: str = "",
    *,
    fresh_head: str = "",
    say: Callable[[str], None] = _log.warning,
    **options: Any,
) -> Any:
    """Return the model of a Hugging Face folder from its safetensors.

    Args:
        auto: class of transformers for the task of the model.
        folder: contains exactly the weights of that model; names may have the prefixes of wrappers
            (`_orig_mod.`, `module.`).
        where: the dotted key that names the folder.
        fresh_head: name of an output layer that the folder may lack and that the caller draws: then the folder may
            contain the output layer of a causal language model in its place.
        say: receives a message about what is done to the weights: prefixes removed, quantized weights turned into
            numbers, tensors left out that the model does not read.
        options: as from_pretrained takes them.

    Raises:
        StageError: `foreign_code`, `unsafe_file`, `no_model` as for a tokenizer; what `folder_problems` finds;
            `weights_do_not_fit` for missing, unused and differently shaped weights; `head_not_tied` where config.json
            ties weights that differ; `non_finite_weights` for NaN and infinity.
    """
    _check(folder, where)
    where = where or str(folder)
    if problems := folder_problems(folder, where):
        raise StageError(*problems)
    weights, block = stored_weights(folder), None
    config = read_json(folder / "config.json", nan=True)
    if (method := unquantizes(config)) == "fp8":
        block = fp8_block(config) or (1, 1)
        if problems := fp8_problems(weights, block, where):
            raise StageError(*problems)
        weights = without_scales(weights)
    elif method:
        from transformers import Mxfp4Config

        # transformers does not compare the shapes of quantized weights with those of the model.
        if problems := weights_problems(auto, folder, where):
            raise StageError(*problems)
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    if method:
        numbers = str(options.get("dtype", "float32")).removeprefix("torch.")
        say(f"{where}: weights in {method.upper()} are turned into {numbers}")
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with _quiet(), _every_name():
        if weights.prefixes:
            prefixes = ", ".join(weights.prefixes)
            say(f"{where}: {prefixes} of torch.compile or distributed training removed from the names of weights")
        if weights.prefixes or block:
            shape = load_pretrained_shape(auto, folder, where, num_labels=options.pop("num_labels", None))
            _forget_quantization(shape.config)
            stored = stored_tensors(stored_weights(folder))
            tensors = fp8_numbers(stored, block) if block else stored
            model, info = type(shape).from_pretrained(None, config=shape.config, state_dict=tensors, **options)
            if getattr(shape, "generation_config", None) is not None:
                model.generation_config = shape.generation_config
        else:
            model, info = auto.from_pretrained(
                folder, **options, use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
    if "quantization_config" in options:
        model = model.to(model.dtype)  # unquantized weights are bf16, whatever the others are
        model._weight_conversions = None  # or transformers 5.17 saves experts under the pattern that found them
    # transformers 5 unties weights that differ while it loads them: config.json's own model still has them tied.
    tied = load_pretrained_shape(auto, folder, where) if getattr(model.config, "tie_word_embeddings", False) else model
    if problems := [*_misfits(model, info, weights, where, fresh_head), *_untied(tied, weights, where)]:
        raise StageError(*problems)
    if broken := non_finite(model, fresh_head):
        raise StageError(non_finite_problem(broken, where))
    for what, names in _left_out(model, info, weights, fresh_head).items():
        say(f"{where}: {what} left out, since a {type(model).__name__} does not read them: {named(names)}")
    return model


def load_pretrained_shape(auto: Any, folder: Path, where: str = "", num_labels: int | None = None) -> Any:
    """The model of a Hugging Face folder without its weights, on torch's device `meta`: for its config and its settings
    of generating.

    Args:
        auto: as of `load_pretrained_model`.

    Raises as `load_pretrained_tokenizer`.
    """
    _check(folder, where)
    import torch

    # PreTrainedModel is imported first: packages that it imports compute with tensors, which `meta` has none of.
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel  # noqa: F401

    config = AutoConfig.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        **({} if num_labels is None else {"num_labels": num_labels}),
    )
    with torch.device("meta"):
        model = auto.from_config(config)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def weights_problems(auto: Any, folder: Path, where: str) -> list[Problem]:
    """Return why the weights of a folder do not fit its config.json, by their names and shapes alone.

    A folder with `folder_problems`, or that transformers does not know, has none here.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    shape = load_pretrained_shape(auto, folder, where)
    weights = stored_weights(folder)
    config = read_json(folder / "config.json", nan=True)
    if method := unquantizes(config):
        _forget_quantization(shape.config)
        if method == "fp8":
            if problems := fp8_problems(weights, fp8_block(config) or (1, 1), where):
                return problems
            weights = without_scales(weights)
        else:
            weights = _as_unquantized(weights)
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights.tensors.items()}
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _quiet(), _every_name():
            _, info = type(shape).from_pretrained(
                None,
                config=shape.config,
                state_dict=empty,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
    return [*_misfits(shape, info, weights, where), *_untied(shape, weights, where)]


def non_finite(model: Any, fresh_head: str = "") -> list[str]:
    """Return the names of a model's weights that contain NaN or infinity.

    Args:
        fresh_head: a layer that is drawn later.
    """
    return [
        name
        for name, weight in model.named_parameters()
        if not (fresh_head and name.startswith(f"{fresh_head}.")) and not is_finite(weight)
    ]


def non_finite_tensors(folder: Path) -> list[str]:
    """Return the names of the tensors of a folder that has no `folder_problems` which contain NaN or infinity.

    Raises StageError `bad_model` for a header that safetensors does not take.
    """
    from safetensors import SafetensorError, safe_open

    names = []
    for file in sorted({tensor.file for tensor in stored_weights(folder).tensors.values()}):
        try:
            with safe_open(file, "pt") as opened:
                names += [name for name in opened.keys() if not is_finite(opened.get_tensor(name))]  # noqa: SIM118
        except SafetensorError as error:
            message = f"{file} is damaged or not a safetensors file: {error}"
            raise stage_error("bad_model", str(folder), message, "download or copy the file again") from error
    return sorted(names)


def is_finite(tensor: Any) -> bool:
    """Return True if a tensor contains neither NaN nor infinity. Its minimum and maximum are NaN where one number is,
    and take no memory."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.dtype.itemsize == 1:  # torch has no aminmax of 8 bits
        tensor = tensor.float()
    return all(bool(bound.isfinite()) for bound in tensor.detach().aminmax())


def non_finite_problem(names: list[str], where: str) -> Problem:
    return Problem(
        "non_finite_weights",
        where,
        f"expected finite weights, found NaN or infinity in {named(names)}",
        "download or copy the folder again; if its weights are the same there, use an earlier checkpoint",
    )


def _as_unquantized(weights: StoredWeights) -> StoredWeights:
    """Stored weights in MXFP4, `…_blocks (E, N, G, 16)` and `…_scales (E, N, G)`, as the weights `… (E, 32 G, N)` that
    transformers makes of them: E experts, N outputs, G groups of 32 numbers, two in a byte."""
    tensors = dict(weights.tensors)
    for name, blocks in weights.tensors.items():
        scales = weights.tensors.get(f"{name.removesuffix('_blocks')}_scales")
        if scales and len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape:
            experts, outputs, groups, size = blocks.shape
            shape = (experts, groups * size * 2, outputs)
            tensors[name.removesuffix("_blocks")] = StoredTensor(blocks.file, blocks.key, shape)
            del tensors[name], tensors[f"{name.removesuffix('_blocks')}_scales"]
    return StoredWeights(tensors)


def _forget_quantization(config: Any) -> None:
    """Weights are loaded as numbers: transformers must not take them for quantized ones."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _misfits(
    model: Any, info: Mapping[str, Any], weights: StoredWeights, where: str, fresh_head: str = ""
) -> Iterator[Problem]:
    """Weights that the model has and the folder has not, the reverse, and those of another shape.

    Args:
        info: as from_pretrained returns it within `_every_name`; transformers has left out tied weights.
    """
    ignored = _pattern(model._keys_to_ignore_on_load_missing)
    buffers = {name for name, _ in model.named_buffers()}
    # A buffer that a family may lack has the value that the model is made with; a weight would be drawn at random.
    missing = sorted(name for name in info["missing_keys"] if not (name in buffers and ignored.search(name)))
    missing = [name for name in missing if not (fresh_head and name.startswith(f"{fresh_head}."))]
    heads = _causal_names(model, info, fresh_head)
    unused = sorted(
        name for name in info["unexpected_keys"] if name not in heads and not _may_be_left_over(name, weights, model)
    )
    expected = model.state_dict()
    other = [
        f"{name} is {list(weights.tensors[name].shape) if name in weights.tensors else 'another shape'}, "
        f"not {list(expected[name].shape)}"
        for name in sorted(entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"])
    ]
    parts = [
        f"missing: {named(missing)}" if missing else "",
        f"left over: {named(unused)}" if unused else "",
        f"of another shape: {named(other)}" if other else "",
    ]
    if finding := "; ".join(filter(None, parts)):
        yield Problem(
            "weights_do_not_fit",
            where,
            f"expected exactly the weights of a {type(model).__name__} as config.json describes it; {finding}",
            "correct config.json (architectures, num_hidden_layers, vocab_size, …), or save the whole model again with "
            "save_pretrained; weights that are missing would be drawn at random",
        )


def _causal_names(model: Any, info: Mapping[str, Any], fresh_head: str) -> set[str]:
    """Names of the weights of a causal language model, which a folder may contain in place of a head that is drawn."""
    if not fresh_head or not info["unexpected_keys"]:
        return set()
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return set(AutoModelForCausalLM.from_config(model.config).state_dict())


def _left_out(model: Any, info: Mapping[str, Any], weights: StoredWeights, fresh_head: str) -> dict[str, list[str]]:
    """Stored tensors that a loaded model does not contain, by what they are."""
    heads = _causal_names(model, info, fresh_head)
    left_out: dict[str, list[str]] = {}
    for name in sorted(set(info["unexpected_keys"]) - heads):
        left_out.setdefault(_may_be_left_over(name, weights, model), []).append(name)
    return left_out


def _may_be_left_over(name: str, weights: StoredWeights, model: Any) -> str:
    """Return what a stored tensor is that a model computes the same without; empty for a weight.

    The pooler that encoders are pretrained with and most of their classifiers do without; masks and positions that
    earlier versions of transformers stored, by name and shape; and of the names that transformers ignores for a family
    those of parts that its model of text does not run. Other names that it ignores (`attn.bias` of GPT-J, whatever its
    shape) are weights.
    """
    tensor = weights.tensors.get(name)
    last = name.rpartition(".")[2]
    if tensor is not None:
        *others, rows, columns = (1, 1, *tensor.shape)
        one_row = all(size == 1 for size in others)
        if (
            (last in ("bias", "causal_mask") and len(tensor.shape) == 4 and one_row and rows == columns)
            or (last in ("masked_bias", "version") and one_row and rows == columns == 1)
            or (last in ("inv_freq", "original_inv_freq") and len(tensor.shape) == 1)
            or (last == "position_ids" and one_row and rows == 1)
        ):
            return "masks and positions of earlier versions of transformers"
    if ".pooler." in f".{name}":
        return "the pooler"
    config = model.config.get_text_config()
    layers, more = getattr(config, "num_hidden_layers", 0), getattr(config, "num_nextn_predict_layers", None) or 0
    if (layer := _LAYER.match(name)) and layers <= int(layer[2]) < layers + more:
        # Such a layer joins the hidden state with the next token's embedding: one without is a layer of the trunk.
        return next(iter(_NOT_RUN)) if f"{layer[1]}.eh_proj.weight" in weights.tensors else ""
    if _pattern(model._keys_to_ignore_on_load_unexpected).search(name):
        return next((what for what, pattern in _NOT_RUN.items() if pattern.search(name)), "")
    return ""


def _pattern(patterns: Any) -> re.Pattern[str]:
    """One pattern for names that match any of those of a family."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns or ())) or r"(?!)")


def _untied(model: Any, weights: StoredWeights, where: str) -> Iterator[Problem]:
    """Weights that config.json makes one and that the folder has with other numbers: one of them would be dropped."""
    groups: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in weights.tensors:
            groups.setdefault(id(weight), []).append(name)
    for first, *others in groups.values():
        for name in others:
            if not _same(weights.tensors[first], weights.tensors[name]):
                yield Problem(
                    "head_not_tied",
                    where,
                    f"config.json ties {name} to {first}, and the folder contains other numbers for each",
                    "set tie_word_embeddings to false in config.json if the model was trained with both, or remove "
                    f"{name} from the safetensors if it was not",
                )


def _same(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two stored tensors have the same numbers, read a part at a time."""
    import torch
    from safetensors import safe_open

    if tensor.shape != other.shape:
        return False
    rows = max(1, _COMPARED // max(1, tensor.shape[-1]))
    with safe_open(tensor.file, "pt") as first, safe_open(other.file, "pt") as second:
        values, other_values = first.get_slice(tensor.key), second.get_slice(other.key)
        return all(
            torch.equal(values[start : start + rows].float(), other_values[start : start + rows].float())
            for start in range(0, tensor.shape[0], rows)
        )


@contextmanager
def _every_name() -> Iterator[None]:
    """Context in which from_pretrained reports all weights that are missing or left over.

    transformers removes from its reports the names that a family's class ignores (`attn.bias` of GPT-2 and GPT-J,
    `model.layers.61` of DeepSeek), whatever tensors have them, and offers no option against it.
    """
    from transformers import PreTrainedModel

    with _LOADING:
        removes = PreTrainedModel._adjust_missing_and_unexpected_keys
        PreTrainedModel._adjust_missing_and_unexpected_keys = lambda model, info: None
        try:
            yield
        finally:
            PreTrainedModel._adjust_missing_and_unexpected_keys = removes


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' warnings of weights that do not fit, which are refused here, or requested; and
    without its bar of loaded weights outside a terminal."""
    from transformers.utils import logging as transformers_logging

    before, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _check(folder: Path, where: str) -> None:
    """A name without a folder would be looked up in the hub's cache."""
    if not folder.is_dir():
        raise stage_error("no_model", where or str(folder), f"expected a Hugging Face folder, but {folder} is not one")
    check_model(folder, where)
