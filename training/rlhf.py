"""Aligns an SFT model with rewards by PPO, RLOO, GRPO, REINFORCE++ or RAFT, kept near the SFT model by a KL penalty.

python -m training.rlhf --config rlhf.yaml --input model=DIR --input prompts=DIR --out DIR
    [--input reward_model=DIR] [--input reward_model_2=DIR …] [--input judge=DIR] [--input shards=DIR]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from corpus.model_folders.adapters import keep_adapters
from infra.errors import StageError, stage_error
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.chat.base import Chat, read_rows
from training.checkpoint.export import export
from training.config import RlhfConfig
from training.config.alignment import samplers_problem
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware, prepare
from training.core.plan import Plan
from training.core.train_state import Loader, TokenCount, TrainState
from training.data.rows import prompts_of
from training.distributed.parallel import whole_weights
from training.generation.vllm_sampler import VllmSampler
from training.guard.finite import check_measured
from training.model.attention import choose_attention
from training.model.lora import add_adapters, merged
from training.model.models import limit_length, load
from training.model.new_tokens import forget_untrained
from training.planner.measured import planned
from training.rl.algorithms import CLIPPED, algorithm_of
from training.rl.ensemble import Ensemble, member_names, same_weights
from training.rl.environments.episodes import own_tasks
from training.rl.environments.heldout import measure_episodes, playing, searched_documents
from training.rl.grading import Graders
from training.rl.heldout import Heldout
from training.rl.policy_and_value import PolicyAndValue
from training.rl.prompts import Prompt
from training.rl.rewards import Rewards, RewardScale
from training.rl.rollouts.pool import SamplerPool
from training.rl.rollouts.processes import OwnSampler, SamplerHandle, questions, remote_samplers
from training.rl.round import Rollouts
from training.rl.rubrics import rubric_of
from training.rl.verify import announce_sandbox, rules_of
from training.train_modules.adapting import Adapting, sharing_frozen
from training.train_modules.mixed_text import TextBeside, text_examples
from training.train_modules.scorer import Scorer, load_other_scorer
from training.trainer.fit import fit

_TEXTS = 4096
"""Documents that minibatches draw from."""
_SIDES = ("train", "heldout")


class _Ratios(Callback):
    """Records the parts of the loss at each batch."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def batch_end(self, state: TrainState) -> None:
        parts = {f"rlhf/{name}_loss": loss for name, loss in state.losses.items() if name not in ("total", CLIPPED)}
        clipped = {f"rlhf/{CLIPPED}": state.losses[CLIPPED]} if CLIPPED in state.losses else {}
        self._run.metrics(clipped | parts, state.clock.batch)


