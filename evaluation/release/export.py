"""Export of a model to a folder for the Hugging Face hub, checked with the snippets that its users run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from corpus.model_folders.inputs import name_model_inputs
from corpus.model_folders.licence import licence_files
from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from evaluation.config import RegisterConfig
from evaluation.release.card import model_card
from evaluation.release.elsewhere import auto_class
from evaluation.release.quantized import GGUF, Quantization, converter, quantize, to_gguf
from evaluation.results.artifacts import Artifact
from infra.errors import stage_error
from infra.io.foreign import check_model
from infra.io.json import read_json, read_own_json
from infra.store.layout import AUX, MANIFEST
from infra.store.manifest import Manifest

CARD = "README.md"
REGISTERED_CARD = "MODEL_CARD.md"
ELSEWHERE = Path(__file__).parent / "elsewhere.py"
NOT_EXPORTED = {MANIFEST, "trained_sequences.json"}
"""Files of the artifact that only this store reads."""


@dataclass(frozen=True)
class Loaded:
    """Findings of a new process in an exported folder.

    tokens: tokens that the model wrote after a text, 0 for a model that writes none. checks: the snippets that the
    process ran. deviation: for quantized weights, the largest difference of a logit from the unquantized model's; 0 for
    others. largest_logit: of the unquantized model, to compare the deviation with.
    """

    architecture: str
    parameters: int
    chat_template: bool
    tokens: int
    checks: list[str]
    deviation: float = 0.0
    largest_logit: float = 0.0


def export(model: Artifact, card: str, out: Path, quantization: Quantization | None = None) -> Loaded:
    """Write weights, tokenizer, generation config and README.md, and try them in a new process.

    `out` must not exist or must be empty; it appears whole or not at all.

    Args:
        quantization: int8 and fp8 replace the weights by quantized ones, gguf writes a file of llama.cpp next to
            them.

    Raises StageError `not_empty`, `not_loadable` if transformers cannot load or run the written model, and
    `other_logits` if its logits differ from the model's; also raises as `evaluation.release.quantized` does.
    """
    program = converter() if quantization == "gguf" else None  # before anything is copied
    with appearing(out) as unfinished:
        for file in sorted(model.folder.rglob("*")):
            path = file.relative_to(model.folder)
            if file.is_file() and path.parts[0] != AUX and path.name not in NOT_EXPORTED:
                (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, unfinished / path)
        copy_licence(model.folder, unfinished)
        (unfinished / CARD).write_text(card, encoding="utf-8")
        name_model_inputs(unfinished)  # models of earlier versions lack them
        weights = quantization if quantization in ("int8", "fp8") else None
        loaded = check_elsewhere(unfinished, model.folder, weights)
        if program is not None:
            to_gguf(unfinished, program)
        if quantization is not None:
            (unfinished / CARD).write_text(
                f"{card.rstrip()}\n\n{_quantized_part(quantization, loaded)}", encoding="utf-8"
            )
    return loaded


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` if nothing raises. Raises StageError `not_empty`."""
    out = Path(os.path.abspath(out))  # `.` has no name
    # transformers turns a folder's name into a module name, and warns about a space or hyphen in it.
    plain = re.sub(r"\W", "_", out.name)
    name = f".{plain}.unfinished"
    out_exists = out.exists()
    if out_exists and (not out.is_dir() or any(path.name != name for path in out.iterdir())):
        raise stage_error("not_empty", str(out), "expected a new or empty folder", "choose another, or empty it")
    # An existing folder is not replaced: it may be a working directory or a mount point.
    unfinished = (out if out_exists else out.parent) / name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if out_exists:
            for path in sorted(unfinished.iterdir()):
                path.rename(out / path.name)
        else:
            unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_licence(source: Path, out: Path) -> None:
    """Copy the licence's files of an artifact to the top of a folder, except those that it already has."""
    for file in licence_files(source):
        if not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def _quantized_part(quantization: Quantization, loaded: Loaded) -> str:
    """Return the section of the card about quantized weights."""
    if quantization == "gguf":
        text = f"`{GGUF}` has the same weights in blocks of 8 bits (Q8_0), for llama.cpp."
    else:
        kind = "8-bit integers" if quantization == "int8" else "8-bit floating-point numbers (E4M3)"
        text = (
            f"The weights of linear layers are {kind} with one scale per row, by torchao; embeddings and output layer "
            f"are not quantized. On one text a logit differs by up to {loaded.deviation:.3g} from the unquantized "
            f"model's, whose largest is {loaded.largest_logit:.3g} in magnitude."
        )
    return f"## Quantized weights\n\n{text} The figures above are of the unquantized model.\n"


