"""Losses and gradients of every alignment stage against trl's on the same batch, to 1e-5: SFT, reward model, DPO, IPO,
KTO, ORPO, GRPO, GKD; RAFT's against transformers' own.

Its trainers compute them on a copy of the model, as far as they can be made without a training; else their loss
functions.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from training.chat.base import Chat, Conversation, pad
from training.config import DistillConfig, PreferenceTuningConfig, RlhfConfig
from training.core.hardware import Hardware
from training.data.preferences import Pair, Preferred, Ranking, ranking_batch
from training.generation.completions import AnswerBatch, Completions
from training.model.loss import IGNORE
from training.model.models import load
from training.rl.algorithms import CLIPPED, Sampled, algorithm_of
from training.rl.policy_and_value import PolicyAndValue
from training.rl.rewards import RewardScale
from training.train_modules.answer_logprobs import answer_logprobs
from training.train_modules.distillation import Distilled
from training.train_modules.language_model import LanguageModel
from training.train_modules.preference_losses import kto_kl
from training.train_modules.preference_model import Example, PreferenceTuned, preference_batch
from training.train_modules.scorer import RewardModel, load_scorer

CPU = Hardware(torch.device("cpu"), bf16=False)
PROMPTS = ["What does a do?", "b", "And why?"]
CHOSEN = ["Sort the list.", "Load the file, then write it.", "No."]
REJECTED = ["Copy.", "Load the string.", "Return the sum of the array."]
SILENT: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}


@pytest.fixture
def chat(base_dir: Path) -> Chat:
    return Chat.load(base_dir)


@pytest.fixture
def policy(base_dir: Path) -> PreTrainedModel:
    """The untrained model with weights large enough that its log-probabilities differ from guessing."""
    return _moved(load(base_dir).eval(), 5)


@pytest.fixture
def pairs(chat: Chat) -> list[Pair]:
    sides = (chat.conversations(PROMPTS, answers) for answers in (CHOSEN, REJECTED))
    return [Pair(*both) for both in zip(*sides, strict=True)]


def _moved(network: PreTrainedModel, seed: int, by: float = 0.1) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator))
    return network


def _unchanged(value: Any) -> Any:
    return value


def _gradients(network: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None}


def _same(ours: Tensor, theirs: Tensor, network: nn.Module, copied: nn.Module) -> None:
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5, abs=1e-5)
    found, expected = _gradients(network, ours), _gradients(copied, theirs)
    assert found.keys() == expected.keys() and any(float(one.abs().max()) > 1e-3 for one in found.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def _padded(talks: list[Conversation], chat: Chat) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, attention_mask and completion_mask, as trl has them."""
    ids = pad([one.ids for one in talks], chat.pad)
    places = torch.arange(ids.shape[1])
    starts = torch.tensor([len(one.prompt) for one in talks])[:, None]
    ends = torch.tensor([len(one.ids) for one in talks])[:, None]
    return ids, (places < ends).long(), ((places >= starts) & (places < ends)).long()


def _trainer(
    name: str, network: PreTrainedModel, reference: PreTrainedModel, chat: Chat, out: Path, **keys: Any
) -> Any:
    import trl
    from datasets import Dataset

    rows = {
        "DPO": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4,
        "KTO": [{"prompt": "a", "completion": "b", "label": bool(number % 2)} for number in range(4)],
    }[name]
    args = getattr(trl, f"{name}Config")(output_dir=str(out), **SILENT, **keys)
    trainer = getattr(trl, f"{name}Trainer")(
        model=network, ref_model=reference, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=chat.tokenizer,
    )  # fmt: skip
    trainer.model.eval()
    return trainer


