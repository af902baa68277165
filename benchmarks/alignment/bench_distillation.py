"""Distillation of the quickstart's RLHF model into a quarter of its size, against training that size directly.

python -m benchmarks.alignment.bench_distillation OUT TEACHER [TEACHER …] [--rounds 10] [--threads 1]

TEACHER: a `rlhf` artifact of configs/quickstart.yaml in a store, from whose manifest all other inputs follow. Teachers
differ by the seed of their runs; shards and tokenizer are the same. There is one student: the quickstart's pretraining
and SFT at a quarter of the size. From that SFT model on, contenders of each seed spend equal FLOPs:

    sft         more of the quickstart's SFT
    rlhf        the quickstart's RLHF, with the reward model of the teacher, for `--rounds` rounds
    off_policy  distillation along the answers of the instructions, KL(teacher ‖ student)
    on_policy   distillation along the student's own answers, KL(student ‖ teacher)

FLOPs of a pass are those of the planner (PaLM, appendix B), a third of a training step's for a forward pass alone. All
passes count: those of the teacher, of the reward model, of the reference, and sampling. Padding counts nothing, and
neither does the training of the teacher, which exists. All models answer the same held-out prompts and are
scored by the teacher's reward model, by a judge that trained nothing, and by rules. Existing artifacts in OUT are
taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.alignment.stages import Figures, Stages, spread
from infra.io.json import parse_own_json
from infra.io.yaml import read_plain, read_text
from infra.launch.config import LaunchConfig
from infra.project import PROJECT
from infra.store.measurements import TRAINED
from training import distill, rlhf
from training.chat.base import Chat, read_rows
from training.config import DistillConfig, PretrainConfig, RlhfConfig, SftConfig
from training.data.conversations import fitted_conversations
from training.planner.architecture import of_transformers
from training.pretrain import pretrain
from training.sft import sft

STUDENT: dict[str, Any] = {"layers": 5, "width": 96, "heads": 2, "mlp_width": 256}
"""Sizes next to the quickstart's preset."""
CONTENDERS = ("sft", "rlhf", "off_policy", "on_policy")
DISTILLATION: dict[str, Any] = {
    "global_batch_examples": 32, "group_by_length": True, "max_length": 160, "evaluate_every": "100 %",
    "answer_max_tokens": 32, "heldout_prompts": 96, "heldout_limit": 256,
    "schedule": {"decay": "linear", "warmup": "5 %", "final_share": 0.05},
}  # fmt: skip
DIVERGENCES: Mapping[str, dict[str, Any]] = {
    "off_policy": {"optimizer": {"learning_rate": 6.0e-4, "weight_decay": 0.0, "muon": {"learning_rate": 0.01}}},
    "on_policy": {"beta": 1.0, "on_policy_share": 1.0, "optimizer": {"learning_rate": 6.0e-4, "weight_decay": 0.0}},
}
LENGTH = 64
"""Tokens of a usual conversation, for the part of attention that grows with it."""


@dataclass(frozen=True)
class Teacher:
    """A `rlhf` artifact, the seed of its run, and the artifacts that it was made from, by the name of the input."""

    folder: Path
    seed: int
    inputs: Mapping[str, Path]

    @classmethod
    def of(cls, folder: Path) -> Teacher:
        manifest = _manifest(folder)
        root = folder.resolve().parent.parent
        inputs = {name: root / entry["path"] for name, entry in manifest["inputs"].items()}
        inputs["tokenizer"] = root / _manifest(inputs["shards"])["inputs"]["tokenizer"]["path"]
        return cls(folder, manifest["config"]["seed"], inputs)


@dataclass(frozen=True)
class Cost:
    """FLOPs per token of a forward pass of both models, and mean tokens of a prompt and of a given answer."""

    student: float
    teacher: float
    prompt: float
    answer: float

    @classmethod
    def of(cls, student: Path, teacher: Path, instructions: Path) -> Cost:
        chat = Chat.load(student)
        rows = read_rows(instructions / "train.jsonl", ("prompt", "response"))
        talks = fitted_conversations(chat, rows, DISTILLATION["max_length"], "cut_prompt").examples
        prompt = statistics.fmean(len(talk.prompt) for talk in talks)
        return cls(_forward(student), _forward(teacher), prompt, statistics.fmean(len(talk.response) for talk in talks))

    def per_example(self, contender: str, sampled: float) -> float:
        """FLOPs of an example of a contender. sampled: mean tokens of an answer that the student samples."""
        read = self.prompt + (self.answer if contender in ("sft", "off_policy") else sampled)
        match contender:
            case "sft":
                return read * 3 * self.student
            case "rlhf":  # sampling, the policy before the update and the reference; the update; the reward
                return read * (6 * self.student + self.teacher)
            case "off_policy":
                return read * (3 * self.student + self.teacher)
            case _:  # with sampling
                return read * (4 * self.student + self.teacher)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("teachers", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=10, help="of RLHF, which set the FLOPs of all contenders")
    parser.add_argument("--pretraining", type=int, default=400, help="batches of the student's")
    parser.add_argument("--tuning", type=int, default=150, help="batches of the student's SFT")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stages = Stages(args.out, LaunchConfig(threads=args.threads, trainer="native", device="cpu"))
    quickstart = read_plain(read_text(PROJECT / "configs" / "quickstart.yaml"))
    rows: dict[str, list[Figures]] = {}
    teachers = [Teacher.of(folder) for folder in args.teachers]
    start = student(stages, quickstart, teachers[0], args.pretraining, args.tuning)
    for teacher in teachers:
        for name, figures in raced(stages, quickstart, teacher, start, args.rounds, args.contenders).items():
            rows.setdefault(name, []).append(figures)
    keys = (
        ("FLOPs", "flops", 1.0),
        ("reward", "heldout_reward_rlhf", 1.0),
        ("judge", "heldout_judge_rlhf", 1.0),
        ("right, %", "verified_rlhf", 100.0),
        ("KL from the teacher, nats per answer", "answers_kl_distilled", 1.0),
        ("loss of given answers", "heldout_loss_distilled", 1.0),
    )
    print(f"| model | seeds | {' | '.join(name for name, _, _ in keys)} |\n|{'---|' * (len(keys) + 2)}")
    for name, several in rows.items():
        cells = [
            spread([factor * figures[key] for figures in several]) if all(key in figures for figures in several) else ""
            for _, key, factor in keys
        ]
        print(f"| {name} | {len(several)} | {' | '.join(cells)} |")


