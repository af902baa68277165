"""The usual snippets of transformers, run on a model folder that is known by its path alone.

    cd EMPTY && python -I elsewhere.py FOLDER THREADS

It imports nothing of this project. It writes result.json and logits.npy to the working directory. result.json holds
`check`, the snippet that was tried last, and `error` if one failed.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

TEXT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is a list?"}]
LENGTH = {"max_new_tokens": 4, "do_sample": False}


WRITE = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")


def auto_class(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the class of transformers that loads a model with this config, and the task of the hub and a pipeline."""
    kind = (config.get("architectures") or [""])[0]
    if kind.endswith("ForSequenceClassification"):
        return "AutoModelForSequenceClassification", "text-classification"
    if kind.endswith("ForMaskedLM"):
        return "AutoModelForMaskedLM", "fill-mask"
    if config.get("is_encoder_decoder") or kind.startswith("T5"):
        return "AutoModelForSeq2SeqLM", "text2text-generation"
    return "AutoModelForCausalLM", "text-generation"


def try_snippets(folder: str, threads: int, outcome: dict[str, Any]) -> None:
    """Run the snippets for the kind of model that `folder` holds, and fill `outcome`."""
    outcome["check"] = "import transformers"
    import numpy as np
    import torch
    import transformers
    from transformers import AutoConfig, pipeline

    torch.set_num_threads(threads)
    outcome["checks"] = done = []

    def begin(check: str) -> None:
        outcome["check"] = check
        done.append(check)

    begin("AutoTokenizer.from_pretrained")
    config = AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto, task = auto_class(config.to_dict())
    writes = auto in WRITE

    begin(f"{auto}.from_pretrained")
    model = getattr(transformers, auto).from_pretrained(folder)
    inputs = tokenizer(TEXT, return_tensors="pt")
    call = "model.generate(**{}, max_new_tokens=4)" if writes else "model(**{})"

    run = partial(model.generate, **LENGTH) if writes else model
    begin(call.format('tokenizer(text, return_tensors="pt")'))
    written = run(**inputs)
    if tokenizer.chat_template:
        begin(call.format("tokenizer.apply_chat_template(messages, return_dict=True)"))
        turns = tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=writes, return_tensors="pt", return_dict=True
        )
        run(**turns)

    begin(f"{auto}'s logits")
    model_inputs = dict(inputs)
    if config.is_encoder_decoder:
        model_inputs["decoder_input_ids"] = torch.tensor([[config.decoder_start_token_id]])
    with torch.no_grad():
        np.save("logits.npy", model(**model_inputs).logits.float().numpy())
    outcome |= {
        "text": TEXT,
        "auto": auto,
        "dtype": str(model.dtype).removeprefix("torch."),
        "inputs": {name: ids[0].tolist() for name, ids in model_inputs.items()},
        "architecture": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "chat_template": bool(tokenizer.chat_template),
        "tokens": written.shape[1] - (1 if config.is_encoder_decoder else len(inputs["input_ids"][0])) if writes else 0,
    }
    del run, model  # a pipeline loads another

    # transformers 5 has no pipeline for encoder-decoder models.
    if auto != "AutoModelForSeq2SeqLM" and (task != "fill-mask" or tokenizer.mask_token):
        begin(f'pipeline("{task}", model=folder)')
        ready = pipeline(task, model=folder)
        if task == "text-generation":
            ready(TEXT, **LENGTH)
            if tokenizer.chat_template:
                ready(MESSAGES, **LENGTH)
        else:
            ready(TEXT if task == "text-classification" else f"{TEXT} {tokenizer.mask_token}")


if __name__ == "__main__":
    outcome: dict[str, Any] = {}
    try:
        try_snippets(sys.argv[1], int(sys.argv[2]), outcome)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    Path("result.json").write_text(json.dumps(outcome), encoding="utf8")
