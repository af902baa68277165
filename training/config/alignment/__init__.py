"""Config of the stages that tune a language model: SFT, preference tuning, reward model, RLHF and distillation.

Public: one config class per stage, each in its file. `LoraConfig`, `AsyncConfig`, `EnvironmentConfig` and
`RubricConfig` are sections of them. `chat_trainer` has the settings that all of them share.
"""

from training.config.alignment.chat_trainer import ChatTrainerConfig, LoraConfig
from training.config.alignment.distillation import DistillConfig
from training.config.alignment.preference_tuning import PreferenceTuningConfig
from training.config.alignment.reward_model import RewardModelConfig
from training.config.alignment.rlhf import NO_REWARD_MODELS, AsyncConfig, RlhfConfig, samplers_problem
from training.config.alignment.sft import SftConfig

__all__ = [
    "NO_REWARD_MODELS",
    "AsyncConfig",
    "ChatTrainerConfig",
    "DistillConfig",
    "LoraConfig",
    "PreferenceTuningConfig",
    "RewardModelConfig",
    "RlhfConfig",
    "SftConfig",
    "samplers_problem",
]