def check_elsewhere(folder: Path, source: Path, weights: Literal["int8", "fp8"] | None = None) -> Loaded:
    """Run the usual snippets on `folder` in a process that knows nothing of this project
    (`evaluation/release/elsewhere.py`), and compare its token ids and logits with those of `source` in this process.

    Args:
        weights: quantization to apply to those of `folder` first. Its logits are then compared with those of the
            quantized model in this process, and their deviation from the model's is measured.
    """
    import torch
    import transformers

    fix = "stemma verify checks whether it is complete"
    check_model(folder)
    quantized = None
    if weights is not None:
        config = read_json(source / "config.json", nan=True)
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        quantized = quantize(folder, getattr(transformers, auto_class(config)[0]), weights, getattr(torch, name))
    report, logits = run_elsewhere(ELSEWHERE, str(folder))
    if "error" in report:
        message = f"transformers cannot use it: {report['check']}: {report['error']}"
        raise stage_error("not_loadable", str(folder), message, fix)
    try:
        tokenizer = load_pretrained_tokenizer(source)
        auto, dtype = getattr(transformers, report["auto"]), getattr(torch, report["dtype"])
        network = load_pretrained_model(auto, source, dtype=dtype).eval()
        with torch.no_grad():
            inputs = {name: torch.tensor([ids]) for name, ids in report["inputs"].items()}
            expected = network(**inputs).logits.float().numpy()
            of_quantized = expected if quantized is None else quantized(**inputs).logits.float().numpy()
    except Exception as error:  # transformers may raise anything for a folder that it cannot use
        message = f"this project cannot use it: {type(error).__name__}: {error}".splitlines()[0]
        raise stage_error("not_loadable", str(source), message, fix) from error
    if list(tokenizer(report["text"]).input_ids) != report["inputs"]["input_ids"]:
        message = f"token ids of {report['text']!r} differ from the model's"
        raise stage_error("other_logits", str(folder), message, fix)
    if not np.array_equal(of_quantized, logits, equal_nan=True):
        message = f"logits of {report['text']!r} differ from the model's by up to {abs(of_quantized - logits).max():g}"
        raise stage_error("other_logits", str(folder), message, fix)
    loaded_fields = {item.name: report[item.name] for item in fields(Loaded) if item.name in report}
    return Loaded(
        **loaded_fields, deviation=float(abs(expected - logits).max()), largest_logit=float(abs(expected).max())
    )


def run_elsewhere(program: Path, *args: str) -> tuple[dict[str, Any], Any]:
    """Run a program of this folder in a new process that knows nothing of this project.

    Return its result.json, with `check` and `error` if it failed, and its logits.npy.
    """
    import torch

    with TemporaryDirectory(prefix="stemma-export-") as empty:
        # Sums of floating-point numbers depend on the number of threads.
        command = [sys.executable, "-I", str(program), *args, str(torch.get_num_threads())]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        ended = subprocess.run(command, cwd=empty, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        result = Path(empty, "result.json")
        report = read_own_json(result) if result.exists() else {}
        report.setdefault("check", "import")
        if ended.returncode and "error" not in report:
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            report["error"] = f"the process ended with code {ended.returncode}: {last}"
        return report, None if "error" in report else np.load(Path(empty, "logits.npy"), allow_pickle=False)


def card_of(model: Artifact, registration: tuple[Path, Manifest] | None) -> tuple[str, str]:
    """Return the model's card and its origin: the card of its registration, otherwise one without evaluations.

    Args:
        registration: a folder in which MODEL_CARD.md can be read, and its manifest.
    """
    if registration is not None:
        folder, manifest = registration
        return (folder / REGISTERED_CARD).read_text(encoding="utf-8"), f"register/{manifest.fingerprint}"
    return model_card(RegisterConfig(), model.folder.parent.name, model, {"model": model}, []), ""
