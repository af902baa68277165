"""How finished work becomes an artifact, and what happens to the one that was there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from infra.errors import StageError
from infra.store.ancestry import locate
from infra.store.manifest import Manifest, SourceRecord
from infra.store.reference import require_whole
from infra.store.store import Store
from tests.support.artifacts import Make


def test_a_finished_artifact_is_found_and_whole(store: Store, make: Make) -> None:
    made = make("clean", {"documents/a": "text", "aux/log": "said"})
    assert store.find("clean", made.fingerprint) == made
    assert store.differences(store.path(made), made, read_all=True) == []
    assert not list((store.root / ".work" / "clean").rglob("artifact"))


def test_the_digest_is_that_of_the_payload_alone(make: Make) -> None:
    one = make("clean", {"a": "text", "aux/log": "one"}, config={"x": 1})
    other = make("clean", {"a": "text", "aux/log": "another"}, config={"x": 2})
    assert one.digest == other.digest
    assert one.digest != make("clean", {"a": "texts", "aux/log": "one"}, config={"x": 3}).digest


def test_the_same_bytes_again_keep_the_folder_that_is_there(store: Store, make: Make) -> None:
    first = make("clean", {"a": "text", "aux/log": "first"})
    kept = store.path(first).stat().st_ino
    again = make("clean", {"a": "text", "aux/log": "second"})
    assert again == first
    assert store.path(first).stat().st_ino == kept
    assert (store.path(first) / "aux" / "log").read_text() == "first"


def test_whoever_may_read_the_store_may_read_weights(store: Store) -> None:
    """safetensors leaves its files to their owner alone: another user's `check` took every model for damaged."""
    folder = store.layout.work("sft", "0" * 16) / "artifact"
    folder.mkdir(parents=True)
    before = os.umask(0o027)
    try:
        save_file({"weight": np.zeros(2)}, folder / "model.safetensors")
        (folder / "run.sh").touch(0o700)
        store.describe_files(folder)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"model.safetensors": 0o640, "run.sh": 0o740}


def test_other_bytes_retire_the_old_artifact_and_lineage_still_finds_it(store: Store, make: Make) -> None:
    old = make("clean", {"a": "text"})
    model = make("pretrain", {"w": "1"}, inputs={"data": old})
    new = make("clean", {"a": "other"})
    assert (new.fingerprint, new.digest != old.digest) == (old.fingerprint, True)
    assert store.find("clean", old.fingerprint) == new
    retired = store.root / "clean" / f"{old.fingerprint}.{old.digest[:8]}"
    assert locate(store, model.inputs["data"]) == (retired, old)
    assert store.differences(retired, old, read_all=True) == []


def test_the_same_bytes_mend_a_damaged_artifact(store: Store, make: Make) -> None:
    made = make("clean", {"a": "text"})
    (store.path(made) / "a").write_text("flip")
    assert [item.what for item in store.differences(store.path(made), made)] == ["changed"]
    make("clean", {"a": "text"})
    assert (store.path(made) / "a").read_text() == "text"
    assert [folder.name for folder in store.layout.artifacts("clean")] == [made.fingerprint]


@pytest.mark.parametrize(
    "left", ["", "{", '{"schema": 99}', "[]", '{"schema": 1, "inputs": 3}', "[" * 100_000, "\udcff"]
)
def test_a_folder_without_a_readable_manifest_is_no_artifact(store: Store, make: Make, left: str) -> None:
    made = make("clean", {"a": "text"})
    manifest = store.path(made) / "manifest.json"
    manifest.unlink()
    if left:
        manifest.write_bytes(os.fsencode(left))
    assert store.find("clean", made.fingerprint) is None
    assert list(store.manifests()) == []


WRONG = [None, 7, "text", [], ["text"], {}, {"text": None}, True]


