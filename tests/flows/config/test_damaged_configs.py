"""Configs of another form, each as small as fuzzing found it: all that is wrong is reported by name."""

from __future__ import annotations

from typing import Any

import pytest

from flows.config.read import parse
from infra.errors import ConfigError

CONTINUING = {"uses": "pretrain", "continues": {"step": "pretrain"}}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"adopted": 3, "decontaminate": {}}, "adopted"),
        ({"adopted": ["decontaminate"], "decontaminate": {}}, "adopted"),
        ({"pretrain": 3, "steps": {"longer": CONTINUING}}, "pretrain"),
        ({"pretrain": [3], "steps": {"longer": CONTINUING}}, "pretrain"),
        ({"steps": {"first": 3, "longer": {"continues": {"step": "first"}}}}, "steps.first"),
        ({"steps": {"first": None, "longer": {"continues": {"step": "first"}}}}, "steps.first"),
    ],
    ids=str,
)
def test_a_key_of_another_type_is_named(data: Any, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"name": "n", **data})
    assert key in {problem.path for problem in raised.value.problems}
