"""Plans and configs: what a config asks a plan for, and the config that `stemma plan --write` leaves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.config.architecture import architecture_of
from flows.config.graph import graph
from flows.config.read import load
from flows.planning.needs import sequence_length
from infra.errors import ConfigError, Problem
from infra.io.files import write_whole
from training.config import PretrainConfig
from training.config.duration import parse_duration
from training.config.presets import known_presets
from training.config.recipes import RECIPES


def wishes_of(config: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """Wishes of a config for a plan, as keywords of `training.planner.plan.request`: model, sequence length, batch,
    tokens and devices of its first fresh pretraining, as far as it gives them.

    Raises ConfigError for a config that is wrong, has no such training, or a model of unknown sizes.
    """
    pipeline = load(config, settings)
    nodes = graph(pipeline)
    fresh = {
        name: node.config
        for name, node in nodes.items()
        if isinstance(node.config, PretrainConfig) and "model" not in node.inputs and not node.measures
    }
    if not fresh:
        fix = "plan without a config, with --preset or --parameters"
        raise ConfigError(
            Problem("nothing_to_plan", str(config), "expected a config that pretrains a fresh model", fix)
        )
    name, section = next(iter(fresh.items()))
    arch = architecture_of(nodes, name)
    if arch is None:
        message = "expected a model config with the usual keys: hidden_size, num_hidden_layers, num_attention_heads"
        fix = "plan a model of about its size, with --preset or --parameters"
        raise ConfigError(Problem("unknown_sizes", f"{nodes[name].key}.model.transformers", message, fix))
    duration, batch = parse_duration(section.duration), section.global_batch_tokens
    tokens = {"tokens": duration.value, "batches": duration.value * batch}.get(duration.unit)
    wishes: dict[str, Any] = {
        "arch": arch,
        "model": section.model.model_dump(mode="json", exclude_unset=True),
        "length": sequence_length(nodes, name, arch),
        "batch_tokens": batch,
    }
    if tokens is not None:
        wishes["tokens"] = tokens
    if pipeline.launch.hardware:
        wishes |= {"gpu": pipeline.launch.hardware, "gpus": pipeline.launch.ranks}
    return wishes


def planned_config(plan: Mapping[str, Any], name: str) -> str:
    """The YAML text for a document of `stemma plan`. Raises ConfigError where no layout that `launch:` knows fits."""
    layout = plan["runnable"]
    if layout is None:
        message = (
            "no layout of data, tensor, context, pipeline or expert parallelism that training supports fits the devices"
        )
        raise ConfigError(Problem("no_such_layout", "--write", message, "use more devices or a smaller model"))
    launch = launch_keys(plan)
    called = re.sub(r"[^a-z0-9._-]", "-", name.lower()).lstrip("._-") or "planned"
    recipe = plan["model"].replace("gpt-", "gpt3-")
    distance = max(1, min(plan["failures"]["checkpoint_every_batches"], plan["batches"]))
    return "\n".join(
        [
            "# Made by `stemma plan --write`. Set the path of your text, then:",
            "#   stemma check THIS_FILE",
            "#   stemma run THIS_FILE",
            f"# Planned: {plan['hours']:.3g} h ({plan['hours_low']:.3g} to {plan['hours_high']:.3g}) and "
            f"{plan['cost_usd']:,.0f} USD on {plan['gpus']} {plan['gpu']}.",
            f"name: {called}",
            "seed: 17",
            "",
            "ingest:",
            "  read:",
            "    # YOUR text: {kind: files, paths: [/data/corpus/*.parquet]}",
            "    - {kind: docstrings, limit_mb: null}",
            "",
            "validate:",
            "clean:",
            "dedupe:",
            "",
            f"tokenizer: {{vocab_size: {plan['vocabulary']}}}",
            f"shard: {{sequence_length: {plan['sequence_length']}, compression: zstd}}",
            "",
            "pretrain:",
            *([f"  recipe: {recipe} # rates and decay of Brown et al. 2020"] if recipe in RECIPES else []),
            f"  model: {_model(plan, layout['vocabulary_multiple'])}",
            f"  duration: {plan['batches'] * plan['batch_tokens']:_} tokens",
            f"  global_batch_tokens: {plan['batch_tokens']}",
            *(["  batch_warmup: null"] if recipe in RECIPES else []),
            *([] if recipe in RECIPES else [f"  optimizer: {{learning_rate: {_rate(plan['parameters']):.1e}}}"]),
            "  schedule: {warmup: 1 %}",
            f"  checkpoint_every: {distance} batches # by Daly 2006 for {plan['gpus']} devices",
            "",
            "benchmarks:",
            "safety:",
            "register:",
            "report:",
            "",
            "launch:",
            f"  hardware: {plan['gpu']}",
            f"  processes: {launch['processes']} # one a GPU",
            *([f"  nodes: {launch['nodes']} # set launch.cluster to what starts them"] if launch["nodes"] > 1 else []),
            *_groups(layout),
            *([f"  pipeline_pieces: {layout['interleave']}"] if layout["interleave"] > 1 else []),
            *(f"  {key}: {launch[key]}" for key in ("sharding", "recompute", "microbatch")),
            "",
        ]
    )


def launch_keys(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `launch:` for the layout that a plan can set it to."""
    layout = plan["runnable"]
    processes = _processes(plan["gpus"], plan["devices_of_node"], layout["tp"])
    degrees = {key: layout[short] for short, key, _ in _KINDS if layout[short] > 1}
    return {
        "hardware": plan["gpu"],
        "processes": processes,
        "nodes": plan["gpus"] // processes,
        **degrees,
        **({"trainer": "native"} if degrees else {}),
        **({"pipeline_pieces": layout["interleave"]} if layout["interleave"] > 1 else {}),
        "sharding": "fsdp" if layout["sharding"] == "zero3" else layout["sharding"],
        "recompute": layout["recompute"],
        "microbatch": layout["microbatch"],
    }