def test_a_manifest_with_values_of_a_wrong_kind_is_damaged_and_never_a_crash(store: Store, make: Make) -> None:
    made = make(
        "clean",
        {"a": "text"},
        sources=(SourceRecord("s", "0" * 64, {"/a": "0" * 64}),),
        inputs={"x": make("ingest", {"b": "c"})},
    )
    path = store.path(made) / "manifest.json"
    right = json.loads(path.read_text())
    for key in right:
        for wrong in WRONG:
            path.write_text(json.dumps({**right, key: wrong}))
            found = store.find("clean", made.fingerprint)
            assert found is None or found == made or store.differences(store.path(made), found) or key in UNCHECKED
            assert list(store.manifests("clean")) == ([(store.path(made), found)] if found else [])


def test_a_manifest_of_an_earlier_version_is_read(store: Store, make: Make) -> None:
    """It called `gates` what an artifact requires, and named no step."""
    made = make("clean", {"a": "text"}, requires={"verdict": make("validate", {"b": "yes"})})
    path = store.path(made) / "manifest.json"
    told = json.loads(path.read_text())
    del told["step"]
    path.write_text(json.dumps({"gates": told.pop("requires"), **told}))
    assert store.find("clean", made.fingerprint) == made
    assert made.requires["verdict"].stage == "validate"