def student(stages: Stages, quickstart: dict[str, Any], teacher: Teacher, pretraining: int, tuning: int) -> Path:
    """The SFT model of the student's size, after a number of batches of both trainings."""
    section = quickstart["pretrain"]
    given = {"model": section["model"] | STUDENT, "duration": f"{pretraining} batches", "seed": 1}
    inputs = {name: teacher.inputs[name] for name in ("shards", "tokenizer")}
    base = stages.made("base", pretrain, PretrainConfig.model_validate(section | given), inputs)
    inputs = {"model": base, "instructions": teacher.inputs["prompts"], "shards": teacher.inputs["shards"]}
    learnt = SftConfig.model_validate(quickstart["sft"] | {"duration": f"{tuning} batches", "seed": 1})
    return stages.made("start", sft, learnt, inputs)


def raced(
    stages: Stages, quickstart: dict[str, Any], teacher: Teacher, start: Path, rounds: int, contenders: list[str]
) -> dict[str, Figures]:
    """Figures of each contender of one seed, of the SFT model that they begin from, and of the teacher."""
    seed, inputs = teacher.seed, teacher.inputs
    shared = {"model": start, "instructions": inputs["prompts"]}
    scorers = {"prompts": inputs["prompts"], "reward_model": inputs["reward_model"]}
    cost = Cost.of(start, teacher.folder, inputs["prompts"])
    # Without pretraining text in its minibatches: all of its FLOPs go into rewards.
    learning = {"rollouts": rounds, "text_coef": 0.0, "text_sources": [], "seed": seed, "heldout_answers": 1}
    learning |= {"heldout_prompts": 300}
    aligning = RlhfConfig.model_validate(quickstart["rlhf"] | learning)
    models = {"start": start, "teacher": teacher.folder}
    models["rlhf"] = stages.made(f"rlhf_{seed}", rlhf.train, aligning, {"model": start, **scorers})
    sampled = _mean_metric(models["rlhf"].with_suffix(".jsonl"), "rlhf/answer_tokens")
    budget = rounds * aligning.rollout_prompts * cost.per_example("rlhf", sampled)
    judged = {**scorers, "judge": inputs["judge"]}
    of_start = stages.made(
        f"scored_start_{seed}", rlhf.measure_trained, aligning, {"model": start, TRAINED: start, **judged}
    )
    answers = stages.figures_of(of_start.name)["answer_tokens_sft"]  # which those of a distillation are near
    for contender in contenders:
        if contender == "rlhf":
            continue
        batches = round(budget / cost.per_example(contender, answers) / DISTILLATION["global_batch_examples"])
        length = {"duration": f"{batches} batches", "seed": seed + 100}
        if contender == "sft":
            config = SftConfig.model_validate(quickstart["sft"] | {"text_share": 0.0, "text_sources": []} | length)
            models[contender] = stages.made(f"sft_{seed}", sft, config, shared)
        else:
            learnt = DistillConfig.model_validate(DISTILLATION | DIVERGENCES[contender] | length)
            given = {**shared, "teacher": teacher.folder}
            models[contender] = stages.made(f"{contender}_{seed}", distill.train, learnt, given)
    figures = {}
    for name, model in models.items():
        measured = {"model": start, TRAINED: model}
        known = DistillConfig.model_validate(DISTILLATION | {"seed": 1})
        near = stages.made(
            f"near_{name}_{seed}",
            distill.measure_trained,
            known,
            {**measured, "instructions": inputs["prompts"], "teacher": teacher.folder},
        )
        right = stages.made(f"scored_{name}_{seed}", rlhf.measure_trained, aligning, {**measured, **judged})
        figures[name] = stages.figures_of(near.name) | stages.figures_of(right.name)
        if name in CONTENDERS:
            trained = stages.figures_of(f"{name}_{seed}")
            answer_tokens = sampled
            if name == "on_policy":
                answer_tokens = _mean_metric(model.with_suffix(".jsonl"), "distill/answer_tokens")
            count = trained["batches"] * (aligning.minibatch_answers if name == "rlhf" else 32)
            figures[name] |= {"flops": count * cost.per_example(name, answer_tokens), "seconds": trained["seconds"]}
    return figures


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = parse_own_json((folder / "manifest.json").read_text(encoding="utf8"))
    return manifest


def _forward(folder: Path) -> float:
    values = parse_own_json((folder / "config.json").read_text(encoding="utf8"))
    architecture = of_transformers(values, values["vocab_size"])
    assert architecture is not None
    return architecture.flops_per_token(LENGTH) / 3


def _mean_metric(journal: Path, name: str) -> float:
    """Mean of a metric of a stage's journal, 0 if it has none."""
    lines = map(json.loads, journal.read_text(encoding="utf8").splitlines())
    values = [line["values"][name] for line in lines if line["kind"] == "metric" and name in line["values"]]
    return statistics.fmean(values) if values else 0.0


if __name__ == "__main__":
    main()
