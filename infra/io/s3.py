"""Objects on S3 (any server that speaks its protocol): listed, opened as files, and tried again when the server fails;
`infra.io.s3_write` puts them there.

Credentials, region, server (`AWS_ENDPOINT_URL`) and number of tries (`AWS_MAX_ATTEMPTS`) come from the environment,
never from a config.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from infra.errors import Cancelled, StageError, stage_error

SCHEME = "s3://"
BUFFER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
TRIES = 6
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0
FETCHES = 3
"""Number of times that an object is fetched as a whole until its hash is right."""
_PASSING = {
    "SlowDown",
    "RequestTimeout",
    "RequestTimeoutException",
    "Throttling",
    "ThrottlingException",
    "InternalError",
    "BadDigest",  # the server got other bytes than were sent
    "IncompleteBody",
    "ConditionalRequestConflict",  # two conditional writes at once, of which neither was done
}

AT_ONCE = 8
"""Concurrent requests: a small one spends most of its time on the round trip."""

T = TypeVar("T")
Item = TypeVar("Item")
Stopped = Callable[[], bool]
"""Function called before each of many requests; True ends them."""


@dataclass(frozen=True, order=True)
class S3Object:
    """One object, as it was when it was listed.

    etag: "" where it is to be read whichever it is by now. modified: when it was written, in seconds; 0 if not known.
    """

    bucket: str
    key: str
    size: int
    etag: str
    modified: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        return self.key.rsplit("/", 1)[-1]

    @property
    def content_tag(self) -> str:
        """Tag that identifies the bytes without reading them; see docs/decisions for what that trusts."""
        return f"etag:{self.etag}:{self.size}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"


def object_at(url: str) -> S3Object:
    """Return the current object at a URL; its size is not known."""
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    return S3Object(bucket, key, 0, "")


def list_objects(url: str) -> list[S3Object]:
    """Return the objects behind s3://bucket/key, s3://bucket/folder or a glob; none if nothing matches.

    Raises StageError, naming the URL: `source_unreachable`, `s3_refused`, `s3_credentials`, `missing_source` (bucket).
    """
    bucket, _, pattern = url.removeprefix(SCHEME).partition("/")
    literal = _before_wildcard(pattern)
    objects = [item for item in persistently(url, lambda: _list(bucket, literal)) if not item.key.endswith("/")]
    if literal != pattern:
        return [item for item in objects if _matches(item.key.split("/"), pattern.split("/"))]
    folder = f"{pattern.rstrip('/')}/" if pattern else ""
    return [item for item in objects if item.key == pattern or item.key.startswith(folder)]


def list_folders(url: str) -> list[str]:
    """The names right below s3://bucket/folder that other names are below. Raises StageError as `list_objects` does."""
    bucket, _, folder = url.removeprefix(SCHEME).partition("/")
    prefix = f"{folder.rstrip('/')}/" if folder else ""

    def pages() -> list[str]:
        listing = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
        return [row["Prefix"] for page in listing for row in page.get("CommonPrefixes", [])]

    return [name.removeprefix(prefix).rstrip("/") for name in persistently(url, pages)]


def read_object(url: str) -> tuple[bytes, str] | None:
    """Return the bytes of a small object and its ETag; None if it does not exist.

    Raises StageError as `list_objects` does, for a bucket that is not there too.
    """
    from botocore.exceptions import ClientError

    bucket, _, key = url.removeprefix(SCHEME).partition("/")

    def read() -> tuple[bytes, str] | None:
        try:
            answer = client().get_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"].get("Code") in ("NoSuchKey", "404"):  # the number alone where its words are cut
                return None
            raise
        return bytes(answer["Body"].read()), str(answer["ETag"]).strip('"')

    return persistently(url, read)


def open_object(item: S3Object) -> io.BufferedReader:
    """The bytes of an object as a seekable file. Reads that fail on the way are tried again from where they broke.

    Reading raises StageError: `missing_source` for an object that is gone, `source_changed` for one that is another by
    now, `source_unreachable` when the server goes on failing.
    """
    return io.BufferedReader(_ObjectReader(item), BUFFER_BYTES)


def download(url: str, target: Path, size: int, algorithm: str, digest: str) -> None:
    """Download an object into a file, which is then complete or absent.

    size: its bytes. algorithm, digest: what its hash must be, of hashlib or xxhash, hexadecimal.
    Raises StageError: what reading an object raises; `bad_checksum` where it is another however often it is fetched.
    """
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    temporary = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    for _ in range(FETCHES):
        digested = getattr(xxhash if algorithm.startswith("xx") else hashlib, algorithm)()
        try:
            with open_object(S3Object(bucket, key, size, "")) as source, temporary.open("wb") as file:
                while block := source.read(BUFFER_BYTES):
                    digested.update(block)
                    file.write(block)
            if digested.hexdigest() == digest:
                temporary.replace(target)
                return
        finally:
            temporary.unlink(missing_ok=True)
    raise stage_error(
        "bad_checksum",
        url,
        f"expected {algorithm} {digest}, found {digested.hexdigest()} after {FETCHES} tries",
        "upload the object again",
    )


