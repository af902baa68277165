"""Writes the artifact folders of a plausible pipeline, as the stages would leave them."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from evaluation.statistics.intervals import Interval, bootstrap, difference_of_proportions, wilson
from infra.store.manifest import File, Manifest, SourceRecord

MODELS = {"base": "pretrain", "sft": "sft", "rlhf": "rlhf"}
INPUTS: dict[str, dict[str, str]] = {
    "ingest": {},
    "validate": {"data": "ingest"},
    "clean": {"documents": "ingest"},
    "tokenizer": {"documents": "clean"},
    "shard": {"documents": "clean", "tokenizer": "tokenizer"},
    "pretrain": {"shards": "shard", "tokenizer": "tokenizer"},
    "instructions": {},
    "validate_instructions": {"data": "instructions"},
    "sft": {"model": "pretrain", "instructions": "instructions"},
    "preferences": {},
    "validate_preferences": {"data": "preferences"},
    "reward_model": {"model": "sft", "preferences": "preferences"},
    "rlhf": {"model": "sft", "reward_model": "reward_model", "prompts": "instructions"},
    **{f"benchmarks_{name}": {"model": model} for name, model in MODELS.items()},
    **{f"safety_{name}": {"model": model, "shards": "shard"} for name, model in MODELS.items()},
    "register": {"model": "rlhf", "benchmarks_rlhf": "benchmarks_rlhf", "safety_rlhf": "safety_rlhf"},
}  # fmt: skip
REQUIRES = {"clean": "validate", "sft": "validate_instructions", "reward_model": "validate_preferences"}
HEADLINES = {
    "ingest": "11,873 documents, 12.0 MB of text",
    "clean": "kept 10,412 of 11,873 documents, 10.9 MB",
    "tokenizer": "4,096 entries, 3.61 bytes per token",
    "shard": "3.0M training tokens",
    "pretrain": "validation loss 4.31 (bigram 4.92, unigram 6.71)",
    "sft": "held-out loss 4.84 → 3.37, 100% of answers end",
    "reward_model": "held-out pairs right 71.4% (65.9% to 76.4%)",
    "rlhf": "held-out reward +0.62 (+0.31 to +0.94), KL 3.1",
}
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
WORDS = "return the number of items in a list string file object value error default argument name".split()  # noqa: SIM905


def write_pipeline(root: Path, ids: Collection[str] | None = None, seed: int = 0) -> dict[str, Path]:
    """Folders by stage id, in the order in which they are built; only those named in `ids`, all by default."""
    chosen = [id for id in INPUTS if ids is None or id in ids]
    made: dict[str, Manifest] = {}
    folders = {}
    for id in chosen:
        stage = id.rsplit("_", 1)[0] if id.startswith(("benchmarks", "safety", "validate_")) else id
        fingerprint = hashlib.sha256(id.encode()).hexdigest()[:16]
        folder = root / stage / fingerprint
        (folder / "aux").mkdir(parents=True)
        figures = WRITERS[stage](folder, id, random.Random(f"{seed}{id}"))
        manifest = Manifest(
            stage=stage,
            version=1,
            fingerprint=fingerprint,
            digest=hashlib.sha256(f"digest {id}".encode()).hexdigest(),
            build_id="build",
            config={"seed": 17, "batch_size": 32},
            identity={"limit": 3} if stage == "ingest" else {},
            inputs={name: made[of].as_input() for name, of in INPUTS[id].items() if of in made},
            requires={"verdict": made[REQUIRES[id]].as_input()} if REQUIRES.get(id) in made else {},
            sources=(SourceRecord(f"{id}.read.0", "ab" * 32),) if stage in {"ingest", "instructions"} else (),
            files=(File("aux/metrics.jsonl", 0, "0" * 64),),
            result={"figures": figures, "headline": HEADLINES.get(id, "")},
            pipeline="quickstart",
            code={"commit": "58650d0c16fc54f718ffa8e98618fb0dee10a7bc", "dirty": False},
            lock_hash="68ba296569afbe3d4dfa222667b64cf902d581b9d43872e43ebee368b84ed94d",
            versions={"torch": "2.7.0", "mosaicml": "0.32.1", "lm-eval": "0.4.13", "python": "3.11.7"},
            host="bench-1",
            device="cpu",
            started="2026-11-21T07:00:00.000+00:00",
            finished="2026-11-21T07:05:12.000+00:00",
            seconds=round(random.Random(id).uniform(2, 40), 1),
        )
        manifest.write(folder)
        made[id], folders[id] = manifest, folder
    return folders


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def bounded(name: str, value: float, low: float, high: float) -> dict[str, float]:
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def curves(folder: Path, steps: int, series: Mapping[str, Any], every: Mapping[str, int] | None = None) -> None:
    rows = []
    for step in range(1, steps + 1):
        values = {name: curve(step) for name, curve in series.items() if step % (every or {}).get(name, 1) == 0}
        if values:
            rows.append({"time": step / 10, "step": step, "values": values})
    write_lines(folder / "aux/metrics.jsonl", rows)


def falling(start: float, end: float, half: float, noise: float, random: random.Random) -> Any:
    return lambda step: end + (start - end) * math.exp(-step / half) + random.gauss(0, noise)


def _ingest(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    return {"documents": 11873.0, "text_bytes": 12.0e6, "quarantined": 3.0}


def _validate(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    expectations = [{"expectation": f"expectation {n}", "success": True} for n in range(6)]
    write_json(
        folder / "verdict.json", {"success": True, "suite": "documents", "rows": 9, "expectations": expectations}
    )
    return {"rows": 9.0}


def _clean(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    dropped = {"min_characters": 610, "exact_duplicate": 512, "min_stop_words": 208, "max_bullet_line_share": 131}
    write_json(folder / "aux/counts.json", {"read": 11873, "kept": 10412, "dropped": dropped, "kept_bytes": 10900000})
    return {"documents": 10412.0, "dropped": 1461.0}


def _tokenizer(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    return {"vocab_size": 4096.0, "bytes_per_token": 3.61}


def _shard(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    meta = {"vocab_size": 4096, "train_tokens": 2870000, "validation_tokens": 151000, "train_bytes": 10360700}
    write_json(folder / "meta.json", meta)
    return {"train_tokens": 2870000.0}


def _pretrain(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    rate = lambda step: 1e-3 * min(step / 25, 0.55 + 0.45 * math.cos(math.pi * step / 250))  # noqa: E731
    train, validation = falling(8.3, 4.15, 45, 0.08, random), falling(8.3, 4.31, 45, 0.01, random)
    series = {"train/loss": train, "train/lr": rate, "validation/sample_loss": validation}
    curves(folder, 250, series, {"validation/sample_loss": 25})
    write_json(folder / "config.json", {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4})
    return {
        **bounded("validation_loss", 4.312, 4.281, 4.343),
        "validation_perplexity": 74.6, "bits_per_byte": 1.723, "unigram_loss": 6.712, "bigram_loss": 4.921,
        "parameters": 4.2e6, "batches": 250.0, "tokens": 1.02e6, "tokens_per_s": 10400.0,
    }  # fmt: skip


def _pairs(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    return {"train_pairs": 7601.0, "heldout_pairs": 399.0}


def _sentence(random: random.Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(4, 22))).capitalize() + "."


def _prompt(number: int) -> str:
    return f"What does the function `item_{number}(values, default=None)` do?"


def _sft(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    series = {"train/loss": falling(4.9, 3.3, 20, 0.12, random), "validation/sample_loss": lambda step: 5 - step / 60}
    curves(folder, 90, series, {"validation/sample_loss": 9})
    rows = [
        {
            "prompt": _prompt(n),
            "reference": _sentence(random),
            "answers": {"base": _sentence(random) * 2, "sft": _sentence(random)},
        }
        for n in range(12)
    ]  # fmt: skip
    rows[0]["answers"]["base"] = HOSTILE
    rows[1]["answers"]["base"] = "  "
    write_lines(folder / "aux/samples.jsonl", rows)
    return {
        "heldout_loss_base": 4.84, "heldout_loss_sft": 3.37, "heldout_pairs": 399.0,
        **bounded("improvement", 1.47, 1.40, 1.55), **bounded("improvement_text", 1.11, 1.04, 1.18),
        **bounded("ends_share_base", 0.0, 0.0, 0.029), **bounded("ends_share_sft", 0.984, 0.945, 0.996),
    }  # fmt: skip


def _reward_model(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    rising = lambda step: 0.6 + abs(step - 40) / 400  # noqa: E731
    series = {"train/loss": falling(0.70, 0.52, 30, 0.05, random), "validation/sample_loss": rising}
    curves(folder, 80, series, {"validation/sample_loss": 8})
    return {**bounded("heldout_accuracy", 0.714, 0.659, 0.764), "heldout_pairs": 287.0, "p_value": 1.2e-13}


def _rlhf(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    reward = lambda step: 0.05 + 0.7 * (1 - math.exp(-step / 40)) + random.gauss(0, 0.07)  # noqa: E731
    divergence = lambda step: 3.1 * (1 - math.exp(-step / 50)) + random.gauss(0, 0.1)  # noqa: E731
    curves(folder, 120, {"rlhf/reward": reward, "rlhf/kl": divergence}, {"rlhf/reward": 4, "rlhf/kl": 4})
    rows = [
        {
            "prompt": _prompt(n),
            "reference": _sentence(random),
            "answers": {"sft": _sentence(random), "rlhf": _sentence(random)},
            "rewards": {"sft": random.gauss(0, 1), "rlhf": random.gauss(0.6, 1)},
        }
        for n in range(12)
    ]
    write_lines(folder / "aux/samples.jsonl", rows)
    return {
        **bounded("heldout_reward_sft", 0.04, -0.12, 0.21), **bounded("heldout_reward_rlhf", 0.66, 0.48, 0.83),
        **bounded("reward_gain", 0.62, 0.31, 0.94), **bounded("kl_to_sft", 3.08, 2.71, 3.49),
        **bounded("reward_gain_equal_length", 0.41, 0.12, 0.7), "reward_per_token": 0.037,
        "answer_tokens_sft": 16.2, "answer_tokens_rlhf": 21.9,
        **bounded("ends_share_sft", 0.97, 0.93, 0.99), **bounded("ends_share_rlhf", 0.99, 0.95, 1.0),
    }  # fmt: skip


def _benchmarks(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    shift = {"base": 0.0, "sft": 0.01, "rlhf": -0.01}[id.split("_")[1]]
    tasks, parts, figures = {}, {}, {}
    for task, n, right, chance in (("minimal_pairs", 478, 0.74, 0.5), ("cloze", 360, 0.33, 0.26)):
        rows = [{"doc_id": i, "acc": float(random.random() < right + shift)} for i in range(n)]
        write_lines(folder / f"aux/samples_{task}.jsonl", rows)
        hits = int(sum(row["acc"] for row in rows))
        interval = wilson(hits, n)
        tasks[task] = {"acc": {**interval.as_json(), "n": n, "stderr": 0.03, "chance": chance}}
        figures |= interval.as_figures(f"{task}_accuracy")
        parts[task] = {
            part: {**wilson(random.randint(6, 16), 16).as_json(), "n": 16}
            for part in ("agreement", "word_order", "article")
        }
    write_json(folder / "results.json", {"tasks": tasks, "parts": parts})
    return figures


def _safety(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    def toxicity(prompts: int, toxic: int) -> dict[str, Any]:
        scores = [random.random() ** 3 for _ in range(prompts)]
        return {
            "expected_max_toxicity": bootstrap(scores).as_json(),
            "toxicity_probability": wilson(toxic, prompts).as_json(),
            "toxic_continuations": Interval(toxic / prompts / 9, 0.0, toxic / prompts / 5).as_json(),
            "prompts": prompts,
        }

    def bias(pairs: int) -> dict[str, Any]:
        scores = {}
        for name in ("stereotype_score", "stereotype_score_shared"):
            hits = round(pairs * random.uniform(0.35, 0.68))
            interval = wilson(hits, pairs)
            scores[name] = {key: 100 * value for key, value in interval.as_json().items()} | {
                "n": pairs,
                "p_value": 0.3,
            }
        return {"pairs": pairs, **scores}

    exact = {"train": 4, "validation": 1}
    results = {
        "toxicity": {
            "scorer": "alt-profanity-check 1.9.1", "limits": "It sees profanity, not implicit hate.", "prompts": 64,
            "samples_per_prompt": 8, "max_new_tokens": 20, "threshold": 0.5, "overall": toxicity(64, 9),
            "by_kind": {"neutral": toxicity(32, 2), "provoking": toxicity(32, 7)},
        },
        "personal_data": {
            "continuations": 512, "overall": {"value": 0.01, "low": 0.002, "high": 0.02, "found": 5},
            "by_kind": {"email": {"value": 0.01, "low": 0.002, "high": 0.02, "found": 5}},
        },
        "bias": {
            "pairs": 160, "overall": bias(160),
            "by_category": {c: bias(32) for c in ("age", "disability", "gender", "nationality", "religion")},
            "by_direction": {"stereo": bias(80), "antistereo": bias(80)},
        },
        "memorisation": {
            "prefix_tokens": 50, "continuation_tokens": 50,
            "trained_sequences": 4_000, "training_sequences": 13_260,
            **{split: {"sequences": 200, "exact_match": wilson(hits, 200).as_json(),
                       "recited_tokens": {"value": 2.1, "low": 1.6, "high": 2.7}} for split, hits in exact.items()},
            "exact_match_difference": difference_of_proportions(4, 200, 1, 200).as_json(),
        },
    }  # fmt: skip
    write_json(folder / "results.json", results)
    rows = [{"prompt": f"My {word} is", "kind": "neutral", "continuations": [{"text": f" {HOSTILE}", "toxicity": 0.7}]}
            for word in WORDS]  # fmt: skip
    write_lines(folder / "aux/generations.jsonl", rows)
    overall: Any = results["toxicity"]["overall"]
    cell = overall["toxicity_probability"]
    return bounded("toxicity_probability", cell["value"], cell["low"], cell["high"])


def _register(folder: Path, id: str, random: random.Random) -> dict[str, float]:
    return {"gates": 0.0}


WRITERS = {
    "ingest": _ingest, "validate": _validate, "clean": _clean, "tokenizer": _tokenizer, "shard": _shard,
    "pretrain": _pretrain, "instructions": _pairs, "preferences": _pairs, "sft": _sft, "reward_model": _reward_model,
    "rlhf": _rlhf, "benchmarks": _benchmarks, "safety": _safety, "register": _register,
}  # fmt: skip


def with_figures(folder: Path, **figures: float) -> None:
    """Changes figures in the manifest of a folder that `write_pipeline` made."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["result"]["figures"] |= figures
    (folder / "manifest.json").write_text(json.dumps(manifest))
