"""Ranks of a training stage that torchrun starts, in place of our launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.launch.ranks import free_port
from tests.support.programs.command import environment

CONFIG = {
    "model": {"family": "llama", "layers": 1, "width": 16, "heads": 2, "positions": 64},
    "duration": "6 batches",
    "global_batch_tokens": 256,
}


@pytest.mark.long
def test_torchrun_starts_the_ranks_that_our_launcher_starts(
    tmp_path: Path, shards_dir: Path, tokenizer_dir: Path
) -> None:
    """The risk: a rank depends on more than torchrun's variables, or two ranks train apart from each other."""
    config = tmp_path / "pretrain.yaml"
    config.write_text(yaml.safe_dump(CONFIG))

    def train(name: str, starter: list[str]) -> bytes:
        out = tmp_path / name
        command = [sys.executable, "-m", *starter, "training.pretrain", "--config", str(config), "--out", str(out)]
        for key, folder in (("shards", shards_dir), ("tokenizer", tokenizer_dir)):
            command += ["--input", f"{key}={folder}"]
        for setting in ("processes=2", "device=cpu", "threads=1", "precision=fp32", "trainer=native"):
            command += ["--launch", setting]
        variables = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr[-8000:]
        return (out / "model.safetensors").read_bytes()

    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    assert train("torchrun", torchrun) == train("launcher", [])
