"""Whether a learning rate found on a narrow model serves a wide one, with µP and without, by sweeps.

python benchmarks/training/bench_mup.py [--root DIR] [--widths 32,128]
    [--tokens 409600]    about 10 minutes on 2 quiet cores
python benchmarks/training/bench_mup.py --seed 18 --powers=-9..-5    another seed, and the rates 2^-9 to 2^-5 alone

The text is the docstrings of installed packages. Two sweeps over width and learning rate, alike but for
`optimizer.mup_base_width`; told is the validation loss of each pair, each width's best rate (by a parabola through the
best and its neighbours, in log2), and what the narrowest model's best rate costs a wider one. The narrowest is trained
once, since µP changes nothing there. The seed is that of the training alone: first weights and the order of the data.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "name": "mup",
    "ingest": {"read": [{"kind": "docstrings", "packages": ["numpy", "scipy", "pandas", "sklearn"], "limit_mb": 6}]},
    "tokenizer": {"vocab_size": 512},
    "shard": {"sequence_length": 64},
    "pretrain": {
        "model": {
            "family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "tie_embeddings": False,
            "init": "fan_in",
        },
        "global_batch_tokens": 2048,
        "evaluate_every": "1000 batches",
        "validation_tokens": 200_000,
        "keep_state": "none",
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="The store; by default a folder that goes afterwards.")
    parser.add_argument("--widths", type=lambda text: [int(one) for one in text.split(",")], default=[32, 128])
    parser.add_argument("--tokens", type=int, default=409_600)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--powers", default="-10..-4", metavar="FROM..TO", help="Learning rates, as powers of two.")
    parser.add_argument("--threads", type=int, help="Of a training; by default as many as there are cores.")
    given = parser.parse_args()
    low, high = map(int, given.powers.split(".."))
    given.rates = [float(f"{2.0**power:.6g}") for power in range(low, high + 1)]
    with tempfile.TemporaryDirectory() as folder:
        root = given.root or Path(folder) / "store"
        narrowest, *wider = given.widths
        narrow = sweep(Path(folder), root, narrowest, "as they are", given)
        for way in ("as they are", "mup"):
            losses = {narrowest: narrow, **{width: sweep(Path(folder), root, width, way, given) for width in wider}}
            show(way, losses, given.rates)


def sweep(folder: Path, root: Path, width: int, way: str, given: argparse.Namespace) -> dict[float, float]:
    """Validation loss by learning rate of one width; heads keep their size."""
    config = json.loads(json.dumps(CONFIG))
    config["name"] = f"mup-{width}-{way.split()[0]}"
    config["pretrain"] |= {"duration": f"{given.tokens} tokens", "seed": given.seed}
    config["launch"] = {"threads": given.threads}
    config["pretrain"]["model"] |= {"width": width, "heads": width // 16}
    if way == "mup":
        config["pretrain"]["optimizer"] = {"mup_base_width": given.widths[0]}
    path = folder / "mup.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf8")
    key = f"pretrain.optimizer.learning_rate={','.join(map(str, given.rates))}"
    command = [sys.executable, "-m", "cli.main", "sweep", str(path), "--key", key, "--root", str(root), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    document = json.loads(done.stdout)
    if done.returncode:
        raise SystemExit(f"the sweep failed: {document['errors']}")
    return {
        float(trial["settings"]["pretrain.optimizer.learning_rate"]): trial["value"]
        for trial in document["trials"]
        if trial["status"] == "done"
    }


def show(way: str, losses: dict[int, dict[float, float]], rates: list[float]) -> None:
    print(f"\nlearning rates {way}")
    print("width   " + "  ".join(f"{rate:>8.5f}" for rate in rates) + "   best rate")
    first = min(losses)
    narrow = min(losses[first], key=lambda rate: losses[first][rate])
    for width, found in losses.items():
        row = "  ".join(f"{found.get(rate, math.nan):8.4f}" for rate in rates)
        cost = found[narrow] - min(found.values()) if narrow in found else math.nan
        print(f"{width:>5}   {row}   {best(found):.5f}; the rate of width {first} costs {cost:+.4f}", flush=True)


def best(found: dict[float, float]) -> float:
    """The rate at the lowest point of a parabola through the best and its neighbours; the best one at an edge."""
    rates = sorted(found)
    at = min(range(len(rates)), key=lambda place: found[rates[place]])
    if at in (0, len(rates) - 1):
        return rates[at]
    below, here, above = (found[rates[place]] for place in (at - 1, at, at + 1))
    return rates[at] * 2 ** ((below - above) / (2 * (below - 2 * here + above)))


if __name__ == "__main__":
    main()
