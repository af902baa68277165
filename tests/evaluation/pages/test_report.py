"""The report: one page that loads nothing, escapes what models said, and says what the figures say."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import ReportConfig
from evaluation.pages.lineage import Edge, edges_of, lineage_picture
from evaluation.pages.report.benchmarks.answer_sections import answers_over_training
from evaluation.pages.verdicts import claims
from evaluation.report import render, report
from evaluation.results.artifacts import ancestors, read_artifacts
from evaluation.results.pipeline import PipelineResults
from infra.run import Run
from infra.store.manifest import Manifest
from infra.store.states import write_states
from tests.evaluation.pipeline import HOSTILE, INPUTS, with_figures, write_pipeline

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, links and text, and checks that tags are nested as they should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            self.handlers += [name] if name.startswith("on") else []
            self.links += [value or ""] if name in {"href", "src", "action", "data"} else []
            self.ids += [value or ""] if name == "id" else []
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data


def _address(id: str) -> str:
    """The first digits of the fingerprint that `write_pipeline` gives a stage."""
    return hashlib.sha256(id.encode()).hexdigest()[:8]


def page_of(tmp_path: Path, ids: Collection[str] | None = None, **config: Any) -> str:
    folders = write_pipeline(tmp_path / "store", ids)
    out = tmp_path / "out"
    out.mkdir()
    report(ReportConfig(**config), folders, out, Run(tmp_path / "work"))
    return (out / "report.html").read_text()


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    html = page_of(tmp_path)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.handlers == []
    outside = {link for link in page.links if not link.startswith("#")}
    folders = {f"../../{folder.parent.name}/{folder.name}/" for folder in (tmp_path / "store").glob("*/*")}
    assert outside and outside <= folders | {f"{folder}MODEL_CARD.md" for folder in folders}
    assert not re.search(r"url\(|@import|https?://", html)


def test_model_output_is_shown_as_text(tmp_path: Path) -> None:
    html = page_of(tmp_path, title=HOSTILE, command=HOSTILE)
    assert "<script" not in html and "<img" not in html
    assert Page(html).text.count(HOSTILE) >= 4, "title, command, sample, most toxic continuation"


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert page_of(tmp_path / "a") == page_of(tmp_path / "b")


def test_every_section_of_a_whole_pipeline_is_there(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, title="demo", command="stemma run configs/quickstart.yaml"))
    assert page.ids == [
        "pretraining", "tuning", "alignment", "benchmarks", "samples", "toxicity", "bias", "memorisation", "data",
        "stages", "lineage", "reproduce",
    ]  # fmt: skip
    for said in ("bigram 4.92", "58650d0c16", "17: ", "min characters", "stemma run configs/quickstart.yaml"):
        assert said in page.text


def test_the_page_opens_with_what_was_built_in_plain_words(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    first = json.loads((tmp_path / "out" / "aux" / "first_screen.json").read_text())
    assert len(first["key_figures"]) == 3 and all(figure["value"] in page for figure in first["key_figures"])
    assert {answer["label"] for answer in first["samples"][0]["answers"]} >= {"SFT model", "RLHF model"}
    opening = Page(page.split('<div class="claims">')[0] + "</header></body></html>").text
    for said in (
        "The RLHF model is a llama language model of 4.2M parameters (4 layers of width 256)",
        "from scratch on 1.02M tokens",
        "Instruction tuning on 7,601 pairs",
        "PPO against a reward model that is right in 71 % of held-out pairs",
        "has 30 times its parameters and was trained on 11,000 times its text",
        "stemma chat rlhf/",
        "stemma serve sft/",
        "weights of the RLHF model",
    ):
        assert said in opening, opening
    assert re.findall(r">([^<>]*)</th>", page)[:4] == ["", "base model", "SFT model", "RLHF model"]


def test_the_first_screen_has_the_outcome_three_numbers_a_chart_and_answers(tmp_path: Path) -> None:
    html, judged = render(ReportConfig(), write_pipeline(tmp_path / "store"))
    first, rest = html.split('<div class="claims">')
    holding = sum(claim.state == "holds" for claim in judged)
    assert re.search(rf'<p class="outcome \w+">{holding} of {len(judged)} claims hold', first)
    assert first.count('<div class="key-figure">') == 3
    assert first.count("<svg") == 1 and 'aria-label="loss over batches"' in first
    assert 'aria-label="loss over batches"' not in rest, "the chart is not drawn again"
    answered = re.findall(r'<div class="sample">.*?</div>\s*</div>\s*</div>', first, re.DOTALL)
    assert len(answered) == 2
    assert all(f">{name} model<" in answered[0] for name in ("base", "SFT", "RLHF"))
    # The report is a stage of its run too.
    assert f"stages <b>{len(INPUTS) + 1}</b>" in first
    # Each claim shows its decisive figure with its interval, in columns.
    assert rest.count('<span class="claim-figure">') == len(judged) == len([c for c in judged if c.evidence])
    assert all(row.interval for claim in judged for row in claim.evidence[:1])


def test_an_effect_that_rounds_to_zero_is_told_as_none(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    tiny = {"improvement": 0.002, "improvement_low": 0.001, "improvement_high": 0.003}
    with_figures(folders["sft"], **tiny, heldout_loss_base=8.1402, heldout_loss_sft=8.1382)
    (claim,) = [claim for claim in claims(PipelineResults(folders)) if claim.about == "sft"]
    assert claim.title == "Instruction tuning had no effect on held-out instructions: loss 8.14 → 8.14"
    assert claim.state == "fails"


def test_the_claim_of_preference_tuning_has_its_figures_in_rows(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    folder = tmp_path / "store" / "preference_tuning" / ("7" * 16)
    shutil.copytree(folders["rlhf"], folder)
    replace(Manifest.read(folder), stage="preference_tuning", step="dpo", fingerprint="7" * 16).write(folder)
    measured = {"win_rate": (0.6, 0.55, 0.65), "margin": (1.0, 0.5, 1.5), "chosen_rise": (0.1, 0.05, 0.2)}
    bounds = {
        f"{name}{end}": value
        for name, values in measured.items()
        for end, value in zip(("", "_low", "_high"), values, strict=True)
    }
    with_figures(folder, **bounds)
    (claim,) = [
        claim for claim in claims(PipelineResults({**folders, "dpo": folder})) if claim.about == "preference_tuning"
    ]
    rows = {row.label: (row.value, row.interval) for row in claim.evidence}
    assert rows["pairs whose chosen answer gained more"] == ("60.0 %", "55.0 to 65.0 %")
    assert rows["margin, nats per answer"] == ("+1.00", "0.50 to 1.50")


def test_scores_are_shown_with_those_of_an_untrained_model(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    for model in ("base", "sft", "rlhf"):
        path = folders[f"benchmarks_{model}"] / "results.json"
        results = json.loads(path.read_text())
        results["tasks"]["cloze"]["acc_norm"] = {**results["tasks"]["cloze"]["acc"], "value": 0.61, "low": 0.55}
        results["untrained"] = {"cloze": {"acc": {"value": 0.77}, "acc_norm": {"value": 0.58}}}
        results["headlines"] = {"cloze": "acc_norm"}
        path.write_text(json.dumps(results))
    text = Page(render(ReportConfig(), folders)[0]).text
    assert "cloze, right (untrained 58 %)" in text
    assert "cloze: base, sft, rlhf is not distinguishable from an untrained model." in text
    assert "cloze: by likelihood per character" in text


def rows_of(html: str, caption: str) -> list[list[str]]:
    """The cells of the table under a caption, line by line, as they are read."""
    (table,) = re.findall(rf"{re.escape(caption)}.*?(<table.*?</table>)", html, re.DOTALL)
    lines = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    return [[unescape(re.sub(r"<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", line)] for line in lines]


def test_what_safety_found_of_canaries_and_in_newer_bias_sets_is_read_in_rows(model_dir: Path, tmp_path: Path) -> None:
    """The tables of a real artifact: a model with random weights, two canaries of ten texts, HONEST and BEC-Pro."""
    from corpus.tokens.canaries import Canary, Format, write_canaries
    from evaluation.config import SafetyConfig
    from evaluation.safety.stage import safety

    shards, asked = tmp_path / "shards", tmp_path / "asked"
    for folder in (shards, asked):
        folder.mkdir()
    form = Format("The pin is {digits:1}")
    write_canaries([Canary(form, 7, 40), Canary(form, 2, 0)], shards)
    people = (("the aunt", "female"), ("she", "female"), ("the son", "male"), ("he", "male"))
    templates = [f"{who} worked as a [M].\t{who}\t{group}\tsingular\toccupation" for who, group in people]
    (asked / "t.tsv").write_text("\n".join(["template_masked\tidentity\tcategory\tnumber\ttype", *templates]) + "\n")
    (asked / "lex.tsv").write_text("id\tpos\tcategory\tstereotype\tlemma\tlevel\n1\tn\tan\tno\trat\tconservative\n")
    (asked / "bec.tsv").write_text(
        "\tSentence\tTemplate\tPerson\tGender\tProfession\tProf_Gender\n"
        + "".join(
            f"0\t{who} is a {job}.\t<p> is a <j>.\t{who}\t{gender}\t{job}\t{group}\n"
            for job, group in (("nurse", "female"), ("cook", "female"), ("guard", "male"), ("mover", "male"))
            for who, gender in (("He", "male"), ("She", "female"))
        )
    )
    sets = [
        {"kind": "honest", "path": str(asked / "t.tsv"), "lexicon": str(asked / "lex.tsv"), "top_k": 2},
        {"kind": "bec_pro", "path": str(asked / "bec.tsv")},
    ]
    folders = write_pipeline(tmp_path / "store")
    config = SafetyConfig.model_validate({"toxicity": None, "bias": {"limit": 2, "sets": sets}})
    safety(config, {"model": model_dir, "shards": shards}, folders["safety_base"], Run(tmp_path / "work"))
    found = json.loads((folders["safety_base"] / "results.json").read_text())
    html, _ = render(ReportConfig(), folders)

    columns, *canaries = rows_of(html, "Exposure of planted canaries")
    assert columns == ["model", "canary", "planted", "trained on", "rank", "exposure in bits", "p"]
    ranks = {row["text"]: row["rank"] for row in found["exposure"]}
    assert [row[1:5] for row in canaries] == [
        ["The pin is 7", "40", "–", f"{ranks['The pin is 7']} of 10"],
        ["The pin is 2", "0", "–", f"{ranks['The pin is 2']} of 10"],
    ]
    for row in canaries:
        assert row[5].startswith(f"{math.log2(10 / ranks[row[1]]):.1f} (")
    for kind, caption in (("honest", "HONEST: "), ("bec_pro", "BEC-Pro: ")):
        (n, *_), *shown = rows_of(html, caption)
        told = [row for row in found["bias"]["sets"] if row["set"] == kind]
        assert n == "category" and len(shown) == len(told) >= 3
        for row, one in zip(shown, told, strict=True):
            assert row[:3] == [one["category"], one["metric"].replace("_", " "), str(one["n"])]
            digits = 1 if abs(one["high"]) > 1 else 2
            assert row[3].replace("−", "-").startswith(f"{one['value']:.{digits}f} (")
            assert ("p = " in row[3]) == ("p_holm" in one)


def test_held_out_points_of_the_tunings_are_drawn_and_quoted(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    for chart in ("SFT loss", "reward model loss"):
        (svg,) = re.findall(rf'<svg[^>]*aria-label="{chart}".*?</svg>', page)
        assert svg.count('<circle class="dot validation"') == 10, chart
    claims = Page(page.split("<nav>")[0] + "</header></body></html>").text
    assert (
        "On a sample of held-out pairs the loss went from 4.850 at batch 9 to 3.500 at batch 90, lowest at the end."
        in claims
    )
    assert "went from 0.680 at batch 8 to 0.700 at batch 80, lowest at batch 40 (0.600)." in claims


def test_a_loss_that_was_not_measured_is_no_number(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    path = folders["sft"] / "manifest.json"
    document = json.loads(path.read_text())
    figures = document["result"]["figures"]
    kept = {name: value for name, value in figures.items() if not name.startswith("heldout_loss")}
    path.write_text(json.dumps({**document, "result": {**document["result"], "figures": kept}}))
    text = Page(render(ReportConfig(), folders)[0]).text
    assert "The loss on all held-out instructions was not measured." in text and "from – to –" not in text


def test_what_is_said_of_benchmarks_follows_whose_they_are(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    assert "small, easy tasks" not in Page(render(ReportConfig(), folders)[0]).text
    tasks = [{"name": "cloze", "kind": "project"}, {"name": "quiz", "kind": "multiple_choice"}]
    path = folders["benchmarks_sft"] / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "config": {"tasks": tasks}}))
    text = Page(render(ReportConfig(), folders)[0]).text
    assert "cloze: small, easy tasks of the project's own" in text and "quiz: tasks of yours" in text


def test_tasks_that_tuning_has_seen_stand_against_those_that_it_has_not(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    assert "Task generalisation" not in render(ReportConfig(), folders)[0]
    for name, value in (("base", 0.25), ("sft", 0.5)):
        folder = folders[f"benchmarks_{name}"]
        results = json.loads((folder / "results.json").read_text())
        scores = {
            task: {"acc": {"value": value, "low": 0.1, "high": 0.9}} for task in ("cloze", "minimal_pairs", "quiz")
        }
        scores["quiz"]["acc"]["value"] = 0.75
        results["shots"] = {"0": scores, "2": scores}
        (folder / "results.json").write_text(json.dumps(results))
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "config": {"tuned_on": ["cloze"]}}))
    page = render(ReportConfig(), folders)[0]
    (table,) = re.findall(r"<table(?:(?!</table>).)*kind of task.*?</table>", page, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert [row[:2] for row in rows] == [
        ["tuned on", "cloze"], ["tuned on", "mean"],
        ["never seen", "minimal_pairs"], ["never seen", "quiz"], ["never seen", "mean"],
    ]  # fmt: skip
    assert "base, 0 shots" in table and "sft, 2 shots" in table
    assert rows[-1][2:6] == ["50.0 %", "50.0 %", "62.5 %", "62.5 %"]


def test_reward_and_judge_are_drawn_over_the_distance_and_the_turn_is_told(tmp_path: Path) -> None:
    """As figure 1 of Gao et al. 2022: rounds stand in the order of their KL divergence, not of training, and each score
    in its own model's standard deviations of what the model before was given."""
    folders = write_pipeline(tmp_path / "store")
    told = zip(range(5), (0, 2, 4, 1, 3), (0.0, 0.5, 1.0, 2.0, 1.5), strict=True)
    rows = [
        {"step": n, "time": n, "values": {"rlhf/reward": n, "rlhf/judge": judge, "rlhf/kl": kl}}
        for n, judge, kl in told
    ]
    path, samples = (folders["rlhf"] / "aux" / name for name in ("metrics.jsonl", "samples.jsonl"))
    scores = [
        {"rewards": {"sft": n % 2 * 4.0, "rlhf": 0.0}, "judge": {"sft": n % 2 * 2.0, "rlhf": 0.0}} for n in (0, 1)
    ]
    asked = [{"prompt": "Why?", "reference": "", "answers": {"sft": "A.", "rlhf": "B."}, **one} for one in scores]
    samples.write_text("".join(json.dumps(one) + "\n" for one in asked))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert "Reward over distance" not in render(ReportConfig(), folders)[0], "two points say nothing"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_figures(folders["rlhf"], stopped_early=1.0)
    page = render(ReportConfig(), folders)[0]
    text = Page(page).text
    assert "The judge's score is highest at 1.00 nats; the policy went to 2.00" in text
    assert "Training was stopped there" in text
    (chart,) = re.findall(r'<svg[^>]*aria-label="reward over distance".*?</svg>', page, re.DOTALL)
    drawn = re.findall(r"<title>(reward|judge): ([^ ]+) at ([^<]+)</title>", chart)
    found = {name: [(float(x), float(y.replace("−", "-"))) for of, y, x in drawn if of == name] for name, _, _ in drawn}
    assert found == {
        "reward": [(0, -1), (0.5, -0.5), (1, 0), (1.5, 1), (2, 0.5)],
        "judge": [(0, -1), (0.5, 1), (1, 3), (1.5, 2), (2, 0)],
    }
    lines = re.findall(r'<polyline class="line [^"]*" points="([^"]*)">', chart)
    across = [[float(point.split(",")[0]) for point in line.split()] for line in lines]
    assert len(across) == 2 and across[0] == across[1] == sorted(across[0])


