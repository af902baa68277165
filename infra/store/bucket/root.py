"""Roots on a bucket: check that a prefix is a root, and make an empty prefix one."""

from __future__ import annotations

import os
from dataclasses import replace

from infra.errors import ConfigError, Problem, StageError
from infra.io.s3 import client, object_at, persistently, read_object
from infra.io.s3_write import put_if, remove
from infra.store.layout import FORMAT, MARKER

_FORMAT_LINE = f"{FORMAT}\n".encode()
_FIXES = {
    "missing_source": "make the bucket, or correct --root",
    "s3_credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a server of your own",
    "s3_refused": "look at the credentials and the bucket's policy: a root is listed, read and written",
}
_opened: set[tuple[str, str, bool]] = set()


def open_root(url: str, *, make: bool) -> None:
    """Check once per process that this is a root, and make it one if it is empty and `make` is True.

    Raises ConfigError if the bucket does not exist or refuses access, if the place holds anything else, for another
    format, and for a server without conditional puts; StageError as `infra.io.s3.persistently` does.
    """
    key = (url, os.environ.get("AWS_ENDPOINT_URL", ""), make)
    if key in _opened:
        return
    try:
        _open(url, make)
    except StageError as error:
        (problem,) = error.problems
        if problem.code not in _FIXES:
            raise
        raise ConfigError(replace(problem, path="--root", fix=_FIXES[problem.code])) from None
    _opened.add(key)


def _open(url: str, make: bool) -> None:
    marker_url = f"{url}/{MARKER}"
    content = read_object(marker_url)
    if content is None:
        if strange := _first_below(url):
            message = f"this is not a root, and not empty: it contains {strange}"
            raise ConfigError(Problem("not_a_store", url, message, "use a root, or an empty or new prefix"))
        if not make:
            return
        put_if(_FORMAT_LINE, marker_url, None)
        if put_if(b"only if there is none", marker_url, None):
            remove([object_at(marker_url)])
            message = "this server ignores `If-None-Match`: two machines could both commit one artifact there"
            fix = "use AWS S3, a newer version of this server, or a folder as --root"
            raise ConfigError(Problem("no_conditional_put", url, message, fix))
        content = read_object(marker_url)
    if content is None or content[0] != _FORMAT_LINE:
        format_text = (content[0] if content else b"")[:20].decode(errors="replace").strip()
        message = f"this root has format {format_text!r}, this version of stemma reads format {FORMAT}"
        raise ConfigError(Problem("store_format", url, message, "use the version that wrote it, or another --root"))


def _first_below(url: str) -> str:
    """One of the keys below a URL, without asking for all of them; empty if there is none."""
    location = object_at(url)
    prefix = f"{location.key}/" if location.key else ""
    listing = persistently(url, lambda: client().list_objects_v2(Bucket=location.bucket, Prefix=prefix, MaxKeys=1))
    return next((str(row["Key"]) for row in listing.get("Contents", [])), "")
