"""Templates from outside are rendered within bounds of memory and time."""

from __future__ import annotations

import os
import resource
from itertools import pairwise
from pathlib import Path

import pytest

from evaluation.failures.templates import draw_cases, read_failure_class
from infra.errors import StageError
from infra.io.template_process import MEMORY_BYTES, TEXT_CHARACTERS
from infra.io.templates import TemplateFault, chat, fill

GROWING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
BOMBS = {
    "repeated": ("{{ 'a' * 3000000000 }}", "memory"),
    "a list": ("{{ ([0] * 900000000) | length }}", "memory"),
    "padded": ("{{ 'a' | center(3000000000) }}", "memory"),
    "formatted": ("{{ '%03000000000d' % 1 }}", "memory|too big|precision"),
    "joined": ("{{ range(99999) | map('center', 99999) | join }}", "memory"),
    "growing": (GROWING, "memory"),
    "long": ("{{ 'a' * 11000000 }}", f"more than {TEXT_CHARACTERS:,} characters"),
    "a power": ("{{ 7 ** (9 ** 9) }}", "processor time"),
    "loops in loops": (LOOPS, "processor time"),
    "calls": (DOUBLE, "processor time"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses|memory|too deep"),
    "nested": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "too many nested|recurses|too deep"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_takes_too_much_is_an_error_and_the_next_one_is_rendered(bomb: str) -> None:
    template, reason = BOMBS[bomb]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateFault, match=reason):
        list(fill(None, [template], [{}]))
    assert list(fill(None, ["{{ a | words }}"], [{"a": 21}])) == [["twenty-one"]]
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MEMORY_BYTES, "the text of the bomb came back"


def test_what_is_rendered_before_the_fault_is_given() -> None:
    rendered = fill("a != 2", ["{{ 6 // a }}", "x"], [{"a": 3}, {"a": 2}, {"a": 0}])
    assert next(rendered) == ["2", "x"]
    assert next(rendered) is None
    with pytest.raises(TemplateFault, match="zero"):
        next(rendered)


def test_templates_run_no_code_and_see_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
    for template in ("{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.environ }}"):
        with pytest.raises(TemplateFault, match=r"unsafe|access|undefined"):
            list(fill(None, [template], [{}]))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "swordfish"


def failure_class(tmp_path: Path, prompt: str, more: str = "") -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"name: mine\nabout: Counts.\n{more}tests:\n  - name: next\n    kind: minimum_functionality\n"
        f"    prompt: {prompt!r}\n    right: ' a'\n    wrong: [' b']\n"
    )
    return path


def test_a_failure_class_with_a_bomb_names_its_test(tmp_path: Path) -> None:
    found = read_failure_class(failure_class(tmp_path, "{{ 'a' * 3000000000 }}"))
    with pytest.raises(StageError, match=r"mine: next: the template cannot be filled: it takes more than 256 MB"):
        draw_cases(found, 5, 17)


@pytest.mark.parametrize(
    "more",
    [
        "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuv")),
        "fill: &a {a: [*a]}\n",
        "fill: " + "[" * 5000 + "\n",
    ],
    ids=["aliases", "a loop", "nesting"],
)
def test_a_failure_class_whose_yaml_is_a_bomb_names_its_file(more: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"mine\.yaml") as caught:
        read_failure_class(failure_class(tmp_path, "a", more))
    assert caught.value.problems[0].code == "bad_failure_class"


def test_a_device_is_no_failure_class() -> None:
    with pytest.raises(StageError, match=r"/dev/zero: .*a device"):
        read_failure_class(Path("/dev/zero"))


def test_chat_templates_of_models_have_the_same_bounds() -> None:
    asked = {
        "conversations": [[{"role": "user", "content": "Hi"}]],
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '>' if add_generation_prompt }}"
    assert chat(chat_template=template, **asked) == (["<s>[Hi]>"], [])
    learnt = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert chat(chat_template=learnt, return_assistant_tokens_mask=True, **asked) == (["[Hi]"], [[(0, 4)]])
    with pytest.raises(TemplateFault, match="no system role") as caught:
        chat(chat_template="{{ raise_exception('no system role') }}", **asked)
    assert caught.value.is_own and not caught.value.beyond_bounds
    with pytest.raises(TemplateFault, match="processor time") as caught:
        chat(chat_template=LOOPS, **asked)
    assert not caught.value.is_own and caught.value.beyond_bounds