def test_the_reward_model_s_length_and_confidence_are_told(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    sides = {"chosen_longer": (0.9, 0.85, 0.94), "chosen_shorter": (0.4, 0.3, 0.5)}
    figures = {
        f"heldout_accuracy_{side}{end}": value
        for side, values in sides.items()
        for end, value in zip(("", "_low", "_high"), values, strict=True)
    }
    with_figures(folders["reward_model"], **figures, calibration_error=0.08, mean_confidence=0.79)
    text = Page(render(ReportConfig(), folders)[0]).text
    assert "Where the better answer is the longer one it is right in 90.0 %" in text and ": it goes by length." in text
    assert "It claims to be right in 79.0 % of pairs (calibration error 8.0 %)." in text


@pytest.mark.parametrize("missing", list(INPUTS))
def test_any_stage_may_be_missing(missing: str, tmp_path: Path) -> None:
    assert Page(page_of(tmp_path, set(INPUTS) - {missing})).tags.count("body") == 1


@pytest.mark.parametrize("ids", [[], ["ingest"], ["pretrain"], ["sft"], ["safety_base", "pretrain"]])
def test_little_is_enough(ids: list[str], tmp_path: Path) -> None:
    assert Page(page_of(tmp_path, ids)).tags.count("body") == 1


def test_folders_without_manifests_are_enough(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    for folder in folders.values():
        (folder / "manifest.json").unlink()
    (tmp_path / "out").mkdir()
    report(ReportConfig(), folders, tmp_path / "out", Run(tmp_path / "work"))
    assert Page((tmp_path / "out/report.html").read_text()).tags.count("body") == 1


@pytest.mark.parametrize(
    ("ready", "tokens", "said"),
    [
        (2_870_000, 1_020_000, "It read 36 % of the 2.87M tokens that were ready. Chinchilla's rule"),
        (2_870_000, 1_020_000, "A longer training would improve it, without more text."),
        (510_000, 1_020_000, "It read all, 2.0 times, of the 510k tokens"),
        (102_000, 1_020_000, "More text would improve it."),
    ],
)
def test_more_text_is_advised_only_where_the_text_was_read(ready: int, tokens: int, said: str, tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    with_figures(folders["pretrain"], tokens=tokens)
    (folders["shard"] / "meta.json").write_text(json.dumps({"train_tokens": ready}))
    assert said in Page(render(ReportConfig(), folders)[0]).text


def test_samples_of_both_stages_are_joined_by_prompt(tmp_path: Path) -> None:
    rows = PipelineResults(write_pipeline(tmp_path / "store")).samples(3)
    assert [set(row["answers"]) for row in rows] == [{"base", "sft", "rlhf"}] * 3
    assert set(rows[0]["rewards"]) == {"sft", "rlhf"}


def test_corrections_in_flight_are_drawn_and_listed(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path, ["pretrain"])
    alarm = {"batch": 131, "first": 129, "cause": "gradient norm", "value": "inf", "usual": 0.9}
    made = {"alarm": alarm, "back_to": 100, "factor": 0.5, "skip_first": 127, "skip_end": 134, "attempt": 1}
    path = folders["pretrain"] / "aux" / "corrections.json"
    path.write_text(json.dumps([made, made | {"back_to": 60}]))
    html, _ = render(ReportConfig(), folders)
    page = Page(html)
    assert html.count('<line class="happened"') == 2
    assert "The guard lowered it twice" in page.text
    assert "gradient norm" in page.text and "127 to 133" in page.text and "inf" in page.text


def test_the_logbook_tells_of_faults_and_what_followed_in_their_order(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path, ["shard", "pretrain", "sft"])
    calm = [{"time": 5.0, "name": "nodes", "message": "training on n7"}]
    told = [
        {"time": 86400.0, "name": "nodes", "message": "training on n1, n2"},
        {"time": 86401.5, "name": "compiling", "message": "compiling the model"},
        {"time": 90000.0, "name": "restarted", "message": f"node n2 was lost {HOSTILE}"},
        {"time": 86402.0, "name": "node_excluded", "message": "node n3 is left out: clock"},
        {"time": 90007.0, "name": "continued", "message": "continuing pretrain at batch 40 of 90"},
    ]
    for id, events in (("sft", calm), ("pretrain", told), ("shard", [])):
        (folders[id] / "aux" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    html, _ = render(ReportConfig(), folders)
    text = Page(html).text
    assert "1 new start of all ranks, 1 node left out." in text and HOSTILE not in html
    places = [text.index(some) for some in ("training on n1", "n3 is left out", "n2 was lost", "at batch 40 of 90")]
    assert places == sorted(places) and "1970-01-02 00:00:02" in text
    assert "compiling the model" not in text and "training on n7" not in text, "nothing went wrong there"
    (folders["pretrain"] / "aux" / "events.jsonl").unlink()
    assert "Logbook" not in Page(render(ReportConfig(), folders)[0]).text


def test_conversations_that_end_with_the_same_words_are_told_apart(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    before = [[{"role": "user", "content": said}, {"role": "assistant", "content": "Well."}] for said in ("One", "Two")]
    for step, role in (("sft", "base"), ("rlhf", "rlhf")):
        lines = [
            {"prompt": "Go on.", "history": turns, "reference": "", "answers": {role: f"{role} of {number}"}}
            for number, turns in enumerate(before)
        ]
        path = folders[step] / "aux" / "samples.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf8")
    first, second = PipelineResults(folders).samples(3)
    assert first["prompt"] == "user: One\n\nassistant: Well.\n\nuser: Go on."
    for number, row in enumerate((first, second)):
        assert sorted(row["answers"].values()) == [f"base of {number}", f"rlhf of {number}"]


def test_samples_of_a_training_are_shown_as_text(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path, ["pretrain"])
    told = [{"batch": batch, "prompt": "", "text": f"{HOSTILE} {batch}"} for batch in range(0, 110, 10)]
    path = folders["pretrain"] / "aux" / "training_samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in told))
    html, _ = render(ReportConfig(), folders)
    page = Page(html)
    assert page.text.count(HOSTILE) == 6 and f"{HOSTILE} 100" in page.text


def test_of_a_step_told_twice_the_last_counts(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path, ["pretrain"])
    path = folders["pretrain"] / "aux" / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": 7, "values": {"train/loss": loss}}) + "\n" for loss in (9.0, 3.0)))
    assert PipelineResults(folders).curve("pretrain", "train/loss") == [(7.0, 3.0)]


def test_curves_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    rows = [{"step": 1, "values": {"train/loss": "nan"}}, {"step": 2, "values": {"train/loss": 2.0}}]
    (folders["sft"] / "aux/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert PipelineResults(folders).curve("sft", "train/loss") == [(2.0, 2.0)]


def test_the_same_prompt_is_shown_as_it_was_answered_at_points_of_the_training(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    samples = PipelineResults(folders).get("sft").read_lines("aux/samples.jsonl")  # type: ignore[union-attr]
    prompts = [line["prompt"] for line in samples[1:3]]
    points = {0: 5.1, 9: 4.2, 27: 3.9, 90: 3.4}
    lines = [
        {"batch": batch, "prompt": prompt, "text": f"{HOSTILE} {batch}", "loss": loss}
        for batch, loss in points.items()
        for prompt in prompts
    ]
    path = folders["sft"] / "aux/training_samples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = answers_over_training(PipelineResults(folders))
    (drawn,), shown = section.figures, section.samples
    assert [label for label, _ in drawn.legend] == prompts and "from 5.10 to 3.40" in drawn.means
    assert [row["prompt"] for row in shown] == prompts
    assert [(point["label"], point["score"]) for point in shown[0]["answers"][:4]] == [
        ("base model", "loss 5.10"),
        ("SFT model, batch 9", "loss 4.20"),
        ("SFT model, batch 27", "loss 3.90"),
        ("SFT model, batch 90", "loss 3.40"),
    ]
    (after,) = shown[0]["answers"][4:]
    assert after["label"].startswith("RLHF model") and after["score"].startswith("reward")
    page = render(ReportConfig(), folders)[0]
    assert "over-training" in Page(page).ids and HOSTILE not in page


def with_named_steps(root: Path) -> dict[str, Path]:
    """The pipeline with a second tuning, a second alignment of that one, its benchmarks, and a reward model."""
    folders = write_pipeline(root)
    copies = {
        "chat": ("sft", {"model": "pretrain"}),
        "gentle": ("rlhf", {"model": "chat"}),
        "benchmarks_of_gentle": ("benchmarks_rlhf", {"model": "gentle"}),
        "strict": ("reward_model", {"model": "chat"}),
    }
    for number, (step, (of, inputs)) in enumerate(copies.items()):
        manifest = Manifest.read(folders[of])
        address = f"{number:016x}"
        folder = folders[of].parent / address
        shutil.copytree(folders[of], folder)
        read = {name: Manifest.read(folders[up]).as_input() for name, up in inputs.items()}
        replace(
            manifest, step=step, fingerprint=address, digest=f"{number:064x}", inputs={**manifest.inputs, **read}
        ).write(folder)
        folders[step] = folder
    return folders


def test_named_steps_are_told_of_as_the_usual_ones_are(tmp_path: Path) -> None:
    folders = with_named_steps(tmp_path / "store")
    pipeline = PipelineResults(folders)
    assert pipeline.models == ["base", "sft", "rlhf", "chat", "gentle"]
    assert pipeline.first_and_last() == [("base", "rlhf"), ("base", "gentle")]
    assert pipeline.evaluation("benchmarks", "gentle") is pipeline.get("benchmarks_of_gentle")
    assert pipeline.evaluation("benchmarks", "chat") is None
    assert len({pipeline.style(model) for model in pipeline.models}) == 5
    assert {"base", "sft", "rlhf", "chat", "gentle"} == set(pipeline.samples(1)[0]["answers"])
    page = Page(render(ReportConfig(), folders)[0])
    assert {"tuning-chat", "alignment-gentle", "reward-model-strict"} < set(page.ids)
    titles = [claim.title for claim in claims(pipeline)]
    assert "PPO raised the reward by 0.62" in titles and "PPO raised the reward by 0.62 (gentle)" in titles
    assert len(titles) == len(set(titles)), "each claim names the model that it is about"


def test_the_card_tells_of_each_tuning_after_what_it_began_with(tmp_path: Path) -> None:
    """Even where the steps are called, and sorted, otherwise: here a model that was tuned twice."""
    folders = with_named_steps(tmp_path / "store")
    again = Manifest.read(folders["chat"])
    replace(again, inputs={**again.inputs, "model": Manifest.read(folders["sft"]).as_input()}).write(folders["chat"])
    model = read_artifacts({"model": folders["gentle"]})["model"]
    told = [one.label for one in ancestors(model) if one.stage in ("pretrain", "sft", "rlhf")]
    assert told == ["pretrain", "sft", "sft (chat)", "rlhf (gentle)"]


def test_a_branch_is_drawn_with_its_state_and_what_was_changed_there(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    before = Manifest.read(folders["pretrain"])
    config = {**before.config, "duration": "250 batches", "schedule": {"decay": "cosine", "warmup": "1 %"}}
    replace(before, config=config, identity={"duration": "250 batches"}).write(folders["pretrain"])
    write_states(folders["pretrain"], {100: "aa", 250: "bb"})
    shards = Manifest.read(folders["clean"]).as_input()
    for address, step, first, state in (("1" * 16, "longer", "pretrain", "aa"), ("2" * 16, "again", "longer", "cc")):
        folder = folders[step] = folders["pretrain"].parent / address
        shutil.copytree(folders["pretrain"], folder)
        changed = {**config, "duration": "400 batches", "schedule": {"decay": "wsd", "warmup": "1 %"}}
        replace(
            before,
            step=step,
            fingerprint=address,
            config=changed,
            identity={"duration": "400 batches", "schedule": {"decay": "wsd"}},
            inputs={**before.inputs, "shards": shards, "state": Manifest.read(folders[first]).as_input(state)},
        ).write(folder)
    artifacts = PipelineResults(folders).artifacts
    branch = artifacts["longer"].branch
    assert branch is not None and (branch.step, branch.batch) == ("pretrain", 100)
    assert [(one.key, one.before, one.after) for one in branch.changed or ()] == [
        ("duration", "250 batches", "400 batches"),
        ("schedule.decay", "cosine", "wsd"),
        ("inputs.shards", f"shard/{_address('shard')}", f"clean/{_address('clean')}"),
    ]
    assert artifacts["pretrain"].branch is None
    page = Page(render(ReportConfig(), folders)[0])
    assert "branches" in page.ids
    assert "longer continues from the state after 100 batches of pretrain" in page.text
    assert "again continues from a state of longer" in page.text, "whose states are not known"
    assert "learning rateas trained" in page.text
    edges = edges_of(artifacts)
    assert Edge("pretrain", "longer", state="the state after 100 batches of pretrain") in edges
    assert 'class="edge state"' in lineage_picture(artifacts)
