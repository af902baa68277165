"""Streams of `stemma serve` at once, against the same one after the other.

python -m benchmarks.bench_serving [--model FOLDER] [--streams 16] [--tokens 64] [--rounds 3] [--json]

Starts the server as a user does, as a process of its own, on a model folder or on an untrained Llama (12 layers, width
512, 8,192 tokens, 47M parameters), whose speed is that of a trained one. A client asks for greedy completions of texts
of different lengths, streamed, with an end of text forbidden, first one after the other and then all at once, in turns
for some rounds. Whether the texts are equal is reported too: by rounding they may differ where two tokens are nearly
as likely.

Prints tokens per second, their ratio, and the time until the first token; tokens per second of the server's processor
time say more on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from infra.servers.http import answers
from infra.servers.ports import any_free_port

WORDS = ["the", "sum", "of", "a", "list", "is", "what", "its", "numbers", "come", "to", "when", "they", "are", "added"]


def untrained(folder: Path) -> Path:
    """A Llama with random weights, and a tokenizer whose tokens are bytes and a few thousand numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from corpus.tokens.chat_format import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
    from training.checkpoint.export import export
    from training.config import ModelConfig
    from training.model.models import build, hf_config

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *letters, *(f"<{number}>" for number in range(8192 - len(SPECIAL_TOKENS) - len(letters)))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=PAD,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    whole.save_pretrained(folder / "tokenizer")
    config = ModelConfig(family="llama", layers=12, width=512, heads=8, positions=2048)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    export(build(hf_config(config, len(names), special), seed=1), folder / "tokenizer", folder / "model")
    return folder / "model"


def stream(url: str, number: int, tokens: int) -> tuple[str, float, float]:
    """The text of one answer, seconds until its first token, and until its end."""
    prompt = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(8 + 3 * (number % 5)))
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": {"0": -100}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    began, first, text = time.perf_counter(), 0.0, ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text, first, time.perf_counter() - began


def measure(url: str, server: int, streams: int, tokens: int, *, at_once: bool) -> dict[str, Any]:
    """Figures of some streams. server: the id of its process."""
    results: dict[int, tuple[str, float, float]] = {}

    def ask(number: int) -> None:
        results[number] = stream(url, number, tokens)

    process = psutil.Process(server)
    began, processor = time.perf_counter(), sum(process.cpu_times()[:2])
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": streams * tokens / seconds,
        "tokens_per_processor_s": streams * tokens / (sum(process.cpu_times()[:2]) - processor),
        "first_token_s": statistics.median(first for _, first, _ in results.values()),
        "texts": [results[number][0] for number in range(streams)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, port = given.model or untrained(Path(folder)), any_free_port()
        command = [sys.executable, "-m", "cli.main", "serve", str(model), "--engine", "own", "--port", str(port)]
        server = subprocess.Popen(command, env={**os.environ, "NO_PROXY": "*"}, stderr=subprocess.DEVNULL)
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.5)
            url = f"http://127.0.0.1:{port}/v1/completions"
            measure(url, server.pid, 2, 4, at_once=True)  # the model is tried, and its weights are laid out, once
            rounds = [
                [measure(url, server.pid, given.streams, given.tokens, at_once=at_once) for at_once in (False, True)]
                for _ in range(given.rounds)
            ]
        finally:
            server.terminate()
            server.wait()
    found: dict[str, Any] = {"model": str(given.model or "untrained, 47M"), "streams": given.streams}
    for place, name in enumerate(("one_after_the_other", "at_once")):
        for key in ("tokens_per_s", "tokens_per_processor_s", "first_token_s"):
            found[f"{name}_{key}"] = round(statistics.median(each[place][key] for each in rounds), 3)
    for key in ("tokens_per_s", "tokens_per_processor_s"):
        ratios = [both[key] / one[key] for one, both in rounds]
        found[f"ratio_of_{key}"] = round(statistics.median(ratios), 2)
        found[f"ratios_of_{key}"] = [round(ratio, 2) for ratio in ratios]
    pairs = [pair for one, both in rounds for pair in zip(one["texts"], both["texts"], strict=True)]
    found["equal_texts"] = f"{sum(one == both for one, both in pairs)} of {len(pairs)}"
    print(json.dumps(found) if given.json else "\n".join(f"{key:40} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
