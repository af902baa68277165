"""Streams of `stemma serve` at once against one after the other, and against other servers.

python -m benchmarks.evaluation.bench_serving [--model FOLDER] [--streams 16] [--tokens 64] [--rounds 3]
    [--transformers PYTHON] [--json]

Starts the server as a user does, in a separate process, on a model folder or on an untrained Llama (12 layers, width
512, 8,192 tokens, 47M parameters), whose speed is that of a trained one. A client asks for greedy completions of texts
of different lengths, streamed, with an end of text forbidden, first one after the other and then all at once, in turns
for some rounds. Then, while all streams but one are running, it asks for single answers (the first token of a request
that joins) and for an answer to a prompt that nearly fills the context (the longest pause of the others).

`transformers serve --continuous-batching` does the same in turn in this run, on the same folder, if the current
environment, or that of PYTHON, has its dependencies; so does vLLM where it is installed ($STEMMA_VLLM or the PATH).

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from infra.launch.launchers import VllmConfig
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from infra.servers.vllm import NO_USAGE_STATS, own_environment, program_of, vllm_command

WORDS = ["the", "sum", "of", "a", "list", "is", "what", "its", "numbers", "come", "to", "when", "they", "are", "added"]


def untrained(folder: Path) -> Path:
    """A Llama with random weights, and a tokenizer whose tokens are bytes and a few thousand numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from corpus.tokens.chat_template import CHAT_TEMPLATE, END_OF_TEXT, PAD, SPECIAL_TOKENS
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


class Stream:
    """A streamed answer. times: of its pieces, in seconds since the request; text: of all of them."""

    def __init__(self, url: str, number: int, tokens: int, *, words: int = 0) -> None:
        self.url, self.tokens, self.text = url, tokens, ""
        self.times: list[float] = []
        self.stopped = False
        count = words or 8 + 3 * (number % 5)
        self.prompt = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(count))

    def run(self) -> Stream:
        body = {
            "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True,
            "logit_bias": {"0": -100},
        }  # fmt: skip
        request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        began = time.perf_counter()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600) as response:
            for line in response:
                if self.stopped:
                    break
                if line.startswith(b"data: {"):
                    text = json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
                    if text:
                        self.times.append(time.perf_counter() - began)
                    self.text += text
        return self

    @property
    def first(self) -> float:
        return self.times[0] if self.times else float("nan")


def measure(url: str, server: int, streams: int, tokens: int, *, at_once: bool) -> dict[str, Any]:
    """Figures of some streams. server: the id of its process."""
    requested = [Stream(url, number, tokens) for number in range(streams)]
    processor_before, began = processor_s(server), time.perf_counter()
    threads = [threading.Thread(target=stream.run) for stream in requested]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": streams * tokens / seconds,
        "tokens_per_processor_s": streams * tokens / (processor_s(server) - processor_before),
        "first_token_s": statistics.median(stream.first for stream in requested),
        "texts": [stream.text for stream in requested],
    }


def processor_s(server: int) -> float:
    """Processor time of a server's processes so far."""
    process = psutil.Process(server)
    return sum(sum(member.cpu_times()[:2]) for member in (process, *process.children(recursive=True)))


def joining(url: str, streams: int, requests: int, longest: int) -> dict[str, float]:
    """Seconds until the first token of single requests, alone and while all streams but one run, and the longest pause
    of these while a prompt of `longest` words is read."""
    alone = [Stream(url, number, 2).run().first for number in range(requests)]
    running = [Stream(url, number, 1500) for number in range(streams - 1)]
    threads = [threading.Thread(target=stream.run) for stream in running]
    for thread in threads:
        thread.start()
    while not all(len(stream.times) > 1 for stream in running):
        time.sleep(0.02)
    joined = [Stream(url, number, 2).run().first for number in range(requests)]
    before = [len(stream.times) for stream in running]
    long_prompt = Stream(url, 0, 2, words=longest).run()
    pauses = []
    for stream, start in zip(running, before, strict=True):
        stream.stopped = True
        times = stream.times[start:]
        pauses += [after - earlier for earlier, after in pairwise(times)]
    for thread in threads:
        thread.join()
    return {
        "alone_first_token_s": statistics.median(alone),
        "joining_first_token_s": statistics.median(joined),
        "ratio_of_joining_first_token": statistics.median(joined) / statistics.median(alone),
        "long_prompt_first_token_s": long_prompt.first,
        "longest_pause_meanwhile_s": max(pauses, default=0.0),
    }


