"""Pairs as tasks of Label Studio, and its annotations as judgements (labelstud.io/tags/pairwise)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from evaluation.people.pairs import AnswerPair

_TIE, _NEITHER = "as good as each other", "neither can be used"

LABELLING = f"""<View>
  <Header value="Which answer is better?"/>
  <Text name="prompt" value="$prompt"/>
  <Pairwise name="comparison" toName="answer1,answer2"/>
  <View style="display: flex; gap: 1em">
    <View style="flex: 1"><Text name="answer1" value="$answer1"/></View>
    <View style="flex: 1"><Text name="answer2" value="$answer2"/></View>
  </View>
  <Choices name="otherwise" toName="prompt" showInline="true">
    <Choice value="{_TIE}"/>
    <Choice value="{_NEITHER}"/>
  </Choices>
  <Header value="Why? (not needed)"/>
  <TextArea name="reason" toName="prompt" maxSubmissions="1"/>
  <Header value="How should it have been answered? (not needed)"/>
  <TextArea name="correction" toName="prompt" maxSubmissions="1"/>
</View>
"""
"""Labelling interface of a Label Studio project for importing the tasks."""


def tasks(pairs: Iterable[AnswerPair], export: str) -> list[dict[str, Any]]:
    """Return the pairs in Label Studio's import format. export: its id, which is returned with the annotations."""
    return [
        {"data": {"pair": pair.id, "export": export, "prompt": pair.prompt, "answer1": pair.a, "answer2": pair.b}}
        for pair in pairs
    ]


def judgements_of_task(task: Any) -> Iterator[Any]:
    """Yield a task of Label Studio's JSON export as rows in the form of this project's page, one per annotation;
    anything that is not such a task is yielded unchanged.

    An annotation that was cancelled is {"skipped": true}.
    """
    if not isinstance(task, Mapping) or not isinstance(task.get("data"), Mapping):
        yield task
        return
    data = task["data"]
    for annotation in _items(task.get("annotations")):
        if not isinstance(annotation, Mapping):
            yield annotation
            continue
        if annotation.get("was_cancelled"):
            yield {"skipped": True}
            continue
        values = dict(_values(annotation.get("result")))
        row = {"pair": data.get("pair"), "annotator": _annotator(annotation.get("completed_by")), "left": "a"}
        row |= {"choice": _choice(values), "seconds": annotation.get("lead_time")}
        row |= {name: " ".join(map(str, _items(values.get(name, {}).get("text")))) for name in ("reason", "correction")}
        yield row | ({"export": data["export"]} if "export" in data else {})


def _items(value: Any) -> Sequence[Any]:
    """Return a list unchanged; for a single value in its place, such as a text, a list with that value."""
    return value if isinstance(value, list) else [value] if value else []


def _values(results: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the value given under each name; results of another form are ignored."""
    for result in _items(results):
        if isinstance(result, Mapping) and isinstance(result.get("value"), Mapping):
            yield str(result.get("from_name")), result["value"]


def _choice(values: Mapping[str, Mapping[str, Any]]) -> str | None:
    otherwise = next(iter(_items(values.get("otherwise", {}).get("choices"))), None)
    if otherwise in (_TIE, _NEITHER):
        return "tie" if otherwise == _TIE else "neither"
    return {"left": "a", "right": "b"}.get(str(values.get("comparison", {}).get("selected")))


def _annotator(completed_by: Any) -> str:
    """Return the annotator's name. Label Studio identifies a user by number, or in its full export by a record with the
    address."""
    if isinstance(completed_by, Mapping):
        return str(completed_by.get("email") or completed_by.get("id") or "")
    return "" if completed_by is None else str(completed_by)
