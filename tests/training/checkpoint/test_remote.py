"""Shards on S3 (moto's real server, behind a proxy that fails): the same training as on those of a disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus.config import RemoteShardsConfig, ShardConfig
from corpus.documents.parts import DocumentWriter, make_document
from corpus.shard import shard
from corpus.tokens.remote import remote_shards
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.processes import wait_until
from tests.support.programs.ranked import pretrain_in_ranks
from tests.support.services import object_store
from tests.support.services.object_store import cut_off, flips_a_bit, stalls, unavailable
from training.config import PretrainConfig
from training.data.node_storage import own_shared_memory
from training.data.packed_shards import PackedShards
from training.data.remote_shards import note_failure, noted_failure
from training.data.shard_index import Split
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
LENGTH = 32
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64},
    "duration": "90 batches",
    "global_batch_tokens": 8 * LENGTH,
    "evaluate_every": "1000 batches",
    "sample_prompts": [],
    "shuffle_block": 16,
}
PLACE = "s3://shards/corpora/names"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """Compressed shards of some kilobytes in about fifty files."""
    folder = tmp_path_factory.mktemp("here")
    with DocumentWriter(folder / "documents") as writer:
        for number in range(1_200):
            writer.write(make_document(f"Sort the list {number} of {number * 7919 % 1000} names.", f"names/{number}"))
    (folder / "shard").mkdir()
    config = ShardConfig(sequence_length=LENGTH, shard_mb=0.001, heldout_share=0.05, compression="zstd", by_source=True)
    run = Run(folder / "work", LaunchConfig(device="cpu", threads=1))
    shard(config, {"documents": folder, "tokenizer": tokenizer_dir}, folder / "shard", run)
    return folder / "shard"


@pytest.fixture
def bucket(s3_port: int, here: Path, proxy: Any) -> Iterator[Any]:
    """A client of the server itself, where the shards lie in a bucket."""
    with object_store.bucket(s3_port, "shards") as client:
        for file in here.rglob("*"):
            if file.is_file():
                client.upload_file(str(file), "shards", f"corpora/names/{file.relative_to(here)}")
        yield client


def _import(folder: Path) -> Path:
    folder.mkdir()
    remote_shards(RemoteShardsConfig(location=PLACE), {}, folder, Run(folder.parent / "import.work"))
    return folder


def _train(folder: Path, shards: Path, tokenizer: Path, launch: dict[str, Any] | None = None, **changed: Any) -> Path:
    (folder / "model").mkdir(parents=True)
    run = Run(folder / "work", LaunchConfig(device="cpu", threads=1, precision="fp32", **(launch or {})))
    config = PretrainConfig.model_validate(SETTINGS | changed)
    pretrain(config, {"shards": shards, "tokenizer": tokenizer}, folder / "model", run)
    return folder / "model"


class _Watched:
    """Looks how much of the training split lies in a folder whenever this process fetches something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from training.data import remote_shards as remote

        self.most, self.most_in_order = 0, 0
        download = remote.download

        def size(name: str) -> int:
            found = 0
            for file in folder.rglob(f"{name}/*.mds*"):
                # Another loader worker may take it away between the listing and the look.
                with suppress(FileNotFoundError):
                    found += file.stat().st_size
            return found

        def measured(*given: Any) -> None:
            download(*given)
            self.most = max(self.most, size("train"))
            self.most_in_order = max(self.most_in_order, size("train-in-order"))

        monkeypatch.setattr(remote, "download", measured)


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_faults_and_a_small_cache_change_nothing_of_the_model(
    mixed: bool,
    here: Path,
    bucket: Any,
    proxy: Any,
    tokenizer_dir: Path,
    tmp_path: Path,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any number of the faults may meet the same request. The risk of the long one: more lies in the cache than may."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "15")
    changed = {"mixture": {"proportion": {"names": 1}}} if mixed else {}
    expected = _train(tmp_path / "here", here, tokenizer_dir, **changed)
    shards = _import(tmp_path / "there")
    assert not list(shards.rglob("*.mds*")), "nothing is fetched before it is read"
    proxy.requests.clear()
    proxy.faults[:] = 2 * [unavailable, lambda proxy: False, cut_off, flips_a_bit, lambda proxy: False, stalls]
    cache = 13 * 1024 / 1e9
    watched = _Watched(monkeypatch, tmp_path / "lean" / "work")
    launch = {"shard_cache_gb": cache, "loader_workers": 2 if mixed else 0}
    found = _train(tmp_path / "lean", shards, tokenizer_dir, launch, **changed)
    assert not proxy.faults
    ours, theirs = weights(found), weights(expected)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    index = json.loads((here / "train" / "index.json").read_text())["shards"]
    whole = sum(one["raw_data"]["bytes"] for one in index)
    assert mixed or 0 < watched.most <= cache * 1e9 < whole / 2, "loader workers fetch by themselves"
    assert 0 < watched.most_in_order <= cache * 1e9, "nor where baselines are counted at the end"
    assert not list((tmp_path / "lean" / "work").rglob("*.mds*")), "and nothing is left"


def _is_fetched_ahead(text: PackedShards) -> bool:
    """Return True if the thread that fetches files waits for the reader, or has fetched all."""
    at = text._iterator
    return at.prepare_index == at.total or at.prepare_index - at.yield_index > text.predownload


def test_what_is_fetched_ahead_pushes_out_no_file_that_is_still_read(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where batches are larger than files, eight of them do not fit into the cache beside what is being read."""
    from training.data import remote_shards as remote

    fetched: list[str] = []
    download = remote.download

    def counted(url: str, *rest: Any) -> None:
        fetched.append(url)
        download(url, *rest)

    monkeypatch.setattr(remote, "download", counted)
    folder = _import(tmp_path / "there") / "train"
    with own_shared_memory(tmp_path):
        text = PackedShards(
            Split.read(folder), tmp_path, 32, 0, shuffle=True, limit_gb=13 * 1024 / 1e9, shuffle_block=16
        )
        for number, _ in enumerate(text):
            if number % 32 == 0:
                # A batch trains for as long as the thread that fetches files ahead takes to be ahead.
                wait_until(lambda: _is_fetched_ahead(text))
    assert len(fetched) == len(set(fetched)) > 20


@pytest.mark.long
def test_two_ranks_share_a_cache_and_train_as_on_shards_of_this_disk(
    here: Path, bucket: Any, proxy: Any, tokenizer_dir: Path, tmp_path: Path, weights: Weights
) -> None:
    """Either fetches into the folder that both read from, and faults meet whichever asks. The risk: one waits for ever
    for a file that the other has pushed out or failed to fetch."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_S3"))}
    ranked: dict[str, Any] = {"environment": kept | {"AWS_MAX_ATTEMPTS": "15"}}
    local, remote = {"shards": here}, {"shards": _import(tmp_path / "there")}
    proxy.requests.clear()
    proxy.faults[:] = [unavailable, cut_off, flips_a_bit, unavailable]
    for name, shards in (("near", local), ("far", remote)):
        launch = {"trainer": "native", "precision": "fp32", "shard_cache_gb": 24 * 1024 / 1e9}
        inputs = {**shards, "tokenizer": tokenizer_dir}
        pretrain_in_ranks(2, {**SETTINGS, "duration": "40 batches"}, inputs, tmp_path / name, launch=launch, **ranked)
    assert not proxy.faults and proxy.requests
    ours, theirs = weights(tmp_path / "far"), weights(tmp_path / "near")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list((tmp_path / "far.work").rglob("*.mds*")), "and nothing is left"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_what_cannot_be_fetched_is_named_with_its_place(
    workers: int, bucket: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = _import(tmp_path / "there")
    index = json.loads((shards / "train" / "index.json").read_text())["shards"]
    name = index[len(index) // 2]["zip_data"]["basename"]
    whole = bucket.get_object(Bucket="shards", Key=f"corpora/names/train/{name}")["Body"].read()
    bucket.put_object(Bucket="shards", Key=f"corpora/names/train/{name}", Body=whole[:-1] + b"?")
    with pytest.raises(StageError) as error:
        _train(tmp_path / "damaged", shards, tokenizer_dir, {"loader_workers": workers})
    assert [(one.code, one.path) for one in error.value.problems] == [("bad_checksum", f"{PLACE}/train/{name}")]
    bucket.delete_object(Bucket="shards", Key=f"corpora/names/train/{name}")
    with pytest.raises(StageError) as error:
        _train(tmp_path / "gone", shards, tokenizer_dir, {"loader_workers": workers})
    assert [one.code for one in error.value.problems] == ["missing_source"]
    with pytest.raises(StageError) as error:
        _import(tmp_path / "again")
    assert [(one.code, one.path) for one in error.value.problems] == [("missing_shards", f"{PLACE}/train/{name}")]


def test_a_cache_that_is_too_small_and_another_tokenizer_are_named(
    bucket: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = _import(tmp_path / "there")
    with pytest.raises(StageError) as error:
        _train(tmp_path / "small", shards, tokenizer_dir, {"shard_cache_gb": 1e-5}, shuffle_block=400)
    assert [one.code for one in error.value.problems] == ["cache_too_small"]
    other = shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 320, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StageError) as error:
        _train(tmp_path / "other", shards, other)
    assert [one.code for one in error.value.problems] == ["other_tokenizer"]


def test_a_local_file_that_cannot_be_unpacked_is_an_error_and_no_early_end_of_the_epoch(
    here: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = shutil.copytree(here, tmp_path / "shards")
    packed = sorted((shards / "train").glob("*.zstd"))[20]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(StageError) as error:
        _train(tmp_path / "trained", shards, tokenizer_dir)
    assert [one.code for one in error.value.problems] == ["bad_shards"]


def test_threads_that_fail_at_once_leave_one_whole_failure(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        for _ in range(100):
            note_failure(tmp_path, ValueError(f"shard {number}"))
            found = noted_failure(tmp_path)
            assert found is not None and "ValueError: shard" in str(found)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fail, range(3)))
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
