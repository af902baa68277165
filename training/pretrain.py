"""Pretrains a decoder-only model on packed shards.

python -m training.pretrain --config pretrain.yaml --input shards=DIR --input tokenizer=DIR --out DIR
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from infra.errors import StageError, stage_error
from infra.run import Result, Run
from training.adapter import Plan, fit
from training.config import PretrainConfig, batches
from training.evaluate import Validation, sequence_losses
from training.export import export
from training.hardware import prepare
from training.loaders import PackedShards, count_sequences, packed_loader, read_tokens
from training.models import LanguageModel, build, choose_attention, flops_per_token, hf_config
from training.ngram import Bigram, Unigram
from training.shared_memory import own_shared_memory
from training.statistics import bootstrap_ratio, perplexity


def pretrain(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Trains on `shards/train`, measures on `shards/validation`, exports a Hugging Face folder.

    Figures: validation_loss (nats a token, with its bootstrap interval over sequences), bits_per_byte, perplexity,
    unigram_loss and bigram_loss of the same tokens, tokens, batches, tokens_per_s, parameters, mfu where the device's
    peak is known. Raises StageError where batch, positions or vocabulary do not fit the shards.
    """
    shards, tokenizer_dir = inputs["shards"], inputs["tokenizer"]
    meta = _meta(shards)
    length, vocab_size = int(meta["sequence_length"]), int(meta["vocab_size"])
    if problems := config.problems(length, vocab_size):
        raise StageError(*problems)
    batch_size = config.global_batch_tokens // length
    train_sequences = count_sequences(shards / "train")
    if train_sequences < batch_size:
        raise stage_error(
            "too_few_sequences",
            "pretrain.global_batch_tokens",
            f"expected at least one batch of {batch_size} sequences, the training split has {train_sequences}",
            "lower global_batch_tokens or give more text",
        )
    hardware = prepare(run.launch)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    network = build(hf_config(config.model, vocab_size, special), config.seed)
    choose_attention(network, hardware, length)
    model = LanguageModel(network, hardware)
    epoch_batches = train_sequences // batch_size
    scale = {"batch_tokens": config.global_batch_tokens, "epoch_batches": epoch_batches}
    plan = Plan(batches(config.duration, **scale), batch_size, config.global_batch_tokens, epoch_batches)
    flops = flops_per_token(network, length)

    with own_shared_memory(run.work_dir):
        cache = run.work_dir / "shards"
        validation = read_tokens(shards / "validation", cache)
        watched = validation[: max(1, config.evaluate_tokens // length)]
        train = PackedShards(shards / "train", cache, batch_size, config.seed, shuffle=True)
        done = fit(
            "pretrain",
            model,
            packed_loader(train, batch_size),
            plan,
            config,
            hardware,
            run,
            [Validation(model, watched, batches(config.evaluate_every, **scale), run)],
        )
        counted = read_tokens(shards / "train", cache)

    losses = sequence_losses(model, validation, run)
    loss = bootstrap_ratio(losses, [length - 1] * len(losses), config.seed)
    unigram, bigram = (model_of(counted, vocab_size).loss(validation) for model_of in (Unigram, Bigram))
    bytes_per_token = float(meta["validation_bytes"]) / float(meta["validation_tokens"])
    figures = {
        **loss.as_figures("validation_loss"),
        "validation_perplexity": perplexity(loss.value),
        "bits_per_byte": loss.value / math.log(2) / bytes_per_token,
        "unigram_loss": unigram,
        "bigram_loss": bigram,
        "parameters": float(sum(weight.numel() for weight in network.parameters())),
        "batches": float(done.batches),
        "tokens": float(done.tokens),
        "tokens_per_s": done.tokens_per_s,
        "tflops": done.tokens_per_s * flops / 1e12,
    }
    if hardware.peak_flops is not None:
        figures["mfu"] = done.tokens_per_s * flops / hardware.peak_flops
    run.metrics({"validation/loss": loss.value}, done.batches)
    export(network, tokenizer_dir, out_dir)
    return Result(figures, f"validation loss {loss.value:.3f} (bigram {bigram:.3f}, unigram {unigram:.3f})")


def _meta(shards: Path) -> dict[str, Any]:
    path = shards / "meta.json"
    if not path.exists():
        raise stage_error(
            "no_shards", str(shards), "expected the shard stage's folder with meta.json", "run the shard stage"
        )
    meta: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    return meta


if __name__ == "__main__":
    from infra.alone import main

    main(pretrain, PretrainConfig)
