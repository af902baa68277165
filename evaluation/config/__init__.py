"""Config of benchmarks, safety, registration and reports. Loads nothing heavy."""

from evaluation.config.benchmark_text import BenchmarkTextConfig
from evaluation.config.benchmarks import (
    ANSWER_FAULTS,
    FAILURE_CLASSES,
    FAILURE_CLASSES_DIR,
    IDENTIFIER,
    ROWS_FOR_SHOTS,
    AnswerLimits,
    BenchmarksConfig,
    BenchmarkTask,
    FailureClassesConfig,
    TaskByName,
)
from evaluation.config.report import CLAIMS, FIRST_SCREEN, CorpusReportConfig, Gate, RegisterConfig, ReportConfig
from evaluation.config.safety import (
    ADVERSARIAL_WORDS,
    AdversarialConfig,
    BiasConfig,
    BiasSet,
    GeneratedPersonalDataConfig,
    LabelledSet,
    MemorisationConfig,
    SafetyConfig,
    ToxicityConfig,
    ToxicityScorer,
)
from evaluation.config.task_sources import DATA_DIR, lm_eval_files, mirrored_files

__all__ = [
    "ADVERSARIAL_WORDS",
    "ANSWER_FAULTS",
    "CLAIMS",
    "DATA_DIR",
    "FAILURE_CLASSES",
    "FAILURE_CLASSES_DIR",
    "FIRST_SCREEN",
    "IDENTIFIER",
    "ROWS_FOR_SHOTS",
    "AdversarialConfig",
    "AnswerLimits",
    "BenchmarkTask",
    "BenchmarkTextConfig",
    "BenchmarksConfig",
    "BiasConfig",
    "BiasSet",
    "CorpusReportConfig",
    "FailureClassesConfig",
    "Gate",
    "GeneratedPersonalDataConfig",
    "LabelledSet",
    "MemorisationConfig",
    "RegisterConfig",
    "ReportConfig",
    "SafetyConfig",
    "TaskByName",
    "ToxicityConfig",
    "ToxicityScorer",
    "lm_eval_files",
    "mirrored_files",
]
