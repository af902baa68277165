"""Damaged shards are named with the file and what is wrong with it before anything is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.elsewhere import run_module
from training.config import PretrainConfig
from training.pretrain import pretrain


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def shard_of(folder: Path) -> Path:
    return next((folder / "train").glob("*.mds"))


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def overwrite_ends(path: Path, content: bytes) -> None:
    """Overwrite the end of each sequence: an MDS file opens with their number and where each begins and the last
    ends."""
    count = int(np.fromfile(path, np.uint32, 1)[0])
    for end in np.fromfile(path, np.uint32, count + 2)[2:].tolist():
        overwrite(path, end - len(content), content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut index": (lambda f: (f / "train/index.json").write_text('{"shards": [{"samp'), r"train/index\.json: not JSON"),
    "empty index": (lambda f: (f / "train/index.json").write_text(""), "not JSON"),
    "index of bytes": (lambda f: (f / "train/index.json").write_bytes(b"\xff\xfe\x00\x01"), "not JSON"),
    "index that is a list": (lambda f: edit(f / "train/index.json", lambda i: [i]), "expected an object"),
    "index without shards": (lambda f: edit(f / "train/index.json", lambda i: {"version": 2}), "expected `shards`"),
    "entry without samples": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0].pop("samples") and None),
        r"shards\.0: expected `samples`",
    ),
    "entry without a file": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0].update(raw_data=None)),
        "expected `raw_data`",
    ),
    "entry of a file elsewhere": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0]["raw_data"].update(basename="../x.mds")),
        "expected `basename`",
    ),
    "missing shard": (lambda f: shard_of(f).unlink(), r"shard\.00000\.mds: index\.json names this file"),
    "cut shard": (lambda f: shard_of(f).write_bytes(shard_of(f).read_bytes()[:-9]), "expected the .* bytes"),
    "shard of zeros": (
        lambda f: shard_of(f).write_bytes(bytes(shard_of(f).stat().st_size)),
        "its header is not that of the file",
    ),
    "shard with a damaged header": (lambda f: overwrite(shard_of(f), 8, b"\xff\xff\xff\xff"), "its header is damaged"),
    "another format": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0].update(format="csv")),
        r"shards\.0: expected `format` mds",
    ),
    "entry of fewer columns": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0].update(column_encodings=["ndarray"])),
        "expected `column_encodings`, a list with an entry for each",
    ),
    "column that is code": (
        lambda f: edit(f / "train/index.json", lambda i: i["shards"][0]["column_encodings"].__setitem__(0, "pkl")),
        "expected columns of arrays in `column_encodings`, found pkl",
    ),
    "damaged sequences": (
        lambda f: overwrite(shard_of(f), 4_000, b"\xff" * 6_000),
        r"shards/train: sequence [\d,]+ cannot be read",
    ),
    "tokens that the vocabulary lacks": (
        lambda f: overwrite_ends(shard_of(f), b"\xff\x7f"),
        r"sequence [\d,]+ cannot be read",
    ),
    "cut meta": (lambda f: (f / "meta.json").write_text('{"vocab'), r"meta\.json: not JSON"),
    "meta without a length": (
        lambda f: edit(f / "meta.json", lambda i: i.pop("sequence_length") and None),
        "expected `sequence_length`",
    ),
    "validation": (
        lambda f: (f / "validation/index.json").write_text("[]"),
        r"validation/index\.json: expected an object",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, shards_dir: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(shards_dir, folder)
    harm, message = DAMAGES[damage]
    harm(folder)
    config = PretrainConfig.model_validate(
        {
            "model": {"family": "llama", "layers": 1, "width": 16, "heads": 2, "positions": 64},
            "duration": "2 batches",
            "global_batch_tokens": 256,
        }
    )
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
    with pytest.raises(StageError, match=message) as named:
        pretrain(config, {"shards": folder, "tokenizer": tokenizer_dir}, tmp_path / "out", run)
    assert named.value.problems[0].code == "bad_shards" and named.value.problems[0].fix


def test_the_program_names_damage_in_one_line(shards_dir: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(shards_dir, tmp_path / "shards")
    (tmp_path / "shards/train/index.json").write_text('{"shards": [{"samp')
    (tmp_path / "pretrain.yaml").write_text(
        "model: {family: llama, layers: 1, width: 16, heads: 2, positions: 64}\n"
        "duration: 2 batches\nglobal_batch_tokens: 256\n"
    )
    inputs = [f"shards={tmp_path / 'shards'}", f"tokenizer={tokenizer_dir}"]
    words = ["training.pretrain", "--config", tmp_path / "pretrain.yaml", "--out", tmp_path / "out"]
    done = run_module([*words, "--input", inputs[0], "--input", inputs[1], "--launch", "device=cpu"], ["infra.alone"])
    assert done.returncode == 1
    assert "train/index.json: not JSON" in done.stderr and "Traceback" not in done.stderr
