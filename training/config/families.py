"""Families of transformers whose training here is proven to be of the model that others run.

Imports nothing heavy: configs are held against it before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infra.errors import Problem


@dataclass(frozen=True)
class Family:
    """Properties of a causal family that tests/training/model/test_families.py compares with transformers.

    windows: where attention looks back over `sliding_window` tokens alone: nowhere (none), in every layer if the config
        names a window (one), or in the layers that `layer_types` calls sliding_attention (by_layer).
    varlen: True if the family hands `cu_seq_lens` on to a flash kernel.
    plain_head: True if logits are hidden @ weight.T and nothing else, so that the loss can be computed in chunks.
    router: True if it is a mixture of experts, whose balancing loss belongs to its training.
    idle_experts: True if an expert that no token of a batch chose has a gradient of 0, by which an optimizer with
        momentum or weight decay still moves it, as transformers 4 trained the family; elsewhere it has none and stays.
    tensor_parallel: True if ranks can share its layers, held by tests/training/distributed/test_tensor_parallel.py.
    context_parallel: True if ranks share its sequences, held by tests/training/distributed/test_context_parallel.py.
    pipeline_parallel: True if it can be a pipeline, held by tests/training/distributed/test_pipeline_parallel.py.
    vllm: True if a server of vLLM takes its new weights while it runs, held by tests/training/serving/test_vllm.py.
    linear: True if its matrices are torch's linear layers, as `training.model.float8` takes them.
    """

    windows: Literal["none", "one", "by_layer"] = "none"
    varlen: bool = True
    plain_head: bool = True
    router: bool = False
    idle_experts: bool = False
    tensor_parallel: bool = False
    context_parallel: bool = True
    pipeline_parallel: bool = False
    vllm: bool = False
    linear: bool = True


FAMILIES: dict[str, Family] = {
    "arcee": Family(vllm=True),
    "cohere2": Family("by_layer", plain_head=False),
    "exaone4": Family("by_layer", vllm=True),
    "gemma": Family(vllm=True),
    "gemma3_text": Family("by_layer", vllm=True),
    "glm4": Family(vllm=True),
    "gpt2": Family(varlen=False, vllm=True, linear=False),
    "gpt_neox": Family(),
    "granite": Family(plain_head=False, vllm=True),
    "llama": Family(tensor_parallel=True, pipeline_parallel=True, vllm=True),
    "mistral": Family("one", tensor_parallel=True, pipeline_parallel=True),
    "mixtral": Family("one", router=True, tensor_parallel=True, pipeline_parallel=True),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family("by_layer"),
    "olmoe": Family(varlen=False, router=True, idle_experts=True, context_parallel=False),
    "opt": Family(varlen=False),
    "phi": Family(plain_head=False),
    "phi3": Family("one"),
    "qwen2": Family("by_layer", tensor_parallel=True, pipeline_parallel=True),
    "qwen3": Family("by_layer", tensor_parallel=True, pipeline_parallel=True, vllm=True),
    "qwen3_moe": Family("one", router=True, tensor_parallel=True, pipeline_parallel=True),
    "smollm3": Family("by_layer"),
    "stablelm": Family(varlen=False, context_parallel=False),
    "starcoder2": Family("one"),
}


def is_mixture(model_type: str) -> bool:
    """Return True if a proven family is a mixture of experts."""
    return model_type in FAMILIES and FAMILIES[model_type].router


LEARNED_POSITIONS = {"gpt2", "opt"}
"""Causal families with a vector for each position, which only tokens at that position train."""


def windows(config: Any) -> dict[str, int | None]:
    """Return the number of tokens that each kind of layer looks back over, the current one included; None for all. One
    entry under "" if all layers are of one kind. Empty for a family that is not proven.

    Args:
        config: of transformers.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return {}
    if family.windows == "none":
        return {"": None}
    window = getattr(config, "sliding_window", None)
    if family.windows == "one":
        return {"": window}
    kinds = set(config.layer_types)
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def documents_problem(model_type: str) -> Problem | None:
    """Why a mask of ours, for documents or a prefix, is refused to a causal family, if it is."""
    if model_type in FAMILIES:
        return None
    return Problem(
        "unproven_family",
        "pretrain.attention",
        f"expected, with attention: document or objective: prefix, a family that is proven to keep to such a mask, not "
        f"{model_type}: a recurrent layer, for example, carries a document into the next",
        "train it with objective: causal and attention: sequence, or take one of " + ", ".join(sorted(FAMILIES)),
    )


def sampler_problems(model_type: str) -> Iterator[Problem]:
    """Why a policy's answers cannot be vLLM's (rlhf.sampler), if they cannot."""
    family = FAMILIES.get(model_type)
    if family is None or not family.vllm:
        able = ", ".join(sorted(name for name, entry in FAMILIES.items() if entry.vllm))
        message = f"expected a model of {able}, whose reloaded weights were confirmed to reach vLLM, not {model_type}"
        yield Problem("no_vllm_family", "rlhf.sampler", message, "leave rlhf.sampler out to use the built-in sampler")


def experts_problem(model_type: str, values: Mapping[str, Any], path: str) -> Problem | None:
    """Why a mixture of experts is refused, if it is: its balancing loss would be left out without a word.

    Args:
        values: the config of transformers as a mapping.
        path: the dotted key that names the model.
    """
    family = FAMILIES.get(model_type)
    if (family and family.router) or not any(count > 1 for count in _experts(values)):
        return None
    proven = ", ".join(sorted(name for name, entry in FAMILIES.items() if entry.router))
    return Problem(
        "unproven_experts",
        path,
        f"expected a mixture of experts whose balancing loss is trained as in transformers, not {model_type}",
        f"use one of {proven}, or a model without experts",
    )


def _experts(values: Mapping[str, Any]) -> Iterator[int]:
    """All numbers of experts that a config names, in its parts too."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _experts(value)
        elif (
            "expert" in str(key)
            and isinstance(value, int)
            and not isinstance(value, bool)
            and "per_tok" not in str(key)
        ):
            yield value
