"""Config of every training: optimizer, schedule, checkpoints; every default names its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Config, Seed, StageConfig, outside_identity
from training.config.batch_size import BatchSizeRampup
from training.config.duration import Length, LengthOrShare, parse_duration
from training.config.guard import GuardConfig


class MuonConfig(Config):
    """Muon for the matrices between embeddings and output layer: steps of momentum whose matrices are made orthogonal
    (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks")."""

    learning_rate: float = Field(0.02, gt=0)
    """Peak learning rate of these matrices, under the same schedule; 0.02 in Jordan et al. 2024. A matrix with more
    outputs than inputs takes √(outputs/inputs) times as large steps (the same)."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of Nesterov's momentum; 0.95 in Jordan et al. 2024."""
    iterations: int = Field(5, ge=1)
    """Newton-Schulz steps that make a matrix orthogonal; 5 in Jordan et al. 2024."""


class OptimizerConfig(Config):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019) or what `kind` names, for matrices Muon if it is
    given."""

    kind: Literal["adamw", "lion", "adafactor"] = "adamw"
    """Optimizer. lion: the sign of a momentum (Chen et al. 2023, section 5: a learning rate 3 to 10 times smaller than
    AdamW's, a decay as many times larger, betas of 0.9 and 0.99). adafactor: second moments by rows and columns of a
    matrix, and steps in proportion to a weight's size (Shazeer & Stern 2018, algorithm 4: a learning rate of about
    1e-2); it has no momentum, so `betas` and `eps` have no effect, and it needs unsharded weights."""
    learning_rate: float = Field(6.0e-4, gt=0)
    """Peak learning rate; 6.0e-4 for GPT-3 125M (table 2.1)."""
    embedding_scale: float = Field(1.0, gt=0)
    """Learning rate of embeddings and output layer as a multiple of the others'; 1 in GPT-3. The rate of matrices falls
    with width, that of embeddings need not (Yang et al. 2022, table 3)."""
    head_scale: float | None = Field(None, gt=0)
    """Learning rate of an output layer that is not the embedding's too, as a multiple of the others'; by default
    `embedding_scale`."""
    mup_base_width: int | None = Field(None, ge=1)
    """µP (Yang et al. 2022, "Tensor Programs V", table 3): rates that were found for a model of this width serve one of
    any width. With m = width / mup_base_width the rates of matrices and of the output layer are divided by m (their
    decay a step stays), and fresh matrices have a standard deviation smaller by √m, the output layer by m. Only the
    width changes: heads keep their size, and embeddings are not tied. By default rates are for the model at hand."""
    muon: MuonConfig | None = None
    """Muon for the matrices of a model's blocks, `{}` with its defaults; by default AdamW for all weights."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments; GPT-3, appendix B."""
    eps: float = Field(1.0e-8, gt=0)
    """Added to the denominator; GPT-3, appendix B."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of what `decayed` names. 0.1 in GPT-3, appendix B."""
    decayed: tuple[Literal["matrices", "embeddings", "norms", "biases"], ...] = ("matrices",)
    """Parameters with weight decay: matrices between layers, embeddings (with the output layer), weights of norms,
    biases. Decayed norms and biases only lose what they learnt; embeddings decay in GPT-2 and GPT-NeoX, not in OLMo 2
    (section 3.3)."""
    gradient_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm; GPT-3, appendix B."""

    @model_validator(mode="after")
    def _kind_goes_with_the_rest(self) -> Self:
        if self.muon is not None and self.kind != "adamw":
            raise ValueError(f"expected muon with kind: adamw, which steps what Muon does not, not {self.kind}")
        if self.kind == "adafactor" and self.mup_base_width is not None:
            raise ValueError("expected mup_base_width without kind: adafactor, whose steps follow a weight's own size")
        return self

    @field_validator("betas")
    @classmethod
    def _betas_are_shares(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("expected two numbers of at least 0 and below 1")
        return betas


class ScheduleConfig(Config):
    """The learning rate over training: linear warm-up, then a decay."""

    decay: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    """Schedule after the warm-up; cosine in GPT-3, appendix B. wsd (warm-up, stable, decay) stays at the peak and falls
    at the very end, so that a longer training can branch off (Hu et al. 2024, section 4)."""
    warmup: LengthOrShare = "1 %"
    """Length of the linear warm-up, or its percentage of training; 1 % in Mosaic LLMs (Part 1)."""
    final_share: float = Field(0.1, ge=0, le=1)
    """Share of the peak that the learning rate falls to, and would have in the batch after the last; 0.1 in GPT-3,
    appendix B. With wsd 0 where it is left out: it falls to zero (Hägele et al. 2024, section 3)."""
    decay_length: LengthOrShare = "10 %"
    """Length of wsd's fall at the end; 10 % in MiniCPM (Hu et al. 2024, section 4.2)."""

    @model_validator(mode="before")
    @classmethod
    def _wsd_falls_to_zero(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("decay") == "wsd":
            return {"final_share": 0.0, **values}
        return values


class KeepEvery(Config):
    """Whole states at regular distances, and the last."""

    every: Length = "1000 batches"
    """Distance between two kept states."""


class Continues(Config):
    """A training that goes on from a kept state of another step: longer, or with other settings from there on."""

    step: str
    """The step of this pipeline whose training is continued."""
    at: Length | None = None
    """After how many batches of it; by default after its last one."""

    @field_validator("at")
    @classmethod
    def _at_is_in_batches(cls, at: str | None) -> str | None:
        if at is not None and parse_duration(at).unit != "batches":
            raise ValueError(f"expected a number of batches, such as '8000 batches', not {at!r}")
        return at

    @property
    def batches(self) -> int | None:
        return None if self.at is None else int(parse_duration(self.at).value)


class TrainerConfig(StageConfig):
    """Settings shared by all training stages."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    guard: GuardConfig = GuardConfig()
    """Watches for spikes and divergence, and answers them."""
    seed: Seed = 17
    """Seeds initial weights, data order, dropout and sampling."""
    checkpoint_every: Length = outside_identity("200 batches")
    """Interval between checkpoints in the work folder, from which a killed run continues."""
    keep_checkpoints: int = outside_identity(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_checkpoints_hours: float = outside_identity(0.0, ge=0)
    """Also keep older checkpoints until they are this number of hours old."""
    keep_state: Literal["last", "none"] | KeepEvery = outside_identity("last")
    """Complete training states (weights, optimizer, random states, position in the data) to keep with the finished
    model, so that another training can continue from them: the last, none, or one at an interval in batches. A state
    takes about three times the space of the weights in fp32."""
    continues: Continues | None = outside_identity(None)
    """Goes on from a kept state of another step instead of from the beginning. `duration` and `schedule` count from the
    beginning of the first training. The state's digest is part of the identity, its place in the pipeline is not."""

    @model_validator(mode="before")
    @classmethod
    def _groups_begin_at_the_stage_s_own(cls, given: Any) -> Any:
        """Defaults of a partly written group are this stage's, not those of the group's class."""
        if not isinstance(given, Mapping):
            return given
        filled = dict(given)
        for name in ("optimizer", "schedule", "guard"):
            default, part = cls.model_fields[name].default, given.get(name)
            if isinstance(part, Mapping):
                # How far the rate falls belongs to how it does.
                kept = default.model_fields_set - ({"final_share"} if "decay" in part else set())
                filled[name] = {**{key: getattr(default, key) for key in kept}, **part}
        return filled


def batches(
    length: str, *, batch_tokens: int = 1, epoch_batches: int = 1, whole: int = 0, rampup: BatchSizeRampup | None = None
) -> int:
    """A length from a config in batches, at least one.

    Args:
        rampup: counts from the first batch on while batches grow.
    """
    duration = parse_duration(length)
    if rampup is not None and duration.unit in ("tokens", "epochs"):
        return max(1, rampup.length(duration, batch_tokens))
    return max(1, duration.batches(batch_tokens=batch_tokens, epoch_batches=epoch_batches, whole=whole))
