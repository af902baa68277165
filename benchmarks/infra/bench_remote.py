"""Whether training waits for shards that lie on a slow object store.

python benchmarks/infra/bench_remote.py [--latency-ms 50] [--batches 96] [--file-kb 12] [--width 256]

About 6 minutes on 2 quiet cores. The same pretraining of a small Llama on shards of this disk, and on the same shards
in moto's S3 server, in a process of its own on loopback, every answer of which comes `--latency-ms` late: with no bound
on the cache, and with one that holds a quarter of the files, so that files are fetched to the end. Waiting is the time
from asking the loader for a batch until it is there, in the process that trains; before the first batch nothing is
there yet, so that it is told apart. As a measure of what there is to hide, the same is done once more with reading
ahead turned off.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.training.train_setting import VOCABULARY, write_tokenizer
from cli.common.output import print_table

LENGTH = 256
BATCH = 8
"""Sequences of a batch."""
BLOCK = 32
"""Sequences over which they are shuffled."""
BUCKET = "shards"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--batches", type=int, default=96)
    parser.add_argument("--file-kb", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs, options.latency_ms / 1000), daemon=True)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files, size = write(folder / "here", options.batches, 1024 * options.file_kb)
        write_tokenizer(folder / "tokenizer")
        put(folder / "here", folder / "there")
        told = f"{files} files of {size / files / 1024:.0f} KB, {options.latency_ms:g} ms before each answer"
        print(told, flush=True)
        ways: list[tuple[str, str, dict[str, Any]]] = [
            ("on this disk", "here", {}),
            ("remote", "there", {}),
            ("remote, cache of a quarter", "there", {"shard_cache_gb": size / 4e9}),
            ("remote, nothing read ahead", "there", {"ahead": False}),
        ]
        rows = []
        for number, (name, shards, changed) in enumerate(ways):
            job = {"width": options.width, "batches": options.batches, "shards": str(folder / shards), **changed}
            job |= {"tokenizer": str(folder / "tokenizer"), "out": str(folder / f"out{number}")}
            process = spawn.Process(target=train, args=(job,))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(f"{name}: ended with {process.exitcode}")
            rows.append(row(name, json.loads((folder / f"out{number}" / "waits.json").read_text())))
            print(rows[-1], flush=True)
    server.terminate()
    columns = {"what": "", "step": "ms a batch", "waited": "ms waited a batch", "longest": "longest, ms"}
    print_table(rows, columns | {"share": "of the time", "first": "first batch, ms", "fetched": "files fetched"})


def serve(pipe: Connection, latency_s: float) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None:
            return

    moto = DomainDispatcherApplication(create_backend_app)

    def late(environment: Any, start: Any) -> Any:
        time.sleep(latency_s)
        return moto(environment, start)

    server = make_server("127.0.0.1", 0, late, threaded=True, request_handler=Quiet)
    pipe.send(server.server_port)
    server.serve_forever()


def write(folder: Path, batches: int, file_bytes: int) -> tuple[int, int]:
    """Packed random tokens of so many batches. How many files the training side has, and their bytes."""
    from streaming import MDSWriter

    random = np.random.default_rng(0)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}", "starts": "ndarray:uint32"}
    for split, count in (("train", batches * BATCH), ("validation", BATCH)):
        place = str(folder / split)
        with MDSWriter(out=place, columns=columns, hashes=["xxh3_64"], size_limit=file_bytes) as writer:
            for _ in range(count):
                tokens = random.integers(1, VOCABULARY, LENGTH).astype(np.uint16)
                writer.write({"tokens": tokens, "starts": np.zeros(1, np.uint32)})
    train, validation = batches * BATCH * LENGTH, BATCH * LENGTH
    meta = {"vocab_size": VOCABULARY, "end_of_text_id": 0, "sequence_length": LENGTH}
    meta |= {"train_tokens": train, "train_bytes": 4 * train}
    meta |= {"validation_tokens": validation, "validation_bytes": 4 * validation}
    (folder / "meta.json").write_text(json.dumps(meta))
    found = [path.stat().st_size for path in (folder / "train").glob("*.mds")]
    return len(found), sum(found)


def put(folder: Path, imported: Path) -> None:
    """Uploads shards, and imports them as the step `remote_shards` does."""
    from corpus.config import RemoteShardsConfig
    from corpus.tokens.remote import remote_shards
    from infra.io import s3
    from infra.run import Run

    s3.client().create_bucket(Bucket=BUCKET)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            s3.client().upload_file(str(path), BUCKET, f"run/{path.relative_to(folder)}")
    imported.mkdir()
    remote_shards(RemoteShardsConfig(location=f"s3://{BUCKET}/run"), {}, imported, Run(imported.parent / "import"))


def train(job: dict[str, Any]) -> None:
    """One pretraining in this process; leaves what it waited for each batch, and when it asked, in waits.json."""
    from infra.launch.config import LaunchConfig
    from infra.run import Run
    from training.config import PretrainConfig
    from training.data import packed_batches, packed_shards
    from training.data import remote_shards as remote
    from training.pretrain import pretrain

    asked: list[tuple[float, float]] = []
    fetched: list[str] = []
    read, download = packed_batches.PackedBatches.__iter__, remote.download

    def timed(self: Any) -> Iterator[Any]:
        batches = read(self)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            asked.append((begun, time.perf_counter() - begun))
            yield batch

    def counted(url: str, *rest: Any) -> None:
        fetched.append(url)
        download(url, *rest)

    packed_batches.PackedBatches.__iter__ = timed  # type: ignore[method-assign]
    remote.download = counted
    if not job.get("ahead", True):
        init = packed_shards.StreamingDataset.__init__
        packed_shards.StreamingDataset.__init__ = lambda self, **given: init(self, **given | {"predownload": 0})
    out = Path(job["out"])
    (out / "model").mkdir(parents=True)
    model = {"family": "llama", "layers": 4, "width": job["width"], "heads": 4, "positions": LENGTH}
    config = PretrainConfig.model_validate(
        {
            "model": model,
            "duration": f"{job['batches']} batches",
            "global_batch_tokens": BATCH * LENGTH,
            "evaluate_every": "100000 batches",
            "checkpoint_every": "100000 batches",
            "keep_state": "none",
            "sample_prompts": [],
            "shuffle_block": BLOCK,
            "guard": {"enabled": False},
        }
    )
    launch = LaunchConfig(device="cpu", threads=1, compile="off", shard_cache_gb=job.get("shard_cache_gb"))
    inputs = {"shards": Path(job["shards"]), "tokenizer": Path(job["tokenizer"])}
    pretrain(config, inputs, out / "model", Run(out / "work", launch))
    (out / "waits.json").write_text(json.dumps({"asked": asked[: job["batches"]], "fetched": len(fetched)}))


def row(name: str, told: dict[str, Any]) -> dict[str, str]:
    times, waits = zip(*told["asked"], strict=True)
    steps = np.diff(times)
    later = waits[1:]
    return {
        "what": name,
        "step": f"{1000 * statistics.median(steps):.0f}",
        "waited": f"{1000 * statistics.mean(later):.2f}",
        "longest": f"{1000 * max(later):.1f}",
        "share": f"{100 * sum(later) / (times[-1] - times[1]):.2f} %",
        "first": f"{1000 * waits[0]:.0f}",
        "fetched": f"{told['fetched']}",
    }


if __name__ == "__main__":
    main()
