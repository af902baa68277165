"""The usual snippets of PEFT, run on a folder of adapters and its base model, which are known by their paths alone.

    cd EMPTY && python -I elsewhere_adapters.py BASE FOLDER THREADS

It imports nothing of this project. It writes result.json and logits.npy, of the base model with adapters, to the
working directory. result.json holds `check`, the snippet that was tried last, and `error` if one failed.
"""

import json
import sys
from pathlib import Path
from typing import Any

TEXT = "Once upon a time"


def try_snippets(base: str, folder: str, threads: int, findings: dict[str, Any]) -> None:
    """Load base model and adapters, generate and merge, and fill `findings`."""
    findings["check"] = "import peft"
    import numpy as np
    import torch
    import transformers
    from peft import PeftModel

    torch.set_num_threads(threads)
    findings["checks"] = done = []

    def begin(check: str) -> None:
        findings["check"] = check
        done.append(check)

    begin("PeftModel.from_pretrained(base, folder)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = network.get_input_embeddings().weight.shape[0]
    model = PeftModel.from_pretrained(network, folder).eval()
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        np.save("logits.npy", model(**inputs).logits.numpy())

    begin("model.generate(**tokenizer(text), max_new_tokens=4)")
    model.generate(**inputs, max_new_tokens=4, do_sample=False)

    begin("merge_and_unload()")
    merged = model.merge_and_unload()
    findings |= {
        "text": TEXT,
        "inputs": inputs["input_ids"][0].tolist(),
        "rows": rows,
        "architecture": type(merged).__name__,
        "chat_template": bool(tokenizer.chat_template),
    }


if __name__ == "__main__":
    findings: dict[str, Any] = {}
    try:
        try_snippets(sys.argv[1], sys.argv[2], int(sys.argv[3]), findings)
    except Exception as error:
        findings["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    Path("result.json").write_text(json.dumps(findings), encoding="utf8")
