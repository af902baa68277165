"""Config of RLHF: algorithm, rewards, sampling; every default names its source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from infra.config import Config, measured_only, outside_identity
from infra.errors import Problem
from infra.io.sources import Source
from infra.launch.config import LaunchConfig
from infra.store.measurements import TRAINED
from training.config.alignment.chat_trainer import MORE_POSITIONS, ChatTrainerConfig, LoraConfig, no_room
from training.config.alignment.environment import EnvironmentConfig
from training.config.alignment.functions import file_of, missing_functions
from training.config.alignment.rubrics import RubricConfig
from training.config.duration import Length
from training.config.guard import GuardConfig
from training.config.trainer import OptimizerConfig, ScheduleConfig

NO_REWARD_MODELS = ("model", "prompts", "judge", "rubric_judge", "shards", "documents", "state", TRAINED)
"""Inputs of `rlhf` that are no reward model of its policy."""


def samplers_problem(config: RlhfConfig, launch: LaunchConfig) -> Problem | None:
    """Return why these machines do not support `rlhf.async`, if they do not."""
    if config.async_ is None:
        return None
    if launch.ranks > 1:
        return Problem(
            "contradiction",
            "rlhf.async",
            f"expected one training process, not the {launch.ranks} ranks of launch: samplers take their weights from "
            "one process",
            "set launch.processes and launch.nodes to 1 and give samplers other devices (launch.samplers.gpus), "
            "or leave async out",
        )
    gpus = launch.vllm.gpus.split(",") if launch.vllm.gpus else []
    if config.sampler == "vllm" and len(gpus) % launch.samplers.count:
        return Problem(
            "contradiction",
            "launch.samplers.count",
            f"expected a divisor of the {len(gpus)} GPUs of launch.vllm.gpus, not {launch.samplers.count}: each vLLM "
            "server gets as many",
            "change the number of servers, or name other GPUs",
        )
    return None


class AsyncConfig(Config):
    """Asynchronous sampling: sampler processes answer later rounds while the trainer learns from earlier ones."""

    max_staleness: int = Field(1, ge=0)
    """Maximum number of rounds between the weights that sampled a token and those that learn it. 0: the trainer waits
    for answers of its current weights, and the result is bit-identical to training without `async`. 1 hides sampling
    that takes at most as long as learning, or the reverse; more only evens out rounds of different length, at the price
    of older answers. Fu et al. 2025, "AReaL", learn as well with 1 to 8 and `correction`."""
    order: Literal["fixed", "free"] = "fixed"
    """Order in which answers are used. fixed: round r learns the answers to its own prompts, written by the weights of
    round r - max_staleness, so that the result depends on no clock: a killed training ends with the bits of one that
    was not, for any number and speed of samplers. free: a round learns the first answers that are ready, written by the
    newest weights at their start; those that a slow sampler delivers later than max_staleness are dropped and counted.
    The order of use is recorded: a killed training repeats the rounds that it had begun, and goes on from them."""
    parts: int = Field(1, ge=1)
    """Parts of a round that are sampled separately, each by one sampler: a multiple of the samplers keeps all of them
    busy. More than one changes results by rounding."""
    correction: Literal["token", "sequence", "none"] = "token"
    """Importance weight of answers that other weights wrote, with which their advantages are multiplied: the ratio of
    the policy at the round's start to the weights that wrote them, at most `correction_cap`. token: of each token (the
    decoupled loss of Hilton et al. 2022 and AReaL, truncated as in Espeholt et al. 2018, "IMPALA").
    sequence: of the answer, the geometric mean over its tokens, as in GSPO (Zheng et al. 2025, equation 7). none: 1."""
    correction_cap: float = Field(2.0, ge=1)
    """Largest importance weight; 2 in Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"."""


