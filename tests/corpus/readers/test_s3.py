"""Sources on S3: the real protocol against moto's server, through a proxy that fails as servers and networks do."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus.config import IngestConfig, InstructionsConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError
from infra.io import s3
from infra.io.hashing import HashBook
from infra.io.sources import expand, open_place
from tests.support.programs.command import write_config
from tests.support.services.object_store import bucket, cut_off, silent, unavailable

TEXTS = [f"Letter {number}, in which the river is described once more." for number in range(50)]


@pytest.fixture
def put(s3_port: int, proxy: Any) -> Iterator[Callable[[str, bytes | None], str]]:
    """put(key, content) gives the URL of a new object; None takes it away."""
    with bucket(s3_port, "letters") as client:

        def call(key: str, content: bytes | None) -> str:
            if content is None:
                client.delete_object(Bucket="letters", Key=key)
            else:
                client.put_object(Bucket="letters", Key=key, Body=content)
            return f"s3://letters/{key}"

        yield call


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def config(*urls: str, **keys: Any) -> IngestConfig:
    return IngestConfig(read=[{"kind": "files", "paths": urls, **keys}])


def parquet(texts: list[str]) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=10)
    return bytes(out.getvalue())


def test_objects_folders_and_globs_give_what_the_same_files_give(build, put, write, payload):
    contents = {"a.jsonl.gz": gzip.compress(jsonl(TEXTS[:20])), "b.parquet": parquet(TEXTS[20:40]), "c.txt": b"last"}
    for name, content in contents.items():
        put(f"crawl/{name}", content)
    put("crawl.txt", b"a neighbour of the folder")
    local = payload(build(ingest, config(*(write(name, content) for name, content in contents.items()))))
    assert payload(build(ingest, config("s3://letters/crawl"))) == local
    assert payload(build(ingest, config("s3://letters/crawl/"))) == local
    assert payload(build(ingest, config("s3://letters/crawl/*.*"))) == local
    assert payload(build(ingest, config(*(f"s3://letters/crawl/{name}" for name in contents)))) == local


def test_a_glob_takes_the_objects_that_it_would_take_of_files(put, tmp_path):
    names = ["raw/a.txt", "raw/b.jsonl", "raw/.hidden.txt", "raw/old/x.txt", "raw/old/deep/y.txt", "rawer/z.txt"]
    for name in names:
        put(name, b"text")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"text")
    for pattern in ("raw/*.txt", "raw/*", "raw*/*.txt", "raw/**/*.txt", "raw/**", "**/x.txt", "raw/*/*", "r?w/[ab].*"):
        files = {path.relative_to(tmp_path).as_posix() for path in expand([str(tmp_path / pattern)]) if path.is_file()}
        assert {item.key for item in s3.list_objects(f"s3://letters/{pattern}")} == files, pattern


def test_a_large_object_is_read_in_parts(build, put, monkeypatch):
    url = put("a.jsonl", jsonl(TEXTS))
    whole = list(read_documents(build(ingest, config(url))))
    monkeypatch.setattr("corpus.readers.plan.PARTITION_BYTES", 700)
    assert list(read_documents(build(ingest, config(url)))) == whole


@pytest.mark.parametrize("faults", [[unavailable], [silent], [cut_off], [cut_off, unavailable]])
def test_faults_that_pass_are_tried_again_and_change_nothing(build, put, proxy, faults, monkeypatch):
    if silent in faults:
        monkeypatch.setenv("STEMMA_S3_READ_TIMEOUT_S", "2")
    url = put("a.jsonl", jsonl(TEXTS))
    proxy.faults[:] = [*faults]
    assert [document.text for document in read_documents(build(ingest, config(url)))] == TEXTS
    assert not proxy.faults


@pytest.mark.parametrize(
    ("fault", "told"), [(unavailable, "SlowDown"), (silent, "imeout"), (cut_off, r"IncompleteRead|ended|broken")]
)
def test_faults_that_do_not_pass_name_the_object(build, put, proxy, fault, told, monkeypatch):
    if fault is silent:
        monkeypatch.setenv("STEMMA_S3_READ_TIMEOUT_S", "2")
    # Each answer that is cut off brings the reader 100 bytes further.
    url = put("a.jsonl", jsonl(TEXTS * 40))
    proxy.faults[:] = [fault] * 3 if fault is not cut_off else [cut_off, unavailable, unavailable, unavailable]
    told = told if fault is not cut_off else "SlowDown"
    with pytest.raises(
        StageError, match=rf"s3://letters/a\.jsonl: the server failed 3 times, most recently with .*{told}"
    ) as caught:
        build(ingest, config(url))
    assert caught.value.problems[0].code == "source_unreachable"


def test_what_is_not_there_is_named(build, put, proxy):
    put("a.txt", b"here")
    with pytest.raises(StageError, match=r"s3://letters/b\.txt: no such object"):
        build(ingest, config("s3://letters/b.txt"))
    with pytest.raises(StageError, match=r"s3://nobody/a\.txt: no such bucket"):
        build(ingest, config("s3://nobody/a.txt"))


def test_an_object_that_vanishes_or_changes_while_it_is_read_is_named(put, proxy):
    put("a.txt", b"first")
    [item] = s3.list_objects("s3://letters/a.txt")
    put("a.txt", b"other")
    with open_place(item) as file, pytest.raises(StageError, match="the object was changed after it was listed"):
        file.read()
    put("a.txt", None)
    with open_place(item) as file, pytest.raises(StageError, match=r"no such object: s3://letters/a\.txt"):
        file.read()


def test_identity_needs_no_byte_of_an_object_and_notices_a_change(put, proxy, tmp_path):
    book = HashBook(tmp_path / "book.sqlite")
    url = put("a.txt", b"first")

    def digest() -> str:
        [source] = config(url).sources()
        return book.digest(source)

    before = digest()
    assert digest() == before
    put("a.txt", b"other")
    assert digest() != before
    assert all("list-type" in path for path in proxy.requests)


def test_missing_credentials_are_asked_for(build, proxy, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(StageError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        build(ingest, config("s3://letters/a.txt"))


@pytest.mark.parametrize(
    ("url", "variable", "told"),
    [
        ("s3://bad bucket/a", ("AWS_ENDPOINT_URL", ""), "s3://bad bucket/a: .*Invalid bucket name"),
        ("s3://letters/a", ("AWS_PROFILE", "nobody"), "s3://letters/a: .*nobody.* could not be found"),
        ("s3://letters/a", ("AWS_DEFAULT_REGION", "us east"), "s3://letters/a: .*'us east'"),
        ("s3://letters/a", ("AWS_ENDPOINT_URL", "minio"), "AWS_ENDPOINT_URL: Invalid endpoint: minio"),
        ("s3://letters/a", ("AWS_MAX_ATTEMPTS", "many"), "zero in AWS_MAX_ATTEMPTS, got 'many'"),
    ],
)
def test_what_cannot_even_be_asked_is_no_fault_of_a_server(proxy, monkeypatch, url, variable, told):
    """It was tried again for half a minute, then by each retry of the stage, and a root or a place for checkpoints
    passed for one whose server is away for now."""
    if variable[1]:
        monkeypatch.setenv(*variable)
    s3.client.cache_clear()
    with pytest.raises(StageError, match=told) as caught:
        s3.list_objects(url)
    assert caught.value.problems[0].code == "s3_refused" and not proxy.requests


def test_other_schemes_are_an_error_of_the_config():
    for kind in (IngestConfig, InstructionsConfig):
        with pytest.raises(ValueError, match="expected a local path or s3://bucket/key, not gs://bucket/a"):
            kind(read=[{"kind": "files", "paths": ["gs://bucket/a"]}])


def test_through_the_command(run, put, tmp_path):
    put("set/a.jsonl", jsonl(TEXTS))
    pipeline = write_config(
        tmp_path / "config.yaml",
        {"name": "letters", "ingest": {"read": [{"kind": "files", "paths": ["s3://letters/set"]}]}},
    )
    store = tmp_path / "store"
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    first = run("run", pipeline, "--root", store, **credentials)
    assert first.code == 0, first.document["errors"]
    assert first.statuses() == {"ingest": "built"}
    put("set/b.jsonl", jsonl(TEXTS[:1]))
    again = run("check", pipeline, "--root", store, **credentials)
    assert again.statuses() == {"ingest": "build"}
