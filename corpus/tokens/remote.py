"""Shards that stay on S3: an artifact with their index, their facts and their location, but without their tokens.

python -m corpus.tokens.remote --config remote.yaml --out DIR
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus.config import RemoteShardsConfig
from infra.errors import Problem, StageError, stage_error
from infra.io.contained import names_outside
from infra.io.json import read_own_json
from infra.io.s3 import list_objects, open_object
from infra.run import Result, Run

SIDES = ("train", "validation")
_LOCATION = "remote.json"
_HASHES = ("xxh3_64", "xxh128", "xxh64", "blake2b", "sha256")
"""Those that the shard stage may write, the quickest first."""


@dataclass(frozen=True)
class Checksum:
    """Bytes of a file, and its hash (hexadecimal) by an algorithm that the shard stage knows."""

    size: int
    algorithm: str
    digest: str


def remote_shards(config: RemoteShardsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write meta.json and the index.json of both sides, which hold the hash of every file; aux/remote.json has the
    location of the files, so that shards that are moved stay the same artifact.

    Raises StageError: what `infra.io.s3` raises; `no_shards` where one of these files is missing; `no_hashes` for an
    index without them; `missing_shards` for files that the index names and that are not there in their size.
    """
    location = config.location.rstrip("/")
    objects = {str(item): item for item in list_objects(f"{location}/")}
    for name in ("meta.json", *(f"{side}/index.json" for side in SIDES)):
        item = objects.get(f"{location}/{name}")
        if item is None:
            raise stage_error(
                "no_shards",
                f"{location}/{name}",
                "expected the output of the shard stage",
                "copy the whole folder of a shard artifact there",
            )
        (out_dir / name).parent.mkdir(exist_ok=True)
        with open_object(item) as file:
            (out_dir / name).write_bytes(file.read())
    sizes = {key: item.size for key, item in objects.items()}
    problems = [problem for side in SIDES for problem in _differences(f"{location}/{side}", out_dir / side, sizes)]
    if problems:
        raise StageError(*problems[:5])
    (out_dir / "aux").mkdir(exist_ok=True)
    (out_dir / "aux" / _LOCATION).write_text(json.dumps({"location": location}) + "\n", encoding="utf8")
    meta = read_own_json(out_dir / "meta.json")
    figures = {name: float(meta[name]) for name in ("train_tokens", "validation_tokens", "train_bytes")}
    return Result(figures, f"{meta['train_tokens']:,.0f} training tokens in {location}")


def _differences(location: str, folder: Path, sizes: Mapping[str, int]) -> Iterator[Problem]:
    for name, checksum in checksums(_shards(folder)).items():
        if sizes.get(f"{location}/{name}") != checksum.size:
            size = sizes.get(f"{location}/{name}")
            message = f"expected {checksum.size:,} bytes, found {'nothing' if size is None else f'{size:,}'}"
            yield Problem("missing_shards", f"{location}/{name}", message, "copy the shards there again")


def checksums(shards: Sequence[Mapping[str, Any]]) -> dict[str, Checksum]:
    """Return the checksum of each file that is fetched, by its name; compressed where the shards are.

    Raises StageError `no_hashes`, and `unsafe_file` for a name by which it would be written outside of its folder.
    """
    by_file = {}
    for number, shard in enumerate(shards):
        for part in ("raw_data", "zip_data"):
            if shard[part] and names_outside(str(shard[part]["basename"])):
                location = f"index.json: shards.{number}.{part}.basename"
                message = f"names {str(shard[part]['basename'])[:80]}, which is outside the folder of the shards"
                raise stage_error("unsafe_file", location, message, "rewrite the shards")
        file = shard["zip_data"] or shard["raw_data"]
        algorithm = next((name for name in _HASHES if name in file["hashes"]), None)
        if algorithm is None:
            raise stage_error(
                "no_hashes",
                file["basename"],
                "expected a hash of each file in index.json, which shows that a transfer was complete",
                "shard with shard.hashes, such as the default [xxh3_64]",
            )
        by_file[file["basename"]] = Checksum(int(file["bytes"]), algorithm, file["hashes"][algorithm])
    return by_file


def location_of(split: Path) -> str | None:
    """Return the location of a split's files (train/ or validation/ of a shard artifact) if they are on S3; None for
    those next to their index."""
    try:
        record = read_own_json(split.parent / "aux" / _LOCATION)
    except FileNotFoundError:
        return None
    return f"{record['location']}/{split.name}"


def _shards(folder: Path) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = read_own_json(folder / "index.json")["shards"]
    return shards


if __name__ == "__main__":
    from infra.alone import main

    main(remote_shards, RemoteShardsConfig)