class _ObjectReader(io.RawIOBase):
    def __init__(self, item: S3Object) -> None:
        self._item = item
        self._position = 0
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._item.size}[whence]
        if start + offset != self._position:
            self._drop()
            self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._item.size:
            return 0
        data = persistently(str(self._item), lambda: self._read(len(buffer)), self._drop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._body is None:
            answer = client().get_object(
                Bucket=self._item.bucket,
                Key=self._item.key,
                Range=f"bytes={self._position}-",
                **({"IfMatch": f'"{self._item.etag}"'} if self._item.etag else {}),
            )
            self._body = answer["Body"]
        data = bytes(self._body.read(size))
        if not data:
            raise ConnectionError(f"the answer ended at byte {self._position:,} of {self._item.size:,}")
        return data

    def _drop(self) -> None:
        if self._body is not None:
            with suppress(Exception):
                self._body.close()
            self._body = None


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if a key matches a glob as files do: * stops at a slash, ** does not, neither matches hidden
    names."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        is_match = _matches(names, patterns[1:]) if len(patterns) > 1 else not names
        return is_match or (bool(names) and not names[0].startswith(".") and _matches(names[1:], patterns))
    if not names or (names[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _before_wildcard(pattern: str) -> str:
    ends = [pattern.index(mark) for mark in "*?[" if mark in pattern]
    return pattern[: min(ends)] if ends else pattern


def _list(bucket: str, prefix: str) -> list[S3Object]:
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [
        S3Object(bucket, row["Key"], row["Size"], row["ETag"].strip('"'), row["LastModified"].timestamp())
        for page in pages
        for row in page.get("Contents", [])
    ]


def persistently(place: str, call: Callable[[], T], before_retry: Callable[[], None] = lambda: None) -> T:
    """Return the result of `call`, retried with growing pauses (exponential, with full jitter) while the fault may
    pass.

    Raises StageError, naming the place, as `list_objects` does.
    """
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConfigParseError,
        InvalidRegionError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
        ProfileNotFound,
    )
    from urllib3.exceptions import HTTPError

    tries = int(_number_of("AWS_MAX_ATTEMPTS", TRIES))
    for pause in _pauses(tries):
        try:
            return call()
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise stage_error(
                "s3_credentials", place, str(error), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except (ParamValidationError, ProfileNotFound, ConfigParseError, InvalidRegionError) as error:
            # It was not even sent. The server has no part in it, and the next time is as this one.
            message = " ".join(str(error).split())
            fix = "correct the URL, or AWS_PROFILE, AWS_DEFAULT_REGION and their files"
            raise stage_error("s3_refused", place, message, fix) from None
        except ClientError as error:
            refused = _refusal(place, error)
            if refused:
                raise refused from None
            last = f"{error.response['Error'].get('Code')}: {error.response['Error'].get('Message')}"
        except (BotoCoreError, HTTPError, OSError) as error:
            last = f"{type(error).__name__}: {error}"
        before_retry()
        if pause is not None:
            time.sleep(pause)
    raise stage_error(
        "source_unreachable",
        place,
        f"the server failed {tries} times, most recently with {last}",
        "run again when it is up",
    )


def _number_of(variable: str, default: float) -> float:
    value = os.environ.get(variable) or str(default)
    with suppress(ValueError):
        if 0 < (number := float(value)) < math.inf:
            return number
    raise stage_error(
        "s3_refused", variable, f"expected a number above zero in {variable}, got {value!r}", "correct it"
    )


def _pauses(tries: int) -> Iterator[float | None]:
    for number in range(tries - 1):
        yield random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number))
    yield None


def _refusal(location: str, error: Any) -> StageError | None:
    """Return the error of an answer that will be the same next time; None for one that may pass."""
    code = str(error.response["Error"].get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in ("PreconditionFailed", "412"):
        return stage_error("source_changed", location, "the object was changed after it was listed", "run again")
    if status == 404:
        resource = "bucket" if code == "NoSuchBucket" else "object"
        return stage_error(
            "missing_source", location, f"no such {resource}: {location}", "correct the path in the config"
        )
    if status >= 500 or status == 429 or code in _PASSING:
        return None
    message = f"the server refused: {code}: {error.response['Error'].get('Message', '')}"
    return stage_error("s3_refused", location, message, "check the credentials and the bucket's policy")


def side_by_side(call: Callable[[Item], T], items: Sequence[Item], stopped: Stopped = lambda: False) -> list[T]:
    """Return the result of each call, running AT_ONCE calls at a time. The first error cancels the calls that have not
    begun; if `stopped` returns True, that error is Cancelled."""

    def go_on(item: Item) -> T:
        if stopped():
            raise Cancelled
        result = call(item)
        if stopped():
            raise Cancelled
        return result

    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(go_on, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@cache
def client() -> Any:
    """Return boto3's client of this process, which threads may share."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    # We try again ourselves, since a body that breaks midway is past the client's own tries.
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=_number_of("STEMMA_S3_READ_TIMEOUT_S", READ_TIMEOUT_S),
        retries={"total_max_attempts": 1},
        # Servers other than AWS's refuse the newer checksums; what is uploaded carries its MD5.
        request_checksum_calculation="when_required",
    )
    try:
        return boto3.client("s3", config=config)
    except BotoCoreError:
        raise
    except ValueError as error:  # of an address that is none
        message = f"{error} in AWS_ENDPOINT_URL: expected an address such as https://minio.example:9000"
        raise stage_error("s3_refused", "AWS_ENDPOINT_URL", message, "correct it, or unset it for AWS") from None


# A forked process would share the parent's open connections.
os.register_at_fork(after_in_child=client.cache_clear)
