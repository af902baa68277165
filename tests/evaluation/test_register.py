"""A model is registered if every gate is kept; its card tells where it comes from and how it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import ModelCard

from evaluation.benchmarks import benchmark_figures
from evaluation.config import RegisterConfig
from evaluation.register import register, register_or_refuse
from evaluation.release.gates import Verdict, judge
from evaluation.results.artifacts import read_artifacts
from evaluation.results.comparison import paired_figures
from evaluation.statistics.intervals import difference_of_paired_proportions, wilson
from infra.errors import GateRefused, StageError
from infra.run import Run
from tests.evaluation.pipeline import write_pipeline


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """What the pipeline hands to register: the final model, the models before it, their evaluations."""
    folders = write_pipeline(tmp_path / "store")
    names = [
        "pretrain",
        "sft",
        "reward_model",
        *(f"{k}_{m}" for k in ("benchmarks", "safety") for m in ("base", "rlhf")),
    ]
    return {"model": folders["rlhf"], **{name: folders[name] for name in names}}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def config_of(*gates: dict) -> RegisterConfig:
    return RegisterConfig.model_validate({"name": "demo", "gates": gates})


def test_registration_names_model_digest_figures_and_verdicts(inputs: dict[str, Path], out: Path, run: Run) -> None:
    config = config_of(
        {"figure": "pretrain.validation_loss", "at_most": 5},
        {"figure": "rlhf.reward_gain_low", "at_least": 0},
        {"figure": "safety_rlhf.toxicity_probability", "at_most": 0.9},
    )
    result = register(config, inputs, out, run)
    record = json.loads((out / "registration.json").read_text())
    manifest = json.loads((inputs["model"] / "manifest.json").read_text())
    assert (record["name"], record["stage"], record["digest"]) == ("demo", "rlhf", manifest["digest"])
    assert [gate["passed"] for gate in record["gates"]] == [True, True, True]
    assert record["figures"]["reward_model.heldout_accuracy"] == 0.714
    assert result.headline == "demo, 3 gates kept"


def test_a_refusing_gate_names_figure_value_and_bound(inputs: dict[str, Path], out: Path, run: Run) -> None:
    config = config_of(
        {"figure": "pretrain.validation_loss", "at_most": 4},
        {"figure": "sft.improvement", "at_least": 1, "at_most": 2},
        {"figure": "reward_model.heldout_accuracy", "at_least": 0.8},
    )
    with pytest.raises(GateRefused) as refused:
        register_or_refuse(config, inputs, out, run)
    messages = [problem.message for problem in refused.value.problems]
    assert messages == [
        "pretrain.validation_loss is 4.312, expected at most 4",
        "reward_model.heldout_accuracy is 0.714, expected at least 0.8",
    ]
    record = json.loads((out / "registration.json").read_text())
    assert refused.value.exit_code == 3 and record["status"] == "rejected"
    assert [reason["message"] for reason in record["reasons"]] == messages
    assert "It broke 2 of 3 gates and is recorded as rejected." in (out / "MODEL_CARD.md").read_text()


def test_a_gate_on_an_unknown_figure_names_the_nearest(inputs: dict[str, Path], out: Path, run: Run) -> None:
    config = config_of({"figure": "safety_rlhf.toxicity_probabilty", "at_most": 1}, {"figure": "zzz.qqq", "at_most": 1})
    with pytest.raises(StageError) as error:
        register(config, inputs, out, run)
    first, second = error.value.problems
    assert first.path == "register.gates.0.figure" and first.fix == "did you mean safety_rlhf.toxicity_probability?"
    assert "zzz.qqq" in second.message


class TestAgainstThePromotedModel:
    """Gates on what a figure is more than that of the model that is promoted."""

    CLOZE: ClassVar = {"figure": "benchmarks_rlhf.cloze_accuracy", "at_least": 0.0, "against": "promoted"}

    @pytest.fixture
    def promoted(self, tmp_path: Path, run: Run) -> Path:
        """The registration of another pipeline, of the same steps."""
        folders = write_pipeline(tmp_path / "promoted", seed=3)
        evaluated = {name: folders[name] for name in ("benchmarks_rlhf", "safety_rlhf")}
        register(config_of(), {"model": folders["rlhf"], **evaluated}, folders["register"], run)
        return folders["register"]

    def judged(self, inputs: dict[str, Path], out: Path, run: Run, *gates: dict) -> list[dict]:
        register(config_of(*gates), inputs, out, run)
        record = json.loads((out / "registration.json").read_text())
        found: list[dict] = record["gates"]
        assert (record["status"] == "rejected") is not all(gate["passed"] for gate in found)
        return found

    def answer(self, folder: Path, right: Callable[[int], bool], metric: str = "acc") -> None:
        """Has the model answer the items of `cloze` right of which `right` says so, by the metric to read."""
        samples = folder / "aux/samples_cloze.jsonl"
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        rows = [{**row, metric: float(right(row["doc_id"]))} for row in rows]
        samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
        manifest = json.loads((folder / "manifest.json").read_text())
        interval = wilson(int(sum(row[metric] for row in rows)), len(rows))
        results = json.loads((folder / "results.json").read_text())
        results["tasks"]["cloze"][metric] = {**results["tasks"]["cloze"]["acc"], **interval.as_json()}
        results["headlines"] = {"cloze": metric}
        (folder / "results.json").write_text(json.dumps(results))
        manifest["result"]["figures"] |= benchmark_figures(results)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    @pytest.mark.parametrize(("metric", "figure"), [("acc", "cloze_accuracy"), ("acc_norm", "cloze_score")])
    def test_over_the_same_items(
        self, inputs: dict[str, Path], promoted: Path, out: Path, run: Run, tmp_path: Path, metric: str, figure: str
    ) -> None:
        """180 of 360 right before; 150 of them and 12 others now: Newcombe's interval of -18/360 from the counts."""
        manifest = json.loads((promoted / "manifest.json").read_text())
        theirs = {name: tmp_path / "promoted" / one["path"] for name, one in manifest["inputs"].items()}
        self.answer(theirs["benchmarks_rlhf"], lambda item: item < 180, metric)
        register(config_of(), theirs, promoted, run)
        self.answer(inputs["benchmarks_rlhf"], lambda item: item < 150 or 180 <= item < 192, metric)
        gate = {**self.CLOZE, "figure": f"benchmarks_rlhf.{figure}"}
        gates = [gate, {**gate, "at_least": -0.1, "shown": "kept"}, {**gate, "at_least": -0.03}]
        found = self.judged({**inputs, "promoted": promoted}, out, run, *gates)
        expected = difference_of_paired_proportions(150, 12, 30, 168)
        difference = found[0]["difference"]
        assert difference["by"] == "items" and difference["promoted"] == 0.5
        assert (difference["value"], difference["low"], difference["high"]) == pytest.approx(
            (expected.value, expected.low, expected.high), abs=1e-6
        )
        assert [gate["passed"] for gate in found] == [False, True, True], "shown worse; shown within 0.1; not shown"
        card = (out / "MODEL_CARD.md").read_text()
        assert "-0.05 (" in card and f"more than 0.5 of register/{promoted.name}; expected at least 0 more" in card
        assert [of.metric_value for of in ModelCard(card).data.eval_results if of.dataset_name == "cloze"] == [0.45]
        before, now = (read_artifacts({"b": side["benchmarks_rlhf"]})["b"] for side in (theirs, inputs))
        compared = {pair.figure: pair.difference.value for pair in paired_figures(before, now)}
        name = "cloze accuracy per character" if metric == "acc_norm" else "cloze accuracy"
        assert compared[name] == pytest.approx(-0.05), "compare and promote read the metric that the report shows"

    def test_without_the_same_items_by_both_intervals(
        self, inputs: dict[str, Path], promoted: Path, out: Path, run: Run
    ) -> None:
        """Both have 0.62 (0.31 to 0.94); the interval of a difference by Zou & Donner (2008)."""
        gate = {"figure": "rlhf.reward_gain", "at_least": -0.1, "against": "promoted"}
        broken, kept = self.judged({**inputs, "promoted": promoted}, out, run, gate, {**gate, "shown": "kept"})
        difference = broken["difference"]
        assert difference["by"] == "intervals" and difference["value"] == 0
        low, high = (0.62 - 0.31) ** 2, (0.94 - 0.62) ** 2
        assert difference["low"] == pytest.approx(-((low + high) ** 0.5), abs=1e-6)
        assert (broken["passed"], kept["passed"]) == (True, False)

    def test_nothing_to_compare_with(self, inputs: dict[str, Path], promoted: Path, out: Path, run: Run) -> None:
        kept = {**self.CLOZE, "shown": "kept"}
        assert [gate["passed"] for gate in self.judged(inputs, out, run, self.CLOZE, kept)] == [True, True]
        unknown = {**kept, "figure": "pretrain.validation_loss"}  # which the promoted model was registered without
        found = self.judged({**inputs, "promoted": promoted}, out, run, {**unknown, "shown": "broken"}, unknown)
        assert [(gate["passed"], gate["difference"]) for gate in found] == [(True, None), (False, None)]

    def test_a_gate_says_against_what_it_is_shown(self) -> None:
        with pytest.raises(ValueError, match="`shown` is for gates with `against: promoted`"):
            config_of({"figure": "a.b", "at_least": 0, "shown": "kept"})


