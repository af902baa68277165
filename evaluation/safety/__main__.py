"""python -m evaluation.safety runs the stage on its own; see `evaluation.safety.stage`."""

from evaluation.config import SafetyConfig
from evaluation.safety.stage import safety
from infra.alone import main

main(safety, SafetyConfig)
