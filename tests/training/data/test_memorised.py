"""What a pretraining was trained on is written down exactly, and memorisation is measured on that alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import MDSWriter

from corpus.tokens.trained import FILE, TrainedSequences, split_fingerprint
from evaluation.config import SafetyConfig
from evaluation.safety.stage import safety
from infra.errors import StageError
from infra.run import Run
from training.checkpoint.export import export
from training.config.batch_size import BatchSizeRampup
from training.core.hardware import Hardware
from training.core.train_state import TokenCount
from training.data.node_storage import own_shared_memory
from training.data.packed_batches import packed_loader, trained_sequences
from training.data.packed_shards import PackedShards
from training.data.shard_index import Split
from training.model.documents import Packed
from training.model.models import build, hf_config
from training.objectives.causal import Causal
from training.train_modules.language_model import LanguageModel

SEQUENCES, LENGTH, BATCH = 48, 40, 4
DOCUMENTS = np.array([0, 14, 21], np.uint32)
WINDOW = {"prefix_tokens": 6, "continuation_tokens": 6}


@pytest.fixture(scope="module")
def random_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of random tokens, which nobody tells who has not learnt them by heart; compressed, in small shards."""
    folder = tmp_path_factory.mktemp("random")
    random = np.random.default_rng(7)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}", "starts": "ndarray:uint32"}
    for split in ("train", "validation"):
        out = str(folder / split)
        with MDSWriter(out=out, columns=columns, compression="zstd", size_limit=1000) as writer:
            for _ in range(SEQUENCES):
                tokens = random.integers(5, 300, LENGTH).astype(np.uint16)
                tokens[DOCUMENTS[1:] - 1] = 0
                writer.write({"tokens": tokens, "starts": DOCUMENTS})
    assert len(json.loads((folder / "train/index.json").read_text())["shards"]) > 3
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rampup", [None, BatchSizeRampup(first=2, full=8, over=20, epoch=40)])
def test_what_was_trained_on_follows_from_the_loader_s_order(
    workers: int, rampup: BatchSizeRampup | None, random_shards: Path, tmp_path: Path
) -> None:
    """Against what a training's own loader gives, batch by batch, into the second epoch."""
    batch_size = 8 if rampup else 20
    first = rampup.first if rampup else None

    def batch(packed: Packed) -> dict[str, torch.Tensor]:
        return {"numbers": torch.tensor([number for _, number in packed.draws])}

    with own_shared_memory(tmp_path):
        split, cache = Split.read(random_shards / "train"), tmp_path / "shards"
        read = PackedShards(split, cache, batch_size, 3, shuffle=True, read_at_once=first)
        loader = packed_loader(read, batch_size, batch, lambda _: TokenCount(0, 0), workers=workers, rampup=rampup)
        batches = [found["numbers"].tolist() for _ in range(2) for found in loader.dataloader]
        told = PackedShards(split, cache, batch_size, 3, shuffle=True, read_at_once=first)
        seen: set[int] = set()
        for count, numbers in enumerate(batches, 1):
            seen.update(numbers)
            found = trained_sequences(told, count, batch_size, rampup)
            assert set(np.flatnonzero(found).tolist()) == seen
        without = {number for place, numbers in enumerate(batches[:4]) if place != 2 for number in numbers}
        found = trained_sequences(told, 4, batch_size, rampup, skipped={2})
        assert set(np.flatnonzero(found).tolist()) == without


