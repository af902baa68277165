"""A model folder with weights in 8 bits, by torchao through transformers, or as GGUF by llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, cast

from infra.errors import StageError, stage_error

Quantization = Literal["int8", "fp8", "gguf"]
ELSEWHERE = {"awq": "AWQModifier", "gptq": "GPTQModifier"}
"""Formats that no tool writes in this environment, with the class of llm-compressor that does."""
GGUF = "model-q8_0.gguf"
_CONVERTER = "convert_hf_to_gguf.py"
_OPTION = "--quantize"


def written_here(kind: str | None) -> Quantization | None:
    """Return a format that is written here, or None. Raises StageError `not_written_here` for one in `ELSEWHERE`."""
    if kind in ELSEWHERE:
        message = (
            f"{kind.upper()} is not written here: llm-compressor, which is maintained, needs older versions of torch "
            "and transformers than this environment has, and AutoAWQ is not maintained"
        )
        fix = (
            "export without the option, then in a separate environment: pip install llmcompressor, and "
            f"oneshot(model=folder, recipe={ELSEWHERE[kind]}(scheme='W4A16', targets=['Linear'], ignore=['lm_head']), "
            "dataset=texts on which the model should be good)"
        )
        raise stage_error("not_written_here", _OPTION, message, fix)
    return cast(Quantization | None, kind)


def quantize(folder: Path, auto: Any, kind: Literal["int8", "fp8"], dtype: Any) -> Any:
    """Rewrite the linear layers' weights of a model folder in 8 bits, one scale per row, and return the model.

    Embeddings and the output layer stay unchanged, which is torchao's default in transformers.

    Args:
        folder: of a model that transformers loads; its safetensors are replaced.
        auto: transformers' class that loads it.
        kind: int8 or fp8 (E4M3).
        dtype: type of the unquantized weights and of the computation.

    Raises:
        StageError: `nothing_to_quantize` for a family without linear layers, such as GPT-2.
    """
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = Int8WeightOnlyConfig(version=2) if kind == "int8" else Float8WeightOnlyConfig()
    model = auto.from_pretrained(folder, dtype=dtype, quantization_config=TorchAoConfig(settings)).eval()
    if not any(type(weight.data).__module__.startswith("torchao") for weight in model.parameters()):
        message = f"{type(model).__name__} has no linear layers that torchao quantizes"
        raise stage_error("nothing_to_quantize", _OPTION, message, "leave the option out")
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink()
    model.save_pretrained(folder)
    return model


def converter() -> Path:
    """Return llama.cpp's converter, from the folder in $LLAMA_CPP or the PATH. Raises StageError `no_converter`."""
    directory = os.environ.get("LLAMA_CPP")
    script = Path(directory, _CONVERTER) if directory else Path(shutil.which(_CONVERTER) or "")
    if not script.is_file():
        location = f"in {directory}, which LLAMA_CPP names" if directory else "on the PATH"
        fix = "clone https://github.com/ggml-org/llama.cpp, install its requirements.txt, set LLAMA_CPP to its folder"
        raise stage_error("no_converter", _OPTION, f"expected llama.cpp's {_CONVERTER} {location}, found none", fix)
    return script


def to_gguf(folder: Path, program: Path) -> None:
    """Write a model folder as GGUF next to its safetensors, in blocks of 8 bits. Raises StageError `not_converted` with
    the converter's last line, for example for a tokenizer that llama.cpp does not know."""
    command = [sys.executable, str(program), str(folder), "--outfile", str(folder / GGUF), "--outtype", "q8_0"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ended.returncode or not (folder / GGUF).is_file():
        last = (ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or ["it wrote nothing"])[-1]
        raise _not_converted(f"{program.name} ended with code {ended.returncode}: {last}")


def _not_converted(message: str) -> StageError:
    return stage_error("not_converted", _OPTION, message, "export without the option, and convert the folder by hand")
