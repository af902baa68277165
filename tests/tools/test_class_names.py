"""One name, one class: names that several classes once had belong to at most one each."""

import ast
from collections import defaultdict

from tests.support.programs.command import REPOSITORY

PACKAGES = ("stemma", "cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")
UNIQUE = {
    "Answers", "Batch", "Clock", "Correction", "Index", "Judge", "Layout", "Member", "Node", "Outcome", "PipelineRun",
    "Prompt", "Row", "Run", "Schedule", "Selection", "Split", "StageRow", "Step", "ToolCall",
}  # fmt: skip


def test_no_two_classes_share_such_a_name() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path.relative_to(REPOSITORY).as_posix())
    assert len(places) > 500
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: paths for name, paths in shared.items() if name in UNIQUE}
