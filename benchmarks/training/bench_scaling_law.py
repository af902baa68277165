"""A scaling law for real at tiny sizes on a CPU: a sweep of nine pretrainings, of which the largest is predicted.

python benchmarks/training/bench_scaling_law.py [--root DIR]    about 3 minutes on 2 quiet cores

The text is the docstrings of installed packages; parameters are counted with embeddings. A law of models of some
thousand parameters is about the method, not about language: what it shows is how far off the held-out run is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CONFIG = {
    "name": "tiny-law",
    "ingest": {"read": [{"kind": "docstrings", "packages": ["numpy", "scipy", "pandas", "sklearn"], "limit_mb": 6}]},
    "tokenizer": {"vocab_size": 512},
    "shard": {"sequence_length": 64},
    "pretrain": {
        "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
        "duration": "128_000 tokens",
        "global_batch_tokens": 2048,
        "optimizer": {"learning_rate": 5.0e-3},
        "evaluate_every": "1000 batches",
        "validation_tokens": 200_000,
    },
}
SIZES = (16, 32, 64)
LENGTHS = ("131072 tokens", "262144 tokens", "524288 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="The store; by default a folder that goes afterwards.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "law.yaml"
        config.write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf8")
        keys = {"pretrain.model.width": SIZES, "pretrain.duration": LENGTHS}
        words = [word for key, values in keys.items() for word in ("--key", f"{key}={','.join(map(str, values))}")]
        root = given.root or Path(folder) / "store"
        command = [sys.executable, "-m", "cli.main", "sweep", str(config), *words, "--law", "--root", str(root)]
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=False)
        document = json.loads(done.stdout)
    if done.returncode:
        raise SystemExit(f"the sweep failed: {document['errors']}")
    law = document["law"]
    for point in sorted(law["points"], key=lambda one: one["parameters"] * one["tokens"]):
        print(f"{point['parameters']:>9,.0f} parameters {point['tokens']:>9,.0f} tokens: loss {point['loss']:.4f}")
    held = law["held_out"]
    print(json.dumps({"law": law["law"], "intervals": law["intervals"], "rmse_log": law["rmse_log"]}, indent=1))
    print(
        f"held out: predicted {held['predicted']:.4f} ({held['low']:.4f} to {held['high']:.4f}), "
        f"measured {held['loss']:.4f}, a miss of {100 * held['miss']:+.2f} %"
    )


if __name__ == "__main__":
    main()
