"""The register stage: gates, the model card, and the record by which a model is registered.

python -m evaluation.register --input model=MODEL_DIR --input safety_base=SAFETY_DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from evaluation.config import RegisterConfig
from infra.errors import GateRefused, Problem
from infra.io.json import read_own_json
from infra.run import Result, Run

PROMOTED = "promoted"


def register(config: RegisterConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Judge the model by the gates and write MODEL_CARD.md and registration.json.

    A model that breaks a gate is recorded as rejected, with every figure that broke its bound, its value and the bound.
    It still gets a card, which states the rejection.

    Args:
        inputs: model, the artifact to register; every other artifact that gates or the card refer to, by its step's
            name; promoted (optional), the registration of the model that gates with `against: promoted` compare
            with.
    """
    from evaluation.release.card import model_card
    from evaluation.release.gates import judge, refusals
    from evaluation.results.against import against_promoted
    from evaluation.results.artifacts import read_artifacts

    artifacts = read_artifacts({name: folder for name, folder in inputs.items() if name != PROMOTED})
    model = artifacts["model"]
    name = config.name or model.stage
    figures = {
        f"{key}.{figure}": value for key, artifact in artifacts.items() for figure, value in artifact.figures.items()
    }
    names = {model.stage, model.manifest.step or model.stage} if model.manifest else {model.stage}
    figures |= {f"{name}.{figure}": value for name in names for figure, value in model.figures.items()}
    against = None
    if promoted := inputs.get(PROMOTED):
        compared_figures = [gate.figure for gate in config.gates if gate.against]
        by_name = {**artifacts, **dict.fromkeys(names, model)}
        against = against_promoted(compared_figures, figures, by_name, promoted)
    verdicts = judge(config.gates, figures, against)
    reasons = refusals(verdicts)
    card = model_card(config, name, model, artifacts, verdicts)
    (out_dir / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    registration = {
        "name": name,
        "stage": model.stage,
        "fingerprint": model.manifest.fingerprint if model.manifest else None,
        "digest": model.manifest.digest if model.manifest else None,
        "figures": {key: value for key, value in sorted(figures.items()) if not key.startswith("model.")},
        "gates": [verdict.as_json() for verdict in verdicts],
        "status": "rejected" if reasons else "registered",
        "reasons": [reason.as_json() for reason in reasons],
    }
    text = json.dumps(registration, indent=1, sort_keys=True, ensure_ascii=False)
    (out_dir / "registration.json").write_text(text + "\n", encoding="utf-8")
    outcome = f"{len(verdicts)} gates kept" if verdicts else "no gates set"
    if reasons:
        outcome = f"refused: {'; '.join(reason.message for reason in reasons)}"
    run.event("judged", f"{name}: {outcome}")
    return Result({"gates": float(len(verdicts)), "gates_refused": float(len(reasons))}, f"{name}, {outcome}")


def register_or_refuse(config: RegisterConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Run `register` as a standalone program. Raises GateRefused for a rejected model, after its card is written."""
    result = register(config, inputs, out_dir, run)
    record = read_own_json(out_dir / "registration.json")
    if record["reasons"]:
        raise GateRefused(*(Problem(**reason) for reason in record["reasons"]))
    return result


if __name__ == "__main__":
    from infra.alone import main

    main(register_or_refuse, RegisterConfig)