@pytest.mark.parametrize(
    ("value", "bounds", "passed"),
    [
        (1.0, {"at_least": 1}, True),
        (1.0, {"at_most": 1}, True),
        (0.99, {"at_least": 1}, False),
        (1.01, {"at_most": 1}, False),
        (float("nan"), {"at_most": 1}, False),
    ],
)
def test_bounds_hold_at_their_edge_and_nan_holds_none(value: float, bounds: dict, passed: bool) -> None:
    gate = config_of({"figure": "a.b", **bounds}).gates[0]
    assert Verdict(gate, value).passed is passed
    assert judge([gate], {"a.b": value})[0].passed is passed


def test_the_card_walks_back_to_sources_that_are_no_direct_inputs(inputs: dict[str, Path], out: Path, run: Run) -> None:
    register(config_of(), inputs, out, run)
    card = (out / "MODEL_CARD.md").read_text()
    titles = [line[3:] for line in card.splitlines() if line.startswith("## ")]
    assert titles == [
        "Use", "Data", "Results", "Limits", "Samples", "Where it comes from", "Settings",
    ]  # fmt: skip
    assert "Sources of ingest: `ingest.read.0`" in card and "kept 10,412 of 11,873 documents" in card
    assert "| prompts with a toxic continuation |" in card and "2026" not in card
    assert "| | base model | SFT model | RLHF model |" in card


