"""Checkpoints uploaded behind training to a real S3 server that fails: what is lost with a machine is fetched again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled, StageError
from infra.io import s3
from infra.io.s3_write import remove_below, upload
from infra.launch.config import LaunchConfig
from infra.run import Run, open_journal, read_journal
from tests.support.programs.processes import wait_until
from tests.support.programs.ranked import pretrain_in_ranks, training_process
from tests.support.services.object_store import bucket as make_bucket
from tests.support.services.object_store import cut_off, knows_no_upload, loses_the_answer, refused, silent, unavailable
from training import pretrain as pretrain_module
from training.config import PretrainConfig
from training.core.callbacks import Callback
from training.core.train_state import TrainState
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
PLACE = "s3://saved/lab/pretrain/0123"
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 1, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": "30 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
    "checkpoint_every": "5 batches",
    "sample_prompts": [],
}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


@pytest.fixture
def bucket(s3_port: int, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "6")
    with make_bucket(s3_port, "saved") as client:
        yield client


def _keys(client: Any) -> list[str]:
    return [row["Key"] for row in client.list_objects_v2(Bucket="saved").get("Contents", [])]


def _complete(client: Any) -> list[int]:
    """The batches of complete checkpoints on the server, but for that from before the first."""
    manifests = [key for key in _keys(client) if "/checkpoints/" in key and key.endswith("/manifest.json")]
    return sorted(int(key.split("/ba")[1].split(".")[0]) for key in manifests)


def _train(out: Path, inputs: dict[str, Path], journal: Any = None, place: str = "", **changes: Any) -> Path:
    out.mkdir(exist_ok=True, parents=True)
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32", grace_s=10)
    run = Run(out.parent / f"{out.name}.work", launch, journal=journal, checkpoint_place=place)
    pretrain(PretrainConfig.model_validate(SETTINGS | changes), inputs, out, run)
    return out


class Waits(Run):
    """Waits after checkpoints until what is to be uploaded is there, or was given up, and is killed at batch 18."""

    def metrics(self, values: Any, step: int | None = None) -> None:
        super().metrics(values, step)
        if step is not None and step % 5 == 2 and step < 18:
            wait_until(lambda: not list((self.work_dir / "upload").glob("*.ba*")))
        if step == 18:
            os.kill(os.getpid(), signal.SIGKILL)


def _train_and_die(out: Path, inputs: dict[str, Path], environment: dict[str, str]) -> None:
    """The forked process."""
    os.environ |= environment
    s3.FIRST_PAUSE_S = 0.01
    out.mkdir(parents=True)
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    with open_journal(out.parent / "journal.jsonl") as journal:
        run = Waits(out.parent / f"{out.name}.work", launch, journal=journal, checkpoint_place=PLACE)
        pretrain(PretrainConfig.model_validate(SETTINGS), inputs, out, run)


def test_a_machine_that_is_lost_takes_no_complete_checkpoint_along(
    inputs: dict[str, Path],
    bucket: Any,
    proxy: Any,
    tmp_path: Path,
    journal: Any,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEMMA_S3_READ_TIMEOUT_S", "5")  # of which the silent server takes all
    expected = weights(_train(tmp_path / "unbroken", inputs))
    passes = [lambda proxy: False]
    looks = [unavailable, *2 * passes]  # whether the place can be written to
    proxy.faults[:] = [*looks, cut_off, *passes, silent, *passes, unavailable, *passes, cut_off]
    proxy.latency_s = 0.01
    proxy.tears = "ba000000015"
    lost = tmp_path / "lost" / "model"
    given = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_S3"))}
    process = training_process(_train_and_die, lost, inputs, given)
    try:
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
    assert not proxy.faults
    told = [line["name"] for line in read_journal(lost.parent / "journal.jsonl") if line["kind"] == "event"]
    assert told == ["uploaded", "upload_failed"], "every try was cut, and training went on"
    assert _complete(bucket) == [5, 10], "two are kept, and the third is incomplete"
    assert any("ba000000015" in key for key in _keys(bucket))
    shutil.rmtree(lost.parent)

    proxy.tears = "nothing"
    left = {key: bucket.get_object(Bucket="saved", Key=key)["Body"].read() for key in _keys(bucket)}
    found = _train(tmp_path / "replaced" / "model", inputs, journal, PLACE)
    said = journal.events()
    assert "passing over the uploaded checkpoint of batch 15: its upload was not completed" in said
    assert "continuing pretrain at batch 10 of 30" in said
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(found).items())
    assert _complete(bucket)[-1] == 30
    folders = {key.rpartition("/")[0] for key in _keys(bucket) if "/ba" in key}
    assert folders == {key.rpartition("/")[0] for key in _keys(bucket) if key.endswith("/manifest.json")}

    # A bit of the newest is flipped on the server.
    for key in _keys(bucket):
        bucket.delete_object(Bucket="saved", Key=key)
    for key, body in left.items():
        is_newest = "ba000000010" in key and key.endswith("rank0.safetensors")
        bucket.put_object(Bucket="saved", Key=key, Body=body[:-1] + bytes([body[-1] ^ is_newest]))
    journal.lines.clear()
    found = _train(tmp_path / "again" / "model", inputs, journal, PLACE)
    said = journal.events()
    assert any("passing over the uploaded checkpoint of batch 10: expected xxh3_128" in one for one in said)
    assert "continuing pretrain at batch 5 of 30" in said
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(found).items())


class Poison(Callback):
    """Gives some batches tokens without sense, as a broken file would."""

    def after_dataloader(self, state: TrainState) -> None:
        if state.clock.batch in range(41, 53):
            draw = torch.Generator().manual_seed(state.clock.batch)
            ids = torch.randint(0, 300, state.batch["input_ids"].shape, generator=draw)
            labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
            state.batch = {**state.batch, "input_ids": ids, "labels": labels}


class Stops:
    """A run's `is_cancelled` that says yes at a batch, after so many corrections."""

    def __init__(self, journal: Any, at: int, corrections: int) -> None:
        self._journal, self._at, self._corrections = journal, at, corrections

    def __call__(self) -> bool:
        made = [line for line in self._journal.lines if line.get("name") == "correction"]
        steps = [line["step"] for line in self._journal.lines if line["kind"] == "metric"]
        return len(made) == self._corrections and bool(steps) and steps[-1] >= self._at


