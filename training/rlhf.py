"""Aligns an SFT model with rewards by PPO, RLOO or GRPO, kept near the SFT model by a KL penalty.

python -m training.rlhf --config rlhf.yaml --input model=DIR --input prompts=DIR --out DIR
    [--input reward_model=DIR] [--input reward_model_2=DIR …] [--input judge=DIR] [--input shards=DIR]
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from evaluation.statistics import bootstrap, bootstrap_ratio
from infra.errors import StageError, stage_error
from infra.run import Result, Run
from training import ranks
from training.algorithms import CLIPPED, Algorithm, algorithm_of
from training.answer_figures import answer_figures, lengthening, means, raw_scores, score_figures, share
from training.attention import choose_attention
from training.best_of import best_of_figures
from training.callbacks import Callback
from training.chat import Chat, read_rows
from training.completions import Completions, answer_logits, answered, generate, kl_of, scores_of, token_logprobs
from training.config import RlhfConfig
from training.conversations import prompts_of
from training.ensemble import Ensemble, member_names, same_weights
from training.export import export
from training.fit import Plan, fit
from training.hardware import Hardware, prepare
from training.mixed_text import TextBeside, loss_of_text, text_examples
from training.models import LanguageModel, limit_length, load
from training.norms import last_stack
from training.parallel import whole_weights
from training.reward_model import Scorer, load_scorer
from training.rewards import Asked, Rewards, RewardScale
from training.rollouts import Rollouts
from training.train_state import Loader, TokenCount, Trainable, TrainState
from training.verify import right_answers, rules_of

_TEXTS = 4096
"""Documents that minibatches draw from."""


class PolicyAndValue(Trainable):
    """A policy and, where the algorithm has one, a value function of its own, begun from the reward model (InstructGPT,
    section 3.5).

    A batch is a minibatch of `training.rollouts.Rollouts`.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        value: Scorer | None,
        scale: RewardScale,
        algorithm: Algorithm,
        temperature: float,
        hardware: Hardware,
        text_coef: float = 0.0,
    ):
        super().__init__()
        self.policy = policy
        self.value = value
        self.scale = scale
        self.algorithm = algorithm
        self._temperature = temperature
        self._hardware = hardware
        # In a tuple the policy is no second part of this network.
        self._reading = (LanguageModel(policy, hardware),) if text_coef else ()
        self._text_coef = text_coef

    def train(self, mode: bool = True) -> PolicyAndValue:
        """Stays in evaluation mode: dropout would make the ratio to the sampling policy a matter of luck
        ("N implementation details of RLHF", section 2.5)."""
        return super().train(False)

    def last_stack(self) -> nn.Module:
        """The module that gives the policy's last hidden state."""
        return last_stack(self.policy)

    def networks(self) -> dict[str, nn.Module]:
        """The two, which share no weights."""
        return {"policy": self.policy, **({"value": self.value} if self.value is not None else {})}

    def values(self, ids: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Expected normalised reward (B, T) at the places (B, T) of ids; where `mask (B, T)` is 0 anything."""
        assert self.value is not None
        return self.scale.of_first(self.value.at(ids, places, answered(places, mask)))

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities and values (B, T) of the answers' tokens, probabilities at the sampling temperature; and
        the loss of the text beside them (`training.mixed_text`)."""
        ids, places, mask = batch["ids"], batch["places"], batch["mask"]
        logits = answer_logits(self.policy, ids, places, mask, self._hardware, self._temperature)
        values = self.values(ids, places, mask) if self.value is not None else None
        weight = self.algorithm.weight(batch)
        text = loss_of_text(self._reading[0], batch, weight) if self._reading else None
        return token_logprobs(logits, batch["tokens"]), values, text

    def loss(self, outputs: tuple[Tensor, Tensor | None, Tensor | None], batch: Any) -> dict[str, Tensor]:
        logprobs, values, text = outputs
        losses = self.algorithm.loss(logprobs, values, batch)
        if text is None:
            return losses
        return {**losses, "text": text, "total": losses["total"] + self._text_coef * text}


class _Ratios(Callback):
    """Tells how the parts of the loss fare at each batch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        parts = {f"rlhf/{name}_loss": loss for name, loss in state.losses.items() if name not in ("total", CLIPPED)}
        self._run.metrics({f"rlhf/{CLIPPED}": state.losses[CLIPPED], **parts}, state.clock.batch)


def rlhf(config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Trains the policy on the prompts of `prompts/train.jsonl`, measures on those of `prompts/heldout.jsonl`.

    Figures: heldout_reward_sft, heldout_reward_rlhf (the reward model's mean raw score of answers sampled at the
    training temperature), reward_gain (bootstrap interval over prompts, paired), reward_gain_equal_length (what is left
    of it between answers of one length, by least squares over the prompts, with its bootstrap interval) and
    reward_per_token (what one more token is worth there), kl_to_sft (nats an answer, from whole
    next-token distributions along the policy's own answers, with its interval), kl_per_token, answer_tokens_sft,
    answer_tokens_rlhf, ends_share_sft, ends_share_rlhf. Of several answers to a prompt (`heldout_answers`) the mean
    counts. Answers and rewards go to aux/samples.jsonl.

    With further reward models, inputs of any other names, the reward is what `ensemble` makes of all, each in standard
    deviations of its own; heldout_reward_… are of that. reward_models_apart_sft and _rlhf are how far the models lie
    apart over an answer, in the mean (`training.ensemble`).

    With the input `judge`, a second reward model that trains nothing, each round's mean score by it is told as
    rlhf/judge, and the same held-out answers give heldout_judge_sft, heldout_judge_rlhf, judge_gain and
    judge_gain_equal_length. Raises StageError where it is the reward model itself.

    With `reward_functions`, the weighted sum of what they give the same answers is heldout_functions_sft,
    heldout_functions_rlhf and functions_gain.

    With `best_of`, best_of_4_kl and best_of_4_reward, _judge, _verified are what the best of so many answers of the SFT
    model comes to, with bootstrap intervals.

    Where a rule can check the answers to a prompt (`verify`), it rewards in place of the reward model. Figures of
    rewards are then of the other prompts alone, and verified_sft, verified_rlhf (share of right answers),
    verified_gain (bootstrap over prompts, paired) and verified_prompts of these.
    """
    hardware = prepare(run.launch)
    chat = Chat.load(inputs["model"])
    policy, algorithm = load(inputs["model"]), algorithm_of(config)
    names = member_names(inputs)
    scorers = {
        name: load_scorer(inputs[name], hardware) for name in (*names, *(["judge"] if "judge" in inputs else []))
    }
    ensemble, judge = Ensemble({name: scorers[name] for name in names}, config), scorers.get("judge")
    for name, scorer in scorers.items():
        if scorer.model.config.vocab_size != policy.config.vocab_size:
            raise stage_error(
                "other_vocabulary",
                name,
                f"expected the policy's vocabulary of {policy.config.vocab_size}, not {scorer.model.config.vocab_size}",
                f"train the {name.replace('_', ' ')} from the same model",
            )
    if judge is not None and any(same_weights(judge, one) for one in ensemble.members.values()):
        raise stage_error(
            "same_judge",
            "judge",
            "expected another model than the reward model, and its weights are the same",
            "train the judge with another seed or on other pairs",
        )
    longest = limit_length(policy, config.max_prompt_tokens + config.answer_max_tokens)
    if problems := config.problems(longest):
        raise StageError(*problems)
    for network in (policy, *(scorer.model for scorer in scorers.values())):
        choose_attention(network, hardware, longest)
    reference = copy.deepcopy(policy).eval().requires_grad_(False).to(hardware.device)
    scale = RewardScale(config.kl_coef, len(ensemble))
    if algorithm.has_values and not ensemble:
        raise stage_error(
            "no_reward_model",
            "rlhf.algorithm",
            f"expected the input reward_model for {config.chosen_algorithm}: its value function begins from it",
            "give one, or take algorithm: rloo or grpo",
        )
    value = copy.deepcopy(ensemble.first) if algorithm.has_values else None
    model = PolicyAndValue(policy, value, scale, algorithm, config.temperature, hardware, config.text_coef)
    model = model.to(hardware.device)
    for scorer in scorers.values():
        scorer.eval().requires_grad_(False).to(hardware.device)

    room = longest - config.answer_max_tokens
    train, heldout = (_short(chat, inputs["prompts"] / f"{side}.jsonl", room, run) for side in ("train", "heldout"))
    heldout = heldout[: config.heldout_prompts]
    if not train or not heldout:
        raise stage_error(
            "no_prompts", "rlhf.max_prompt_tokens", f"expected prompts of at most {room} tokens, found none", "raise it"
        )
    rewards = Rewards(ensemble, scale, chat, config, hardware, judge)
    if not ensemble and not config.reward_functions and any(one.rule is None for one in train):
        raise stage_error(
            "no_reward",
            "rlhf.reward_functions",
            "expected something that rewards every prompt: there is no reward model, no function, and prompts without "
            "a rule (verify)",
            "give the input reward_model, name a function, or give instructions that a rule can check",
        )
    if config.stop_on_divergence and (judge is None or not ensemble):
        raise stage_error(
            "no_judge",
            "rlhf.stop_on_divergence",
            "expected the inputs reward_model and judge, whose scores it compares",
            "give a judge: a reward model of another seed or of other pairs, or set it to null",
        )
    steps = config.epochs * (config.rollout_prompts // config.minibatch_answers)
    acting, refresh = _acting(model, run)
    values = acting.values if value is not None else None
    beside: dict[str, Any] = {}
    if config.text_coef:
        text = text_examples(inputs["shards"], _TEXTS, longest, config.seed, run)
        beside["beside"] = TextBeside(text, chat.response_batch, algorithm.weight, config.seed)
    rollouts = Rollouts(
        acting.policy,
        reference,
        values,
        rewards,
        algorithm,
        scale,
        train,
        chat,
        config,
        hardware,
        run,
        refresh=refresh,
        **beside,
    )
    loader = Loader(
        DataLoader(rollouts, batch_size=None, generator=torch.Generator().manual_seed(0)),
        lambda batch: TokenCount(batch["ids"].numel(), algorithm.weight(batch)),
    )
    tokens = config.minibatch_answers * longest
    plan = Plan(config.rollouts * steps, config.minibatch_answers, tokens, steps)
    done = fit("rlhf", model, loader, plan, config, hardware, run, [_Ratios(run)], model.networks(), inputs)
    export(policy, inputs["model"], out_dir, chat.stops)
    done.leave(out_dir)
    refresh()
    policy = acting.policy

    each = config.heldout_answers
    prompts = [one.ids for one in heldout for _ in range(each)]
    answers = {
        name: generate(one, prompts, chat, config, hardware, seed=config.seed, in_ranks=True)
        for name, one in (("sft", reference), ("rlhf", policy))
    }
    scores, apart = _rewards_of(ensemble, scale, answers, chat, hardware) if ensemble else ({}, {})
    judged = raw_scores(judge, answers, chat, hardware) if judge else {}
    best = {}
    if config.best_of > 1:
        best = _best_of(reference, heldout, ensemble, scale, judge, chat, config, hardware)
    kl, lengths = (each.double().numpy() for each in kl_of(policy, reference, answers["rlhf"], chat, hardware))
    rules = [one.rule for one in heldout for _ in range(each)]
    right = {name: right_answers([chat.decode(ids) for ids in side.ids], rules) for name, side in answers.items()}
    _write_samples(out_dir / "aux" / "samples.jsonl", heldout, chat, answers, scores, judged, right, each)
    ruled = np.array([one.rule is not None for one in heldout])
    scores, judged, right = ({name: means(x, each) for name, x in one.items()} for one in (scores, judged, right))
    kl, lengths, longer = (means(x, each) for x in (kl, lengths, lengthening(answers["sft"], answers["rlhf"])))
    by_model = score_figures("reward", scores, longer, ~ruled, config.seed) if scores else {}
    by_rule = _verified_figures(right, ruled, each, config.seed)
    by_function: dict[str, float] = {}
    if config.reward_functions:
        asked = [one for one in heldout for _ in range(each)]
        given = {name: _weighted(rewards, config, chat, side, asked) for name, side in answers.items()}
        given = {name: means(values, each) for name, values in given.items()}
        by_function = score_figures("functions", given, longer, np.ones(len(heldout), bool), config.seed)
    by_judge = score_figures("judge", judged, longer, ~ruled, config.seed) if judged else {}
    divergence = bootstrap(kl, seed=config.seed)
    figures = {
        **by_model,
        **by_judge,
        **by_rule,
        **by_function,
        **best,
        **{f"reward_models_apart_{name}": value for name, value in apart.items()},
        **divergence.as_figures("kl_to_sft"),
        "kl_per_token": bootstrap_ratio(kl, lengths, config.seed).value,
        "heldout_prompts": float(len(heldout)),
        "batches": float(done.batches),
        **({"stopped_early": float(done.batches < plan.batches)} if config.stop_on_divergence else {}),
        **answer_figures(answers, each),
    }
    told = ("reward_gain", "reward_gain_equal_length", "judge_gain", "functions_gain", "verified_gain", "kl_to_sft")
    run.metrics({f"rlhf/{name}": figures[name] for name in told if name in figures}, done.batches)
    said = []
    if by_model:
        bounds = f"({figures['reward_gain_low']:+.2f} to {figures['reward_gain_high']:+.2f})"
        level = figures["reward_gain_equal_length"]
        said.append(f"held-out reward {figures['reward_gain']:+.2f} {bounds}, at equal length {level:+.2f}")
    if by_judge:
        bounds = f"({figures['judge_gain_low']:+.2f} to {figures['judge_gain_high']:+.2f})"
        said.append(f"by the judge {figures['judge_gain']:+.2f} {bounds}")
    if by_function:
        said.append(f"by the functions {figures['functions_gain']:+.2f}")
    if by_rule:
        said.append(f"right answers {figures['verified_sft']:.0%} → {figures['verified_rlhf']:.0%}")
    if done.batches < plan.batches:
        said.append(f"STOPPED after {done.batches // steps:,} of {config.rollouts:,} rounds, as the judge's score fell")
    return Result(figures, ", ".join([*said, f"KL {divergence.value:.1f}"]))


def _acting(model: PolicyAndValue, run: Run) -> tuple[PolicyAndValue, Callable[[], None]]:
    """The networks that sample and look at answers, and what brings them to what was learnt.

    These are the model's own, but where weights are sharded a whole copy on each rank: ranks sample answers of their
    own, each of another number of steps, and sharded layers would have to be gathered for all of them in step.
    """
    if not run.launch.shards_weights or (ranks.world_size() == 1 and not run.launch.offload):
        return model, lambda: None
    acting = copy.deepcopy(model).requires_grad_(False)
    acting.scale = model.scale

    def refresh() -> None:
        for name, network in model.networks().items():
            acting.networks()[name].load_state_dict(whole_weights(network))

    return acting, refresh


def _weighted(
    rewards: Rewards, config: RlhfConfig, chat: Chat, answers: Completions, asked: Sequence[Asked]
) -> NDArray[np.float64]:
    """The weighted sum of what the config's functions give the answers (A,)."""
    given = rewards.by_functions([chat.decode(ids) for ids in answers.ids], asked)
    total = sum(config.reward_functions[path] * values.double() for path, values in given.items())
    return np.asarray(total)


def _rewards_of(
    ensemble: Ensemble, scale: RewardScale, answers: Mapping[str, Completions], chat: Chat, hardware: Hardware
) -> tuple[dict[str, NDArray[np.float64]], dict[str, float]]:
    """The reward (A,) of each side's answers: the raw score of one model, of several what they come to together; and
    how far several lie apart."""
    raw = {name: ensemble.raw(side, chat, hardware) for name, side in answers.items()}
    if len(ensemble) == 1:
        return {name: one.double().numpy() for name, one in raw.items()}, {}
    each = {name: scale(one.to(scale.mean.device)).cpu() for name, one in raw.items()}
    combined = {name: ensemble.combined(one).double().numpy() for name, one in each.items()}
    return combined, {name: ensemble.apart(one) for name, one in each.items()}


def _best_of(
    reference: PreTrainedModel,
    heldout: Sequence[Asked],
    ensemble: Ensemble,
    scale: RewardScale,
    judge: Scorer | None,
    chat: Chat,
    config: RlhfConfig,
    hardware: Hardware,
) -> dict[str, float]:
    """What the best of several answers of the SFT model scores: chosen by the reward, told by it (reward) and by the
    judge; and where a rule tells, how often one of them is right (verified)."""
    asked = [one for one in heldout for _ in range(config.best_of)]
    prompts = [one.ids for one in asked]
    answers = generate(reference, prompts, chat, config, hardware, seed=config.seed + 1, in_ranks=True)
    table = len(heldout), config.best_of
    ruled = np.array([one.rule is not None for one in heldout])
    figures: dict[str, float] = {}
    if ensemble and not ruled.all():
        scored = {"reward": _rewards_of(ensemble, scale, {"sft": answers}, chat, hardware)[0]["sft"]}
        if judge is not None:
            scored["judge"] = scores_of(judge, answers, chat, hardware).double().numpy()
        scored = {name: values.reshape(table)[~ruled] for name, values in scored.items()}
        figures |= best_of_figures(scored["reward"], scored, config.best_of, config.seed)
    if ruled.any():
        texts = [chat.decode(ids) for ids in answers.ids]
        right = right_answers(texts, [one.rule for one in asked]).reshape(table)[ruled]
        figures |= best_of_figures(right, {"verified": right}, config.best_of, config.seed)
    return figures


def _verified_figures(
    right: Mapping[str, NDArray[np.float64]], of: NDArray[np.bool_], each: int, seed: int
) -> dict[str, float]:
    """How many answers are right of the prompts that a rule judges; nothing where there are none.

    right: share of right answers (prompts,) of `each` to a prompt.
    """
    if not of.any():
        return {}
    figures = bootstrap(right["rlhf"][of] - right["sft"][of], seed=seed).as_figures("verified_gain")
    for name, shares in right.items():
        figures |= share(shares[of], each).as_figures(f"verified_{name}")
    return {**figures, "verified_prompts": float(of.sum())}


def _short(chat: Chat, path: Path, room: int, run: Run) -> list[Asked]:
    """The prompts of a pairs file that have at most `room` tokens; the log says how many are left out."""
    rows = read_rows(path, ("prompt",))
    encoded = prompts_of(chat, rows)
    found = [
        Asked(row["prompt"], ids, row.get("response", ""), rule)
        for row, ids, rule in zip(rows, encoded, rules_of(rows, str(path)), strict=True)
        if len(ids) <= room
    ]
    if dropped := len(rows) - len(found):
        message = f"{dropped:,} of {len(rows):,} prompts of {path.name} are longer than {room:,} tokens and left out"
        run.event("prompts_dropped", f"rlhf: {message}")
    return found


def _write_samples(
    path: Path,
    heldout: Sequence[Asked],
    chat: Chat,
    answers: Mapping[str, Completions],
    scores: Mapping[str, Any],
    judged: Mapping[str, Any],
    right: Mapping[str, Any],
    each: int,
) -> None:
    """A line a prompt, with the first of its `each` answers: answers and rewards by model, and under `judge` the
    judge's scores where there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf8") as file:
        for number, one in zip(range(0, each * len(heldout), each), heldout, strict=True):
            line: dict[str, Any] = {
                "prompt": one.text,
                "reference": one.response,
                "answers": {name: chat.decode(side.ids[number]) for name, side in answers.items()},
            }
            if one.rule is None:
                line["rewards"] = {name: round(float(values[number]), 4) for name, values in scores.items()}
                if judged:
                    line["judge"] = {name: round(float(values[number]), 4) for name, values in judged.items()}
            else:
                line["verified"] = {name: bool(values[number]) for name, values in right.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    from infra.alone import main

    main(rlhf, RlhfConfig)
