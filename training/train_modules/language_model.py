"""A language model in training: its attention within packed documents, its computation in bf16, and its loss.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from infra.errors import StageError
from training.config.families import documents_problem, is_mixture, windows
from training.core.hardware import Hardware
from training.core.train_state import Trainable
from training.distributed.context_parallel import SharedSequences
from training.distributed.other_ranks import OtherRanks
from training.distributed.pipeline_parallel import Beside
from training.distributed.split_loss import split_losses
from training.distributed.tensor_parallel import padded
from training.guard.norms import last_stack
from training.model.attention import ADDED_MASKS, FLEX, is_flash
from training.model.balancing import Routed, TokenRanks, balancing_loss, router_sums
from training.model.documents import EncoderDecoderMasks, additive, block_mask, document_bounds, within_documents
from training.model.loss import IGNORE, chunked_cross_entropy, spread_over_vocabulary, token_losses
from training.model.models import decoder, plain_head

Batch = Mapping[str, Any]
Outputs = Tensor | Routed
_MODEL_INPUTS = (
    "input_ids", "position_ids", "decoder_input_ids", "attention_mask",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


class LanguageModel(Trainable):
    """A language model whose loss is the mean over labelled tokens.

    A batch has `input_ids (B, T)` and `labels (B, T)`, where labels[b, t] is the token that follows position t, or
    -100. Padding is on the right, where a causal model needs no mask. Packed batches also have `documents (B, T)` and
    `position_ids (B, T)` (training/model/documents.py), and attention stays within documents. Other objectives
    (training/objectives) have their own labels, `seen_by_all (B, T)` where a token is seen from before it, and
    `decoder_input_ids (B, S)` for a decoder, which then has the labels, with `decoder_documents (B, S)`.
    """

    chance_loss = 0.0
    """The loss of guessing does not show when a language model diverges; see training.guard.judge."""

    tensor_ranks = 1
    """Ranks that share each layer; see training/distributed/tensor_parallel.py."""

    sequences: SharedSequences | None = None
    """This rank's part of the sequences, if ranks share them: `forward` takes a whole batch and returns the outputs of
    this rank's tokens. The mean of the ranks' `loss` is the batch's; `losses` and `example_losses` are of all tokens.
    """

    token_ranks: TokenRanks | None = None
    """Set if ranks share sequences or layers of a mixture of experts: the balancing loss is then of the tokens of
    all."""

    label_smoothing = 0.0
    """Share of each label's probability that is spread over the vocabulary, in `loss` alone."""

    _row_tokens = 0
    """T of the batch that `forward` computes, which flash kernels get in one row."""

    def __init__(self, model: PreTrainedModel, hardware: Hardware) -> None:
        super().__init__()
        self.model = model
        self._hardware = hardware
        self._whole: dict[int, dict[str, Any]] = {}
        self._encoder = model.config.model_type == "bert"
        self._both = EncoderDecoderMasks(model) if model.config.model_type == "t5" else None
        self._windows = windows(model.config)
        self.router = is_mixture(model.config.model_type)
        stack = decoder(model) if self.router else None
        self._routed = [number for number, layer in enumerate(stack.layers) if _routes(layer)] if stack else []
        self._plain_head = plain_head(model)

    def add_noise(self, alpha: float) -> RemovableHandle:
        """Add NEFTune's noise to the embeddings in every forward pass of training, until the handle is removed: uniform
        in ±alpha / √(T·D) (Jain et al. 2023, algorithm 1), with the padded T, as in transformers."""

        def noisy(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
            if not module.training:
                return embedded
            bound = alpha / math.sqrt(self._row_tokens * embedded.shape[-1])
            return embedded + torch.zeros_like(embedded).uniform_(-bound, bound)

        return self.model.get_input_embeddings().register_forward_hook(noisy)

    def last_stack(self) -> nn.Module | None:
        """The module that gives the last hidden state; None where that is what `forward` gives."""
        return None if self._plain_head else last_stack(self.model)

    def forward(self, batch: Batch) -> Outputs:
        """Return hidden states (B, T, D), or logits (B, T, V) where the family's output layer is more than a matrix;
        for a mixture of experts also the balancing loss of its routers."""
        if self.pipeline is not None:
            raise RuntimeError("expected a whole model: one in a pipeline computes by Pipeline.train and measure")
        if self.router:
            batch = {**batch, "counted": _counted(batch["labels"])}
        whole, length = padded(batch, 1 if self.sequences else self.tensor_ranks)
        own = whole if self.sequences is None else self.sequences.parts(whole)
        found = self._outputs({**own, **self._attention(whole)})
        states = found[0] if length == whole["input_ids"].shape[1] else found[0][:, :length]
        return Routed(states, *self._balancing(found[1], batch["counted"])) if self.router else states

    def through(self, layers: PreTrainedModel, batch: Batch, before: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a batch through some of the layers of a model: return hidden states (B, T, D). For a mixture of experts
        also return the sums that its routers have added up so far (1, 1 + L·k, E), and after the last layer, with a
        dimension for the microbatch, the figures of `Routed`.

        before: outputs of the layers before those, empty before the first.
        """
        if self.router:
            batch = {**batch, "counted": _counted(batch["labels"])}
        own = batch if self.sequences is None else self.sequences.parts(batch)
        inputs = self._inputs({**own, **self._attention(batch)})
        if before:
            ids = inputs.pop("input_ids")
            inputs["inputs_embeds"] = before[0].reshape(*ids.shape, -1)
        with self._hardware.autocast():
            found = layers(**inputs)
        states: Tensor = found.last_hidden_state.view(*own["input_ids"].shape, -1)
        if not self.router:
            return (states,)
        held = [not isinstance(layer, OtherRanks) for layer in layers.layers]
        sums = self._in_place(found.router_logits, own["counted"], [held[number] for number in self._routed])
        if before:
            sums = sums + before[1][0]
        if not held[-1]:
            return states, sums[None]
        balancing, chosen = self._balancing(sums, batch["counted"])
        return states, balancing[None], chosen[None]

    def beside_states(self) -> Beside:
        """Describe the outputs of `through` besides hidden states."""
        if not self.router:
            return Beside()
        layers, experts, k = self.expert_layers, self.experts_of_a_layer, self.model.config.num_experts_per_tok
        return Beside(((1, 1 + layers * k, experts),), ((1,), (1, layers, experts)), Routed)

    def _attention(self, batch: Batch) -> dict[str, Any]:
        """Return the model inputs that keep attention within documents and windows, in the form that the model's
        attention takes; made outside of the compiled code, and once for all layers."""
        implementation = self.model.config._attn_implementation
        if self._both is not None:
            return {}
        added = implementation in ADDED_MASKS or self.sequences is not None
        if "documents" not in batch:
            # For any other kernel, and for families that are not proven, transformers makes the mask by itself.
            return self._whole_sequences(batch["input_ids"]) if added and self._windows and not self._encoder else {}
        documents, seen_by_all = batch["documents"], batch.get("seen_by_all")
        if is_flash(implementation):
            bounds = document_bounds(documents)
            longest = documents.shape[1]
            return {
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        if implementation in (FLEX, "flex_attention"):
            return self._by_layer(lambda window: block_mask(documents, seen_by_all, window))
        rows = self._rows(documents)

        def visible(window: int | None) -> Tensor:
            mask = within_documents(documents, seen_by_all, window, rows)
            return additive(mask, self._hardware.compute) if added else mask

        return {"attention_mask": visible(None)} if self._encoder else self._by_layer(visible)

    def _by_layer(self, mask: Callable[[int | None], Any]) -> dict[str, Any]:
        """The mask of each kind of layer, as its family in transformers takes it."""
        if problem := documents_problem(self.model.config.model_type):
            raise StageError(problem)
        masks = {kind: mask(window) for kind, window in self._windows.items()}
        return {"attention_mask": masks.get("", masks)}

    def _whole_sequences(self, ids: Tensor) -> dict[str, Any]:
        """The masks of sequences without documents (1, 1, T, T), kept from batch to batch, and the positions: OPT in
        transformers would count them from a mask."""
        length = ids.shape[1]
        if length not in self._whole:
            one = torch.zeros(1, length, dtype=torch.int32, device=ids.device)
            rows = self._rows(ids)
            masks = self._by_layer(
                lambda window: additive(within_documents(one, window=window, rows=rows), self._hardware.compute)
            )
            places = torch.arange(length, device=ids.device) if rows is None else rows
            self._whole = {length: {**masks, "position_ids": places[None]}}
        return self._whole[length]

    def _rows(self, tokens: Tensor) -> Tensor | None:
        """The positions that this rank computes of sequences (B, T) that ranks share."""
        return None if self.sequences is None else self.sequences.places(tokens.shape[1], tokens.device)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs for a model of transformers."""
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
        if not self._encoder:
            inputs["use_cache"] = False
        if "cu_seq_lens_q" in batch:
            # A flash kernel finds its documents in one row of tokens alone.
            inputs |= {name: inputs[name].reshape(1, -1) for name in ("input_ids", "position_ids")}
        if self.router:
            inputs["output_router_logits"] = True
        return inputs

    def _outputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Hidden states or logits, and of a mixture of experts what its routers add up over this rank's tokens."""
        inputs = self._inputs(batch)
        self._row_tokens = batch["input_ids"].shape[1]
        if self._both is not None:
            self._both.set(batch, self._hardware.compute)
        with self._hardware.autocast():
            if not self._plain_head:
                found = self.model(**inputs)
                outputs = found.logits
            else:
                found = decoder(self.model)(**inputs)
                outputs = found.last_hidden_state.to(self._hardware.compute)
        if "cu_seq_lens_q" in batch:
            outputs = outputs.view(len(batch["input_ids"]), -1, outputs.shape[-1])
        return (outputs, self._sums(found.router_logits, batch["counted"])) if self.router else (outputs,)

    def _sums(self, router_logits: Sequence[Tensor], counted: Tensor) -> Tensor:
        """counted: of the tokens (B, T) of the ranks that share layers, including this one."""
        own = counted if self.token_ranks is None else self.token_ranks.own(counted)
        return router_sums(router_logits, self.model.config.num_experts_per_tok, own.flatten())

    def _in_place(self, router_logits: Sequence[Tensor], counted: Tensor, held: Sequence[bool]) -> Tensor:
        """The sums of all layers (1 + L·k, E), of which this rank has only some routers. held: True for each of L that
        it has."""
        k = self.model.config.num_experts_per_tok
        rows = torch.zeros(len(held), k, self.experts_of_a_layer, device=counted.device)
        if not any(held):
            return torch.cat([rows[0, :1], rows.flatten(0, 1)])
        sums = self._sums(router_logits, counted)
        rows[torch.tensor(held, device=counted.device)] = sums[1:].detach().unflatten(0, (-1, k))
        return torch.cat([sums[:1], rows.flatten(0, 1)])

    def _balancing(self, sums: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the balancing loss of all routers over the tokens of a microbatch that count, and how many of these
        tokens each expert saw. counted: of whole sequences."""
        if self.token_ranks is not None:
            sums = self.token_ranks.sum(sums)
        return balancing_loss(sums, self.model.config.num_experts_per_tok, counted.sum().clamp(min=1))

    @property
    def expert_layers(self) -> int:
        """L, the layers of a mixture of experts that have some."""
        return len(self._routed)

    @property
    def experts_of_a_layer(self) -> int:
        """E."""
        config = self.model.config
        return int(getattr(config, "num_local_experts", None) or config.num_experts)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        states = outputs.states if isinstance(outputs, Routed) else outputs
        flat, labels = states.flatten(0, 1), self._own(batch["labels"]).flatten()
        count: Tensor | float = (batch["labels"] != IGNORE).sum().clamp(min=1)
        if self.sequences is not None:
            count = count / self.sequences.size
        if self._plain_head:
            weight = self.model.get_output_embeddings().weight
            if isinstance(weight, DTensor):
                total = split_losses(flat, weight, labels).sum()
            else:
                total = chunked_cross_entropy(flat, weight, labels, compiled=self.compiles_blocks)
                if self.label_smoothing:
                    total = total + self.label_smoothing * spread_over_vocabulary(flat, weight, labels)
        else:
            total = cross_entropy(
                flat.float(), labels, ignore_index=IGNORE, reduction="sum", label_smoothing=self.label_smoothing
            )
        if not isinstance(outputs, Routed):
            return total / count
        return total / count + self.model.config.router_aux_loss_coef * outputs.balancing.mean()

    def states(self, batch: Batch) -> Tensor:
        """Return hidden states (B, T, D), or logits (B, T, V) where `head_weight` is None."""
        outputs = self.forward(batch)
        return outputs.states if isinstance(outputs, Routed) else outputs

    def head_weight(self) -> Tensor | None:
        """Return the weight (V, D) of the output layer; None if that layer is more than a matrix."""
        weight: Tensor | None = self.model.get_output_embeddings().weight if self._plain_head else None
        return weight

    def sequence_logprobs(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """Summed log-probabilities (B,) of each sequence's labelled tokens, with their gradients, from what `forward`
        gave; logits are held for labelled tokens alone."""
        states = outputs.states if isinstance(outputs, Routed) else outputs
        labelled = labels != IGNORE
        scores = states[labelled]
        if self._plain_head:
            scores = scores @ self.model.get_output_embeddings().weight.to(scores.dtype).T
        logprobs = -cross_entropy(scores.float(), labels[labelled], reduction="none")
        rows = labelled.nonzero()[:, 0]
        return logprobs.new_zeros(len(labels)).index_add(0, rows, logprobs)

    @torch.no_grad()
    def losses(self, batch: Batch) -> Tensor:
        """Cross-entropy (B, T) in nats of each labelled token, 0 elsewhere."""
        labels = self._own(batch["labels"])
        if self.pipeline is None:
            found = self._token_losses(self.forward(batch), labels)
        else:
            last = self.pipeline.measure(dict(batch))
            found = self.pipeline.from_last(None if last is None else self._token_losses(last, labels), labels)
        return found if self.sequences is None else self.sequences.whole(found)

    @torch.no_grad()
    def example_losses(self, outputs: Outputs | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each sequence's summed cross-entropy (B,) and labelled tokens (B,), from what `forward` gave; in a pipeline
        from the outputs, which only its last rank has."""
        labels = batch["labels"]
        own = None if outputs is None else self._token_losses(outputs, self._own(labels)).sum(1)
        found = own if self.pipeline is None else self.pipeline.from_last(own, labels[:, 0])
        assert found is not None
        return found if self.sequences is None else self.sequences.sum(found), (labels != IGNORE).sum(1)

    def _own(self, labels: Tensor) -> Tensor:
        """Select the labels of the tokens that this rank computes."""
        return labels if self.sequences is None else self.sequences.part(labels)

    def _token_losses(self, outputs: Outputs, labels: Tensor) -> Tensor:
        flat = (outputs.states if isinstance(outputs, Routed) else outputs).detach().flatten(0, 1)
        if self._plain_head:
            weight = self.model.get_output_embeddings().weight
            of_tokens = split_losses if isinstance(weight, DTensor) else token_losses
            return of_tokens(flat, weight, labels.flatten()).view_as(labels)
        return cross_entropy(flat.float(), labels.flatten(), ignore_index=IGNORE, reduction="none").view_as(labels)


def _routes(layer: nn.Module) -> bool:
    """Return True if a layer of a mixture of experts has experts: a family may also have dense layers."""
    return any(name.endswith("experts") for name, _ in layer.named_modules())


def _counted(labels: Tensor) -> Tensor:
    """Return 1 for each token (B, T) that is not padding, which is on the right: those up to the one after the last
    label; 0 for others."""
    labelled = (labels != IGNORE).flip(1).cummax(1).values.flip(1)
    return torch.cat([labelled[:, :1], labelled[:, :-1]], 1).long()
