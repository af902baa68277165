"""`launch.checkpoint_remote` through the command: a machine is lost while it trains, and another one goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.pipelines import data_config
from tests.support.programs.command import finish, start, stemma, write_config
from tests.support.programs.processes import gone, running_stage, wait_until
from tests.support.services.object_store import bucket as make_bucket
from tests.support.services.object_store import cut_off, unavailable


@pytest.fixture
def bucket(s3_port: int, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "6")
    with make_bucket(s3_port, "saved") as client:
        yield client


def _config(folder: Path, remote: str | None) -> Path:
    return write_config(
        folder / "config.yaml",
        {
            **data_config(folder),
            "shard": {"sequence_length": 64},
            "pretrain": {
                "model": {"preset": "llama-nano"},
                "duration": "300 batches",
                "global_batch_tokens": 512,
                "checkpoint_every": "10 batches",
                "evaluate_every": "1000 batches",
                "sample_prompts": [],
            },
            "launch": {"device": "cpu", "threads": 1, "precision": "fp32", "checkpoint_remote": remote},
        },
    )


@pytest.mark.long
def test_a_training_whose_machine_is_lost_goes_on_elsewhere_to_the_same_model(
    env: dict[str, str], data_pipeline: Path, bucket: Any, proxy: Any
) -> None:
    """The risk: the command names another place for the next machine, or leaves what it uploaded behind."""
    other = shutil.copytree(data_pipeline / "store", data_pipeline / "other")
    third = shutil.copytree(data_pipeline / "store", data_pipeline / "third")
    environment = {
        **env,
        **{name: value for name, value in os.environ.items() if name.startswith(("AWS_", "STEMMA_S3"))},
    }

    def keys() -> list[str]:
        return [row["Key"] for row in bucket.list_objects_v2(Bucket="saved").get("Contents", [])]

    wrong = stemma("run", _config(data_pipeline, "s3://nobody/lab"), "--root", third, env=environment)
    assert wrong.code == 2
    assert [(one["code"], one["path"]) for one in wrong.document["errors"]] == [
        ("missing_source", "launch.checkpoint_remote")
    ]
    undisturbed = stemma("run", _config(data_pipeline, None), "--root", third, env=env)
    assert undisturbed.code == 0, undisturbed.document["errors"]

    config, store = _config(data_pipeline, "s3://saved/lab"), data_pipeline / "store"
    passes = [lambda proxy: False]
    # Looks whether the place can be written to, and the weights before the first batch; then the first checkpoint.
    proxy.faults[:] = [*8 * passes, unavailable, *passes, cut_off]
    lost = start("run", config, "--root", store, env=environment)
    wait_until(lambda: [key for key in keys() if "/checkpoints/" in key and key.endswith("manifest.json")])
    child = running_stage(store, "pretrain")
    assert isinstance(child, psutil.Process)
    lost.kill()
    lost.communicate()
    wait_until(lambda: gone(child), timeout_s=60)
    shutil.rmtree(store)

    found = finish(start("run", config, "--root", other, env=environment))
    assert found.code == 0, found.document["errors"]
    assert "continuing pretrain at batch" in found.stderr
    assert found.rows()["pretrain"]["digest"] == undisturbed.rows()["pretrain"]["digest"]
    assert keys() == [], "nothing of it stays"