@pytest.mark.parametrize(("at", "corrected"), [(33, False), pytest.param(70, True, marks=pytest.mark.long)])
def test_what_the_guard_corrected_or_will_correct_survives_the_machine(
    at: int,
    corrected: bool,
    inputs: dict[str, Path],
    bucket: Any,
    tmp_path: Path,
    journal: Any,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost before the spike, from where the guard goes back to before all that this machine fetched, and after it. The
    risk of the longer proof: the next machine does not know what was corrected, and goes on with other batches."""
    fit = pretrain_module.fit

    def faulty(*given: Any, **named: Any) -> Any:
        *others, callbacks = given
        return fit(*others, [Poison(), *callbacks], **named)

    monkeypatch.setattr(pretrain_module, "fit", faulty)
    changes: dict[str, Any] = {
        "duration": "80 batches",
        "checkpoint_every": "1000 batches",
        "schedule": {"warmup": "5 batches"},
        "guard": {"rollback_every": 10, "healthy_after": 15, "window_least": 10},
    }
    changes["model"] = {**SETTINGS["model"], "dropout": 0.0}
    unbroken = _train(tmp_path / "unbroken", inputs, **changes)
    made = json.loads((unbroken / "aux" / "corrections.json").read_text())
    assert made[0]["back_to"] < 33
    (tmp_path / "lost").mkdir()
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    stops = Stops(journal, at, len(made) if corrected else 0)
    run = Run(tmp_path / "lost.work", launch, journal=journal, is_cancelled=stops, checkpoint_place=PLACE)
    with pytest.raises(Cancelled):
        pretrain(PretrainConfig.model_validate(SETTINGS | changes), inputs, tmp_path / "lost", run)
    assert _complete(bucket) == [at], "the one of the moment is uploaded before the process ends"
    shutil.rmtree(tmp_path / "lost.work")
    journal.lines.clear()
    found = _train(tmp_path / "replaced", inputs, journal, PLACE, **changes)
    assert f"continuing pretrain at batch {at} of 80" in journal.events()
    assert json.loads((found / "aux" / "corrections.json").read_text()) == made
    ours, theirs = weights(found), weights(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_rank_uploads_its_own_part_and_another_number_goes_on(
    inputs: dict[str, Path], bucket: Any, proxy: Any, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_S3"))}
    ranked: dict[str, Any] = {"environment": environment, "launch": {"sharding": "fsdp", "trainer": "native"}}
    whole = pretrain_in_ranks(
        2, {**SETTINGS, "duration": "10 batches"}, inputs, tmp_path / "lost", checkpoint_place=PLACE, **ranked
    )
    assert [line["message"] for line in whole if line.get("name") == "upload_failed"] == []
    assert 10 in _complete(bucket)
    parts = {key.rsplit("/", 1)[1] for key in _keys(bucket) if "/checkpoints/ba000000010." in key}
    assert parts == {
        "rank0.json",
        "rank0.safetensors",
        "rank1.json",
        "rank1.safetensors",
        "state.json",
        "manifest.json",
    }
    shutil.rmtree(tmp_path / "lost.work")
    told = pretrain_in_ranks(
        2, {**SETTINGS, "duration": "10 batches"}, inputs, tmp_path / "found", checkpoint_place=PLACE, **ranked
    )
    assert [line["step"] for line in told if line["kind"] == "metric"] == [], "nothing is left to train"


def test_what_cannot_be_is_said_at_the_start(
    inputs: dict[str, Path], bucket: Any, proxy: Any, tmp_path: Path, journal: Any
) -> None:
    with pytest.raises(StageError, match="no such bucket: s3://nobody/lab"):
        _train(tmp_path / "wrong", inputs, journal, "s3://nobody/lab")
    proxy.faults[:] = [refused]
    with pytest.raises(StageError) as error:
        _train(tmp_path / "refused", inputs, journal, PLACE)
    assert [(one.code, one.path) for one in error.value.problems] == [("s3_refused", f"{PLACE}/write-probe")]
    assert journal.metric("train/loss") == []
    # One that does not answer is tried again later, unless this machine can go on by itself.
    proxy.faults[:] = [unavailable] * 6
    with pytest.raises(StageError) as error:
        _train(tmp_path / "away", inputs, journal, PLACE)
    assert [one.code for one in error.value.problems] == ["source_unreachable"]


def test_a_large_file_goes_up_in_parts_that_are_tried_again_and_nothing_is_left_of_one_that_fails(
    bucket: Any, proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(12 << 20))
    monkeypatch.setattr("infra.io.s3_write.PART_BYTES", 5 << 20)  # the smallest that S3 takes
    proxy.faults[:] = [unavailable, lambda proxy: False, cut_off, unavailable]
    upload(source, "s3://saved/large")
    assert not proxy.faults
    assert bucket.get_object(Bucket="saved", Key="large")["Body"].read() == source.read_bytes()
    # Done, and the answer lost: the upload is known no longer when it is asked for again.
    proxy.faults[:] = [*4 * [lambda proxy: False], loses_the_answer, knows_no_upload]
    upload(source, "s3://saved/large")
    assert not proxy.faults
    proxy.faults[:] = [*2 * [lambda proxy: False], *6 * [cut_off]]
    with pytest.raises(StageError, match="the server failed 6 times"):
        upload(source, "s3://saved/other")
    assert not bucket.list_multipart_uploads(Bucket="saved").get("Uploads")
    bucket.create_multipart_upload(Bucket="saved", Key="lab/begun")
    remove_below("s3://saved/lab")
    assert not bucket.list_multipart_uploads(Bucket="saved").get("Uploads")
    assert _keys(bucket) == ["large"]
