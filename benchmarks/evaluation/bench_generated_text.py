"""How fast `generate` asks, and how fast it repeats from the answers that it kept.

python -m benchmarks.evaluation.bench_generated_text [--documents 300] [--rounds 3]
    [--url http://127.0.0.1:8000/v1 --model NAME]

The first documents of C4 in ../shared/data. Without --url a process beside it answers at once, so that what is measured
is the stage itself: prompts, HTTP, and each answer on the disk before it counts. With --url, of `stemma serve` or
another endpoint, what is measured is mostly that endpoint. Each round asks anew, then builds once more from the kept
answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.corpus.planted import SHARED
from corpus.documents.parts import DocumentWriter, make_document
from corpus.generation.config import GenerateConfig
from corpus.generation.stage import generate
from infra.run import Run


def answer_at_once(port: Connection) -> None:
    """Serves /chat/completions with an answer that is new for each request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length:")[2].partition("\r\n")[0])
                seed = json.loads(await reader.readexactly(size))["seed"]
                message = {"role": "assistant", "content": f"The passage in other words, number {seed}. " * 10}
                usage = {"prompt_tokens": 500, "completion_tokens": 100}
                choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                body = json.dumps({"model": "at-once", "choices": choices, "usage": usage}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def timed(work: Callable[..., dict[str, float]], *names: str) -> tuple[float, float, dict[str, float]]:
    """Seconds, seconds of this process's processor time, and the figures."""
    begun, used = time.perf_counter(), time.process_time()
    figures = work(*names)
    return time.perf_counter() - begun, time.process_time() - used, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--cut-characters", type=int, default=4000)
    parser.add_argument("--url")
    parser.add_argument("--model", default="at-once")
    options = parser.parse_args()
    server = None
    if options.url is None:
        here, there = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(target=answer_at_once, args=(there,), daemon=True)
        server.start()
        options.url = f"http://127.0.0.1:{here.recv()}/v1"
    asked, repeated = [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            DocumentWriter(place / "in" / "documents") as writer,
            (SHARED / "web_demo" / "c4_demo.jsonl").open(encoding="utf8") as file,
        ):
            for number, line in zip(range(options.documents), file, strict=False):
                writer.write(make_document(json.loads(line)["text"], f"c4/{number}"))
        config = GenerateConfig(
            endpoint={"url": options.url, "model": options.model, "concurrency": options.concurrency},
            sampling={"max_tokens": options.max_tokens},
            cut_characters=options.cut_characters,
            keep_truncated=True,
            answer_limits={"truncated": 1, "empty": 1},
        )

        def build(name: str, answers: str) -> dict[str, float]:
            (place / name).mkdir()
            run = Run(place / f"{name}.work", answers_dir=place / answers)
            return dict(generate(config, {"documents": place / "in"}, place / name, run).figures)

        for number in range(options.rounds):
            seconds, used, figures = timed(build, f"first-{number}", f"answers-{number}")
            again, _, kept = timed(build, f"again-{number}", f"answers-{number}")
            assert kept["requests"] == 0 and kept["cached"] == figures["requests"] + figures["cached"]
            asked.append(figures["requests"] / seconds)
            repeated.append(kept["cached"] / again)
            print(
                f"{figures['requests']:,.0f} requests in {seconds:.2f} s ({asked[-1]:,.1f} a second, "
                f"{figures['requests'] / used:,.1f} per second of processor time), "
                f"{figures['completion_tokens'] / seconds:,.1f} tokens written a second; truncated "
                f"{figures['truncated']:,.0f}, empty {figures['empty']:,.0f}, failed {figures['failed']:,.0f}; "
                f"again {again:.2f} s ({repeated[-1]:,.1f} a second)"
            )
    print(f"medians: {statistics.median(asked):,.1f} requests a second, {statistics.median(repeated):,.1f} repeated")
    if server:
        server.terminate()


if __name__ == "__main__":
    main()