def _ours(
    policy: PreTrainedModel, reference: PreTrainedModel, examples: list[Example], chat: Chat, config: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Our loss on these examples, and the batch."""
    settings = PreferenceTuningConfig.model_validate(config)
    model, before = (PreferenceTuned(LanguageModel(network, CPU), settings) for network in (policy, reference))
    nothing = np.zeros((len(examples), len(examples[0].conversations())))
    with torch.no_grad():
        known = before(preference_batch(examples, nothing, chat)).sums.double().numpy()
    batch = preference_batch(examples, known, chat)
    if settings.loss == "kto":
        with torch.no_grad():
            batch["kl"] += kto_kl((model(batch).sums - batch["reference"])[:, 2:])
        batch = {name: value if name == "kl" else value[:, :2] for name, value in batch.items()}
    return model.loss(model(batch), batch)["total"], batch


@pytest.mark.parametrize("plain_head", [True, False], ids=["chunked", "with logits"])
def test_label_smoothing_is_transformers(plain_head: bool, policy: PreTrainedModel, chat: Chat) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    copied, model = copy.deepcopy(policy), LanguageModel(policy, CPU)
    model._plain_head, model.label_smoothing = plain_head, 0.2
    batch = chat.response_batch(chat.conversations(PROMPTS, CHOSEN))
    theirs = LabelSmoother(0.2)({"logits": copied(batch["input_ids"]).logits}, batch["labels"])
    _same(model.loss(model(batch), batch), theirs, policy, copied)
    held_out = model.losses(batch).sum() / (batch["labels"] != IGNORE).sum()
    model.label_smoothing = 0.0
    assert float(held_out) == pytest.approx(float(model.loss(model(batch), batch)), rel=1e-5), "without smoothing"


def test_neftune_is_transformers(policy: PreTrainedModel, chat: Chat) -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    copied, model = copy.deepcopy(policy), LanguageModel(policy, CPU)
    batch = chat.response_batch(chat.conversations(PROMPTS, CHOSEN))
    clean = model.losses(batch)
    copied.get_input_embeddings().neftune_noise_alpha = 5.0
    copied.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    handle = model.add_noise(5.0)
    assert torch.equal(model.losses(batch), clean), "none where the model is measured"
    losses = []
    for network in (model.train(), copied.train()):
        torch.manual_seed(3)
        if network is model:
            losses.append(model.loss(model(batch), batch))
        else:
            logits = network(batch["input_ids"]).logits.flatten(0, 1)
            losses.append(cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE))
    _same(*losses, policy, copied)
    handle.remove()
    quiet = model.loss(model(batch), batch)
    assert abs(float(quiet) - float(losses[0])) > 1e-4


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_dpo_and_ipo_are_trl_s(
    loss: str, policy: PreTrainedModel, pairs: list[Pair], chat: Chat, base_dir: Path, tmp_path: Path
) -> None:
    reference, copied = _moved(load(base_dir).eval(), 8), copy.deepcopy(policy)
    kind = {"dpo": "sigmoid", "ipo": "ipo"}[loss]
    trainer = _trainer("DPO", copied, copy.deepcopy(reference), chat, tmp_path, loss_type=kind, beta=0.3)
    ids, attention, completion = _padded([*(one.chosen for one in pairs), *(one.rejected for one in pairs)], chat)
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    theirs = trainer._compute_loss(trainer.model, inputs, False)
    examples = [Example(number, pair) for number, pair in enumerate(pairs)]
    ours, _ = _ours(policy, reference, examples, chat, {"loss": loss, "beta": 0.3})
    _same(ours, theirs, policy, copied)


def test_kto_is_trl_s(policy: PreTrainedModel, pairs: list[Pair], chat: Chat, base_dir: Path, tmp_path: Path) -> None:
    """The answers to other prompts, by which KTO judges, are the same on both sides, and their KL is not zero."""
    reference, copied = _moved(_moved(load(base_dir).eval(), 8), 9), copy.deepcopy(policy)
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    trainer = _trainer("KTO", copied, copy.deepcopy(reference), chat, tmp_path, beta=0.05, **weights)
    mixed = []
    for one, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        mixed.append(Pair(*(Conversation(one.chosen.prompt, each.response) for each in (other.chosen, other.rejected))))
    rows = [[*(one.chosen for one in part), *(one.rejected for one in part)] for part in (pairs, mixed)]
    inputs: dict[str, Tensor] = {"label": torch.tensor([True] * 3 + [False] * 3)}
    for prefix, talks in zip(("", "KL_"), rows, strict=True):
        names = (f"{prefix}{name}" for name in ("input_ids", "attention_mask", "completion_mask"))
        inputs |= dict(zip(names, _padded(talks, chat), strict=True))
    theirs = trainer._compute_loss(trainer.model, inputs, False)
    examples = [Example(number, pair, other) for number, (pair, other) in enumerate(zip(pairs, mixed, strict=True))]
    ours, batch = _ours(policy, reference, examples, chat, {"loss": "kto", "beta": 0.05, **weights})
    assert float(batch["kl"][0]) > 0.1
    _same(ours, theirs, policy, copied)


def test_orpo_is_trl_s_odds_ratio_beside_the_loss_of_instruction_tuning(
    policy: PreTrainedModel, pairs: list[Pair], chat: Chat
) -> None:
    """trl has its first part over the prompt too; ours, as the paper's, is over the answer (its mean by answer)."""
    from trl.experimental.orpo import ORPOTrainer

    copied = copy.deepcopy(policy)
    ids, attention, completion = _padded([*(one.chosen for one in pairs), *(one.rejected for one in pairs)], chat)
    logits = copied(input_ids=ids, attention_mask=attention).logits
    labels = ids.masked_fill(completion == 0, -100)
    means = ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=True)
    itself: Any = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    odds = ORPOTrainer.odds_ratio_loss(itself, *means.chunk(2))[0]
    tuning = torch.stack(
        [copied(input_ids=ids[[row]], attention_mask=attention[[row]], labels=labels[[row]]).loss for row in range(3)]
    )
    examples = [Example(number, pair) for number, pair in enumerate(pairs)]
    ours, _ = _ours(policy, policy, examples, chat, {"loss": "orpo", "beta": 0.3})
    _same(ours, (tuning - odds).mean(), policy, copied)


