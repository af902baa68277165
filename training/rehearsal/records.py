"""Records of a step: bytes that each collective sends, and bytes of the tensors that exist at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sent(NamedTuple):
    """Kind of a collective, and the ranks of its group."""

    kind: str
    members: tuple[int, ...]


_KINDS: dict[str, str] = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "send": "send", "recv_": "receive",
}  # fmt: skip
"""Collectives by the names of torch's operators, those of torch.distributed and the functional ones of DTensor."""
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
"""Bytes that a rank of a group of n sends in a ring, relative to the largest tensor of the collective."""


class Records(TorchDispatchMode):
    """Records collectives and memory of what runs within it.

    sent: bytes that this rank sends, by collective. calls: number of these collectives. now, most: bytes of all tensors
    without memory that exist, and the most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[Sent] = Counter()
        self.calls: Counter[Sent] = Counter()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def begin(self) -> None:
        """Forget the collectives so far, and the most memory."""
        self.sent.clear()
        self.calls.clear()
        self.most = self.now

    @contextmanager
    def watching(self) -> Iterator[Records]:
        """Record within this context, also the release of storages that their owners resize, as FSDP2 does."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._record(func, args, kwargs or {}, result)
        if isinstance(result, FakeTensor):
            self._count(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, FakeTensor):
                    self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count the present size of a storage, until it is released."""
        number, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(number)
        if before is None:

            def released(_: Any) -> None:
                self.now -= self._sizes.pop(number, 0)
                self._references.pop(number, None)

            self._references[number] = weakref.ref(storage, released)
        self._sizes[number] = size
        self.now += size - (before or 0)
        self.most = max(self.most, self.now)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        kind = _KINDS.get(func._schema.name.split("::")[1])
        if kind is None:
            return
        members = _members(args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        key = Sent(kind, members)
        self.sent[key] += round(size * _SHARES[kind](len(members)))
        self.calls[key] += 1


def _members(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the ranks of a collective's group."""
    for leaf in [*tree_leaves(args), *tree_leaves(kwargs)][::-1]:
        if isinstance(leaf, distributed.ProcessGroup):
            return tuple(distributed.get_process_group_ranks(leaf))
        if isinstance(leaf, torch.ScriptObject):
            try:
                group = distributed.ProcessGroup.unbox(leaf)
            except RuntimeError:  # an option of the collective, such as how it reduces
                continue
            return tuple(distributed.get_process_group_ranks(group))
        if isinstance(leaf, str):
            from torch._C._distributed_c10d import _resolve_process_group

            group = _resolve_process_group(leaf)  # type: ignore[arg-type]
            return tuple(distributed.get_process_group_ranks(group))
    raise TypeError("expected a collective with a process group")


def of_tensors(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors on this rank, of which those that share memory count once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())