UNCHECKED = {
    "config",
    "requires",
    "makes",
    "package",
    "step",
    "result",
    "code",
    "versions",
    "bookkeeping_s",
    "build_id",
    "pipeline",
    "run_id",
    "lock_hash",
    "host",
    "device",
    "mlflow_run_id",
    "flow_run_id",
    "started",
    "finished",
    "seconds",
    "order",
}
"""What a manifest only records: another right value is no contradiction."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("result", {"figures": {"loss": "low"}}),
        ("result", {"figures": None}),
        ("files", [{"path": "../../a", "size": 1, "sha256": "0"}]),
        ("files", [{"path": "/etc/passwd", "size": 1, "sha256": "0"}]),
        ("files", [{"path": "a", "size": "1", "sha256": "0"}]),
        ("inputs", {"x": {"stage": "ingest"}}),
    ],
)
def test_what_stands_in_a_manifest_is_looked_at(store: Store, make: Make, key: str, value: Any) -> None:
    made = make("clean", {"a": "text"})
    path = store.path(made) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert store.find("clean", made.fingerprint) is None


@pytest.mark.parametrize("key", ["digest", "version", "identity", "stage"])
def test_a_manifest_that_disagrees_with_itself_is_damage(store: Store, make: Make, key: str) -> None:
    made = make("clean", {"a": "text"})
    path = store.path(made) / "manifest.json"
    edited = {"digest": "0" * 64, "version": 9, "identity": {"x": float("nan")}, "stage": "ingest"}
    path.write_text(json.dumps({**json.loads(path.read_text()), key: edited[key]}))
    found = store.read(store.path(made))
    assert found is not None
    assert [item.path for item in store.differences(store.path(made), found)] == [path]


def test_a_crash_before_the_rename_leaves_no_artifact(store: Store, tmp_path: Path, make: Make) -> None:
    made = make("clean", {"a": "text"})
    unfinished = store.layout.work("shard", "0" * 16) / "artifact"
    unfinished.mkdir(parents=True)
    made.write(unfinished)
    assert [manifest.stage for _, manifest in store.manifests()] == ["clean"]


def test_every_kind_of_damage_is_named(store: Store, make: Make) -> None:
    made = make("clean", {"a": "one", "b": "two", "c": "three"})
    folder = store.path(made)
    (folder / "a").unlink()
    (folder / "b").write_text("owt")
    found = [(item.path.name, item.what) for item in store.differences(folder, made)]
    assert found == [("a", "missing"), ("b", "changed")]


def test_a_file_put_beside_is_known_and_moves_no_digest(store: Store, make: Make, tmp_path: Path) -> None:
    made = make("rlhf", {"w": "1", "aux/log": "said"})
    card = tmp_path / "CARD.md"
    for text in ("a card", "another"):
        card.write_text(text)
        store.put_beside(made, card, "CARD.md")
        found = store.find("rlhf", made.fingerprint)
        assert found and found.digest == made.digest
        assert {file.path: file.size for file in found.files}["aux/CARD.md"] == len(text)
        assert store.verify(store.path(found), found) == []
    (store.path(made) / "aux" / "CARD.md").write_text("changed")
    assert [item.what for item in store.verify(store.path(found), found)] == ["changed"]


@pytest.mark.parametrize("rewrites", [0, 1])
def test_a_kill_while_a_file_is_put_beside_leaves_a_whole_artifact(
    store: Store, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrites: int
) -> None:
    """It dies at the first or second writing of the manifest; the next time mends what verify tells of."""
    made = make("rlhf", {"w": "1"})
    card = tmp_path / "CARD.md"
    card.write_text("a card")
    store.put_beside(made, card, "CARD.md")
    card.write_text("another")
    write, left = Manifest.rewrite, [rewrites]

    def killed(manifest: Manifest, folder: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(manifest, folder)

    monkeypatch.setattr(Manifest, "rewrite", killed)
    with pytest.raises(KeyboardInterrupt):
        store.put_beside(made, card, "CARD.md")
    monkeypatch.setattr(Manifest, "rewrite", write)
    found = store.find("rlhf", made.fingerprint)
    assert found and store.differences(store.path(found), found, read_all=True) == []
    told = [(item.path.name, item.what) for item in store.verify(store.path(found), found)]
    assert told == ([("CARD.md", "in no manifest")] if rewrites else [])
    store.put_beside(made, card, "CARD.md")
    mended = store.find("rlhf", made.fingerprint)
    assert mended and store.verify(store.path(mended), mended) == []
    assert (store.path(made) / "aux" / "CARD.md").read_text() == "another"


KILLED_AT_THE_RENAME = """
import os, signal, sys
from pathlib import Path
from infra.store.manifest import Manifest
folder = Path(sys.argv[1])
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Manifest.read(folder).rewrite(folder)
"""


def test_what_a_kill_left_of_a_manifest_is_no_part_of_the_artifact_and_in_nobodys_way(
    store: Store, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in the artifact for good, and whoever had that process's number, as in a container, could not write."""
    made = make("rlhf", {"w": "1"})
    child = subprocess.Popen([sys.executable, "-c", KILLED_AT_THE_RENAME, str(store.path(made))])
    assert child.wait() == -signal.SIGKILL
    assert store.verify(store.path(made), made) == [] and store.folders("rlhf") == [store.path(made)]
    monkeypatch.setattr(os, "getpid", lambda: child.pid)
    (card := tmp_path / "CARD.md").write_text("a card")
    store.put_beside(made, card, "CARD.md")
    found = store.find("rlhf", made.fingerprint)
    assert found and store.verify(store.path(found), found) == []
    assert [path.name for path in store.path(found).parent.iterdir()] == [made.fingerprint]


def test_what_is_given_away_has_to_be_whole_but_for_its_records(store: Store, make: Make) -> None:
    made = make("sft", {"weights": "1", "aux/stage.log": "said", "aux/weights": "of a state"})
    folder = store.path(made)
    (folder / "aux" / "stage.log").unlink()
    (folder / "aux" / "weights").write_text("other")
    require_whole(store, folder, made)
    (folder / "weights").write_text("2")
    with pytest.raises(StageError, match="weights is changed"):
        require_whole(store, folder, made)


def test_an_artifact_is_removed_where_there_is_no_room_for_a_folder(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("sft", {"weights": "1"})
    mkdir = Path.mkdir

    def full(path: Path, *given: Any, **how: Any) -> None:
        if path.name == ".trash":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, *given, **how)

    monkeypatch.setattr(Path, "mkdir", full)
    store.remove(store.path(made), made)
    assert not store.path(made).exists()
