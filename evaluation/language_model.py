"""A causal language model with its tokenizer, loaded for scoring and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from corpus.pretrained import load_pretrained_model, load_pretrained_tokenizer
from evaluation.generation import Sampling, generate
from infra.errors import stage_error
from infra.run import Run

SCORED_TOKENS_AT_ONCE = 8192  # bounds the logits: 8192 tokens x 50k words x 4 bytes = 1.6 GB


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and where it runs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @property
    def start_token(self) -> int:
        """The token that documents begin with in training: BOS, or EOS where there is no BOS."""
        token = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if token is None else token)

    @property
    def max_tokens(self) -> int:
        """The longest sequence the model was made for."""
        return int(getattr(self.model.config, "max_position_embeddings", 2048))


def load_model(folder: Path, run: Run) -> LoadedModel:
    """Loads a Hugging Face model folder from safetensors; in fp32 on a CPU, else as `launch` says.

    Raises StageError if the folder holds no such model, brings code along or leads out of itself.
    """
    device = choose_device(run)
    bf16 = device.type == "cuda" and run.launch.precision != "fp32" and torch.cuda.is_bf16_supported()
    if run.launch.threads:
        torch.set_num_threads(run.launch.threads)
    try:
        tokenizer = load_pretrained_tokenizer(folder)
        model = load_pretrained_model(AutoModelForCausalLM, folder, dtype=torch.bfloat16 if bf16 else torch.float32)
    except (OSError, ValueError) as error:
        raise stage_error(
            "bad_model",
            str(folder),
            f"expected a Hugging Face model folder with safetensors and a tokenizer: {str(error).splitlines()[0]}",
            "give the folder of a pretrain, sft, rlhf or base_model artifact",
        ) from error
    model.to(device)
    return LoadedModel(model.eval(), tokenizer, device)


def choose_device(run: Run) -> torch.device:
    """The device that `launch.device` asks for; auto is a GPU where there is one."""
    gpu = run.launch.device == "gpu" or (run.launch.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if gpu else "cpu")


@torch.inference_mode()
def token_log_likelihoods(
    lm: LoadedModel, sequences: Sequence[Sequence[int]], run: Run, note: str = ""
) -> list[tuple[Tensor, Tensor]]:
    """What the model thinks of each token of each sequence, given those before it.

    sequences: N lists of token ids, the first token of each only given, never scored.
    Returns N pairs, each of length T - 1: natural-log likelihoods (float32) and whether the token is the likeliest one.
    """
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(sequences)
    done = 0
    for batch in _batches_by_length(sequences):
        run.stop_if_cancelled()
        longest = max(len(sequences[i]) for i in batch)
        # Padding goes to the right: causal attention never looks there, so any id will do.
        ids = torch.full((len(batch), longest), lm.start_token)
        for row, i in enumerate(batch):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
        ids = ids.to(lm.device)
        logits = lm.model(input_ids=ids[:, :-1], use_cache=False).logits.float()  # (B, T-1, V)
        targets = ids[:, 1:]  # (B, T-1)
        at_target = logits.gather(-1, targets[..., None])[..., 0]
        log_likelihoods = (at_target - logits.logsumexp(-1)).cpu()
        likeliest = (logits.argmax(-1) == targets).cpu()
        for row, i in enumerate(batch):
            length = len(sequences[i]) - 1
            found[i] = log_likelihoods[row, :length], likeliest[row, :length]
        done += len(batch)
        run.progress(done, len(sequences), "sequences", note)
    return [pair for pair in found if pair is not None]


def _batches_by_length(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of the sequences, longest first, in batches of bounded size."""
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    while order:
        size = max(1, SCORED_TOKENS_AT_ONCE // max(1, len(sequences[order[0]])))
        yield order[:size]
        order = order[size:]


def sample_continuations(
    lm: LoadedModel, prompts: Sequence[str], samples: int, sampling: Sampling, run: Run
) -> list[list[str]]:
    """`samples` continuations of each prompt, without the prompt; the same under the same seed.

    Prompts longer than the context allows lose tokens at their start.
    """
    room = max(1, lm.max_tokens - sampling.max_new_tokens)
    encoded = [[lm.start_token, *lm.tokenizer.encode(text, add_special_tokens=False)][-room:] for text in prompts]
    ends = lm.model.generation_config.eos_token_id if lm.model.generation_config else None
    stops = ends if isinstance(ends, list) else [ends] if ends is not None else []
    total = len(prompts) * samples

    def on_token(done: int) -> None:
        run.stop_if_cancelled()
        run.progress(done, total, "samples")

    found = generate(lm.model, [ids for ids in encoded for _ in range(samples)], sampling, stops, on_token)
    run.progress(total, total, "samples")
    texts: list[str] = lm.tokenizer.batch_decode(found, skip_special_tokens=True)
    return [texts[start : start + samples] for start in range(0, total, samples)]
