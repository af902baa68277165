"""A model as a folder that the Hugging Face hub takes, checked by loading it with transformers."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from corpus.pretrained import load_pretrained_model, load_pretrained_tokenizer
from evaluation.artifacts import Artifact
from evaluation.card import model_card
from evaluation.config import RegisterConfig
from infra.errors import stage_error
from infra.store.layout import AUX, MANIFEST
from infra.store.manifest import Manifest

CARD = "README.md"
REGISTERED_CARD = "MODEL_CARD.md"
OURS = {MANIFEST, "trained_sequences.json"}
"""Files of the artifact that only this store reads."""


@dataclass(frozen=True)
class Loaded:
    """What transformers found in an exported folder. tokens: that it wrote after a first one."""

    architecture: str
    parameters: int
    chat_template: bool
    tokens: int


def export(model: Artifact, card: str, out: Path) -> Loaded:
    """Writes weights, tokenizer, generation config and README.md, and loads what it wrote.

    `out` must not be there yet, or be empty; it appears whole or not at all. Raises StageError `not_empty`, and
    `not_loadable` where transformers cannot load or run what was written.
    """
    out = Path(os.path.abspath(out))  # `.` has no name
    # transformers makes a module's name of a folder's, and warns where a space or hyphen is in it.
    plain = re.sub(r"\W", "_", out.name)
    name = f".{plain}.unfinished"
    is_there = out.exists()
    if is_there and (not out.is_dir() or any(path.name != name for path in out.iterdir())):
        raise stage_error("not_empty", str(out), "expected a new or empty folder", "name another, or empty it")
    # One that is there stays what it is: it may be where somebody is, or another disk.
    unfinished = (out if is_there else out.parent) / name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        for file in sorted(model.folder.rglob("*")):
            path = file.relative_to(model.folder)
            if file.is_file() and path.parts[0] != AUX and path.name not in OURS:
                (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, unfinished / path)
        (unfinished / CARD).write_text(card, encoding="utf-8")
        loaded = load_as_a_stranger(unfinished)
        if is_there:
            for path in sorted(unfinished.iterdir()):
                path.rename(out / path.name)
        else:
            unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return loaded


def load_as_a_stranger(folder: Path) -> Loaded:
    """Loads a folder by transformers' own classes and lets it write a few tokens. Raises StageError `not_loadable`."""
    from transformers import AutoModelForCausalLM

    try:
        tokenizer = load_pretrained_tokenizer(folder)
        network = load_pretrained_model(AutoModelForCausalLM, folder)
        inputs = tokenizer("Once upon a time", return_tensors="pt")
        given = inputs["input_ids"]
        written = network.generate(given, attention_mask=inputs["attention_mask"], max_new_tokens=4, do_sample=False)
    except Exception as error:  # whatever transformers makes of a folder that it cannot use
        message = f"transformers cannot use it: {type(error).__name__}: {error}".splitlines()[0]
        raise stage_error("not_loadable", str(folder), message, "stemma verify tells whether it is whole") from error
    parameters = sum(weight.numel() for weight in network.parameters())
    return Loaded(type(network).__name__, parameters, bool(tokenizer.chat_template), written.shape[1] - given.shape[1])


def card_of(model: Artifact, registration: tuple[Path, Manifest] | None) -> tuple[str, str]:
    """The model's card and where it comes from: that of its registration, else one without evaluations.

    registration: a folder in which MODEL_CARD.md can be read, and its manifest.
    """
    if registration is not None:
        folder, manifest = registration
        return (folder / REGISTERED_CARD).read_text(encoding="utf-8"), f"register/{manifest.fingerprint}"
    return model_card(RegisterConfig(), model.folder.parent.name, model, {"model": model}, []), ""
