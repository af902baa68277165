"""No circle of imports between modules, counting those inside functions and for types alone."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from tests.support.programs.command import REPOSITORY

PACKAGES = ("stemma", "cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")
KNOWN = {("training.chat.base", "training.chat.template")}
"""`Chat.load` returns its subclass for models that bring a template along."""


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, among those given by their source."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & sources.keys() or {node.module}
        graph[module] = names & sources.keys() - {module}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle in a graph of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules
    return []


def test_no_modules_import_each_other() -> None:
    sources = {}
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
            sources[module] = path.read_text(encoding="utf8")
    graph = imports(sources)
    assert len(graph) > 500
    for importing, imported in KNOWN:
        graph[importing].remove(imported)
    assert not circle(graph)


def test_a_late_import_and_one_for_types_make_a_circle() -> None:
    late = "def load():\n    from a.second import x\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import first\n"
    assert set(circle(imports({"a.first": late, "a.second": typed}))) == {"a.first", "a.second"}
    assert not circle(imports({"a.first": late, "a.second": "import json\n"}))