def test_the_cards_front_matter_is_what_the_hub_reads(inputs: dict[str, Path], out: Path, run: Run) -> None:
    register(RegisterConfig(name="demo", licence="Our own"), inputs, out, run)
    data = ModelCard.load(out / "MODEL_CARD.md").data
    assert (data.license, data.license_name, data.pipeline_tag) == ("other", "Our own", "text-generation")
    assert data.eval_results is not None
    assert {one.dataset_name for one in data.eval_results} == {"cloze", "minimal_pairs"}


def test_the_card_says_of_data_rules_and_probes_what_they_were(inputs: dict[str, Path], out: Path, run: Run) -> None:
    store = inputs["model"].parent.parent
    clean, safety = next((store / "clean").iterdir()), inputs["safety_rlhf"]
    sources = {"books": {"licence": "CC0-1.0", "language": "de", "weight": 1.0, "documents": 9, "bytes": 4_000_000}}
    (clean / "sources.json").write_text(json.dumps(sources))
    for folder, config in ((clean, {"toxicity": {}, "personal_data": None}), (safety, {"bias": {"pairs": "own.csv"}})):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "config": config}))
    register(config_of(), inputs, out, run)
    card = (out / "MODEL_CARD.md").read_text()
    assert "| books | de | CC0-1.0 | 9 | 4.0 MB |" in card and "No licence is stated" not in card
    assert "toxic text was filtered by a classifier; personal data was not looked for" in card
    assert "that of the pipeline's own files" in card and "English" not in card


def test_the_cards_code_runs_on_the_model(
    model_dir: Path, out: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(config_of(), {"model": model_dir}, out, run)
    code = (out / "MODEL_CARD.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(model_dir)
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_same_family_gives_the_same_bytes(inputs: dict[str, Path], tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        register(config_of(), inputs, tmp_path / name, Run(tmp_path / f"{name}.work"))
        texts.append([path.read_bytes() for path in sorted((tmp_path / name).iterdir())])
    assert texts[0] == texts[1]


def test_a_model_folder_alone_can_be_registered(model_dir: Path, out: Path, run: Run) -> None:
    register(config_of(), {"model": model_dir}, out, run)
    assert "2 layers of width 32" in (out / "MODEL_CARD.md").read_text()
    assert json.loads((out / "registration.json").read_text())["digest"] is None
