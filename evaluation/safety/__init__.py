"""The safety stage and its measurements: toxicity, bias, memorisation, exposure, adversarial prompts.

Public: `stage.safety`. `python -m evaluation.safety` runs the stage on its own.
"""
