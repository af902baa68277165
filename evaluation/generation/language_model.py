"""A causal language model with its tokenizer, loaded for scoring and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from evaluation.generation.chat_prompts import ChatPrompt
from evaluation.generation.choice_rows import ChoiceRow
from evaluation.generation.choice_scoring import ChoiceScorer
from evaluation.generation.decoding import generate
from evaluation.generation.llama_trunk import LlamaTrunk
from evaluation.generation.token_choice import SamplingOptions
from infra.errors import Problem, StageError, stage_error
from infra.io.json import read_json
from infra.run import Run

SCORED_TOKENS_AT_ONCE = 8192  # bounds the logits: 8192 tokens x 50k words x 4 bytes = 1.6 GB


UNBOUNDED = 1_000_000
"""Tokens of a prompt and its answer for a model without a limit."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and where it runs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @property
    def start_token(self) -> int:
        """Token at the beginning of documents in training: BOS, or EOS if there is no BOS."""
        token = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if token is None else token)

    @property
    def positions(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return getattr(self.model.config, "max_position_embeddings", None) or UNBOUNDED

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model supports, for evaluations."""
        return int(getattr(self.model.config, "max_position_embeddings", 2048))

    @property
    def rows(self) -> int:
        """Rows of the embedding: the model knows ids from 0 to one less."""
        return len(self.model.get_input_embeddings().weight)

    def check_ids(self, sequences: Sequence[Sequence[int]], what: str) -> None:
        """Raise StageError `id_out_of_range` if a sequence has an id that the model does not know."""
        largest = max((max(ids) for ids in sequences if len(ids)), default=0)
        if largest >= self.rows:
            raise stage_error(
                "id_out_of_range",
                what,
                f"found the id {largest:,}, and the model's embedding has {self.rows:,} rows",
                "use texts and shards that were made with this model's tokenizer",
            )


def load_model(folder: Path, run: Run) -> LoadedModel:
    """Load a Hugging Face model folder from safetensors: in fp32 on a CPU, otherwise as `launch` specifies.

    Raises StageError if the folder holds no such model, brings code along or leads out of itself, and for every problem
    that `tokenizer_problem` finds.
    """
    device = choose_device(run)
    if run.launch.threads:
        torch.set_num_threads(run.launch.threads)
    try:
        tokenizer = load_pretrained_tokenizer(folder)
        model = load_pretrained_model(AutoModelForCausalLM, folder, dtype=dtype_of(run))
    except (OSError, ValueError, SafetensorError) as error:
        raise stage_error(
            "bad_model",
            str(folder),
            f"expected a Hugging Face model folder with safetensors and a tokenizer: {str(error).splitlines()[0]}",
            "pass the folder of a pretrain, sft, rlhf or base_model artifact",
        ) from error
    if problem := tokenizer_problem(folder, tokenizer, len(model.get_input_embeddings().weight)):
        raise StageError(problem)
    model.to(device)
    return LoadedModel(model.eval(), tokenizer, device)


def check_tokenizers(folders: Iterable[Path]) -> None:
    """Raise StageError for all folders whose tokenizer does not fit their config.json, together and before any weights
    are read; folders that cannot be read are left to `load_model`."""
    problems = []
    for folder in folders:
        try:
            config = read_json(folder / "config.json", nan=True)
            rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
            if not isinstance(rows, int):
                continue
            tokenizer = load_pretrained_tokenizer(folder)
        except (OSError, ValueError, KeyError, AttributeError, ImportError):
            continue
        if problem := tokenizer_problem(folder, tokenizer, rows):
            problems.append(problem)
    if problems:
        raise StageError(*problems)


def tokenizer_problem(folder: Path, tokenizer: PreTrainedTokenizerBase, rows: int) -> Problem | None:
    """Return the problem of a tokenizer with an embedding of `rows` rows: `tokenizer_does_not_fit` for ids beyond the
    rows, `no_start_token` if no token begins a document; None if there is no problem."""
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    if names and (largest := max(names)) >= rows:
        beyond = sum(number >= rows for number in names)
        return Problem(
            "tokenizer_does_not_fit",
            str(folder),
            f"the tokenizer has ids up to {largest:,} ({names[largest]!r}); the model's embedding has {rows:,} rows: "
            f"{beyond:,} ids are without one",
            "put the tokenizer that the model was trained with next to its weights (tokenizer.json, "
            "tokenizer_config.json), or resize the embedding: a `base_model` step does",
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        message = "the tokenizer has neither a BOS nor an EOS token, and documents begin with one of them"
        return Problem("no_start_token", str(folder), message, "name it in tokenizer_config.json: `eos_token`")
    return None


def choose_device(run: Run) -> torch.device:
    """Return the device that `launch.device` selects; auto is a GPU if there is one.

    Raises StageError if a GPU is required and there is none.
    """
    gpu = run.launch.device != "cpu" and torch.cuda.is_available()
    if run.launch.device == "gpu" and not gpu:
        fix = "set launch.device to auto or cpu"
        raise stage_error("no_gpu", "launch.device", "expected a CUDA GPU, found none", fix)
    return torch.device("cuda" if gpu else "cpu")


def dtype_of(run: Run) -> torch.dtype:
    """Return the dtype in which a model is scored: fp32 on a CPU, otherwise as `launch` specifies."""
    cuda = choose_device(run).type == "cuda"
    bf16 = cuda and run.launch.precision != "fp32" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if bf16 else torch.float32


@torch.inference_mode()
def token_log_likelihoods(
    lm: LoadedModel, sequences: Sequence[Sequence[int]], run: Run, note: str = ""
) -> list[tuple[Tensor, Tensor]]:
    """Return the model's likelihood of each token of each sequence, given the tokens before it.

    sequences: N lists of token ids; the first token of each is only context and is never scored.
    Returns N pairs, each of length T - 1: natural-log likelihoods (float32) and a flag that is True if the token is the
    likeliest one.
    Raises StageError `bad_answers` if a likelihood is NaN.
    """
    lm.check_ids(sequences, note or "texts")
    rows = [ChoiceRow([ids[0]], [list(ids[1:])], [[number]]) for number, ids in enumerate(sequences) if len(ids) > 1]
    scorer = ChoiceScorer(lm.model, lm.device)
    has_own_layers = bool(rows) and LlamaTrunk.fits(lm.model) and scorer.usable(max(rows, key=lambda row: row.length))
    if has_own_layers and scorer.way == "own":
        return _as_numbers(_by_own_layers(rows, scorer, len(sequences), run, note), note)
    scores: list[tuple[Tensor, Tensor] | None] = [None] * len(sequences)
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
            scores[i] = log_likelihoods[row, :length], likeliest[row, :length]
        done += len(batch)
        run.progress(done, len(sequences), "sequences", note)
    return _as_numbers([pair for pair in scores if pair is not None], note)


def _as_numbers(scores: list[tuple[Tensor, Tensor]], note: str) -> list[tuple[Tensor, Tensor]]:
    check_numbers((float(likelihoods.sum()) for likelihoods, _ in scores), note or "texts")
    return scores


def check_numbers(likelihoods: Iterable[float], what: str) -> None:
    """Raise StageError `bad_answers` if a log likelihood is NaN: every comparison with it is false.

    Args:
        what: name of the scored texts, for the message.
    """
    values = list(likelihoods)
    if wrong := sum(map(math.isnan, values)):
        message = f"{wrong:,} of {len(values):,} likelihoods are NaN: the model overflows"
        raise stage_error("bad_answers", what, message, "score it in fp32 (launch.precision), or retrain it")


def _by_own_layers(
    rows: Sequence[ChoiceRow], scorer: ChoiceScorer, count: int, run: Run, note: str
) -> list[tuple[Tensor, Tensor]]:
    """Score with this project's own layers; a common beginning of several sequences is computed once. Sequences without
    a row have no token to score."""
    scores = [(torch.zeros(0), torch.zeros(0, dtype=torch.bool))] * count
    done = count - len(rows)
    for batch, scored in scorer.score_tokens(rows):
        run.stop_if_cancelled()
        for row, pair in zip(batch, scored, strict=True):
            scores[row.requests[0][0]] = pair
        done += len(batch)
        run.progress(done, count, "sequences", note)
    return scores


def _batches_by_length(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield indices of the sequences, longest first, in batches of bounded size."""
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    while order:
        size = max(1, SCORED_TOKENS_AT_ONCE // max(1, len(sequences[order[0]])))
        yield order[:size]
        order = order[size:]


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end an answer by the model's generation_config.json."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(ends if isinstance(ends, list) else [ends] if ends is not None else [])


def sample_continuations(
    lm: LoadedModel,
    prompts: Sequence[str],
    samples: int,
    sampling: SamplingOptions,
    run: Run,
    chat: ChatPrompt | None = None,
) -> list[list[str]]:
    """Return `samples` continuations of each prompt, without the prompt; the same seed gives the same texts.

    Prompts longer than the context allows lose tokens at their start. Texts end by `end_ids`.
    chat: the chat template of the model; None for documents that begin with the prompts. A longer prompt would lose the
    template: StageError `context_too_small`.
    """
    max_prompt_tokens = max(1, lm.max_tokens - sampling.max_new_tokens)
    if chat is not None:
        encoded = chat.ids(lm.tokenizer, prompts)
        if (longest := max(map(len, encoded), default=0)) > max_prompt_tokens:
            message = (
                f"a prompt by the model's chat template has {longest:,} tokens and an answer up to "
                f"{sampling.max_new_tokens:,}; the model's context has {lm.max_tokens:,}"
            )
            raise stage_error(
                "context_too_small", "chat_template", message, "use shorter prompts, or leave the chat template out"
            )
    else:
        encoded = [
            [lm.start_token, *lm.tokenizer.encode(text, add_special_tokens=False)][-max_prompt_tokens:]
            for text in prompts
        ]
    lm.check_ids(encoded, "prompts")
    total = len(prompts) * samples

    def on_step(done: int) -> None:
        run.stop_if_cancelled()
        run.progress(done, total, "samples")

    options = replace(sampling, stop_ids=end_ids(lm.model))
    generated = generate(lm.model, [ids for ids in encoded for _ in range(samples)], options, on_step)
    run.progress(total, total, "samples")
    texts: list[str] = lm.tokenizer.batch_decode(generated, skip_special_tokens=True)
    return [texts[start : start + samples] for start in range(0, total, samples)]
