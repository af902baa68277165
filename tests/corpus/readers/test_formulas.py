"""Formulas of pages are kept as text, and raised digits do not join the number before them."""

from __future__ import annotations

import pytest

from corpus.readers.formats.formulas import with_formulas
from corpus.readers.formats.web import main_text

PAGE = "<html><body><main><article><h1>Area</h1>{}<p>{}</p></article></main></body></html>"
PROSE = "<p>The council described a jar of river clay to the surprise of everyone who had stayed behind.</p>" * 3


def test_formulas_are_part_of_the_main_text() -> None:
    formula = (
        "The area is <math><mi>A</mi><mo>=</mo><mi>π</mi><msup><mi>r</mi><mn>2</mn></msup></math>, and water is "
        "H<sub>2</sub>O, ten squared is 10<sup>2</sup>."
    )
    assert main_text(PAGE.format(PROSE, formula)).endswith("The area is A = πr², and water is H₂O, ten squared is 10².")


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("10<sup>−3</sup> m", "10⁻³ m"),
        ("x<SUP class=a><i>n</i>+1</SUP>", "xⁿ⁺¹"),
        ("2<sup>a&lt;b</sup>", "2^(a&lt;b)"),
        ("a<sub>max</sub>", "a_(max)"),
        ("Na<sup>+</sup>", "Na⁺"),
        ("the 1<sup>st</sup>, Acme<sup>®</sup>, said<sup>[1]</sup>", "the 1st, Acme®, said[1]"),
        ("<p>no formula</p>", "<p>no formula</p>"),
        ("<math><mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><mi>b</mi></mfrac></math>", "(a + 1)/b"),
        ("<math><msqrt><mi>x</mi></msqrt><mo>&le;</mo><msub><mi>x</mi><mi>i</mi></msub></math>", "√x ≤ xᵢ"),
        ("a<math><mi>b</mi></math>c", "a b c"),
        ('<math alttext="\\frac{a}{b}"><mi>a</mi></math>', "$\\frac{a}{b}$"),
        (
            '<math><semantics><mi>α</mi><annotation encoding="application/x-tex">\\alpha</annotation></semantics>'
            "</math>",
            "$\\alpha$",
        ),
    ],
)
def test_signs_on_one_line(markup: str, text: str) -> None:
    assert with_formulas(markup) == text


def test_formulas_without_end_are_text() -> None:
    deep = "<mrow>" * 3000 + "<mi>x</mi>"
    assert "x" in with_formulas(f"<math>{deep}</math>")
    assert with_formulas("<math><mi>x") == "<math><mi>x"
