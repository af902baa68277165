"""Kernels of a training step on a GPU, those that we choose beside others: attention, loss, products, optimizers.

python benchmarks/training/bench_kernels.py [--tokens 32768] [--width 2048] [--vocabulary 50304]

Median milliseconds of forward and backward passes in bf16, a few minutes in all. Attention is of sequences of 2,048
tokens and heads of 128; its TFLOP/s count the products of what a causal mask leaves, 3.5 forward passes in all.
Documents are of some 500 tokens.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from training.model import loss as chunks
from training.model.documents import block_mask, within_documents
from training.model.loss import chunked_cross_entropy
from training.trainer.muon import Muon

LENGTH, HEAD, DOCUMENT = 2048, 128, 500
_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU: nothing is measured")
        return
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| kernel | ms | TFLOP/s |\n|---|---|---|")
    attention(options.tokens, options.width)
    losses(options.tokens, options.width, options.vocabulary)
    products(options.tokens, options.width)
    optimizers(options.width)


def tell(title: str, run: Callable[[], Any], flops: float = 0.0) -> None:
    """One row: the median, or why it did not run."""
    from triton.testing import do_bench

    try:
        ms = do_bench(run, warmup=30, rep=150, return_mode="median")
    except Exception as error:  # of any kernel that this GPU or this version has not
        print(f"| {title} | {type(error).__name__}: {str(error).splitlines()[0][:90]} | |", flush=True)
    else:
        print(f"| {title} | {ms:.2f} | {f'{flops / ms / 1e9:.0f}' if flops else ''} |", flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def both_passes(forward: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], None]:
    """Runs forward and backward; the gradient is that of the sum."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        found = forward(*leaves)
        found.backward(torch.ones_like(found))

    return run


def attention(tokens: int, width: int) -> None:
    rows, heads = tokens // LENGTH, width // HEAD
    leaves = [torch.randn(rows, heads, LENGTH, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    flops = 3.5 * 4 * rows * heads * LENGTH**2 * HEAD / 2
    for name in _BACKENDS:

        def by_backend(*qkv: Tensor, name: str = name) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return scaled_dot_product_attention(*qkv, is_causal=True)

        tell(f"causal attention, SDPA's {name}", both_passes(by_backend, *leaves), flops)
    tell("causal attention, what SDPA chooses",
         both_passes(partial(scaled_dot_product_attention, is_causal=True), *leaves), flops)  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)
    whole = torch.zeros(rows, LENGTH, dtype=torch.int32, device="cuda")
    tell(
        "causal attention, flex_attention", both_passes(partial(compiled, block_mask=block_mask(whole)), *leaves), flops
    )
    bounds = (torch.rand(rows, LENGTH, device="cuda") < 1 / DOCUMENT).int().cumsum(1, dtype=torch.int32)
    tell("within documents, flex_attention", both_passes(partial(compiled, block_mask=block_mask(bounds)), *leaves))
    dense = partial(scaled_dot_product_attention, attn_mask=within_documents(bounds))
    tell("within documents, SDPA with a mask (T, T)", both_passes(dense, *leaves))
    tell("its blocks' mask", lambda: block_mask(bounds))


def losses(tokens: int, width: int, vocabulary: int) -> None:
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    flops = 6.0 * tokens * width * vocabulary

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy((hidden @ weight.to(hidden.dtype).T).float(), labels, reduction="sum")

    tell("loss, all logits at once", both_passes(whole, hidden, weight), flops)
    tell("loss, all logits at once, compiled", both_passes(torch.compile(whole), hidden, weight), flops)
    usual = chunks._CHUNK_LOGITS_OF_GPU
    for numbers in (2**25, 2**26, usual, 2**28, 2**29):
        chunks._CHUNK_LOGITS_OF_GPU = numbers
        positions = chunks.chunk_size(weight)
        for compiled in (False, True):
            ours = partial(chunked_cross_entropy, labels=labels, compiled=compiled)
            how = "compiled" if compiled else "uncompiled"
            tell(f"loss, ours, {positions} positions at once, {how}", both_passes(ours, hidden, weight), flops)
    chunks._CHUNK_LOGITS_OF_GPU = usual


def products(tokens: int, width: int) -> None:
    for inner, columns in ((width, width), (width, 4 * width), (4 * width, width), (8192, 8192)):
        rows = 8192 if inner == columns == 8192 else tokens
        a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
        flops = 2.0 * rows * inner * columns
        tell(f"product ({rows}, {inner}) by ({inner}, {columns}), bf16", partial(torch.mm, a, b), flops)
        x, y = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
        one, out = torch.ones((), device="cuda"), torch.bfloat16
        fp8 = partial(torch._scaled_mm, x, y, scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=True)
        tell(f"product ({rows}, {inner}) by ({inner}, {columns}), FP8", fp8, flops)


def optimizers(width: int) -> None:
    """Of 24 layers' matrices of a GPT."""
    shapes: Sequence[tuple[int, int]] = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = [torch.randn(*shape, device="cuda", requires_grad=True) for _ in range(24) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    millions = sum(weight.numel() for weight in weights) // 10**6
    for fused in (True, False):
        adamw = torch.optim.AdamW(weights, lr=1e-4, fused=fused, foreach=not fused)
        tell(f"AdamW, {'fused' if fused else 'foreach'}, {millions}M parameters", adamw.step)
        del adamw
    matrices = {"muon": True, "transposed": False, "lr": 1e-2, "weight_decay": 0.0, "momentum": 0.95, "iterations": 5}
    muon = Muon([{"params": weights, **matrices}], {}, torch.bfloat16)
    tell(f"Muon, {millions}M parameters", muon.step)


if __name__ == "__main__":
    main()
