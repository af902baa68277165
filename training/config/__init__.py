"""Config of the training stages."""

from training.config.alignment import (
    AsyncConfig,
    ChatTrainerConfig,
    DistillConfig,
    LoraConfig,
    PreferenceTuningConfig,
    RewardModelConfig,
    RlhfConfig,
    SftConfig,
)
from training.config.averaging import AverageConfig
from training.config.mixture import MixtureConfig, MixturePhase, MixtureWeights, phase_problem
from training.config.model import ModelConfig
from training.config.pretrain import BaseModelConfig, BatchWarmup, PretrainConfig
from training.config.trainer import (
    Continues,
    KeepEvery,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
    batches,
)

__all__ = [
    "AsyncConfig",
    "AverageConfig",
    "BaseModelConfig",
    "BatchWarmup",
    "ChatTrainerConfig",
    "Continues",
    "DistillConfig",
    "KeepEvery",
    "LoraConfig",
    "MixtureConfig",
    "MixturePhase",
    "MixtureWeights",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "PreferenceTuningConfig",
    "PretrainConfig",
    "RewardModelConfig",
    "RlhfConfig",
    "ScheduleConfig",
    "SftConfig",
    "TrainerConfig",
    "batches",
    "phase_problem",
]
