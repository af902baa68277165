"""People judge answers in a real browser, and what they say comes back as data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Browser, Page

from tests.browser.test_reading import browser  # noqa: F401
from tests.support.programs.command import stemma


def _begin(browser: Browser, page_file: Path, name: str, width: int = 1200) -> Page:  # noqa: F811
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.goto(page_file.as_uri())
    page.get_by_label("Your name").fill(name)
    page.keyboard.press("Enter")
    return page


def _saved(page: Page, folder: Path) -> Path:
    with page.expect_download() as download:
        page.keyboard.press("s")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_two_people_judge_by_keyboard_and_their_choices_come_back(
    browser: Browser,  # noqa: F811
    built_full: Path,
    tmp_path: Path,
) -> None:
    round_ = tmp_path / "round"
    made = stemma(
        *("feedback", "export", "sft", "rlhf", "--root", built_full / "store", "--out", round_),
        *("--pairs", "6", "--max-new-tokens", "8", "--temperature", "1"),
    )
    assert made.code == 0, made.document
    pairs = [json.loads(line) for line in (round_ / "pairs.jsonl").read_text().splitlines()]
    assert made.document["pairs"] == len(pairs) == 6
    # But for the style sheet of all pages, which has a colour for each kind of model.
    page_text = re.sub(r"<style>.*?</style>", "", (round_ / "judge.html").read_text(), count=1, flags=re.S)
    assert "sft" not in page_text and "rlhf" not in page_text

    first = _begin(browser, round_ / "judge.html", "Ann Lee")
    for number in range(3):
        first.keyboard.press("1")
        assert first.locator(".answer").first.get_attribute("aria-pressed") == "true"
        if number == 0:
            first.keyboard.press("w")
            first.keyboard.type("4 clearer <b>words</b>")
            first.keyboard.press("Escape")
            first.keyboard.press("c")
            first.locator("#correction").fill("As it should be.")
            first.keyboard.press("Escape")
        first.keyboard.press("Enter")
    # Whoever closes the page goes on where they were.
    first.reload()
    first.get_by_label("Your name").fill("Ann Lee")
    first.keyboard.press("Enter")
    assert first.locator("#count").inner_text() == "3 of 6 judged"
    assert first.locator("#prompt").inner_text().strip() == pairs[3]["prompt"].strip()
    for key in "234":
        first.keyboard.press(key)
        first.keyboard.press("Enter")
    assert first.locator("#done").is_visible()
    first.keyboard.press("ArrowLeft")
    assert first.locator('[data-choice="tie"]').get_attribute("aria-pressed") == "true"

    second = _begin(browser, round_ / "judge.html", "bob", width=375)
    assert second.evaluate("document.documentElement.scrollWidth <= innerWidth")
    second.locator(".answer").nth(1).click()
    second.get_by_role("button", name="next").click()

    files = [_saved(first, tmp_path), _saved(second, tmp_path)]
    assert files[0].name == "judgements-Ann-Lee.jsonl"
    answer = stemma("feedback", "import", round_, *files)
    assert answer.code == 0, answer.document
    assert answer.document["annotators"] == {"Ann Lee": 6, "bob": 1}
    assert (answer.document["quarantined"], answer.document["corrections"]) == (0, 1)
    assert answer.document["choices"]["tie"] == answer.document["choices"]["neither"] == 1
    # Ann chose the left one of three pairs and the right one of one, Bob a right one.
    assert answer.document["left_preferred"]["value"] == pytest.approx(3 / 5)
    judged = [json.loads(line) for line in (round_ / "judged" / "judgements.jsonl").read_text().splitlines()]
    assert judged[0]["reason"] == "4 clearer <b>words</b>"
    by_id = {pair["id"]: pair for pair in pairs}
    preferred = [json.loads(line) for line in (round_ / "judged" / "preferences.jsonl").read_text().splitlines()]
    said = {
        (by_id[row["pair"]]["prompt"], by_id[row["pair"]][row["choice"]]) for row in judged if row["choice"] in "ab"
    }
    assert {(row["prompt"], row["chosen"]) for row in preferred} <= said


def test_an_answer_that_was_taken_over_and_then_not_chosen_corrects_nothing(
    browser: Browser,  # noqa: F811
    tmp_path: Path,
) -> None:
    from evaluation.people.page import judging_page
    from evaluation.people.pairs import Export, blind

    pairs, given_by = blind([(f"question {n}", [("sft", f"a {n}"), ("rlhf", f"b {n}")]) for n in range(2)], seed=1)
    (tmp_path / "judge.html").write_text(judging_page(Export(pairs, given_by, {}, {}), "Which?"), encoding="utf8")
    page = _begin(browser, tmp_path / "judge.html", "Ann")
    for keys in (("1", "c", "Escape", "2", "Enter"), ("1", "c", "!", "Escape", "2")):
        for key in keys:
            page.keyboard.press(key)
    rows = [json.loads(line) for line in _saved(page, tmp_path).read_text().splitlines()]
    assert [bool(row["correction"]) for row in rows] == [False, True]


def test_documents_are_marked_by_keyboard_and_counted(
    browser: Browser,  # noqa: F811
    built_full: Path,
    tmp_path: Path,
) -> None:
    look = tmp_path / "look"
    made = stemma("review", "export", "clean", "--root", built_full / "store", "--out", look, "--documents", "5")
    assert made.code == 0, made.document
    documents = [json.loads(line) for line in (look / "documents.jsonl").read_text().splitlines()]
    assert made.document["documents"] == len(documents) == 5

    page = _begin(browser, look / "review.html", "Ann", width=375)
    assert documents[0]["text"].strip() in page.locator("#prompt").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for key in "11512":
        page.keyboard.press(key)
        if key == "5":
            page.keyboard.press("w")
            page.keyboard.type("a name and a street")
            page.keyboard.press("Escape")
        page.keyboard.press("Enter")
    assert page.locator("#done").inner_text().startswith("All documents are judged")
    answer = stemma("review", "import", look, _saved(page, tmp_path))
    assert answer.code == 0, answer.document
    rates = {row["mark"]: row["n"] for row in answer.document["rates"]}
    assert rates == {"fine": 3, "private": 1, "broken": 1} and answer.document["flagged"] == 2
    flagged = [json.loads(line) for line in (look / "marked" / "flagged.jsonl").read_text().splitlines()]
    assert flagged[0] == {
        "id": documents[2]["id"],
        "source": documents[2]["source"],
        "verdict": "private",
        "marks": {"private": 1},
        "reasons": ["a name and a street"],
        "annotators": ["Ann"],
    }
