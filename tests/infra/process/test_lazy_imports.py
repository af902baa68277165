"""Imports of a process that answers with a model, and the functions of transformers that import packages later."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs.command import REPOSITORY, environment

WAITING = ("torchao", "scipy", "sklearn", "pandas", "pyarrow", "streaming", "composer", "datasets", "matplotlib")


def _python(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, check=True).stdout


@pytest.mark.slow
def test_a_chat_loads_no_package_that_only_trainings_quantized_or_vision_models_use() -> None:
    """In the same process, transformers still finds them: its quantizer and its losses of object detection."""
    program = (
        "import sys\n"
        "import training.generation.session, training.rl.rollouts.sampler, training.serving\n"
        f"print(sorted(set({WAITING}) & set(sys.modules)))\n"
        "import torch\n"
        "from transformers.loss import loss_for_object_detection as loss\n"
        "from transformers.quantizers import quantizer_torchao\n"
        "print(loss.linear_sum_assignment([[4, 1], [2, 8]])[1].tolist())\n"
        "print(loss.center_to_corners_format(torch.tensor([[1.0, 1.0, 2.0, 2.0]])).tolist())\n"
        "print(quantizer_torchao.flatten_tensor_state_dict({})[0])\n"
        "from scipy.optimize import minimize\n"
        "print(minimize.__module__)\n"
    )
    lines = _python(program).splitlines()
    assert lines == ["[]", "[1, 0]", "[[0.0, 0.0, 2.0, 2.0]]", "{}", "scipy.optimize._minimize"]
