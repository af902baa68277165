"""The one place where a model's or tokenizer's folder is handed to transformers: as data, whoever made it.

Before anything is loaded, the folder is looked through: transformers would run code that it names (after a question on
the terminal, where `y` is enough), and open files wherever they lie. A weight that a folder lacks would be drawn at
random, one that the model has no place for dropped, both without an error: here they are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus.model_folder import StoredTensor, StoredWeights, folder_problems, named, stored_weights, unquantizes
from infra.errors import Problem, StageError, stage_error
from infra.foreign import check_model
from infra.json import read_json

_log = logging.getLogger(__name__)
_COMPARED = 1 << 22


def load_pretrained_tokenizer(folder: Path, where: str = "") -> Any:
    """The tokenizer of a Hugging Face folder, a PreTrainedTokenizerBase.

    where: the dotted key that names the folder. Raises StageError: `foreign_code`, `unsafe_file`, `no_model` where
    there is no such folder. OSError, ValueError, KeyError or ImportError for one that transformers cannot read.
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
        say: receives a message about what is done to the weights: prefixes removed, 4 bits turned into numbers.
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
    weights = stored_weights(folder)
    if unquantizes(read_json(folder / "config.json", nan=True)):
        from transformers import Mxfp4Config

        # transformers does not compare the shapes of quantized weights with those of the model.
        if problems := weights_problems(auto, folder, where):
            raise StageError(*problems)
        say(f"{where}: weights in MXFP4 are turned into {str(options.get('dtype', 'float32')).removeprefix('torch.')}")
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with _quiet():
        if weights.prefixes:
            prefixes = ", ".join(weights.prefixes)
            say(f"{where}: {prefixes} of torch.compile or distributed training removed from the names of weights")
            shape = load_pretrained_shape(auto, folder, where, num_labels=options.pop("num_labels", None))
            model, info = type(shape).from_pretrained(
                None, config=shape.config, state_dict=_tensors(weights), **options
            )
            if getattr(shape, "generation_config", None) is not None:
                model.generation_config = shape.generation_config
        else:
            model, info = auto.from_pretrained(
                folder, **options, use_safetensors=True, local_files_only=True, trust_remote_code=False
            )
    if "quantization_config" in options:
        model = model.to(model.dtype)  # unquantized weights are bf16, whatever the others are
    # transformers 5 unties weights that differ while it loads them: config.json's own model still has them tied.
    tied = load_pretrained_shape(auto, folder, where) if getattr(model.config, "tie_word_embeddings", False) else model
    if problems := [*_misfits(model, info, weights, where, fresh_head), *_untied(tied, weights, where)]:
        raise StageError(*problems)
    if broken := non_finite(model, fresh_head):
        raise StageError(non_finite_problem(broken, where))
    return model


def load_pretrained_shape(auto: Any, folder: Path, where: str = "", num_labels: int | None = None) -> Any:
    """The model of a Hugging Face folder without its weights, on torch's device `meta`: for its config and what it says
    of generating. auto: as of `load_pretrained_model`. Raises as `load_pretrained_tokenizer`."""
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
    if hasattr(shape.config, "quantization_config"):
        del shape.config.quantization_config
        weights = _as_unquantized(weights)
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights.tensors.items()}
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with _quiet():
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
    """Return the names of a model's weights that contain NaN or infinity. fresh_head: a layer that is drawn later."""
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

    found = []
    for file in sorted({tensor.file for tensor in stored_weights(folder).tensors.values()}):
        try:
            with safe_open(file, "pt") as opened:
                found += [name for name in opened.keys() if not is_finite(opened.get_tensor(name))]  # noqa: SIM118
        except SafetensorError as error:
            message = f"{file} is damaged or no safetensors file: {error}"
            raise stage_error("bad_model", str(folder), message, "download or copy the file again") from error
    return sorted(found)


def is_finite(tensor: Any) -> bool:
    """Whether a tensor contains neither NaN nor infinity. Its minimum and maximum are NaN where one number is, and take
    no memory."""
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
        "download or copy the folder again; if its weights are the same there, take an earlier checkpoint",
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


def _misfits(
    model: Any, info: Mapping[str, Any], weights: StoredWeights, where: str, fresh_head: str = ""
) -> Iterator[Problem]:
    """Weights that the model has and the folder has not, the reverse, and those of another shape.

    info: as from_pretrained gives it; transformers has left out tied weights and those that a family does not read.
    """
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if fresh_head:
        import torch
        from transformers import AutoModelForCausalLM

        missing = [name for name in missing if not name.startswith(f"{fresh_head}.")]
        with torch.device("meta"):
            heads = set(AutoModelForCausalLM.from_config(model.config).state_dict()) if unused else set()
        unused = [name for name in unused if name not in heads]
    unused = [name for name in unused if not _may_be_left_over(name, weights)]
    expected = model.state_dict()
    other = [
        f"{name} is {list(weights.tensors[name].shape) if name in weights.tensors else 'another shape'}, "
        f"not {list(expected[name].shape)}"
        for name in sorted(one if isinstance(one, str) else one[0] for one in info["mismatched_keys"])
    ]
    parts = [
        f"missing: {named(missing)}" if missing else "",
        f"left over: {named(unused)}" if unused else "",
        f"of another shape: {named(other)}" if other else "",
    ]
    if found := "; ".join(filter(None, parts)):
        yield Problem(
            "weights_do_not_fit",
            where,
            f"expected exactly the weights of a {type(model).__name__} as config.json describes it; {found}",
            "correct config.json (architectures, num_hidden_layers, vocab_size, …), or save the whole model again with "
            "save_pretrained; weights that are missing would be drawn at random",
        )


def _may_be_left_over(name: str, weights: StoredWeights) -> bool:
    """Whether a model loses nothing without a stored tensor: the pooler that encoders are pretrained with and most of
    their classifiers do without, and the masks and positions that earlier versions of transformers stored."""
    tensor = weights.tensors.get(name)
    return (
        ".pooler." in f".{name}"
        or name.endswith((".masked_bias", ".inv_freq", ".position_ids"))
        or (name.endswith(".bias") and tensor is not None and len(tensor.shape) == 4)
    )


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


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors have the same numbers, read a part at a time."""
    import torch
    from safetensors import safe_open

    if one.shape != other.shape:
        return False
    rows = max(1, _COMPARED // max(1, one.shape[-1]))
    with safe_open(one.file, "pt") as first, safe_open(other.file, "pt") as second:
        ours, theirs = first.get_slice(one.key), second.get_slice(other.key)
        return all(
            torch.equal(ours[start : start + rows].float(), theirs[start : start + rows].float())
            for start in range(0, one.shape[0], rows)
        )


def _tensors(weights: StoredWeights) -> dict[str, Any]:
    from safetensors import safe_open

    found = {}
    for file in sorted({tensor.file for tensor in weights.tensors.values()}):
        with safe_open(file, "pt") as opened:
            for name, tensor in weights.tensors.items():
                if tensor.file == file:
                    found[name] = opened.get_tensor(tensor.key)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns of weights that do not fit, which are refused here, or asked for."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _check(folder: Path, where: str) -> None:
    """A name without a folder would be looked up in the hub's cache."""
    if not folder.is_dir():
        raise stage_error("no_model", where or str(folder), f"expected a Hugging Face folder, {folder} is none")
    check_model(folder, where)
