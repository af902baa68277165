"""Export of the adapters of a fine-tuning alone, as a folder that PEFT takes beside the base model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from corpus.model_folders.adapters import CONFIG, FOLDER, WEIGHTS, adapter_settings
from corpus.model_folders.folder import INDEX, folder_problems
from corpus.model_folders.inputs import name_model_inputs
from corpus.model_folders.pretrained import load_pretrained_model
from evaluation.release.export import CARD, NOT_EXPORTED, appearing, copy_licence, run_elsewhere
from evaluation.results.artifacts import Artifact
from infra.errors import StageError, stage_error
from infra.io.foreign import check_model
from infra.store.layout import AUX
from infra.store.manifest import folder_of, known_manifest, store_root

PROGRAM = Path(__file__).parent / "elsewhere_adapters.py"
CLOSE = 1e-4
"""Largest difference of a logit between base model with adapters and merged model, in parts of the largest logit: what
adapters add is summed in another order than in merged weights."""
_OPTION = "--adapters"
_OF_MODELS = ("config.json", "generation_config.json", INDEX)


@dataclass(frozen=True)
class LoadedAdapters:
    """Findings of a new process with PEFT, a base model and exported adapters.

    base: as adapter_config.json names it. tried_with: the folder of the base model. rows: tokens whose rows are among
    the adapters. checks: the snippets that the process ran; none where PEFT is not installed. deviation: the largest
    difference of a logit from the merged model's. largest_logit: of the merged model. others: base models that were
    tried before and why they were not taken.
    """

    base: str
    tried_with: str
    weights: int
    rows: int
    checks: list[str]
    deviation: float = 0.0
    largest_logit: float = 0.0
    others: list[str] = field(default_factory=list)


def export_adapters(model: Artifact, card: str, out: Path, base: str = "") -> LoadedAdapters:
    """Write the adapters of a model, its tokenizer, licence and card, and try them beside the base model.

    Args:
        model: an artifact of `sft` with `lora`.
        card: model card, which gets the base model and PEFT's snippet.
        out: new or empty folder; it appears whole or not at all.
        base: folder of the base model or its name on the hub, for adapter_config.json. Empty: the folder that it was
            imported from, if adapters there give the same logits, otherwise its artifact.

    Raises:
        StageError: `no_adapters`, `no_peft_form` for adapters of single experts, `no_base` if no base model is on this
            machine, `not_loadable` if PEFT cannot load or run them, `other_logits` if the logits are not the model's.
    """
    settings = adapter_settings(model.folder)
    if settings is None:
        message = f"{model.folder} has no adapters: sft keeps them with lora, but earlier versions did not"
        raise stage_error("no_adapters", _OPTION, message, "leave the option out, or build sft again with --force sft")
    names = stored_names(model.folder / FOLDER / WEIGHTS)
    if any(".experts." in name for name in names):
        message = "PEFT has no format for adapters of single experts, whose weights transformers stacks"
        raise stage_error("no_peft_form", _OPTION, message, "export the merged model, or set sft.lora.targets")
    candidates = _bases(model, base)
    with appearing(out) as unfinished:
        _write_files(model, unfinished)
        others: list[str] = []
        for number, (name, folder) in enumerate(candidates):
            config = {**settings, "base_model_name_or_path": name}
            (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
            (unfinished / CARD).write_text(_card(card, name), encoding="utf8")
            try:
                checks, deviation, largest = _try(unfinished, folder, model.folder)
                break
            except StageError as error:
                if number + 1 == len(candidates):
                    raise
                others.append(f"{name}: {error.problems[0].message}")
        rows = sum(map(len, (settings["trainable_token_indices"] or {}).values()))
        return LoadedAdapters(name, str(folder), sum(names.values()), rows, checks, deviation, largest, others)


def stored_names(path: Path) -> dict[str, int]:
    """Return the number of elements of each tensor of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return {name: int(np.prod(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118


def _bases(model: Artifact, base: str) -> list[tuple[str, Path]]:
    """Return names of the base model and their folders, in the order in which they are tried."""
    if base and Path(base).is_dir():
        return [(base, Path(base))]
    bases: list[tuple[str, Path]] = []
    reference = model.manifest.inputs.get("model") if model.manifest else None
    root = store_root(model.folder)
    if reference and (manifest := known_manifest(root, reference)):
        imported = str(manifest.config.get("path", "")) if manifest.stage == "base_model" else ""
        if imported and not base and not folder_problems(Path(imported), _OPTION):
            bases.append((imported, Path(imported)))
        folder = folder_of(root, reference, manifest)
        if not folder_problems(folder, _OPTION):
            bases.append((base or str(folder), folder))
    if not bases:
        message = "the model that the adapters were trained on is not on this machine"
        raise stage_error("no_base", _OPTION, message, "set its folder with --base")
    return bases


def _write_files(model: Artifact, out: Path) -> None:
    """Copy adapters, the tokenizer with its chat templates, and the licence."""
    for file in sorted(model.folder.rglob("*")):
        path = file.relative_to(model.folder)
        kept = path.parts[0] != AUX and path.name not in NOT_EXPORTED and path.suffix != ".safetensors"
        if file.is_file() and kept:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / path)
    name_model_inputs(out)  # reads the model's config.json
    for name in _OF_MODELS:
        (out / name).unlink(missing_ok=True)
    shutil.copyfile(model.folder / FOLDER / WEIGHTS, out / WEIGHTS)
    copy_licence(model.folder, out)


def _try(folder: Path, base: Path, merged: Path) -> tuple[list[str], float, float]:
    """Load base model and adapters by PEFT in a new process and compare logits with the merged model's."""
    import torch
    from transformers import AutoModelForCausalLM

    check_model(base)
    if find_spec("peft") is None:
        return [], 0.0, 0.0
    report, logits = run_elsewhere(PROGRAM, str(base), str(folder))
    if "error" in report:
        message = f"PEFT cannot use it: {report['check']}: {report['error']}"
        raise stage_error("not_loadable", str(folder), message, "export the merged model, without --adapters")
    network = load_pretrained_model(AutoModelForCausalLM, merged, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = network(torch.tensor([report["inputs"]])).logits.numpy()
    if logits.shape != expected.shape:
        message = f"{base} has {logits.shape[-1]:,} rows of tokens, the model {expected.shape[-1]:,}"
        raise stage_error("other_logits", str(folder), message, "set --base to the model that sft started from")
    deviation, largest = float(abs(logits - expected).max()), float(abs(expected).max())
    if not deviation <= CLOSE * largest:
        message = f"logits with {base} differ from the merged model's by up to {deviation:.3g}, of {largest:.3g}"
        raise stage_error("other_logits", str(folder), message, "set --base to the model that sft started from")
    return report["checks"], deviation, largest


def _card(card: str, base: str) -> str:
    """Return a model card for adapters: the base model in its front matter, and PEFT in its snippet."""
    card = card.replace("library_name: transformers", f"library_name: peft\nbase_model: {json.dumps(base)}", 1)
    card = card.replace("from transformers import Auto", "from peft import PeftModel\nfrom transformers import Auto", 1)
    load = "AutoModelForCausalLM.from_pretrained(folder)"
    with_base = f"AutoModelForCausalLM.from_pretrained({json.dumps(base)})"
    both = f"model = PeftModel.from_pretrained({with_base}, folder)"
    card = card.replace(f"model = {load}", both, 1)
    return card.replace(
        "# this model's folder, or its name on the hub", "# the folder of these adapters, or their name on the hub", 1
    )
