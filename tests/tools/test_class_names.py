"""One name, one class: no two classes of the packages have the same name."""

import ast
from collections import defaultdict

from tests.support.programs.command import REPOSITORY

PACKAGES = ("stemma", "cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path.relative_to(REPOSITORY).as_posix())
    assert len(places) > 500
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared, f"name each by what it is: {shared}"
