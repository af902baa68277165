"""Ranks of a training stage that torchrun or TorchX starts, in place of our launcher."""

from __future__ import annotations

import importlib.util
import os
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
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT", "-m", "MODULE"],
    "torchx": [
        *("-c", "from torchx.cli.main import main; main()", "run", "--scheduler", "local_cwd"),
        *("dist.ddp", "-j", "1x2", "-m", "MODULE", "--"),
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("starter", STARTERS)
def test_a_site_starts_the_ranks_that_our_launcher_starts(
    starter: str, tmp_path: Path, shards_dir: Path, tokenizer_dir: Path
) -> None:
    """The risk: a rank depends on more than torchrun's variables, or two ranks train apart from each other."""
    if starter == "torchx" and not importlib.util.find_spec("torchx"):
        pytest.skip("TorchX is not installed")
    config = tmp_path / "pretrain.yaml"
    config.write_text(yaml.safe_dump(CONFIG))

    def train(name: str, start: list[str]) -> bytes:
        out = tmp_path / name
        words = {"PORT": str(free_port()), "MODULE": "training.pretrain"}
        command = [sys.executable, *(words.get(word, word) for word in start)]
        command += ["--config", str(config), "--out", str(out)]
        command += ["--input", f"shards={shards_dir}", f"tokenizer={tokenizer_dir}"]
        command += ["--launch", "processes=2", "device=cpu", "threads=1", "precision=fp32", "trainer=native"]
        activated = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        variables = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PATH=activated)
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr[-8000:]
        return (out / "model.safetensors").read_bytes()

    assert train("theirs", STARTERS[starter]) == train("ours", ["-m", "MODULE"])
