"""Files of one checkpoint: each rank's tensors in safetensors, the rest in JSON; nothing is pickled.

    state.json           the training's position: batch, samples, data set, callbacks
    rank0.safetensors    this rank's pieces of weights and optimizer state, and its random state
    rank0.json           tensor and part of each piece, and the rest of the random state

A piece is identified by its position in the whole tensor, so any number of ranks can load a checkpoint, however the
model is distributed over them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from infra.errors import stage_error
from infra.io.json import read_own_json
from training.core import ranks
from training.distributed.gradients import local
from training.distributed.zero import ShardedOptimizer

STATE = "state.json"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


@dataclass(frozen=True)
class TensorPart:
    """Part of a tensor of the whole `shape`, between (start, stop) of each dimension."""

    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorPart:
        """The part of a tensor that this rank holds."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls.of_shape(shape)
        sizes, starts = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
        return cls(tuple((start, start + size) for start, size in zip(starts, sizes, strict=True)), shape)

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> TensorPart:
        return cls(tuple((0, size) for size in shape), tuple(shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select this part from the whole tensor."""
        return tuple(slice(start, stop) for start, stop in self.ranges)

    def overlap(self, other: TensorPart) -> TensorPart | None:
        """Intersection of both parts; None if it is empty."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        ranges = tuple((max(left[0], right[0]), min(left[1], right[1])) for left, right in pairs)
        return TensorPart(ranges, self.shape) if all(start < stop for start, stop in ranges) else None

    def within(self, outer: TensorPart) -> tuple[slice, ...]:
        """Slices that select this part from a tensor that holds `outer`."""
        pairs = zip(self.ranges, outer.ranges, strict=True)
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)

    def as_json(self) -> list[Any]:
        """Rows and shape, as in checkpoints of all versions, and the ranges of further dimensions if these are cut."""
        start, stop = self.ranges[0] if self.shape else (0, 1)
        cut = self.ranges[1:] != self.of_shape(self.shape).ranges[1:]
        return [start, stop, self.shape, *([self.ranges[1:]] if cut else [])]

    @classmethod
    def from_json(cls, start: int, stop: int, shape: Sequence[int], further: Sequence[Any] | None = None) -> TensorPart:
        if not shape:
            return cls.of_shape(())
        rest = cls.of_shape(shape).ranges[1:] if further is None else tuple((begin, other) for begin, other in further)
        return cls(((start, stop), *rest), tuple(shape))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Tensors for which an optimizer keeps state, by the name of the parameter."""
    parts = optimizer.part_of if isinstance(optimizer, ShardedOptimizer) else lambda weight: weight
    return {name: parts(parameter) for name, parameter in model.named_parameters()}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that training changes, by name; tied tensors occur once. Shared with the model, not copied."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    tensors = {WEIGHTS + name: value for name, value in model.state_dict().items() if name not in tied}
    names = {id(parameter): name for name, parameter in stepped(model, optimizer).items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{OPTIMIZER}{names[id(parameter)]}/{key}"] = value
    return tensors


def holders_of(names: Iterable[str]) -> dict[str, list[int]]:
    """Map the names of all ranks' tensors, sorted, to the ranks that hold them or a part; every rank must call."""
    own_names = sorted(names)
    if not ranks.hold_parts():
        return {name: [*range(ranks.world_size())] for name in own_names}
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(ranks.gather(own_names)):
        for name in held:
            holders.setdefault(name, []).append(rank)
    return dict(sorted(holders.items()))


def write_rank(folder: Path, tensors: Mapping[str, Tensor], holders: Mapping[str, Sequence[int]]) -> list[Path]:
    """Write this rank's files and return them. Tensors replicated on several ranks are divided among these.

    Args:
        folder: the folder of the checkpoint.
        tensors: weights and optimizer state of this rank by name; a DTensor is written as the part that is local.
        holders: result of `holders_of`.
    """
    own_tensors = {
        name: tensors[name]
        for index, (name, held_by) in enumerate(holders.items())
        if name in tensors and _is_writer(tensors[name], index, held_by)
    }
    pieces = {name: TensorPart.of(tensor) for name, tensor in own_tensors.items()}
    generators = {"random/torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["random/cuda"] = torch.cuda.get_rng_state()
    data, index = (folder / f"rank{ranks.rank()}.{kind}" for kind in ("safetensors", "json"))
    held = {
        name: local(own_tensors[name]).detach().cpu().contiguous() for name, piece in pieces.items() if all(piece.sizes)
    }
    save_file(held | generators, data)
    kind, keys, *rest = np.random.get_state()
    record = {
        "pieces": {name: piece.as_json() for name, piece in pieces.items()},
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    index.write_text(json.dumps(record), encoding="utf8")
    return [data, index]


def _is_writer(tensor: Tensor, index: int, held_by: Sequence[int]) -> bool:
    """Return True if this rank writes its part of a tensor; `index` selects one of the ranks that hold the same."""
    if not isinstance(tensor, DTensor):
        return held_by[index % len(held_by)] == ranks.rank()
    if held_by[0] not in tensor.device_mesh.mesh:
        return False  # ranks of another group hold the same part as the first group
    own_index, copies = 0, 1
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for at, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            own_index, copies = own_index * size + at, copies * size
    return index % copies == own_index


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors for a file that does not have the form of a checkpoint's as StageError `damaged_checkpoint`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "remove the folder of this checkpoint: training then continues from the previous one"
        raise stage_error("damaged_checkpoint", str(path), f"its content has changed: {reason}", fix) from error


# Kind of optimizer by a key of its state of each weight.
_KEPT = {
    "momentum_buffer": "muon",
    "lion_momentum": "lion",
    "row_var": "adafactor",
    "variance": "adafactor",
}


def _kept_by(keys: Sequence[str]) -> str:
    return next((kind for key, kind in _KEPT.items() if key in keys), "adamw")


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the kind of optimizer that updates `group`."""
    if "muon" in group:
        return "muon"
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    return {"Lion": "lion", "Adafactor": "adafactor"}.get(type(inner).__name__, "adamw")


@dataclass
class Snapshot:
    """A checkpoint folder to read from."""

    folder: Path
    state: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _pieces: dict[str, dict[TensorPart, Path]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        """Raise StageError `damaged_checkpoint` for files of another form than `write_rank` writes."""
        path = folder / STATE
        with _reading(path):
            snapshot = cls(folder, dict(read_own_json(path)))
        for index in sorted(folder.glob("rank*.json")):
            with _reading(index):
                for name, record in read_own_json(index)["pieces"].items():
                    piece = TensorPart.from_json(*record)
                    if any(
                        not 0 <= start <= stop <= size
                        for (start, stop), size in zip(piece.ranges, piece.shape, strict=True)
                    ):
                        raise ValueError(f"{name} has the bounds {piece.ranges} in {piece.shape}")
                    snapshot.shapes[name] = piece.shape
                    snapshot._pieces.setdefault(name, {})[piece] = index.with_suffix(".safetensors")
        return snapshot

    def optimizer_keys(self, name: str) -> list[str]:
        """Keys of the optimizer's state of a parameter, such as exp_avg and step."""
        start = f"{OPTIMIZER}{name}/"
        return [key.removeprefix(start) for key in self.shapes if key.startswith(start)]

    def read(self, name: str, requested: TensorPart) -> Tensor:
        """Read a part of a tensor from the files that contain it."""
        tensor: Tensor | None = None
        for held, path in self._pieces[name].items():
            both = held.overlap(requested)
            if both is None:
                continue
            with _reading(path):
                with safe_open(path, "pt") as file:
                    part = file.get_slice(name)[both.within(held)] if requested.shape else file.get_tensor(name)
                if both == requested:
                    return part
                tensor = torch.empty(requested.sizes, dtype=part.dtype) if tensor is None else tensor
                tensor[both.within(requested)] = part
        return torch.empty(requested.sizes) if tensor is None else tensor

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and optimizer state, regardless of the ranks that wrote them. Weights that were stepped by
        another optimizer (Muon, AdamW, Lion, Adafactor) start without state."""
        for name, tensor in tensors_of(model, optimizer).items():
            if name.startswith(WEIGHTS):
                self._fill(tensor, name)
        kinds = {
            id(parameter): _kind(optimizer, group) for group in optimizer.param_groups for parameter in group["params"]
        }
        for name, parameter in stepped(model, optimizer).items():
            keys = self.optimizer_keys(name)
            if id(parameter) not in kinds or _kept_by(keys) != kinds[id(parameter)]:
                continue
            for key in keys:
                full = f"{OPTIMIZER}{name}/{key}"
                if self.shapes[full] == tuple(parameter.shape):
                    value = torch.zeros_like(parameter, requires_grad=False)
                    self._fill(value, full)
                else:
                    value = self.read(full, TensorPart.of_shape(self.shapes[full])).to(parameter.device)
                optimizer.state[parameter][key] = value

    def _fill(self, tensor: Tensor, name: str) -> None:
        with torch.no_grad():
            local(tensor).copy_(self.read(name, TensorPart.of(tensor)))

    def load_random_state(self) -> bool:
        """Restore this rank's random state; return False if the checkpoint is of another number of ranks."""
        if self.state["ranks"] != ranks.world_size():
            return False
        index = self.folder / f"rank{ranks.rank()}.json"
        record = read_own_json(index)
        version, internal, gauss = record["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(record["numpy"]))
        with safe_open(index.with_suffix(".safetensors"), "pt") as file:
            torch.set_rng_state(file.get_tensor("random/torch"))
            if "random/cuda" in file.keys() and torch.cuda.is_available():  # noqa: SIM118 - not a mapping
                torch.cuda.set_rng_state(file.get_tensor("random/cuda"))
        return True
