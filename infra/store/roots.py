"""Local folder of a root: the root itself, or the cache of a root on an object store.

    --root s3://bucket/prefix   →   <cache>/<bucket>-<prefix>-<hash>/

The cache of a root is an ordinary root, whose `remote.json` names the URL. It contains work in progress, journals and
downloads; the artifacts are at the URL (`infra.store.bucket.artifacts`). So a path to the cache is enough to open the
store. <cache> is $STEMMA_CACHE, by default `stemma` in the user's cache folder
($XDG_CACHE_HOME, else ~/.cache); it is for one user of one machine, and may be deleted when nothing runs on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from infra.errors import ConfigError, Problem
from infra.io.s3 import SCHEME
from infra.io.tables import damaged, read_state, unwritable

CACHE = "STEMMA_CACHE"
RECORD = "remote.json"
_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/*?\[\]\\\s]+)*")
_LOST = "delete the folder it is in: it is a cache, and what was not uploaded yet is built again"
_SHOWN = 40


def root_folder(root: str | Path) -> Path:
    """Return the folder of a root; that of a URL is made if it does not exist yet.

    Raises ConfigError `bad_root` for a URL that is not an object store's, StageError if the folder cannot be written.
    """
    text = str(root)
    return _cache_of(_normal(text)) if "://" in text else Path(root).absolute()


def url_of(root: Path) -> str:
    """Return the URL of the artifacts of the root in this folder; empty if they are in the folder itself.

    Raises StageError `damaged_state`.
    """
    path = root / RECORD
    content = read_state(path, _LOST, None) if path.is_file() else None
    if content is None:
        return ""
    if not isinstance(content, dict) or not isinstance(content.get("url"), str):
        raise damaged(path, "expected an object with `url`", _LOST)
    return str(content["url"])


def shown_root(root: Path) -> str:
    """Return the root in a form for people and other machines: the URL of a cache, else the folder."""
    return url_of(root) or str(root)


def refuse_url(root: Path, what: str, fix: str) -> None:
    """Raise ConfigError `local_root_only` for a root on an object store: `what` works on one machine's folder."""
    if url := url_of(root):
        message = f"{what} needs a root in a folder, but {url} is on an object store"
        raise ConfigError(Problem("local_root_only", "--root", message, fix))


def _normal(text: str) -> str:
    url = text.rstrip("/")
    if not _URL.fullmatch(url):
        message = f"expected {SCHEME}BUCKET/PREFIX or a folder, not {text!r}"
        raise ConfigError(Problem("bad_root", "--root", message, f"e.g. --root {SCHEME}models/lab"))
    return url


def _cache_of(url: str) -> Path:
    # Two servers may have buckets with the same name.
    digest = hashlib.sha256(f"{os.environ.get('AWS_ENDPOINT_URL', '')} {url}".encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", url.removeprefix(SCHEME).lower())[:_SHOWN].strip("-")
    folder = _caches() / f"{name}-{digest}"
    record = folder / RECORD
    if record.exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hidden = folder / f".{RECORD}.{os.getpid()}.{os.urandom(4).hex()}"
        hidden.write_text(json.dumps({"url": url}) + "\n", encoding="utf8")
        hidden.replace(record)
    except OSError as error:
        raise unwritable(error, record) from error
    return folder


def _caches() -> Path:
    if directory := os.environ.get(CACHE):
        return Path(directory).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "stemma"