def race(name: str, command: list[str], port: int, given: argparse.Namespace, environment: dict[str, str]) -> Any:
    """Figures of a server, None if it does not start or answer."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            base, url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/v1/completions"
            while not answers(f"{base}/health"):
                if server.poll() is not None:
                    log.seek(0)
                    print(f"{name} did not start: {log.read()[-2000:].decode()}", file=sys.stderr)
                    return None
                time.sleep(0.5)
            measure(url, server.pid, 2, 4, at_once=True)  # the model is tried, and its weights are laid out, once
            rounds = [
                [measure(url, server.pid, given.streams, given.tokens, at_once=at_once) for at_once in (False, True)]
                for _ in range(given.rounds)
            ]
            figures: dict[str, Any] = {}
            for index, way in enumerate(("one_after_the_other", "at_once")):
                for key in ("tokens_per_s", "tokens_per_processor_s", "first_token_s"):
                    figures[f"{way}_{key}"] = round(statistics.median(each[index][key] for each in rounds), 3)
            for key in ("tokens_per_s", "tokens_per_processor_s"):
                ratios = [both[key] / single[key] for single, both in rounds]
                figures[f"ratio_of_{key}"] = round(statistics.median(ratios), 2)
                figures[f"ratios_of_{key}"] = [round(ratio, 2) for ratio in ratios]
            pairs = [pair for single, both in rounds for pair in zip(single["texts"], both["texts"], strict=True)]
            figures["equal_texts"] = f"{sum(single == both for single, both in pairs)} of {len(pairs)}"
            figures["texts"] = rounds[-1][1]["texts"]
            joined = joining(url, given.streams, given.joining, given.long_words) if given.joining else {}
            return {**figures, **{key: round(value, 3) for key, value in joined.items()}}
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joining", type=int, default=8, help="requests that join running streams")
    parser.add_argument("--long-words", type=int, default=300, help="of the long prompt, some 4 tokens each")
    parser.add_argument("--transformers", default=sys.executable, help="Python of `transformers serve`")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    environment = {**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1"}
    report: dict[str, Any] = {"model": str(given.model or "untrained, 47M"), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        model = str(given.model or untrained(Path(folder)))
        port = any_free_port()
        own = [sys.executable, "-m", "cli.main", "serve", model, "--engine", "own", "--port", str(port)]
        report["stemma"] = race("stemma", own, port, given, environment)
        if report["stemma"] is None:
            raise SystemExit(1)
        is_usable = "from transformers.utils.import_utils import is_serve_available as f; raise SystemExit(not f())"
        if subprocess.run([given.transformers, "-c", is_usable], stderr=subprocess.DEVNULL, check=False).returncode:
            report["transformers serve"] = "absent: its dependencies (openai) are not installed"
        else:
            port = any_free_port()
            theirs = [given.transformers, "-m", "transformers.cli.transformers", "serve", model]
            theirs += ["--port", str(port), "--continuous-batching"]
            report["transformers serve"] = race("transformers serve", theirs, port, given, environment)
        if (program := program_of(VllmConfig())) is None:
            report["vLLM"] = "absent: not installed"
        else:
            port = any_free_port()
            command = vllm_command(program, Path(model), "model", "--port", str(port))
            own_variables = {**own_environment(), **NO_USAGE_STATS}
            report["vLLM"] = race("vLLM", command, port, given, own_variables)
    report["load_at_end"] = os.getloadavg()[0]
    texts = {name: row.pop("texts") for name, row in report.items() if isinstance(row, dict)}
    for name, others in texts.items():
        equal = sum(ours == theirs for ours, theirs in zip(texts["stemma"], others, strict=True))
        report[name]["texts_equal_to_stemma"] = f"{equal} of {len(others)}"
    if given.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(name, "" if isinstance(value, dict) else value)
        for key, figure in value.items() if isinstance(value, dict) else ():
            print(f"  {key:40} {figure}")


if __name__ == "__main__":
    main()
