"""Log-probabilities of answers' tokens: logits exist for these tokens alone, and for a part of them at a time.

Shapes: B answers, T answer tokens after padding, N tokens of all answers without padding, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.core.hardware import Hardware
from training.model.loss import chunk_size, fp16_factor, weight_gradient
from training.model.models import plain_head
from training.train_modules.shared_prompts import hidden_states


def answer_logprobs(
    model: PreTrainedModel,
    ids: Tensor,
    places: Tensor,
    tokens: Tensor,
    mask: Tensor,
    hardware: Hardware,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities (B, T) of answers' tokens at a temperature, 0 where `mask (B, T)` is 0; with gradients.

    ids, places, tokens, mask: of `training.generation.completions.AnswerBatch`.
    """
    real = mask.bool()
    states, weight = _predicting(model, ids, places, mask, hardware)
    if weight is None:
        logprobs = (states.float() / temperature).log_softmax(-1)
        found = logprobs.gather(-1, tokens[real][:, None])[:, 0]
    else:
        found = token_logprobs(states, weight, tokens[real], temperature)
    return _padded(found, real)


@torch.no_grad()
def logprobs_and_entropies(
    model: PreTrainedModel,
    ids: Tensor,
    places: Tensor,
    tokens: Tensor,
    mask: Tensor,
    hardware: Hardware,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`answer_logprobs`, and the entropies (B, T) in nats of the distributions that the tokens were drawn from."""
    real = mask.bool()
    states, weight = _predicting(model, ids, places, mask, hardware)
    size = len(states) if weight is None else chunk_size(weight)
    compute = None if weight is None else weight.to(states.dtype)
    logprobs, entropies = [], []
    for chunk, target in zip(states.split(size), tokens[real].split(size), strict=True):
        scores, normaliser = _normalised(chunk, compute, temperature)
        logprobs.append(_at(scores, target) - normaliser)
        shares = (scores - normaliser[:, None]).exp_()
        entropies.append(normaliser - shares.mul_(scores).sum(-1))
    return _padded(torch.cat(logprobs), real), _padded(torch.cat(entropies), real)


def answer_logits(
    model: PreTrainedModel, ids: Tensor, places: Tensor, mask: Tensor, hardware: Hardware, temperature: float = 1.0
) -> Tensor:
    """Logits (N, V) in fp32, over the temperature, that predict answers' tokens, row after row of `mask (B, T)`."""
    states, weight = _predicting(model, ids, places, mask, hardware)
    scores = states if weight is None else states @ weight.to(states.dtype).T
    return scores.float() / temperature


def answered(places: Tensor, mask: Tensor) -> Tensor:
    """Return the number of tokens (B,) of prompt and answer without the answer's last one, which predicts nothing. The
    places of an answer in several turns are not consecutive."""
    return torch.where(mask.bool(), places, places[:, :1] - 1).amax(1) + 1


def _predicting(
    model: PreTrainedModel, ids: Tensor, places: Tensor, mask: Tensor, hardware: Hardware
) -> tuple[Tensor, Tensor | None]:
    """Return the states that predict answers' tokens: hidden states (N, D) and the output layer's weight (V, D), or
    logits (N, V) and None where that layer is more than a matrix."""
    real, lengths = mask.bool(), answered(places, mask)
    if not plain_head(model):
        return hidden_states(model, ids, lengths, places, hardware, logits=True)[real], None
    hidden = hidden_states(model, ids, lengths, places, hardware)[real].to(hardware.compute)
    return hidden, model.get_output_embeddings().weight


def _normalised(states: Tensor, compute: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits (chunk, V) in fp32 over the temperature, and their log-sum-exp (chunk,). compute: the output layer's
    weight in the type of its products; None where the states are logits."""
    scores = (states if compute is None else states @ compute.T).float()
    scores = scores / temperature if temperature != 1 else scores
    return scores, scores.logsumexp(-1)


def _at(scores: Tensor, tokens: Tensor) -> Tensor:
    return scores.gather(-1, tokens[:, None])[:, 0]


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (N,) in fp32 of tokens (N,) through an output layer weight (V, D), of hidden states (N, D), in
    whose type the products run."""
    found: Tensor = _TokenLogprobs.apply(hidden, weight, tokens, temperature)
    return found


def _padded(values: Tensor, real: Tensor) -> Tensor:
    """Values (N,) of the tokens at their places (B, T), 0 elsewhere."""
    return values.new_zeros(real.shape).masked_scatter(real, values)


class _TokenLogprobs(torch.autograd.Function):
    """Token log-probabilities. If all tokens fit one chunk its probabilities are kept for the backward pass; otherwise
    each chunk's are recomputed there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        compute = weight.to(hidden.dtype)
        found, kept = [], []
        for chunk, target in _chunks(hidden, tokens, weight):
            scores, normaliser = _normalised(chunk, compute, temperature)
            found.append(_at(scores, target) - normaliser)
            if len(chunk) == len(hidden):
                kept = [scores.sub_(normaliser[:, None]).exp_()]
        ctx.save_for_backward(hidden, weight, tokens, *kept)
        ctx.temperature = temperature
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, tokens, *kept = ctx.saved_tensors
        scale = upstream[0] / ctx.temperature
        compute = weight.to(hidden.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), None
        half_factor = fp16_factor(scale, hidden.dtype)
        scale = scale if half_factor is None else scale * half_factor
        parts = zip(d_hidden.split(chunk_size(weight)), scale.split(chunk_size(weight)), strict=True)
        for (chunk, target), (d_chunk, factor) in zip(_chunks(hidden, tokens, weight), parts, strict=True):
            if kept:
                shares = kept[0]
            else:
                scores, normaliser = _normalised(chunk, compute, ctx.temperature)
                shares = scores.sub_(normaliser[:, None]).exp_()
            d_scores = shares * -factor[:, None]
            d_logits = d_scores.scatter_add_(1, target[:, None], factor[:, None]).to(hidden.dtype)
            torch.mm(d_logits, compute, out=d_chunk)
            of_chunk = weight_gradient(d_logits, chunk)
            d_weight = of_chunk if d_weight is None else d_weight.add_(of_chunk)
        assert d_weight is not None
        if half_factor is not None:
            d_hidden, d_weight = (d_hidden.float() / half_factor).half(), d_weight.div_(half_factor)
        return d_hidden, d_weight.to(weight.dtype), None, None


def _chunks(hidden: Tensor, tokens: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = chunk_size(weight)
    return zip(hidden.split(size), tokens.split(size), strict=True)
