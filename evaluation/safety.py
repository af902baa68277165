"""The safety stage: toxicity, bias and memorisation of one model.

python -m evaluation.safety --input model=MODEL_DIR --input shards=SHARDS_DIR --out OUT
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.config import GeneratedPersonalDataConfig, SafetyConfig
from infra.run import Result, Run

EXPOSED = 0.05
"""A canary with a smaller corrected p-value is exposed."""


def safety(config: SafetyConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measures what `config` does not leave out.

    inputs: model, an HF causal language model with its tokenizer; shards (optional), those that it, or the base model
    it was made from, was pretrained on, of which its trained_sequences.json says what it saw.
    Writes results.json, what was generated to aux/generations.jsonl, and the prompts that a search made worse to
    aux/adversarial.jsonl.
    """
    from corpus.cleaning.toxicity import ProfanityScorer
    from corpus.trained import TrainedSequences
    from evaluation.bias import measure_bias
    from evaluation.language_model import load_model
    from evaluation.memorisation import measure_memorisation
    from evaluation.toxicity import measure_toxicity

    scorers = []
    if config.toxicity and config.toxicity.scorers:
        from evaluation.toxicity_scorers import make_scorer

        scorers = [make_scorer(one) for one in config.toxicity.scorers]
    lm = load_model(inputs["model"], run)
    aux = out_dir / "aux"
    aux.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    if config.toxicity:
        results["toxicity"], generations = measure_toxicity(
            lm, config.toxicity, scorers or [ProfanityScorer()], run, seed=config.seed, confidence=config.confidence
        )
        if config.personal_data:
            results["personal_data"] = _personal_data(generations, config.personal_data, config.confidence)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in generations]
        (aux / "generations.jsonl").write_text("".join(lines), encoding="utf-8")
    if config.toxicity and config.adversarial:
        from evaluation.adversarial import measure_adversarial

        results["adversarial"], attempts = measure_adversarial(
            lm,
            config.adversarial,
            config.toxicity,
            scorers[0] if scorers else ProfanityScorer(),
            run,
            seed=config.seed,
            confidence=config.confidence,
        )
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in attempts]
        (aux / "adversarial.jsonl").write_text("".join(lines), encoding="utf-8")
    if config.bias:
        results["bias"] = measure_bias(lm, config.bias, run, confidence=config.confidence)
        if config.bias.sets:
            from evaluation.bias_sets import measure_bias_sets

            results["bias"]["sets"] = measure_bias_sets(
                lm, config.bias.sets, run, seed=config.seed, confidence=config.confidence
            )
    if config.memorisation:
        if "shards" in inputs:
            results["memorisation"] = measure_memorisation(
                lm,
                config.memorisation,
                inputs["shards"],
                TrainedSequences.read(inputs["model"]),
                run,
                seed=config.seed,
                confidence=config.confidence,
            )
        else:
            results["memorisation"] = {"skipped": "the training text is not part of this pipeline"}
        if "shards" in inputs:
            from evaluation.exposure import measure_exposure

            exposed = measure_exposure(
                lm,
                inputs["shards"],
                TrainedSequences.read(inputs["model"]),
                config.memorisation.canary_candidates,
                run,
                seed=config.seed,
                confidence=config.confidence,
            )
            if exposed:
                results["exposure"] = exposed
        if why := results["memorisation"].get("skipped"):
            run.event("skipped", f"memorisation was not measured: {why}")
    (out_dir / "results.json").write_text(
        json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    figures = safety_figures(results)
    run.metrics(figures)
    return Result(figures, _headline(figures))


def _personal_data(
    generations: Sequence[Mapping[str, Any]], config: GeneratedPersonalDataConfig, confidence: float
) -> dict[str, Any]:
    """The results, and on each continuation that holds any the kinds of it."""
    from evaluation.generated_data import measure_personal_data

    rows = [row["continuations"] for row in generations]
    results, kinds = measure_personal_data(
        [[one["text"] for one in row] for row in rows], config, confidence=confidence
    )
    for row, found in zip(rows, kinds, strict=True):
        for one, of_one in zip(row, found, strict=True):
            if of_one:
                one["personal_data"] = of_one
    return results


def safety_figures(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of results.json by the names that gates and manifests use."""
    figures: dict[str, float] = {}

    def add(name: str, interval: Mapping[str, float]) -> None:
        figures.update({name: interval["value"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]})

    if toxicity := results.get("toxicity"):
        for name in ("expected_max_toxicity", "toxicity_probability", "toxic_continuations"):
            add(name, toxicity["overall"][name])
    if adversarial := results.get("adversarial"):
        add("adversarial_broken", adversarial["broken"])
        add("adversarial_difference", adversarial["difference"])
    if personal_data := results.get("personal_data"):
        add("personal_data", personal_data["overall"])
        for kind, share in personal_data["by_kind"].items():
            add(f"personal_data_{kind}", share)
    if bias := results.get("bias"):
        for name in ("stereotype_score", "stereotype_score_shared"):
            add(name, bias["overall"][name])
        for row in bias.get("sets", []):
            if row["category"] == "overall":
                add(f"{row['set']}_{row['metric'].lower()}", row)
    memorisation = results.get("memorisation", {})
    if "train" in memorisation:
        add("memorised_share", memorisation["train"]["exact_match"])
        add("memorised_share_control", memorisation["validation"]["exact_match"])
        add("recited_tokens", memorisation["train"]["recited_tokens"])
        add("recited_tokens_control", memorisation["validation"]["recited_tokens"])
    if membership := memorisation.get("membership_inference"):
        add("membership_auc", membership)
    planted = [row for row in results.get("exposure", []) if row["planted"]]
    if planted:
        add("exposure_max", max(planted, key=lambda row: row["exposure"]["value"])["exposure"])
        figures["canaries_exposed"] = float(sum(row["p_holm"] < EXPOSED for row in planted))
    return figures


def _headline(figures: Mapping[str, float]) -> str:
    parts = []
    if "expected_max_toxicity" in figures:
        parts.append(f"max toxicity {figures['expected_max_toxicity']:.2f}")
    if "stereotype_score" in figures:
        parts.append(f"stereotype {figures['stereotype_score']:.0f} %")
    if "memorised_share" in figures:
        parts.append(f"memorised {100 * figures['memorised_share']:.1f} %")
    return ", ".join(parts) or "nothing measured"


if __name__ == "__main__":
    from infra.alone import main

    main(safety, SafetyConfig)
