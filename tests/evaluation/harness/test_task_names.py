"""The names of lm-eval's tasks, groups and tags are read without its index, and give what its index gives."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from evaluation.config.lm_tasks import known_tasks
from evaluation.harness.named_tasks import manager_of, members_of

Index = dict[str, Any]


def with_members(index: Index, name: str) -> Index:
    """The entries of a name and of all that belongs to it."""
    entries: Index = {}
    pending = {name}
    while pending:
        entries |= {each: index.get(each) for each in pending}
        pending = {member for each in pending if index.get(each) for member in members_of(index[each])} - set(entries)
    return entries


def test_a_group_and_a_tag_of_included_settings_have_their_members() -> None:
    """The tag of `paloma` is in a template that each of its tasks includes."""
    assert (
        len(with_members(manager_of("mmlu").task_index, "mmlu")) == 57 + 4 + 4 + 1
    )  # tasks; a tag in each of four groups
    assert len(manager_of("paloma").task_index["paloma"].tags) == 16


@pytest.mark.long
def test_names_and_members_are_those_of_lm_evals_own_index() -> None:
    """Over all its groups and tags: one of another version may write them otherwise."""
    manager = TaskManager()
    assert set(manager.task_index) <= set(known_tasks())
    for name in [*manager.all_groups, *manager.all_tags]:
        assert with_members(manager_of(name).task_index, name) == with_members(manager.task_index, name), name
