"""Import transformers without packages that only quantized and object detection models use: until they are used.

With its model classes, transformers imports torchao and scipy's optimizers, a tenth of the processor time that a
process takes before it can answer. The packages that import transformers call `install` before they do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LATER: Mapping[str, Mapping[str, str]] = {
    "transformers.loss.loss_utils": {
        "scipy.optimize": "linear_sum_assignment",
        "transformers.image_transforms": "center_to_corners_format",
    },
    "transformers.quantizers.quantizer_torchao": {
        "torchao.prototype.safetensors.safetensors_support": "flatten_tensor_state_dict",
    },
}
"""Modules that transformers imports with its model classes, and the function that each takes from a module that can
wait."""


def install() -> None:
    """Have transformers import these modules at their first use, unless it is imported already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _LATER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WaitingLoader(spec.loader, _LATER[fullname])
        return spec


class _WaitingLoader(Loader):
    """The loader of a module, which finds modules that wait in place of those that it imports."""

    def __init__(self, loader: Loader, later: Mapping[str, str]) -> None:
        self._loader, self._later = loader, later

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _waiting(self._later):
            self._loader.exec_module(module)


@contextmanager
def _waiting(later: Mapping[str, str]) -> Iterator[None]:
    waiting = {name: _Waiting(name, function) for name, function in later.items() if name not in sys.modules}
    sys.modules.update(waiting)
    try:
        yield
    finally:
        for name, module in waiting.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _Waiting(ModuleType):
    """A module that is imported when its function is called, or when another thread asks it for anything else."""

    def __init__(self, name: str, function: str) -> None:
        super().__init__(name)
        self.__dict__[function] = _at_first_call(name, function)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # the import system itself asks whether it is a package
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), attribute)


def _at_first_call(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    call.__name__ = name
    return call
