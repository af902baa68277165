"""Upload and removal of files on S3 (any server with its protocol), retried when the server fails.

Each request carries the MD5 of its content, so that a server keeps nothing that was truncated or changed in transit.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from infra.errors import StageError
from infra.io.s3 import SCHEME, S3Object, client, list_objects, persistently, read_object

PART_BYTES = 64 << 20
"""Bytes of one request, all of which are sent again if it breaks. S3 takes 5 GB at most."""
_MOST_PARTS = 10_000
_PROBE = "write-probe"
_CHANGED = {"PreconditionFailed", "412", "NoSuchKey"}


class UploadStopped(Exception):
    """An upload was stopped before it was done."""


def put(content: bytes, url: str) -> None:
    """Write an object, which is then complete or absent. Raises StageError as `infra.io.s3.persistently` does."""
    bucket, key = _place(url)
    persistently(url, lambda: client().put_object(Bucket=bucket, Key=key, Body=content, ContentMD5=_md5(content)))


def put_if(content: bytes, url: str, etag: str | None) -> bool:
    """Writes an object where none is there, or, with an ETag, in place of the one that has it; False where it was
    changed meanwhile. One that has this very content counts as written: the answer that said so may have been lost.

    Raises StageError as `infra.io.s3.persistently` does.
    """
    from botocore.exceptions import ClientError

    bucket, key = _place(url)
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": f'"{etag}"'}

    def put_it() -> bool:
        try:
            client().put_object(Bucket=bucket, Key=key, Body=content, ContentMD5=_md5(content), **condition)
        except ClientError as error:
            if str(error.response["Error"].get("Code", "")) in _CHANGED:
                return False
            raise
        return True

    if persistently(url, put_it):
        return True
    current = read_object(url)
    return current is not None and current[0] == content


def upload(source: Path, url: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Writes a file of any size to an object, in parts where it is large.

    stopped: asked before each part. Raises UploadStopped; StageError as `infra.io.s3.persistently` does.
    """
    size = source.stat().st_size
    with source.open("rb") as file:
        if size <= PART_BYTES:
            if stopped():
                raise UploadStopped
            put(file.read(), url)
            return
        _upload_parts(_parts(file, size), url, stopped)


def etag_of(source: Path) -> str:
    """The ETag that most servers give what `upload` brings them: MD5, of an upload in parts that of the parts' MD5s."""
    size = source.stat().st_size
    with source.open("rb") as file:
        if size <= PART_BYTES:
            return hashlib.md5(file.read(), usedforsecurity=False).hexdigest()
        parts = [hashlib.md5(part, usedforsecurity=False).digest() for part in _parts(file, size)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _parts(file: BinaryIO, size: int) -> Iterator[bytes]:
    return iter(lambda: file.read(max(PART_BYTES, -(-size // _MOST_PARTS))), b"")


def _upload_parts(parts: Iterable[bytes], url: str, stopped: Callable[[], bool]) -> None:
    bucket, key = _place(url)
    upload: dict[str, Any] = {"Bucket": bucket, "Key": key}
    upload["UploadId"] = persistently(url, lambda: client().create_multipart_upload(**upload))["UploadId"]
    done: list[dict[str, Any]] = []
    size = 0
    try:
        for number, content in enumerate(parts, 1):
            if stopped():
                raise UploadStopped
            done.append(persistently(url, partial(_upload_part, upload, number, content)))
            size += len(content)
        try:
            persistently(url, lambda: client().complete_multipart_upload(**upload, MultipartUpload={"Parts": done}))
        except StageError as error:
            # Some servers know an upload no longer that they ended, and the answer that said so may have been lost.
            if error.problems[0].code != "missing_source" or _size_of(bucket, key, url) != size:
                raise
    except BaseException:
        with suppress(Exception):  # parts that are left cost money; `remove_below` looks for them again
            client().abort_multipart_upload(**upload)
        raise


def _size_of(bucket: str, key: str, url: str) -> int:
    return int(persistently(url, lambda: client().head_object(Bucket=bucket, Key=key))["ContentLength"])


def _upload_part(upload: Mapping[str, Any], number: int, content: bytes) -> dict[str, Any]:
    answer = client().upload_part(**upload, PartNumber=number, Body=content, ContentMD5=_md5(content))
    return {"PartNumber": number, "ETag": answer["ETag"]}


def remove(objects: Iterable[S3Object]) -> None:
    """Remove objects, in their order; objects that are already gone are no error."""
    for item in objects:
        persistently(str(item), partial(_delete, item))


def _delete(item: S3Object) -> None:
    client().delete_object(Bucket=item.bucket, Key=item.key)


def remove_below(url: str) -> None:
    """Remove all objects below s3://bucket/folder, and the parts of unfinished uploads there."""
    bucket, prefix = _place(f"{url.rstrip('/')}/")
    remove(list_objects(f"{url.rstrip('/')}/"))
    # Some servers know no list of unfinished uploads; theirs end by the bucket's own rules.
    with suppress(StageError):
        pages = client().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        uploads = persistently(url, lambda: [upload for page in pages for upload in page.get("Uploads", [])])
        for upload in uploads:
            client().abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def check_writable(url: str) -> None:
    """Lists s3://bucket/folder and writes a small object there. Raises StageError as `infra.io.s3.list_objects`
    does."""
    probe_url = f"{url.rstrip('/')}/{_PROBE}"
    list_objects(probe_url)
    put(b"", probe_url)
    bucket, key = _place(probe_url)
    with suppress(StageError):  # who may not remove can upload all the same
        remove([S3Object(bucket, key, 0, "")])


def _place(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    return bucket, key


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