def rlhf(config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train the policy on the prompts of `prompts/train.jsonl`.

    With further reward models, inputs of any other names, `ensemble` combines their rewards into one. With the input
    `judge`, a second reward model that trains nothing, each round's mean score by it is recorded as rlhf/judge. Raises
    StageError where it is the reward model itself.

    Figures: batches, generated_tokens_per_s and generating_share: the speed at which the rounds' answers were
    generated, and the share of the rounds' time that it took, in whole rounds of this process; as curves
    rlhf/generated_tokens_per_s and rlhf/generating_share. stopped_early with `stop_on_divergence`. With `async`, in
    place of generating_share: trainer_idle_share, sampler_idle_share, staleness, answers_dropped and samplers_replaced
    (`training.rl.rollouts.pool`).
    """
    if problem := samplers_problem(config, run.launch):
        raise StageError(problem)
    with ExitStack() as ending:
        graders = Graders(config.reward_processes, config.reward_timeout_s, run.launch.sandbox, run.event)
        ending.callback(graders.close)
        return _trained(config, inputs, out_dir, run, graders, ending)


def _trained(
    config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run, graders: Graders, ending: ExitStack
) -> Result:
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "rlhf")
    # The policy, the models that score its answers, and a frozen copy of the policy as reference.
    adapting, algorithm = _adapting(config), algorithm_of(config)
    policy = adapting.load(inputs["model"], run)
    longest = _longest(config, policy)
    ensemble, judge = _placed_scorers(config, inputs, policy, chat, hardware, longest)
    choose_attention(policy, hardware, longest)
    if config.lora:  # only adapters differ: the reference has the same memory
        reference = sharing_frozen(policy.to(hardware.device).requires_grad_(False)).eval()
    else:
        reference = copy.deepcopy(policy).eval().requires_grad_(False).to(hardware.device)
    ids = adapting.adapt(policy, chat.tokenizer, run)
    # The value function of PPO begins from the reward model.
    scale = RewardScale(config.kl_coef, len(ensemble))
    if algorithm.has_values and not ensemble:
        raise stage_error(
            "no_reward_model",
            "rlhf.algorithm",
            f"expected the input reward_model for {config.chosen_algorithm}: its value function begins from it",
            "add the input, or use algorithm: rloo, grpo or raft",
        )
    value = _value_function(ensemble.first, config) if algorithm.has_values else None
    model = PolicyAndValue(policy, value, scale, algorithm, config.temperature, hardware, config.text_coef)
    model = model.to(hardware.device)

    # Prompts and rewards.
    prompts, heldout = (_short(chat, inputs["prompts"] / f"{side}.jsonl", config, longest, run) for side in _SIDES)
    announce_sandbox((prompt.rule for prompt in (*prompts, *heldout)), graders, run)
    rubric = rubric_of(config.rubric, inputs, hardware, run)
    if rubric is not None:
        ending.callback(rubric.close)
    rewards = Rewards(ensemble, scale, chat, config, hardware, judge, graders, rubric)
    _check_rewards(config, prompts, bool(ensemble), judge is not None)
    # The sampler: this process's policy, or a vLLM server with copies of its weights; with `async`, other processes.
    steps = config.round_batches
    sampler, refresh = acting(model, run)
    values = sampler.values if value is not None else None
    vllm, pool = None, None
    documents = searched_documents(config, inputs, run)
    player = partial(playing, config, documents, chat, hardware, run, ending)
    episodes = player()  # with `async` samplers play instead

    def served(policy: PreTrainedModel, **adapted: Any) -> VllmSampler:
        return VllmSampler(policy, inputs["model"], chat, config, longest, hardware, run, **adapted)

    def trained_weights() -> Mapping[str, Tensor]:
        weights = whole_weights(sampler.policy)
        return merged(weights, config.lora, ids) if config.lora else weights

    def samplers(logs: Path) -> Sequence[SamplerHandle]:
        nonlocal vllm
        count = run.launch.samplers.count
        if config.sampler == "vllm":
            servers = remote_samplers(count, lambda: load(inputs["model"]), served, config, player)
            vllm = servers[0].vllm
            return servers
        return [
            OwnSampler(number, inputs["model"], config, run.launch, longest, logs / f"sampler-{number}.log", documents)
            for number in range(count)
        ]

    if config.async_:
        of_part = partial(questions, config, prompts)
        pool = SamplerPool(config, run, trained_weights, of_part, samplers)
        ending.callback(pool.close)
    elif config.sampler == "vllm":
        vllm = served(sampler.policy, lora=config.lora, token_ids=ids)
        ending.callback(vllm.close)
    # Pretraining text in each minibatch, if the config asks for it.
    extra: dict[str, Any] = {}
    if config.text_coef:
        key, sources = "rlhf.text_sources", config.text_sources
        of_text = {"sources": sources, "key": key, "tokenizer": chat.tokenizer}
        text = text_examples(inputs["shards"], _TEXTS, longest, config.seed, run, **of_text)
        extra["beside"] = TextBeside(text, chat.response_batch, algorithm.weight, config.seed)
    # Rounds are the training data: each samples and scores answers, and yields minibatches of them.
    rollouts = Rollouts(
        sampler.policy,
        reference,
        values,
        rewards,
        algorithm,
        scale,
        prompts,
        chat,
        config,
        hardware,
        run,
        refresh=refresh,
        vllm=vllm,
        pool=pool,
        episodes=episodes,
        **extra,
    )
    loader = Loader(
        DataLoader(rollouts, batch_size=None, generator=torch.Generator().manual_seed(0)),
        lambda batch: TokenCount(batch["ids"].numel(), algorithm.weight(batch)),
    )
    # Training.
    tokens = config.minibatch_answers * longest
    plan = Plan(config.rollouts * steps, config.minibatch_answers, tokens, steps)
    estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
    done = fit(
        "rlhf", model, loader, plan, config, hardware, run, [_Ratios(run), rollouts.times], model.networks(), inputs
    )
    # The model that is left: adapters merged, if there are any.
    refresh()
    tuned, network, adapters = sampler.policy, policy, None
    if config.lora:
        network, adapters = adapting.merge(policy, inputs["model"], ids)
        if not adapting.quantizes:  # the unquantized model may not fit on the device
            choose_attention(network, hardware, longest)
            tuned = network.to(hardware.device).eval().requires_grad_(False)
    export(network, inputs["model"], out_dir, chat.stops)
    if adapters and ranks.is_first():
        keep_adapters(out_dir, *adapters)
    done.leave(out_dir, estimate)
    times = rollouts.times if pool is None else pool
    figures = {"batches": float(done.batches), **times.figures()}
    headline = f"{done.batches // steps:,} rounds of {config.rollout_prompts:,} answers"
    if config.stop_on_divergence:
        figures["stopped_early"] = float(done.batches < plan.batches)
    if done.batches < plan.batches:
        headline = f"STOPPED after {done.batches // steps:,} of {config.rollouts:,} rounds, as the judge's score fell"

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        result = _measured(
            config, inputs, heldout, ensemble, judge, chat, hardware, reference, tuned, measured_dir, its_run
        )
        stopped = done.batches < plan.batches
        return replace(result, headline=f"{result.headline}, {headline}") if stopped else result

    return Result(figures, headline, measure_now)


def measure_trained(config: RlhfConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measure the model `trained` and the one that it was trained from, `model`, on `prompts/heldout.jsonl`.

    Figures: heldout_reward_sft, heldout_reward_rlhf (the reward model's mean raw score of answers sampled at the
    training temperature), reward_gain (paired interval over prompts, clustered by conversation),
    reward_gain_equal_length (the gain that remains between answers of one length, by least squares over the prompts,
    with its interval) and reward_per_token (the reward of one more token there), kl_to_sft (nats per answer, from whole
    next-token distributions along the policy's own answers, with its interval), kl_per_token, answer_tokens_sft,
    answer_tokens_rlhf, ends_share_sft, ends_share_rlhf. Of several answers to a prompt (`heldout_answers`) the mean
    counts. Answers and rewards go to aux/samples.jsonl.

    With further reward models heldout_reward_… are of their combination by `ensemble`, each in standard deviations of
    its scores of the answers of `model`. reward_models_apart_sft and _rlhf are the mean disagreement of the models over
    an answer (`training.rl.ensemble`).

    With the input `judge` the same held-out answers give heldout_judge_sft, heldout_judge_rlhf, judge_gain and
    judge_gain_equal_length. With `reward_functions`, the weighted sum of their rewards of the same answers is
    heldout_functions_sft, heldout_functions_rlhf and functions_gain. With `best_of`, best_of_4_kl and best_of_4_reward,
    _judge, _verified are the figures of the best of 4 answers of `model`, with intervals (and so on up to `best_of`).

    With a `rubric`, rubric_sft, rubric_rlhf and rubric_gain are the weighted mean of its criteria, and
    rubric_<criterion>_sft, _rlhf and _gain those of each.

    Where a rule can check the answers to a prompt (`verify`), it rewards in place of the reward model. Figures of
    rewards are then of the other prompts alone, and verified_sft, verified_rlhf (share of right answers), verified_gain
    (paired interval over prompts) and verified_prompts of these.
    """
    hardware = prepare(run.launch, say=run.event)
    chat = Chat.load(inputs["model"], config.chat_template_kwargs, "rlhf")
    adapting = _adapting(config)
    reference = adapting.load(inputs["model"], run).eval().requires_grad_(False)
    policy = adapting.load_trained(inputs["model"], inputs[TRAINED], run).eval().requires_grad_(False)
    longest = _longest(config, reference)
    ensemble, judge = _placed_scorers(config, inputs, reference, chat, hardware, longest)
    for network in (reference, policy):
        choose_attention(network, hardware, longest)
        network.to(hardware.device)
    heldout = _short(chat, inputs["prompts"] / "heldout.jsonl", config, longest, run)
    return _measured(config, inputs, heldout, ensemble, judge, chat, hardware, reference, policy, out_dir, run)


def _measured(
    config: RlhfConfig,
    inputs: Mapping[str, Path],
    heldout: Sequence[Prompt],
    ensemble: Ensemble,
    judge: Scorer | None,
    chat: Chat,
    hardware: Hardware,
    reference: PreTrainedModel,
    policy: PreTrainedModel,
    out_dir: Path,
    run: Run,
) -> Result:
    """The figures of `measure_trained`. Every rank must call."""
    graders = Graders(config.reward_processes, config.reward_timeout_s, run.launch.sandbox, run.event)
    with ExitStack() as ending:
        ending.callback(graders.close)
        rubric = rubric_of(config.rubric, inputs, hardware, run)
        if rubric is not None:
            ending.callback(rubric.close)
        announce_sandbox((prompt.rule for prompt in heldout), graders, run)
        scale = RewardScale(config.kl_coef, len(ensemble))
        rewards = Rewards(ensemble, scale, chat, config, hardware, judge, graders, rubric)
        chosen = heldout[: config.heldout_prompts]
        if config.environment is None:
            measured = Heldout(chosen, rewards, chat, config, hardware)
            figures, sentences = measured.figures(reference, policy, out_dir / "aux" / "samples.jsonl")
        else:
            figures, sentences = measure_episodes(config, inputs, chosen, rewards, chat, hardware, reference, policy,
                                                  out_dir, run)  # fmt: skip
    check_measured("rlhf", figures)
    return Result(figures, ", ".join(sentences))


def _adapting(config: RlhfConfig) -> Adapting:
    return Adapting("rlhf", config.lora, config.seed, forget_untrained)


def _value_function(scorer: Scorer, config: RlhfConfig) -> Scorer:
    """Return a value function that begins as this reward model: a copy, or with `lora` its frozen weights with adapters
    and a separate score."""
    if config.lora is None:
        return copy.deepcopy(scorer).train().requires_grad_(True)
    value = sharing_frozen(scorer.requires_grad_(False)).train()
    add_adapters(value.model.base_model, config.lora, config.seed + 1, "rlhf")
    head = value.model.get_submodule("score")
    head.weight = nn.Parameter(value.model.get_parameter("score.weight").detach().clone())
    return value


def _longest(config: RlhfConfig, model: PreTrainedModel) -> int:
    """Tokens of the longest prompt with its answer. Raises StageError where nothing is left for a prompt."""
    longest = limit_length(model, config.max_prompt_tokens + config.episode_tokens)
    if problems := config.problems(longest):
        raise StageError(*problems)
    return longest


def _placed_scorers(
    config: RlhfConfig, inputs: Mapping[str, Path], model: PreTrainedModel, chat: Chat, hardware: Hardware, longest: int
) -> tuple[Ensemble, Scorer | None]:
    """The reward models and the judge, ready to score on the device."""
    ensemble, judge = _scorers(config, inputs, model, chat, hardware, longest)
    for scorer in [*ensemble.members.values(), *([judge] if judge is not None else [])]:
        choose_attention(scorer.model, hardware, longest)
        scorer.eval().requires_grad_(False).to(hardware.device)
    return ensemble, judge


def _scorers(
    config: RlhfConfig, inputs: Mapping[str, Path], policy: PreTrainedModel, chat: Chat, hardware: Hardware, tokens: int
) -> tuple[Ensemble, Scorer | None]:
    """The reward models, and the judge where there is one;

    Raises what `load_other_scorer` raises, and StageError `same_judge` where the judge is one of them.

    Args:
        tokens: of the longest prompt with its answer.
    """
    names = member_names(inputs)
    scorers = {
        name: load_other_scorer(name, inputs[name], policy, chat, hardware, tokens)
        for name in (*names, *(["judge"] if "judge" in inputs else []))
    }
    ensemble, judge = Ensemble({name: scorers[name] for name in names}, config), scorers.get("judge")
    if judge is not None and any(same_weights(judge, member) for member in ensemble.members.values()):
        raise stage_error(
            "same_judge",
            "judge",
            "expected another model than the reward model, but its weights are the same",
            "train the judge with another seed or on other pairs",
        )
    return ensemble, judge


def _check_rewards(config: RlhfConfig, prompts: Sequence[Prompt], has_model: bool, has_judge: bool) -> None:
    """Raise StageError where nothing rewards a prompt, or `stop_on_divergence` lacks the two scores that it
    compares."""
    rewards = has_model or config.reward_functions or config.rubric is not None or config.environment is not None
    if not rewards and any(prompt.rule is None for prompt in prompts):
        raise stage_error(
            "no_reward",
            "rlhf.reward_functions",
            "expected something that rewards every prompt: there is no reward model, function or rubric, and prompts "
            "without a rule (verify)",
            "give the input reward_model, name a function, write a rubric, or give instructions that a rule can check",
        )
    if config.stop_on_divergence and not (has_judge and has_model):
        raise stage_error(
            "no_judge",
            "rlhf.stop_on_divergence",
            "expected the inputs reward_model and judge, whose scores it compares",
            "give a judge: a reward model of another seed or of other pairs, or set it to null",
        )
    if config.stop_on_divergence and all(prompt.rule is not None for prompt in prompts):
        raise stage_error(
            "no_judge",
            "rlhf.stop_on_divergence",
            "expected prompts whose answers the reward model judges: a rule judges those of all",
            "set it to null",
        )
    if config.best_of > 1 and not has_model and all(prompt.rule is None for prompt in prompts):
        raise stage_error(
            "no_reward",
            "rlhf.best_of",
            "expected a reward model or a rule to choose the best answer by: there are functions alone",
            "set it to 1",
        )


def _short(chat: Chat, path: Path, config: RlhfConfig, longest: int, run: Run) -> list[Prompt]:
    """Return the prompts of a pairs file that leave room for an answer; the log reports the number left out.

    Raises StageError `no_prompts` where none is left.
    """
    if config.environment is not None and config.environment.tasks:
        return own_tasks(config.environment, path.stem, config.heldout_prompts)
    room = longest - config.episode_tokens
    rows = read_rows(path, ("prompt",))
    encoded = prompts_of(chat, rows)
    prompts = [
        Prompt(row["prompt"], ids, row.get("response", ""), rule, row.get("history", ()))
        for row, ids, rule in zip(rows, encoded, rules_of(rows, str(path)), strict=True)
        if len(ids) <= room
    ]
    if dropped := len(rows) - len(prompts):
        message = f"{dropped:,} of {len(rows):,} prompts of {path.name} are longer than {room:,} tokens and left out"
        run.event("prompts_dropped", f"rlhf: {message}")
    if not prompts:
        raise stage_error(
            "no_prompts", "rlhf.max_prompt_tokens", f"expected prompts of at most {room} tokens, found none", "raise it"
        )
    return prompts


def acting(model: PolicyAndValue, run: Run) -> tuple[PolicyAndValue, Callable[[], None]]:
    """Return the networks that sample and evaluate answers, and a function that updates them to the trained weights.

    These are the model's own. Where weights are sharded they are a whole copy on each rank: ranks sample different
    answers of different lengths, and sharded layers would have to be gathered for all of them in step.
    """
    if not run.launch.shards_weights or (ranks.world_size() == 1 and not run.launch.offload):
        return model, lambda: None
    copied = sharing_frozen(model).requires_grad_(False)
    copied.scale = model.scale

    def refresh() -> None:
        for name, network in model.networks().items():
            copied.networks()[name].load_state_dict(whole_weights(network))

    return copied, refresh


if __name__ == "__main__":
    from infra.alone import main

    main(rlhf, RlhfConfig)
