"""Artifacts of a root on an object store: how they get there, what is asked of it, and what a broken one is called."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import Cancelled, ConfigError, StageError, stage_error
from infra.io.s3 import read_object
from infra.io.s3_write import put_if
from infra.store.ancestry import locate
from infra.store.manifest import Manifest
from infra.store.promotions import FILE, Promotion, Promotions
from infra.store.roots import root_folder
from infra.store.states import CLOCK, STATES, kept_states
from infra.store.store import Store
from tests.infra.store.conftest import URL, Host
from tests.support.artifacts import make_artifact
from tests.support.services.object_store import cut_off, flips_a_bit, refused, unavailable


def _keys(bucket: Any, below: str = "") -> list[str]:
    found = bucket.list_objects_v2(Bucket="models", Prefix=f"lab/{below}").get("Contents", [])
    return [row["Key"].removeprefix("lab/") for row in found]


def _files(requests: list[str]) -> list[str]:
    """The files of artifacts that were asked for."""
    return [path.rsplit("/", 1)[-1] for path in requests if path.startswith("/models/lab/.files/")]


def test_another_machine_finds_it_by_its_manifest_and_downloads_it_once_when_it_is_read(host: Host, proxy: Any) -> None:
    made = make_artifact(host("a"), "clean", {"documents/one": "text", "aux/log": "said"})
    there = host("b")
    proxy.requests.clear()
    assert there.find("clean", made.fingerprint) == made
    assert [folder for folder, _ in there.manifests()] == [there.path(made)]
    assert there.differences(there.path(made), made) == []
    assert (_files(proxy.requests), there.path(made).exists()) == ([], False)
    folder = there.fetch(made)
    assert {path.name: path.read_text() for path in folder.rglob("*") if path.suffix != ".json" and path.is_file()} == {
        "one": "text",
        "log": "said",
    }
    proxy.requests.clear()
    assert there.fetch(made) == folder
    assert proxy.requests == []


def test_an_artifact_is_there_once_its_manifest_is_which_comes_last(host: Host, proxy: Any, bucket: Any) -> None:
    store = host("a")
    proxy.requests.clear()
    make_artifact(store, "clean", {"a": "1", "b": "2"})
    puts = [path.rsplit("/", 1)[-1] for path in proxy.requests if path.startswith("PUT")]
    assert (sorted(puts[:-1]), puts[-1]) == (["a", "b"], "manifest.json")
    (key,) = [key for key in _keys(bucket) if key.endswith("manifest.json")]
    bucket.delete_object(Bucket="models", Key=f"lab/{key}")
    assert _keys(bucket, ".files")
    assert list(host("b").manifests()) == []


def test_an_upload_that_breaks_off_leaves_no_artifact_and_is_gone_on_with(host: Host, proxy: Any, bucket: Any) -> None:
    store = host("a")
    proxy.tears = "PUT /models/lab/.files"
    with pytest.raises(StageError, match="failed 3 times"):
        make_artifact(store, "clean", {"a": "1", "b": "2"})
    assert list(host("b").manifests()) == []
    proxy.tears = "nothing"
    (unfinished,) = (store.root / ".work" / "clean").glob("*/artifact")
    manifest = store.unfinished_commit(unfinished, "clean", unfinished.parent.name)
    assert manifest is not None
    (unfinished / "b").write_text("3")
    assert store.unfinished_commit(unfinished, "clean", unfinished.parent.name) is None, "that is another build's work"
    (unfinished / "b").write_text("2")
    store.commit(unfinished, manifest)
    assert [one for _, one in host("b").manifests()] == [manifest]
    assert (host("b").fetch(manifest) / "a").read_text() == "1"


def test_of_two_that_commit_one_address_the_second_takes_what_the_first_put_there(host: Host, bucket: Any) -> None:
    """Only one can hold the lease: this is what becomes of one that lost it without seeing it."""
    first, second = host("a"), host("b")
    winner = make_artifact(first, "clean", {"a": "1"}, build_id="one")
    folder = second.layout.work("clean", winner.fingerprint) / "artifact"
    shutil.copytree(first.path(winner), folder)
    (folder / "a").write_text("2")
    files = tuple(file for file in second.describe_files(folder))
    loser = replace(winner, files=files, digest=second.content_digest(files), build_id="two")
    assert second.remote is not None
    assert not second.remote._put(loser, loser.fingerprint, None)
    assert second.find("clean", winner.fingerprint) == winner
    # The same payload: the build that is there stays, and nothing of the other.
    same = make_artifact(second, "clean", {"a": "1"}, build_id="three")
    assert (same.build_id, same.digest) == ("one", winner.digest)
    assert {key.split("/")[3] for key in _keys(bucket, ".files/clean")} == {"one"}


def test_one_whose_lease_was_lost_while_it_uploaded_commits_nothing(host: Host, bucket: Any) -> None:
    store = host("a")
    made = make_artifact(host("other"), "clean", {"a": "1"}, build_id="one")
    bucket.delete_object(Bucket="models", Key=f"lab/clean/{made.fingerprint}/manifest.json")
    folder = store.layout.work("clean", made.fingerprint) / "artifact"
    folder.mkdir(parents=True)
    (folder / "a").write_text("1")

    def lost() -> None:
        raise stage_error("lease_lost", "clean", "somebody else builds it", "run again")

    with pytest.raises(StageError, match="somebody else"):
        store.commit(folder, made, lost)
    assert store.find("clean", made.fingerprint) is None


def test_other_bytes_retire_the_old_artifact_and_every_machine_sees_it(host: Host, bucket: Any) -> None:
    first, second = host("a"), host("b")
    old = make_artifact(first, "clean", {"a": "1"}, build_id="one")
    model = make_artifact(first, "pretrain", {"w": "1"}, inputs={"data": old})
    assert (second.fetch(old) / "a").read_text() == "1"
    new = make_artifact(first, "clean", {"a": "2"}, build_id="two")
    assert second.find("clean", old.fingerprint) == new
    assert (second.fetch(new) / "a").read_text() == "2", "not the copy of what it replaced"
    found = locate(second, model.inputs["data"])
    assert found is not None
    assert (found[0].name, found[1]) == (f"{old.fingerprint}.{old.digest[:8]}", old)
    assert (second.fetch(found[1], found[0]) / "a").read_text() == "1"
    # What a third build, that ended midway, left is taken away by the next commit; what manifests name stays.
    bucket.put_object(Bucket="models", Key=f"lab/.files/clean/{old.fingerprint}/dead/a", Body=b"half")
    make_artifact(first, "clean", {"a": "3"}, build_id="three")
    assert {key.split("/")[3] for key in _keys(bucket, ".files/clean")} == {"one", "two", "three"}


def test_faults_on_the_way_are_tried_again_and_other_bytes_are_named(host: Host, proxy: Any, bucket: Any) -> None:
    store = host("a")
    proxy.faults[:] = [unavailable, cut_off, unavailable]
    made = make_artifact(store, "clean", {"a": "x" * 5000, "b": "y" * 5000})
    there = host("b")
    proxy.faults[:] = [cut_off, flips_a_bit, unavailable, cut_off]
    assert (there.fetch(made) / "a").read_text() == "x" * 5000

    key = next(key for key in _keys(bucket, ".files") if key.endswith("/a"))
    bucket.put_object(Bucket="models", Key=f"lab/{key}", Body=b"x" * 4999 + b"y")
    third = host("c")
    assert third.differences(third.path(made), made) == [], "sizes alone tell nothing of it"
    assert [str(one) for one in third.verify(third.path(made), made)] == [f"{URL}/{key} is changed"]
    with pytest.raises(StageError, match=f"{URL}/{key}.*sha256.*--force clean"):
        third.fetch(made)
    assert not third.path(made).exists()
    # The same bytes again mend it.
    mended = make_artifact(third, "clean", {"a": "x" * 5000, "b": "y" * 5000}, build_id="again")
    assert third.differences(third.path(mended), mended, read_all=True) == []
    assert third.folders("clean") == [third.path(mended)]
    assert (host("d").fetch(mended) / "a").read_text() == "x" * 5000
    key = next(key for key in _keys(bucket, ".files") if key.endswith("/a"))
    bucket.delete_object(Bucket="models", Key=f"lab/{key}")
    assert [str(one) for one in third.differences(third.path(mended), mended)] == [f"{URL}/{key} is missing"]


def test_a_cancelled_upload_or_download_ends_and_is_gone_on_with(host: Host, proxy: Any) -> None:
    store = host("a")
    made = make_artifact(store, "clean", {str(number): "text" for number in range(40)})
    there, asked = host("b"), []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) > 20

    with pytest.raises(Cancelled):
        there.fetch(made, stopped=stopped)
    assert not there.path(made).exists()
    proxy.requests.clear()
    there.fetch(made)
    assert 0 < len(_files(proxy.requests)) < 40


def test_a_copy_that_was_changed_here_is_downloaded_again(host: Host) -> None:
    made = make_artifact(host("a"), "clean", {"a": "text"})
    there = host("b")
    (there.fetch(made) / "a").write_text("flip")
    assert (there.fetch(made) / "a").read_text() == "text"


def test_a_card_that_one_machine_puts_beside_a_model_is_there_for_all(host: Host, tmp_path: Path) -> None:
    store = host("a")
    made = make_artifact(store, "sft", {"w": "1"})
    card = tmp_path / "card"
    for text in ("a card", "another card"):
        card.write_text(text)
        store.put_beside(made, card, "CARD.md")
        now = host(text).find("sft", made.fingerprint)
        assert now is not None
        assert now.digest == made.digest
        assert (host(text).fetch(now) / "aux" / "CARD.md").read_text() == text


def test_a_glance_brings_what_it_says_and_not_its_data(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.store.store.GLANCE_BYTES", 3)
    made = make_artifact(host("a"), "clean", {"data.bin": "much", "aux/counts.json": "{}"})
    there = host("b")
    folder = there.glance(made)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["counts.json", "manifest.json"]
    assert not there.path(made).exists()


def test_the_states_of_a_training_come_when_they_are_asked_for(host: Host, proxy: Any) -> None:
    """They are several times as large as its model. A download of one that breaks off is gone on with."""
    states = {f"aux/state/ba00000000{batch}/{name}": f"{batch} {name}" for batch in (2, 4) for name in ("w", CLOCK)}
    files = {"model": "1", STATES: '{"2": "two", "4": "four"}', **states}
    made = make_artifact(host("a"), "pretrain", files)
    there = host("b")
    proxy.requests.clear()
    folder = there.fetch(made)
    assert [path for path in proxy.requests if path.endswith("/w")] == []
    assert [(state.folder / CLOCK).exists() for state in kept_states(folder)] == [True, True], "small, and told from"
    assert there.is_here(folder, made), "all that was asked for"

    proxy.faults[:] = [refused]
    with pytest.raises(StageError, match="AccessDenied"):
        there.fetch(made, state="four")
    assert there.is_here(folder, made)
    proxy.requests.clear()
    assert there.fetch(made, state="four") == folder
    two, four = kept_states(folder)
    assert ((four.folder / "w").read_text(), (two.folder / "w").exists()) == ("4 w", False)
    assert four.files(made) == four.files(Manifest.read(folder))
    proxy.requests.clear()
    assert there.fetch(made, state="four") == there.fetch(made) == folder
    assert proxy.requests == []
    assert there.find("pretrain", made.fingerprint) == made


def test_a_build_of_the_same_bytes_that_keeps_more_states_takes_the_place_of_the_one_that_is_there(host: Host) -> None:
    first, second = host("a"), host("b")

    def build(name: str, *batches: int) -> Manifest:
        states = {f"aux/state/ba00000000{batch}/{file}": f"{batch}" for batch in batches for file in ("w", CLOCK)}
        digests = json.dumps({str(batch): f"after {batch}" for batch in batches})
        return make_artifact(first, "pretrain", {"model": "1", STATES: digests, **states}, build_id=name)

    assert build("one", 4).build_id == build("none", 4).build_id == build("fewer").build_id == "one"
    second.fetch(build("again", 4))
    more = build("two", 2, 4)
    assert more.build_id == "two" and second.find("pretrain", more.fingerprint) == more
    assert (second.fetch(more, state="after 2") / "aux/state/ba000000002/w").read_text() == "2"


def test_a_build_of_the_same_bytes_by_other_packages_is_noted_for_every_machine(host: Host) -> None:
    first, second = host("a"), host("b")
    made = make_artifact(first, "clean", {"a": "1"}, build_id="one", versions={"torch": "2.7"})
    second.fetch(made)
    again = make_artifact(first, "clean", {"a": "1"}, build_id="two", versions={"torch": "2.11"})
    assert again == replace(made, reproduced_with={"torch": "2.11"}) == second.find("clean", made.fingerprint)
    assert second.fetch(again) == second.path(made)


def test_promotions_are_those_of_all_machines(host: Host) -> None:
    first, second = Promotions(host("a").root), Promotions(host("b").root)
    one, two = (Promotion(f"register/{name}", f"rlhf/{name}", name, 1.0) for name in ("1", "2"))
    first.promote("demo", one, None)
    assert second.promoted("demo") == one
    second.promote("demo", two, one)
    with pytest.raises(StageError, match="in the meantime"):
        first.promote("demo", one, one)
    assert first.rollback("demo") == (one, two)
    there = read_object(f"{URL}/{FILE}")
    assert there and put_if(b'{"demo": [', f"{URL}/{FILE}", there[1])
    with pytest.raises(StageError, match="this file is damaged") as caught:
        second.promoted("demo")
    assert caught.value.problems[0].path == f"{URL}/{FILE}"


@pytest.mark.parametrize(
    ("url", "code", "path"),
    [
        ("gs://models/lab", "bad_root", "--root"),
        ("s3://", "bad_root", "--root"),
        ("s3://models/a b", "bad_root", "--root"),
        ("s3://nobodys/lab", "missing_source", "--root"),
        ("s3://models", "not_a_store", "s3://models"),
    ],
)
def test_a_url_that_is_no_root_is_refused(host: Host, bucket: Any, url: str, code: str, path: str) -> None:
    bucket.put_object(Bucket="models", Key="somebodys/file", Body=b"1")
    with pytest.raises(ConfigError) as failure:
        Store(root_folder(url))
    (problem,) = failure.value.problems
    assert (problem.code, problem.path) == (code, path)
    assert problem.fix


def test_without_postgresql_without_rights_or_with_a_server_that_knows_no_condition_nothing_is_made(
    host: Host, database: str, bucket: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.faults[:] = [refused]
    with pytest.raises(ConfigError, match=r"AccessDenied.*policy"):
        host("a")
    monkeypatch.delenv("STEMMA_DATABASE_URL")
    with pytest.raises(ConfigError, match=r"STEMMA_DATABASE_URL.*PostgreSQL.*set STEMMA_DATABASE_URL"):
        Store(root_folder(URL))
    monkeypatch.setenv("STEMMA_DATABASE_URL", "sqlite")
    with pytest.raises(ConfigError, match="PostgreSQL"):
        Store(root_folder(URL))
    assert _keys(bucket) == []
    monkeypatch.setenv("STEMMA_DATABASE_URL", database)
    monkeypatch.setattr("infra.store.bucket.root.put_if", lambda content, url, etag: True)
    with pytest.raises(ConfigError, match="If-None-Match"):
        host("a")
    assert _keys(bucket) == []