class RlhfConfig(ChatTrainerConfig):
    """PPO, RLOO, GRPO, REINFORCE++ or RAFT against rewards, with a KL penalty to the SFT model (Ziegler et al. 2019;
    InstructGPT, section 3.5)."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True, validate_by_alias=True)

    rollouts: int = Field(100, ge=1)
    """Rounds of sampling answers and learning from them."""
    rollout_prompts: int = Field(512, ge=1)
    """Answers sampled in each round; batch size 512 in InstructGPT, appendix C.4."""
    algorithm: Literal["ppo", "rloo", "grpo", "reinforce++", "raft"] | None = None
    """ppo: with a value function (Schulman et al. 2017). rloo: the baseline of an answer is the mean reward of the
    other answers to its prompt, without a value function; the ratio is clipped (Ahmadian et al. 2024, "Back to Basics",
    section 3.2). grpo: the same in standard deviations of these rewards, with the KL penalty in the loss (DeepSeekMath,
    Shao et al. 2024). raft: the best answer to each prompt is learnt by cross entropy, the others are discarded (Dong
    et al. 2023, "RAFT"; Llama 2's rejection sampling, Touvron et al. 2023, section 3.2.3, with kl_coef: 0).
    reinforce++: the reward that follows a token, KL penalty included, in standard deviations over the round; with
    several answers to a prompt less their mean (Hu et al. 2025, "REINFORCE++"). By default ppo with one answer to a
    prompt, rloo with several. Dr. GRPO, DAPO, GSPO and CISPO are grpo with other `scale_rewards`, `clip_ratio_high`,
    `loss_mean`, `ratio` and `loss_form`."""
    answers_per_prompt: int = Field(1, ge=1)
    """Answers per prompt in each round: 1 in PPO, 2 and 4 in Ahmadian et al. 2024, 64 in DeepSeekMath, 8 to 32 in Dong
    et al. 2023."""
    sampler: Literal["own", "vllm"] = "own"
    """Sampler of the answers in each round: own is the built-in sampler, vllm a vLLM server configured in
    `launch.vllm`. Both draw from the same policy, but with different random numbers, so that the resulting models
    differ. Held-out answers are always sampled by own."""
    async_: AsyncConfig | None = Field(None, alias="async")
    """Sample in parallel with training, in separate processes (`launch.samplers`) or a vLLM server; null: sample and
    learn in turns."""
    reward_functions: dict[str, float] = Field(default_factory=dict)
    """Functions that reward answers, `package.module:name`, with their weights. They are called with three lists of
    text: the prompts, the answers and the reference responses ("" if there is none), and return a number per answer, or
    None to abstain: the function's reward is then left out for that answer, as in trl. Added to the reward model's
    normalised score or the rule's; without the input `reward_model` they are the only reward. The reward of an answer
    must not depend on other answers in the call: ranks and processes divide them."""
    rubric: RubricConfig | None = None
    """Criteria by which a judge model scores each answer: an endpoint of OpenAI's protocol, or the input
    `rubric_judge`. Added to the other rewards like a function."""
    reward_processes: int = outside_identity(0, ge=0)
    """Processes of each rank in which reward functions are called and unit tests (`verify: tests`) run side by side, an
    answer at a time; they end with the stage. 0: functions are called in the training's own process, with all answers
    of a rank at once and without a time limit, and unit tests run one after the other."""
    reward_timeout_s: float = Field(10.0, gt=0)
    """Seconds that an answer's unit tests may take, above which it counts as wrong; and with reward_processes what a
    reward function may take for an answer, above which the stage stops and names it."""
    environment: EnvironmentConfig | None = None
    """Environment in which the policy works on tasks in several turns, with tools, for a reward (`training.rl.
    environments`), to which those of reward models and functions are added, if any. A rule (`verify`) then rewards
    nothing: it is a second rule beside the environment's reward. null: each prompt gets one answer."""
    ensemble: Literal["mean", "worst", "variance", "lower_bound"] = "mean"
    """Combination of several reward models (`reward_model` and inputs of any other names), each in standard deviations
    of its scores of the SFT model's answers. mean: their mean. worst: the lowest (WCO in Coste et al. 2023, section
    3.1). variance: the mean minus `ensemble_coef` times their variance (UWO there). lower_bound: the mean minus
    `ensemble_coef` times their standard deviation."""
    ensemble_coef: float = Field(0.1, ge=0)
    """Penalty for disagreement: λ of `variance` and `lower_bound`; 0.1 for PPO in Coste et al. 2023."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of reward models in the mean, by the names of their inputs; 1 if not listed."""
    text_coef: float = Field(0.0, ge=0.0)
    """Weight of the loss on pretraining text (the input `shards`), the mean over its tokens, added to the policy's
    loss: it preserves capabilities that alignment would cost. PPO-ptx with 27.8 in InstructGPT, section 3.5 and
    appendix C.4. A minibatch reads as many beginnings of documents as it has answers, each as long as the longest
    prompt with its answer."""
    text_sources: tuple[str, ...] = ()
    """Sources of the shards that provide the text, as in `sft`; [] uses all."""
    minibatch_answers: int = Field(64, ge=1)
    """Answers per optimizer step; 64 in InstructGPT, appendix C.4. For raft, kept answers."""
    whole_groups: bool = False
    """Keep all answers to a prompt in one minibatch, so that each prompt is computed once per pass, which saves most if
    prompts are long. false: deal the answers of a round to minibatches at random, as trl's GRPOTrainer does."""
    epochs: int = Field(1, ge=1)
    """Passes over each round's answers; 1 in InstructGPT, appendix C.4, 4 in Ziegler et al. 2019."""
    max_prompt_tokens: int = Field(512, ge=4)
    """Maximum length of a prompt in tokens; longer prompts are left out."""
    answer_max_tokens: int = Field(64, ge=1)
    """Maximum length of a sampled answer in tokens."""
    temperature: float = Field(1.0, ge=0.01)
    """Sampling temperature of policy and reference; 1 in InstructGPT, appendix C.4."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL penalty; 0.02 in InstructGPT, section 3.5, 0.05 in Stiennon et al. 2020."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL per answer (nats) of an adaptive kl_coef (Ziegler et al. 2019, section 2.2); null: fixed."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount; none in InstructGPT, appendix C.4."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation (Schulman et al. 2016); 0.95 in Ziegler et al. 2019."""
    clip_ratio: float = Field(0.2, gt=0)
    """Clipping of the probability ratio (Schulman et al. 2017); 0.2 in InstructGPT, appendix C.4."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Upper bound of the clip, if it is to be wider than the lower one, so that unlikely tokens can gain probability:
    0.28 with clip_ratio: 0.2 in Yu et al. 2025, "DAPO", section 3.1. null: the same as clip_ratio."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of the difference between a reward and its group's mean in GRPO. group: the standard deviation of the
    group (DeepSeekMath, section 4.1.2). batch: that of all rewards of the round. none: no division (Liu et al. 2025,
    "Dr. GRPO", section 3.2: a group's own deviation gives too much weight to prompts that are almost always or almost
    never answered correctly). The names are trl's."""
    loss_mean: Literal["answer", "token", "constant"] = "answer"
    """Mean that GRPO's loss takes. answer: over the tokens of each answer, then over the answers (DeepSeekMath,
    equation 3), so that a token of a long answer weighs less. token: over all tokens of the minibatch (Yu et al. 2025,
    "DAPO", section 3.3; trl's default), so that a long answer weighs more. constant: the sum over the tokens of an
    answer divided by answer_max_tokens, then over the answers, so that every token weighs the same in every minibatch
    (Liu et al. 2025, "Dr. GRPO", section 3.2)."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio that GRPO's loss clips. token: of each token. sequence: of the answer, the geometric mean over
    its tokens (Zheng et al. 2025, "GSPO", equation 7). It varies far less, and so wants a far narrower clip: clip_ratio
    3e-4 and clip_ratio_high 4e-4 there, section 5.1. trl's `importance_sampling_level`."""
    loss_form: Literal["clip", "cispo"] = "clip"
    """Loss of a token in GRPO. clip: the clipped surrogate of PPO, in which a token outside the clip has no gradient.
    cispo: log-probability times advantage, weighted by the ratio up to 1 + clip_ratio_high, without a lower bound, so
    that every token has a gradient (MiniMax 2025, "MiniMax-M1", equations 4 and 5)."""
    clip_value: float = Field(0.2, gt=0)
    """Clipping of the value estimate; 0.2 in Ziegler et al. 2019's code."""
    value_coef: float = Field(0.1, ge=0)
    """Weight of the value loss; 0.1 in Ziegler et al. 2019's code."""
    unfinished_penalty: float = Field(1.0, ge=0)
    """Subtracted from the reward of an unfinished answer, as `missing_eos_penalty` is in trl's online DPO."""
    unfinished_reward: float | None = None
    """Reward of an unfinished answer, instead of its reward minus unfinished_penalty: -1 in Ziegler et al. 2019 ("N
    implementation details of RLHF", section 4.3), 0 in Open Instruct's GRPO. In the unit of rewards after
    normalise_reward. null: unfinished_penalty applies."""
    overlong_tokens: int = Field(0, ge=0)
    """Length of the range before answer_max_tokens in which the reward of an answer falls with its length, from no
    change to minus overlong_penalty (Yu et al. 2025, "DAPO", section 3.4, equation 13: 4,096 of 20,480 tokens). It
    comes on top of unfinished_penalty; set that to 0 for DAPO's reward. 0: length has no effect."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Subtracted from the reward of an answer of answer_max_tokens, with overlong_tokens; 1 in DAPO."""
    refill_groups: int = Field(0, ge=0)
    """Maximum number of times per round that groups whose answers all have the same reward, which teach nothing, are
    left out and other prompts are answered in their place ("dynamic sampling" in Yu et al. 2025, "DAPO", section 3.2;
    "active sampling" in Open Instruct). Groups that remain equal stay in the round. Means of rewards are of the round's
    first answers, which are not selected. 0: no group is left out."""
    normalise_reward: bool = True
    """Shift and scale rewards by the SFT model's mean and standard deviation ("N implementation details", 4.4)."""
    verified_reward: float = Field(1.0, gt=0)
    """Reward of an answer that the prompt's rule (`verify` in the instructions) finds right, and with a minus of one
    that it finds wrong, in place of the reward model's; in standard deviations of its scores where those are
    normalised."""
    lora: LoraConfig | None = None
    """Adapters in place of all weights of the policy, as `sft.lora`. The reference is the base without them, on the
    same memory; PPO's value function learns adapters on the reward model and its score. null: all weights learn."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.0e-5, weight_decay=0.0)
    """Learning rate 9.65e-6 for 1.3B in InstructGPT, appendix C.4; small models need more."""
    schedule: ScheduleConfig = ScheduleConfig(decay="constant", warmup="3 %")
    """Constant after a short warm-up, InstructGPT, appendix C.4."""
    guard: GuardConfig = GuardConfig(enabled=False)
    """Not for PPO, whose loss does not measure progress: the KL penalty keeps it in check."""
    stop_on_divergence: int | None = Field(None, ge=1)
    """Window in rounds: stops training if the judge's mean score over the newest window is significantly below the best
    earlier window while the reward rose (overoptimisation, Gao et al. 2022). Windows do not overlap, and at most 5 % of
    runs are stopped by chance, over all their rounds. Needs the input `judge`. null: train to the end."""
    heldout_prompts: int = measured_only(256, ge=2)
    """Held-out prompts that both policies answer at the end, from the beginning of the file."""
    heldout_answers: int = measured_only(1, ge=1)
    """Answers to each of them, which are averaged: more answers reduce noise."""
    best_of: int = measured_only(1, ge=1)
    """Number N of answers of the SFT model to each held-out prompt; from 2 on, the reward of the best of 1, 2, 4, … N
    is measured: the baseline that needs no training (Stiennon et al. 2020)."""
    checkpoint_every: Length = outside_identity("50 batches")
    """Interval between checkpoints in the work folder, from which a killed run continues."""

    @property
    def chosen_algorithm(self) -> Literal["ppo", "rloo", "grpo", "reinforce++", "raft"]:
        """The algorithm, where none is named the one that goes with `answers_per_prompt`."""
        return self.algorithm or ("ppo" if self.answers_per_prompt == 1 else "rloo")

    @property
    def learnt_answers(self) -> int:
        """Answers of a round that are learnt from: all, of raft one to each prompt."""
        return self.rollout_prompts // (self.answers_per_prompt if self.chosen_algorithm == "raft" else 1)

    @property
    def round_batches(self) -> int:
        """Minibatches of a round, over all of its epochs."""
        return self.epochs * (self.learnt_answers // self.minibatch_answers)

    @property
    def episode_tokens(self) -> int:
        """Maximum number of tokens after a prompt: of an answer, or of an episode."""
        return self.environment.max_tokens if self.environment else self.answer_max_tokens

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Between which the probability ratio of policy and sampling policy is clipped."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1 - self.clip_ratio, 1 + high

    def sources(self) -> list[Source]:
        """Files of the reward functions, as far as they can be found: a changed function gives another model."""
        return [
            Source(f"rlhf.reward_functions.{path}", paths=(Path(file),))
            for path in self.reward_functions
            if (file := file_of(path.partition(":")[0]))
        ] + (self.environment.sources() if self.environment else [])

    def missing_functions(self) -> Iterator[Problem]:
        """Reward functions and environments that cannot be imported."""
        yield from missing_functions(self.reward_functions, "rlhf.reward_functions")
        if self.environment is not None:
            yield from self.environment.missing()

    def problems(self, positions: int | None = None) -> list[Problem]:
        """Problems that leave no room for a prompt;

        Args:
            positions: of the model, if known.
        """
        if (environment := self.environment) is not None and positions is not None:
            tokens = self.max_prompt_tokens + environment.max_tokens
            if tokens <= positions:
                return []
            message = f"expected at most {positions} tokens of prompt and episode, the model's positions, not {tokens}"
            return [Problem("no_room", "rlhf.environment.max_tokens", message, f"lower it, or {MORE_POSITIONS}")]
        length = self.max_prompt_tokens + self.answer_max_tokens
        return no_room("rlhf", self.answer_max_tokens, min(length, positions or length), MORE_POSITIONS)

    def _check_environment(self) -> None:
        if self.environment is None:
            return
        if self.overlong_tokens:
            raise ValueError("overlong_tokens: expected 0 with an environment: an episode has several answers")
        if self.best_of > 1:
            raise ValueError("best_of: expected 1 with an environment: it measures single answers")
        if self.answer_max_tokens > self.environment.max_tokens:
            raise ValueError(
                f"answer_max_tokens: expected at most the {self.environment.max_tokens} of environment.max_tokens, not "
                f"{self.answer_max_tokens}"
            )

    def _check_lengths_and_groups(self) -> None:
        if self.overlong_tokens >= self.answer_max_tokens:
            raise ValueError(
                f"overlong_tokens: expected fewer than the {self.answer_max_tokens} of answer_max_tokens, not "
                f"{self.overlong_tokens}"
            )
        if not self.overlong_tokens and self.overlong_penalty != type(self).model_fields["overlong_penalty"].default:
            raise ValueError("overlong_penalty: expected overlong_tokens together with it")
        if self.refill_groups and (self.chosen_algorithm == "raft" or self.answers_per_prompt == 1):
            raise ValueError(
                "refill_groups: expected 0: ppo has no groups of answers, and raft learns the best answer of any group"
                if self.chosen_algorithm in ("ppo", "raft")
                else "refill_groups: expected answers_per_prompt of at least 2: one answer is no group"
            )

    def _check_async(self, ahead: AsyncConfig) -> None:
        if self.refill_groups:
            raise ValueError(
                "refill_groups: expected 0 with async: refilled answers would be sampled while the trainer waits; "
                "leave async out, or set it to 0"
            )
        if self.lora and self.lora.quantize:
            raise ValueError(
                "lora.quantize: expected null with async: samplers have the policy's weights unquantized; leave one out"
            )
        if ahead.max_staleness and self.chosen_algorithm == "raft":
            raise ValueError(
                "async.max_staleness: expected 0 for raft: its cross entropy has no ratio that corrects answers of "
                "earlier weights; use grpo, rloo, ppo or reinforce++"
            )
        if (groups := self.rollout_prompts // self.answers_per_prompt) % ahead.parts:
            raise ValueError(
                f"async.parts: expected a divisor of the {groups} prompts of a round, not {ahead.parts}: answers to "
                "one prompt are sampled together"
            )

    @field_validator("guard")
    @classmethod
    def _no_guard(cls, guard: GuardConfig) -> GuardConfig:
        if guard.enabled:
            raise ValueError("expected enabled: false: the guard watches losses, and PPO's loss carries no such signal")
        return guard

    @model_validator(mode="after")
    def _parts_divide(self) -> Self:
        of_one, of_any = self.chosen_algorithm == "ppo", self.chosen_algorithm == "reinforce++"
        if not of_any and of_one != (self.answers_per_prompt == 1):
            expected = "1" if of_one else "at least 2"
            raise ValueError(f"expected answers_per_prompt: {expected} for algorithm {self.chosen_algorithm}")
        for path in self.reward_functions:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
                raise ValueError(f"reward_functions: expected package.module:name, not {path!r}")
        if any(not weight > 0 for weight in self.reward_weights.values()):
            raise ValueError("reward_weights: expected weights above 0; leave the model out instead")
        if self.reward_weights and self.ensemble == "worst":
            raise ValueError("reward_weights: expected none with ensemble: worst, which takes the lowest score")
        for key, default in (
            ("scale_rewards", "group"),
            ("loss_mean", "answer"),
            ("ratio", "token"),
            ("loss_form", "clip"),
        ):
            if getattr(self, key) != default and self.chosen_algorithm != "grpo":
                raise ValueError(f"{key}: expected {default} for algorithm {self.chosen_algorithm}: it is GRPO's")
        if self.lora and self.lora.quantize and self.sampler == "vllm":
            raise ValueError(
                "lora.quantize: expected null with sampler: vllm, which would sample from unquantized weights"
            )
        self._check_lengths_and_groups()
        if self.async_ is not None:
            self._check_async(self.async_)
        self._check_environment()
        default_penalty = type(self).model_fields["unfinished_penalty"].default
        if self.unfinished_reward is not None and self.unfinished_penalty != default_penalty:
            raise ValueError(
                f"unfinished_penalty: expected none together with unfinished_reward, which replaces it, not "
                f"{self.unfinished_penalty:g}"
            )
        if self.whole_groups and (self.chosen_algorithm in ("ppo", "raft") or self.answers_per_prompt == 1):
            raise ValueError("whole_groups: expected false: ppo and raft learn from one answer to a prompt")
        if self.whole_groups and self.minibatch_answers % self.answers_per_prompt:
            raise ValueError(
                f"whole_groups: expected answers_per_prompt to divide minibatch_answers: {self.answers_per_prompt} "
                f"does not divide {self.minibatch_answers}"
            )
        for key in ("minibatch_answers", "answers_per_prompt"):
            if self.rollout_prompts % (part := getattr(self, key)):
                raise ValueError(
                    f"expected {key} to divide rollout_prompts: {part} does not divide {self.rollout_prompts}"
                )
        if self.learnt_answers % self.minibatch_answers:
            raise ValueError(
                f"expected minibatch_answers to divide the {self.learnt_answers} answers of a round that raft keeps, "
                f"one to each prompt: {self.minibatch_answers} does not"
            )
        return self
