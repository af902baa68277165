"""The stacked layers of a model, and wrappers of their forward pass: activation checkpointing and compilation.

A wrapped layer keeps its class and the names of its weights. The wrapper applies to the function of the layer's class,
so that layers of one kind share the function and its compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Forward = Callable[..., Any]
"""(layer, inputs) → outputs: the forward method of a class."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the stacked layers of a model: the members of its outermost lists of modules."""
    layers: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, ParametrizationList):  # of an embedding with rows that learn beside adapters
            continue
        layers += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return layers


def checkpoint_activations(model: nn.Module, how: str) -> None:
    """Activation checkpointing of every block, in place (`launch.recompute`).

    full: only a block's input is kept (Chen et al. 2016). selective: results of matrix products and of attention are
    kept too, and only what is cheap is computed again (Korthikanti et al. 2022, section 5).
    """
    if how != "none":
        _wrap(model, lambda forward: _recomputed(forward, how))


def compile_blocks(model: nn.Module) -> None:
    """Compile every block separately with torch.compile, in place, for training; evaluation stays uncompiled.

    Hooks on a block, such as FSDP2's that gather its weights, stay outside of the compiled code, which contains no
    collectives: ranks may compile at different times. Layers of one kind are compiled once. Activation checkpointing
    must be applied before, so that the compiler decides what to keep.
    """
    _wrap(model, _compiled)


def _wrap(model: nn.Module, wrapper: Callable[[Forward], Forward]) -> None:
    for block in blocks(model):
        bound: Any = block.forward
        block.forward = MethodType(wrapper(bound.__func__), block)


@cache
def _recomputed(forward: Forward, how: str) -> Forward:
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    extra: dict[str, Any] = {"context_fn": contexts} if how == "selective" else {}

    @wraps(forward)
    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        return checkpoint(forward, block, *args, use_reentrant=False, **extra, **kwargs)

    return run


@cache
def _compiled(forward: Forward) -> Forward:
    compiled = torch.compile(forward)

    @wraps(forward)
    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trains = block.training and torch.is_grad_enabled()
        return (compiled if trains else forward)(block, *args, **kwargs)

    return run


def _keep_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operator)
    products = (
        "aten.mm",
        "aten.bmm",
        "aten.addmm",
        "aten.baddbmm",
        "aten._scaled_dot_product",
        "aten._flash_attention",
    )
    return CheckpointPolicy.MUST_SAVE if name.startswith(products) else CheckpointPolicy.PREFER_RECOMPUTE