def test_sft_and_its_gradients_are_those_of_trl_s_batch(policy: PreTrainedModel, pairs: list[Pair], chat: Chat) -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    copied, model = copy.deepcopy(policy), LanguageModel(policy, CPU)
    talks = [one.chosen for one in pairs]
    collate = DataCollatorForLanguageModeling(pad_token_id=chat.pad)
    theirs = copied(
        **collate([{"input_ids": one.ids, "labels": [-100] * len(one.prompt) + one.response} for one in talks])
    ).loss
    batch = chat.response_batch(talks)
    _same(model.loss(model(batch), batch), theirs, policy, copied)


def test_raft_is_transformers_cross_entropy_on_the_best_answer_to_each_prompt(
    policy: PreTrainedModel, chat: Chat
) -> None:
    """Two prompts with three answers each, of which the second and the last have the highest scores."""
    texts = [*CHOSEN, *REJECTED]
    talks = chat.conversations([PROMPTS[number // 3] for number in range(6)], texts)
    answers = Completions([one.prompt for one in talks], [one.response for one in talks], torch.ones(6))
    settings = {"algorithm": "raft", "answers_per_prompt": 3, "rollout_prompts": 6, "minibatch_answers": 2}
    algorithm, columns = algorithm_of(RlhfConfig.model_validate(settings)), vars(AnswerBatch.of(answers, chat.pad))
    nothing = torch.zeros_like(columns["mask"])
    scores = torch.tensor([0.5, 2.0, -1.0, 0.25, 0.0, 3.0])
    kept = algorithm.kept(Sampled(scores, nothing, nothing, columns["mask"], None, 0.3))
    copied, model = copy.deepcopy(policy), PolicyAndValue(policy, None, RewardScale(0.3), algorithm, 1.0, CPU)
    minibatch = {name: column[kept] for name, column in columns.items()}
    ids, attention, completion = _padded([talks[1], talks[5]], chat)
    theirs = copied(input_ids=ids, attention_mask=attention, labels=ids.masked_fill(completion == 0, -100)).loss
    _same(model.loss(model(minibatch), minibatch)["total"], theirs, policy, copied)


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_is_trl_s_gkd(
    beta: float, pieces: bool, policy: PreTrainedModel, chat: Chat, base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.gkd import GKDTrainer

    if pieces:
        monkeypatch.setattr("training.train_modules.distillation.chunk_size", lambda weight: 3)
    teacher, copied = _moved(_moved(load(base_dir).eval(), 8), 9), copy.deepcopy(policy)
    config = DistillConfig(beta=beta, loss_temperature=1.5)
    model = Distilled(LanguageModel(policy, CPU), LanguageModel(copy.deepcopy(teacher), CPU), config)
    batch = chat.response_batch(chat.conversations(PROMPTS, CHOSEN))
    with torch.no_grad():
        known = teacher(batch["input_ids"]).logits
    logits = copied(batch["input_ids"]).logits
    expected = GKDTrainer.generalized_jsd_loss(logits, known, batch["labels"], beta=beta, temperature=1.5)
    assert expected.item() > 0.01
    _same(model.loss(model(batch), batch), expected, policy, copied)


def test_the_teacher_s_likeliest_tokens_alone_are_learnt(policy: PreTrainedModel, chat: Chat, base_dir: Path) -> None:
    """As KL from the teacher's distribution over them, in numpy."""
    teacher, batch = _moved(load(base_dir).eval(), 8), chat.response_batch(chat.conversations(PROMPTS, CHOSEN))
    distilled = Distilled(LanguageModel(policy, CPU), LanguageModel(teacher, CPU), DistillConfig(top_k=5))
    labelled = batch["labels"] != IGNORE
    with torch.no_grad():
        loss = distilled.loss(distilled(batch), batch).item()
        logits = [model(batch["input_ids"]).logits[labelled].double().numpy() for model in (policy, teacher)]
    likeliest = np.argsort(-logits[1], 1)[:, :5]
    kept = np.exp(np.take_along_axis(logits[1], likeliest, 1))
    kept /= kept.sum(1, keepdims=True)
    logprobs = np.take_along_axis(logits[0] - np.log(np.exp(logits[0]).sum(1, keepdims=True)), likeliest, 1)
    assert loss == pytest.approx((kept * (np.log(kept) - logprobs)).sum(1).mean(), rel=1e-4)


def test_the_reward_model_s_gradients_are_trl_s(base_dir: Path, pairs: list[Pair], chat: Chat) -> None:
    from trl import RewardTrainer

    scorer = load_scorer(base_dir, CPU, seed=3)
    _moved(scorer.model.eval(), 5)
    copied, model = copy.deepcopy(scorer.model), RewardModel(scorer)
    batch = ranking_batch([Ranking([one.chosen, one.rejected], [Preferred(0, 1)]) for one in pairs], chat.pad)
    rows = torch.cat([batch["input_ids"][:, 0], batch["input_ids"][:, 1]])
    names = ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")
    itself: Any = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=None),
        accelerator=SimpleNamespace(gather=_unchanged, gather_for_metrics=_unchanged),
        _metrics={"eval": {name: [] for name in names}},
        _total_train_tokens=0,
    )
    theirs = RewardTrainer.compute_loss(
        itself, copied, {"input_ids": rows, "attention_mask": (rows != chat.pad).long()}
    )
    _same(model.loss(model(batch), batch), theirs, scorer.model, copied)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize(
    ("scale", "high", "mean", "keys", "theirs"),
    [
        ("group", None, "answer", {}, {}),
        ("batch", 0.6, "answer", {}, {}),
        ("none", 0.6, "answer", {}, {}),
        ("none", 0.6, "token", {}, {}),
        pytest.param("none", None, "constant", {}, {}, id="Dr. GRPO"),
        pytest.param("group", 0.3, "answer", {"ratio": "sequence"}, {}, id="GSPO"),
        pytest.param("group", 0.1, "token", {"loss_form": "cispo"}, {"loss_type": "cispo"}, id="CISPO"),
    ],
)
def test_grpo_is_trl_s_from_rewards_to_gradients(
    policy: PreTrainedModel,
    chat: Chat,
    base_dir: Path,
    tmp_path: Path,
    scale: str,
    high: float | None,
    mean: str,
    keys: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    """Two prompts with three answers each that are given to both, their rewards too. trl's own advantages and
    log-probabilities of the policy that sampled; then both policies are moved, past the clip here and there.

    trl weighs the KL penalty by the ratio unless told not to; DeepSeekMath does not. Its `epsilon_high` is the bound
    itself for CISPO, not its distance from 1."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    scores = [0.5, -1.0, 2.0, 0.25, 0.0, 3.0]
    texts = [*CHOSEN, *REJECTED]
    talks = chat.conversations([PROMPTS[number // 3] for number in range(6)], texts)
    answers = Completions([one.prompt for one in talks], [one.response for one in talks], torch.ones(6))
    reference, copied = _moved(load(base_dir).eval(), 8), copy.deepcopy(policy)

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": answers.prompts, "completion_ids": answers.ids, "logprobs": None}

    def worth(**asked: Any) -> list[float]:
        return scores

    config = GRPOConfig(
        output_dir=str(tmp_path), **SILENT, beta=0.3, epsilon=0.2,
        loss_type=theirs.get("loss_type", {"answer": "grpo", "token": "dapo", "constant": "dr_grpo"}[mean]),
        importance_sampling_level=keys.get("ratio", "token"), max_completion_length=16,
        epsilon_high=1 + high if high and theirs else high, scale_rewards=scale, temperature=0.7, num_generations=3,
        num_iterations=2, per_device_train_batch_size=6, per_device_eval_batch_size=6, use_bias_correction_kl=False,
    )  # fmt: skip
    asked = [{"prompt": PROMPTS[number // 3]} for number in range(6)]
    trainer = GRPOTrainer(
        model=copied, reward_funcs=[worth], args=config, train_dataset=Dataset.from_list(asked),
        processing_class=chat.tokenizer, rollout_func=given,
    )  # fmt: skip
    trainer.model.eval()
    trainer.ref_model.load_state_dict(reference.state_dict())
    inputs = trainer._generate_and_score_completions(asked)

    settings: dict[str, Any] = {"algorithm": "grpo", "answers_per_prompt": 3}
    settings |= {"rollout_prompts": 6, "minibatch_answers": 6}
    settings |= {"clip_ratio": 0.2, "clip_ratio_high": high, "scale_rewards": scale, "loss_mean": mean}
    settings |= {"answer_max_tokens": 16, **keys}
    algorithm = algorithm_of(RlhfConfig.model_validate(settings))
    batch = AnswerBatch.of(answers, chat.pad)
    with torch.no_grad():
        before, known = (
            answer_logprobs(one, batch.ids, batch.places, batch.tokens, batch.mask, CPU, 0.7)
            for one in (policy, reference)
        )
    learnt = algorithm.learn(Sampled(torch.tensor(scores), before, known, batch.mask, None, 0.3))
    for network in (policy, copied):
        _moved(network, 4, by=0.01)
    model = PolicyAndValue(policy, None, RewardScale(0.3), algorithm, 0.7, CPU)
    minibatch = {**vars(batch), "logprobs": before, **learnt}
    losses = model.loss(model(minibatch), minibatch)
    assert 0 < float(losses[CLIPPED]) < 1 and float(losses["kl_penalty"]) > 0.01
    _same(losses["total"], trainer._compute_loss(trainer.model, inputs), policy, copied)