def write_config(plan: Mapping[str, Any], path: Path) -> None:
    """Write the config, which `stemma check` then takes. Raises ConfigError for a file that exists, and the errors
    that `planned_config` raises."""
    if path.exists():
        raise ConfigError(
            Problem("file_exists", str(path), "the file exists already", "choose another file with --write")
        )
    text = planned_config(plan, path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    try:
        load(path)
    except ConfigError:
        path.unlink()
        raise


def _processes(gpus: int, node: int, tensor: int) -> int:
    """Processes per node: the largest divisor of `gpus` that is at most `node`, so that all nodes run equally many.

    No process beyond the plan's is started. Divisors that keep the ranks which share layers within one node come first.
    """
    return max((size for size in range(1, min(gpus, node) + 1) if gpus % size == 0), key=lambda n: (n % tensor == 0, n))


_KINDS = (
    ("tp", "tensor_parallel", "these share each layer"),
    ("cp", "context_parallel", "these share each sequence"),
    ("pp", "pipeline_parallel", "these hold some of the layers each"),
    ("ep", "expert_parallel", "these hold some of the experts each"),
)
"""Degrees of parallelism: their names in a plan and in `launch:`, with a comment."""


def _groups(layout: Mapping[str, Any]) -> list[str]:
    """The lines of `launch:` for ranks that share one model, and the loop that knows them."""
    lines = [f"  {key}: {layout[short]} # {comment}" for short, key, comment in _KINDS if layout[short] > 1]
    return [*lines, "  trainer: native"] if lines else []


def _model(plan: Mapping[str, Any], multiple: int) -> str:
    """multiple: of rows of the embedding, which ranks share; beside what the model has of itself."""
    if plan["model_config"] is not None:
        model = dict(plan["model_config"])
        if multiple > 1:
            model["vocab_multiple"] = math.lcm(multiple, model.get("vocab_multiple", 1))
        return json.dumps(model)
    rows = f", vocab_multiple: {multiple}" if multiple > 1 else ""
    if plan["model"] in known_presets():
        longer = f", positions: {plan['sequence_length']}" if plan["sequence_length"] > plan["positions"] else ""
        return f"{{preset: {plan['model']}{longer}{rows}}}"
    sizes = plan["sizes"]
    keys = {
        "family": "llama",
        **{name: sizes[name] for name in ("layers", "width", "heads", "mlp_width")},
        "positions": plan["sequence_length"],
        "tie_embeddings": str(sizes["tied"]).lower(),
    }
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + rows + "}"


def _rate(parameters: float) -> float:
    """A peak learning rate by size: Kaplan et al. 2020, equation D.1, in the range of GPT-3's table 2.1."""
    return min(1e-3, max(6e-5, 0.003239 - 0.0001395 * math.log(parameters)))
