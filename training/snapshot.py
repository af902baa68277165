"""The files of one checkpoint: each rank's tensors in safetensors, the rest in JSON; nothing that is unpickled.

    state.json           where training is: batch, samples, data set, callbacks
    rank0.safetensors    this rank's pieces of weights and optimizer state, and its random state
    rank0.json           which rows of which tensor the pieces are, and the rest of the random state

A tensor is cut along its first dimension, so that any number of ranks, sharded or not, finds its rows again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training import ranks

STATE = "state.json"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a tensor of the whole `shape`; a scalar is one row."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Rows:
        """The rows of a tensor that this rank holds: FSDP2 cuts the first dimension as `torch.chunk` does."""
        shape = tuple(tensor.shape)
        count = shape[0] if shape else 1
        if not isinstance(tensor, DTensor):
            return cls(0, count, shape)
        step = math.ceil(count / tensor.device_mesh.size())
        start = min(tensor.device_mesh.get_local_rank() * step, count)
        return cls(start, min(start + step, count), shape)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, by name; tensors that are tied once. Shared with the model, not copied."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    found = {WEIGHTS + name: value for name, value in model.state_dict().items() if name not in tied}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{OPTIMIZER}{names[id(parameter)]}/{key}"] = value
    return found


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_rank(folder: Path, tensors: Mapping[str, Tensor]) -> list[Path]:
    """Writes this rank's files and returns them. What all ranks hold alike is shared out among them."""
    mine = {
        name: tensor
        for place, (name, tensor) in enumerate(sorted(tensors.items()))
        if isinstance(tensor, DTensor) or place % ranks.world_size() == ranks.rank()
    }
    pieces = {name: Rows.of(tensor) for name, tensor in mine.items()}
    generators = {"random/torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["random/cuda"] = torch.cuda.get_rng_state()
    data, index = (folder / f"rank{ranks.rank()}.{kind}" for kind in ("safetensors", "json"))
    held = {
        name: local(mine[name]).detach().cpu().contiguous() for name, rows in pieces.items() if rows.stop > rows.start
    }
    save_file(held | generators, data)
    kind, keys, *rest = np.random.get_state()
    record = {
        "pieces": {name: [rows.start, rows.stop, rows.shape] for name, rows in pieces.items()},
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    index.write_text(json.dumps(record), encoding="utf8")
    return [data, index]


@dataclass
class Snapshot:
    """A checkpoint folder to read from."""

    folder: Path
    state: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _pieces: dict[str, list[tuple[int, int, Path]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        found = cls(folder, json.loads((folder / STATE).read_text(encoding="utf8")))
        for index in sorted(folder.glob("rank*.json")):
            for name, (start, stop, shape) in json.loads(index.read_text(encoding="utf8"))["pieces"].items():
                found.shapes[name] = tuple(shape)
                found._pieces.setdefault(name, []).append((start, stop, index.with_suffix(".safetensors")))
        return found

    def optimizer_keys(self, name: str) -> list[str]:
        """What the optimizer keeps of a parameter, such as exp_avg and step."""
        start = f"{OPTIMIZER}{name}/"
        return [key.removeprefix(start) for key in self.shapes if key.startswith(start)]

    def read(self, name: str, rows: Rows) -> Tensor:
        """Rows of a tensor, from whichever files have them."""
        parts = list(self._overlaps(name, rows))
        if not parts:
            return torch.empty(0, *rows.shape[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _overlaps(self, name: str, rows: Rows) -> Iterator[Tensor]:
        for start, stop, path in sorted(self._pieces[name]):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                with safe_open(path, "pt") as file:
                    if not rows.shape:
                        yield file.get_tensor(name)
                    else:
                        yield file.get_slice(name)[low - start : high - start]

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and optimizer state in place, whatever the ranks were that wrote them. What another optimizer
        stepped before (Muon, AdamW) begins without state."""
        for name, tensor in tensors_of(model, optimizer).items():
            if name.startswith(WEIGHTS):
                self._fill(tensor, name)
        by_muon = {id(one) for group in optimizer.param_groups if "muon" in group for one in group["params"]}
        for name, parameter in model.named_parameters():
            keys = self.optimizer_keys(name)
            if ("momentum_buffer" in keys) != (id(parameter) in by_muon):
                continue
            for key in keys:
                full = f"{OPTIMIZER}{name}/{key}"
                if self.shapes[full] == tuple(parameter.shape):
                    value = torch.zeros_like(parameter, requires_grad=False)
                    self._fill(value, full)
                else:
                    value = self.read(full, Rows(0, 1, self.shapes[full])).to(parameter.device)
                optimizer.state[parameter][key] = value

    def _fill(self, tensor: Tensor, name: str) -> None:
        rows = Rows.of(tensor)
        with torch.no_grad():
            local(tensor).copy_(self.read(name, rows).reshape(local(tensor).shape))

    def load_random_state(self) -> bool:
        """Puts this rank's random state back; False where the checkpoint is of another number of ranks."""
        if self.state["ranks"] != ranks.world_size():
            return False
        index = self.folder / f"rank{ranks.rank()}.json"
        record = json.loads(index.read_text(encoding="utf8"))
        version, internal, gauss = record["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(record["numpy"]))
        with safe_open(index.with_suffix(".safetensors"), "pt") as file:
            torch.set_rng_state(file.get_tensor("random/torch"))
            if "random/cuda" in file.keys() and torch.cuda.is_available():  # noqa: SIM118 - not a mapping
                torch.cuda.set_rng_state(file.get_tensor("random/cuda"))
        return True