@pytest.fixture(scope="module")
def overfitted(random_shards: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows by heart the first third of the training split, as a training reads it, and nothing else."""
    folder = tmp_path_factory.mktemp("overfitted")
    batches = SEQUENCES // BATCH // 3
    with own_shared_memory(folder):
        split, cache = Split.read(random_shards / "train"), folder / "shards"
        shards = PackedShards(split, cache, BATCH, 3, shuffle=True)
        objective = Causal(3, within_documents=True)
        loader = iter(packed_loader(shards, BATCH, objective.batch, objective.count).dataloader)
        read = [next(loader) for _ in range(batches)]
        seen = trained_sequences(shards, batches, BATCH)
    whole = {name: torch.cat([one[name] for one in read]) for name in read[0]}
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    network = build(_llama(config, special), seed=1)
    model = LanguageModel(network, Hardware(torch.device("cpu"), bf16=False)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with torch.random.fork_rng():
        for _ in range(150):
            optimizer.zero_grad()
            model.loss(model(whole), whole).backward()
            optimizer.step()
    (folder / "model").mkdir()
    export(network, tokenizer_dir, folder / "model")
    TrainedSequences(shards.fingerprint, seen).write(folder / "model")
    return folder / "model"


def _llama(sizes: dict[str, Any], special: dict[str, int]) -> Any:
    from training.config import ModelConfig

    shape = {**sizes, "num_attention_heads": 2, "max_position_embeddings": 128}
    return hf_config(ModelConfig(transformers=shape), 320, special)


def _memorised(model: Path, shards: Path, folder: Path) -> dict[str, Any]:
    section = {"toxicity": None, "bias": None, "memorisation": {"sequences": 16, **WINDOW}}
    folder.mkdir()
    safety(SafetyConfig.model_validate(section), {"model": model, "shards": shards}, folder, Run(folder / "work"))
    assert not list((folder / "work").glob("*.mds")), "what was unpacked is gone"
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["memorisation"]
    return found


def test_text_that_was_trained_on_is_found_and_no_other(overfitted: Path, random_shards: Path, tmp_path: Path) -> None:
    found = _memorised(overfitted, random_shards, tmp_path / "seen")
    assert (found["trained_sequences"], found["training_sequences"]) == (SEQUENCES // 3, SEQUENCES)
    assert found["train"]["sequences"] == 16 and found["train"]["exact_match"]["value"] >= 0.9
    assert found["validation"]["exact_match"]["value"] <= 0.1

    def as_if(name: str, seen: np.ndarray) -> float:
        model = tmp_path / name
        model.mkdir()
        for file in overfitted.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        TrainedSequences(split_fingerprint(random_shards / "train"), seen).write(model)
        return float(_memorised(model, random_shards, tmp_path / f"{name}.out")["train"]["exact_match"]["value"])

    known = TrainedSequences.read(overfitted)
    assert known is not None
    assert as_if("unseen", ~known.seen) <= 0.1
    assert 0.1 < as_if("all", np.ones(SEQUENCES, bool)) < 0.6, "the whole split, as it was: about a third"


def test_a_model_made_from_another_keeps_what_that_was_trained_on(
    overfitted: Path, base_dir: Path, tmp_path: Path
) -> None:
    from training.model.models import load

    export(load(base_dir), overfitted, tmp_path)
    ours, theirs = TrainedSequences.read(tmp_path), TrainedSequences.read(overfitted)
    assert ours is not None and theirs is not None
    assert ours.shards == theirs.shards and ours.seen.tolist() == theirs.seen.tolist()


def test_shards_that_the_model_was_not_trained_on_are_not_measured(
    overfitted: Path, random_shards: Path, shards_dir: Path, base_dir: Path, tmp_path: Path
) -> None:
    assert "other shards" in _memorised(overfitted, shards_dir, tmp_path / "other")["skipped"]
    assert "does not say" in _memorised(base_dir, random_shards, tmp_path / "unknown")["skipped"]


def test_a_damaged_record_is_named(overfitted: Path, random_shards: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"shards": "x", "sequences": 9, "seen": "?"}')
    with pytest.raises(StageError, match=FILE):
        TrainedSequences.read(tmp_path)


def test_no_window_reaches_into_another_document() -> None:
    from evaluation.safety.packed_documents import windows

    random = np.random.default_rng(2)
    for _ in range(300):
        total, length = int(random.integers(1, 60)), int(random.integers(1, 20))
        starts = np.unique([0, *random.integers(0, total, random.integers(0, 6))])
        # As training sees documents: each begins with the token before its first.
        begins = np.zeros(total, int)
        begins[[start - 1 for start in starts if start > 1]] = 1
        documents = begins.cumsum()
        expected = [
            at
            for at in range(total - length + 1)
            if (at == 0 or documents[at - 1] != documents[at]) and len(set(documents[at : at + length])) == 1
        ]
        assert windows(starts, total, length).tolist() == expected
