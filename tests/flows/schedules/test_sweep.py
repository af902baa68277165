"""`stemma sweep`: every trial runs once, shares what it can, and is told of, whatever was killed meanwhile."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from evaluation.pages.sweep_page import sweep_page
from flows.config.architecture import architecture_of
from flows.config.carried import FILE
from flows.config.graph import graph
from flows.config.read import load
from flows.runs.trials import Trial, Trials
from flows.sweeps.definition import Sweep, Wishes, define, more_is_better
from flows.sweeps.law import check, law_of
from flows.sweeps.results import summary
from flows.sweeps.sampling import Drawn, chooser
from flows.sweeps.space import Choices, Range, read_ablation, read_space
from infra.errors import ConfigError
from tests.infra.lineage.relay_process import RelayProcess
from tests.support.pipelines import data_config
from tests.support.programs.command import start, stemma, write_config
from tests.support.programs.processes import wait_until
from training.planner.laws.scaling_laws import find_law

RATE = "pretrain.optimizer.learning_rate"
BATCH = "pretrain.global_batch_tokens"


def tiny(folder: Path) -> Path:
    """The config of a training that takes seconds, from one small file of text."""
    config = {key: value for key, value in data_config(folder).items() if key not in ("validate", "clean")}
    pretrain = {
        "model": {"preset": "llama-nano"},
        "duration": "6 batches",
        "global_batch_tokens": 64,
        "evaluate_every": "2 batches",
    }
    return write_config(folder / "config.yaml", config | {"shard": {"sequence_length": 32}, "pretrain": pretrain})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sweep"))


def wishes(config: Path, *keys: str, **options: Any) -> Wishes:
    return Wishes(config, {}, read_space(keys), options.pop("ablations", {}), **options)


def problems(config: Path, *keys: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        define(wishes(config, *keys, **options))
    return list(map(str, caught.value.problems))


def test_values_and_ranges_are_read() -> None:
    assert read_space(("a.b=1e-4,3", "c=[0.9,0.95],[0.8,0.9]", "d=1e-4..1e-2@log", "e=1..8", "f=on,off")) == {
        "a.b": Choices((1e-4, 3)),
        "c": Choices(([0.9, 0.95], [0.8, 0.9])),
        "d": Range(1e-4, 1e-2, True, False),
        "e": Range(1, 8, False, True),
        "f": Choices(("on", "off")),
    }
    assert read_ablation("short: a.b='6 batches' c=1e-3") == ("short", {"a.b": "6 batches", "c": 1e-3})
    with pytest.raises(ConfigError) as caught:
        read_space(("a", "b=3..1", "c=0..1@log", "d=1,1"))
    assert len(caught.value.problems) == 4


def test_what_is_wrong_is_said_before_anything_is_spent(config: Path, tmp_path: Path) -> None:
    assert "did you mean learning_rate?" in problems(config, "pretrain.optimizer.learning_rat=1e-4,3e-4")[0]
    assert len(problems(config, f"{RATE}=-1,0,1e-3")) == 2
    assert "it sets where to run" in problems(config, "launch.threads=1,2", f"{RATE}=1e-3,2e-3")[0]
    assert "no stage changes" in problems(config, "pretrain.checkpoint_every=3 batches,4 batches")[0]
    assert "only changes pretrain" in problems(config, f"{RATE}=1e-3,2e-3", measure="tokenizer.vocab_size")[0]
    assert "expected the number of settings" in problems(config, f"{RATE}=1e-4..1e-2")[0]
    assert "at least two" in problems(config, ablations={"fast": {RATE: 1e-2}})[0]
    assert "has no effect" in problems(config, ablations={"a": {"launch.threads": 2}}, seeds=2)[0]
    answer = stemma("sweep", config, "--key", "launch.threads=1,2", "--root", tmp_path / "store")
    assert (answer.code, answer.document["status"]) == (2, "invalid")
    assert not (tmp_path / "store").exists()


def test_a_key_that_matters_beside_another_alone_is_swept(config: Path) -> None:
    """wsd's fall is no part of the identity under cosine at its default, and both are swept."""
    sweep = define(wishes(config, "pretrain.schedule.decay=cosine,wsd", "pretrain.schedule.decay_length=10 %,20 %"))
    assert len(sweep.arms) == 4


@pytest.mark.long
def test_a_killed_sweep_goes_on_and_shares_what_it_can(config: Path, env: dict[str, str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ("sweep", config, "--key", f"{RATE}=1e-3,1e-2", "--seeds", "2", "--at-once", "2", "--root", store)
    process = start(*command, env=env)
    wait_until(lambda: any(trial["status"] == "done" for trial in _saved(store)), 300)
    process.kill()
    finish_quietly(process)
    before = {trial["number"]: trial for trial in _saved(store) if trial["status"] == "done"}
    assert 0 < len(before) < 4

    answer = stemma(*command, env=env)

    assert (answer.code, answer.document["status"]) == (0, "done"), answer.document["errors"]
    trials = answer.document["trials"]
    assert [(trial["settings"][RATE], trial["seed"]) for trial in trials] == [
        (rate, seed) for seed in (17, 18) for rate in (1e-3, 1e-2)
    ]
    for number, trial in before.items():
        assert trials[number]["run_id"] == trial["run_id"], "a trial that had ended was run again"
    runs = [json.loads((store / "runs" / trial["run_id"] / "result.json").read_text()) for trial in trials]
    digests = [{row["stage"]: row["digest"] for row in run["stages"]} for run in runs]
    assert len({one["shard"] for one in digests}) == len({one["tokenizer"] for one in digests}) == 1
    assert len({one["pretrain"] for one in digests}) == 4
    built = {name: len([*(store / name).iterdir()]) for name in ("tokenizer", "shard", "pretrain")}
    assert built == {"tokenizer": 1, "shard": 1, "pretrain": 4}, "tokenised, or trained, more than once"
    best = min(answer.document["settings"], key=lambda row: row["mean"])
    assert answer.document["best"]["settings"] == best["settings"]
    assert trials[0]["figures"]["pretrain.validation_loss"] == trials[0]["value"]
    taken = load(config, {RATE: f"from sweep {Path(answer.document['page']).parent}"})
    assert taken.pretrain.optimizer.learning_rate == best["settings"][RATE]  # type: ignore[attr-defined]
    page = Path(answer.document["page"]).read_text()
    assert "Leaderboard" in page and page.count("<polyline") >= 4 + 2
    assert RelayProcess(store, "--until-empty").process.wait() == 0
    once = [(f"trial {number}", "FINISHED", "sweep") for number in range(4)]
    assert _trials_in_mlflow(store) == once

    # As if the last trial had been killed between its end, as MLflow has it, and its result.
    (store / "runs" / trials[3]["run_id"] / "result.json").unlink()
    (kept,) = store.glob("sweeps/*/trials/0003.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "status": "running", "value": None}))
    again = stemma(*command, env=env).document["trials"]
    assert [trial["run_id"] for trial in again] == [trial["run_id"] for trial in trials]
    assert RelayProcess(store, "--until-empty").process.wait() == 0
    assert _trials_in_mlflow(store) == once


def _trials_in_mlflow(store: Path) -> list[tuple[str, str, str]]:
    """Of each trial's run its name, status, and the beginning of its parent run's name."""
    query = (
        "SELECT run.name, run.status, parent.name FROM runs run JOIN tags ON tags.run_uuid = run.run_uuid AND "
        "tags.key = 'mlflow.parentRunId' JOIN runs parent ON parent.run_uuid = tags.value WHERE run.name LIKE 'trial %'"
    )
    with closing(sqlite3.connect(store / "mlflow" / "mlflow.db")) as database:
        found = database.execute(query).fetchall()
    return sorted((name.split(":")[0], status, parent.split()[0]) for name, status, parent in found)


def finish_quietly(process: Any) -> None:
    process.communicate(timeout=60)


def _saved(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(store.glob("sweeps/*/trials/[0-9]*.json"))]


def ended(trial: Trial, value: float, **figures: float) -> Trial:
    figures = {"pretrain.validation_loss": value, **{f"pretrain.{name}": one for name, one in figures.items()}}
    return Trial(**{**vars(trial.begun("run")), "status": "done", "value": value, "figures": figures})


def loss(settings: Mapping[str, Any]) -> float:
    """Least at a rate of 1e-3; the seed of the data order hardly matters."""
    return 2 + math.log10(settings[RATE] / 1e-3) ** 2 + 1e-3 * settings.get("pretrain.optimizer.eps", 0)


def drawn(config: Path, **options: Any) -> Sweep:
    return define(wishes(config, f"{RATE}=1e-5..1e-1@log", **{"sampler": "tpe", **options}))


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_optuna_drew_is_run_once_though_the_sweep_is_killed_at_every_step(
    config: Path, tmp_path: Path, sampler: str
) -> None:
    sweep = drawn(config, trials=12, seeds=2, sampler=sampler)
    trials = Trials(tmp_path, sweep.id)
    trials.create()
    told: list[tuple[int, float]] = []
    while True:
        choose = chooser(sweep, trials)  # as after a kill: only the disk is known
        trial = choose.next()
        if trial is None:
            break
        again = chooser(sweep, trials).next()
        assert again == trial, "settings that were drawn and not run were lost"
        trials.save(trial.begun("cut off"))
        trial = chooser(sweep, trials).next()
        assert trial is not None and trial.run_id == "cut off"
        result = ended(trial, loss(trial.settings))
        trials.save(result)
        told.append((trial.number, trial.settings[RATE]))
        if trial.number % 3:  # else it is killed before Optuna hears of it
            choose = chooser(sweep, trials)
            choose.ended(result)
    assert [number for number, _ in told] == list(range(24))
    assert len({rate for _, rate in told}) == 12
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(trials.folder / "optuna.log")))
    study = optuna.load_study(study_name=sweep.id, storage=storage)
    assert [one.state.name for one in study.get_trials()] == ["COMPLETE"] * 12
    assert [one.value for one in study.get_trials()] == pytest.approx([loss({RATE: rate}) for _, rate in told[::2]])


def test_a_line_of_optunas_log_that_a_full_disk_cut_short_is_in_nobodys_way(config: Path, tmp_path: Path) -> None:
    sweep = drawn(config, trials=4, sampler="random")
    trials = Trials(tmp_path, sweep.id)
    trials.create()
    rates = []
    while (trial := (choose := chooser(sweep, trials)).next()) is not None:
        trials.save(result := ended(trial, loss(trial.settings)))
        choose.ended(result)
        rates.append(trial.settings[RATE])
        with open(trials.folder / "optuna.log", "ab") as log:
            log.write(b'{"op_code":4,"worker_id":"a')
    assert len(set(rates)) == len(rates) == 4


def test_a_trial_whose_validation_is_poor_is_pruned(config: Path, tmp_path: Path) -> None:
    sweep = drawn(config, trials=8, pruner="median")
    trials = Trials(tmp_path, sweep.id)
    trials.create()
    choose = chooser(sweep, trials)
    for _ in range(4):
        trial = choose.next()
        assert trial is not None
        assert not choose.prunes(trial, [(2, 3.0), (4, 2.5)])
        trials.save(result := ended(trial, 2.4))
        choose.ended(result)
    poor, good = choose.next(), choose.next()
    assert poor is not None and good is not None
    assert choose.prunes(poor, [(2, 4.0)])
    assert not choose.prunes(good, [(2, 2.0)])


def test_hyperband_gives_up_poor_settings_and_keeps_the_best(config: Path, tmp_path: Path) -> None:
    """Trials one after another whose validation is seen at six steps; the poorer the rate, the higher all of it."""
    sweep = drawn(config, trials=40, pruner="hyperband")
    trials = Trials(tmp_path, sweep.id)
    trials.create()
    choose, steps = chooser(sweep, trials), [3**power for power in range(6)]
    seen: list[tuple[float, bool]] = []
    while (trial := choose.next()) is not None:
        curve = [(step, loss(trial.settings) + 2 / (1 + step)) for step in steps]
        cut = any(choose.prunes(trial, curve[: place + 1]) for place in range(len(steps)))
        of = ended(trial, curve[-1][1])
        trials.save(of := replace(of, status="pruned", value=None) if cut else of)
        choose.ended(of)
        seen.append((loss(trial.settings), cut))
    assert len(seen) == 40 and sum(cut for _, cut in seen) >= 5
    assert not min(seen)[1], "the best was given up"
    for place, (poor, cut) in enumerate(seen):
        assert not cut or min(better for better, _ in seen[:place]) < poor


def test_ablations_are_paired_by_seed_with_students_interval(config: Path) -> None:
    ablations = {"fast": {RATE: 1e-2}, "no decay": {"pretrain.optimizer.weight_decay": 0}}
    sweep = define(wishes(config, ablations=ablations, seeds=3))
    of = {"base": (2.0, 2.2, 2.1), "fast": (2.31, 2.49, 2.42), "no decay": (2.01, 2.19, 2.1)}
    trials = [
        ended(
            Trial(3 * place + number, place, sweep.arms[place].settings, seed, name),
            of[name][number],
            tokens_per_s=100 + seed,
        )
        for place, name in enumerate(of)
        for number, seed in enumerate(sweep.seeds)
    ]
    document = summary(sweep, trials, False)
    rows = {(row["name"], row["figure"]): row for row in document["ablations"]}
    fast = rows["fast", "pretrain.validation_loss"]
    reference = ttest_rel(of["fast"], of["base"]).confidence_interval(0.95)
    assert (fast["low"], fast["high"]) == pytest.approx((reference.low, reference.high))
    assert fast["difference"] == pytest.approx(0.30667, abs=1e-4) and fast["shown"]
    assert not rows["no decay", "pretrain.validation_loss"]["shown"]
    assert document["best"]["name"] in ("base", "no decay")
    assert "more than chance" in sweep_page("tiny", document, {})


def test_ablations_of_one_name_are_refused(config: Path, tmp_path: Path) -> None:
    """The later one was taken in the place of the first, without a word."""
    (tmp_path / "more.yaml").write_text("wide: {pretrain.model.width: 64}\n")
    words = ["--ablate", f"fast: {RATE}=1e-2", "--seeds", 2, "--root", tmp_path / "store"]
    of_file = ["--ablate", "wide: a.b=1", "--ablations", tmp_path / "more.yaml"]
    for more in (["--ablate", f"fast: {RATE}=2e-2"], of_file):
        answer = stemma("sweep", config, *words, *more)
        assert (answer.code, answer.document["errors"][0]["message"]) == (2, "the name is given twice")
    with pytest.raises(ConfigError, match=r"the key a\.b is given twice"):
        read_ablation("x: a.b=1 a.b=2")


def test_importance_finds_the_key_that_matters(config: Path) -> None:
    eps = "pretrain.optimizer.eps"
    sweep = define(wishes(config, f"{RATE}=1e-4,1e-3,1e-2", f"{eps}=1e-8,1e-7,1e-6"))
    trials = [
        ended(Trial(number, number, arm.settings, 17), loss(arm.settings)) for number, arm in enumerate(sweep.arms)
    ]
    document = summary(sweep, trials, False)
    assert document["importance"][RATE] > 0.9
    assert document["best"]["settings"][RATE] == 1e-3
    page = sweep_page("tiny", document, {})
    assert "Parallel coordinates" in page and "Importance of the keys" in page


def test_a_law_is_refused_before_anything_is_spent_where_it_cannot_come(config: Path) -> None:
    few = define(wishes(config, "pretrain.duration=6 batches,12 batches"))
    with pytest.raises(ConfigError, match="too few"):
        check(few)
    other = define(wishes(config, f"{RATE}=1e-3,2e-3", measure="pretrain.unigram_loss"))
    with pytest.raises(ConfigError, match="validation_loss"):
        check(other)


def test_a_law_of_trials_predicts_the_largest_and_is_a_file_for_plan(config: Path, tmp_path: Path) -> None:
    sweep = define(wishes(config, "pretrain.duration=6 batches,12 batches"))
    trials = []
    for number, (size, length) in enumerate((n, d) for n in (1e5, 2e5, 4e5) for d in (1e6, 2e6, 4e6)):
        of = ended(Trial(number, number, {}, 17), 2 + 60 / size**0.4 + 90 / length**0.4, parameters=size, tokens=length)
        trials.append(of)
    found = law_of(sweep, trials, tmp_path)
    assert found["held_out"]["parameters"] == 4e5 and abs(found["held_out"]["miss"]) < 1e-3
    assert find_law(str(tmp_path / "law.json")).loss(4e5, 4e6) == pytest.approx(trials[-1].value, rel=1e-3)
    page = sweep_page("tiny", {**summary(sweep, trials, False), "law": found}, {})
    assert "one line per size" in page and "a miss of" in page
    # 1e5 · 4e6 = 2e5 · 2e6 = 4e5 · 1e6: three sizes at one budget.
    (budget,) = found["isoflop"]["budgets"]
    assert budget["flops"] == pytest.approx(2.4e12) and len(budget["points"]) == 3
    assert "IsoFLOP" in page and "2.4e+12 FLOPs" in page


@pytest.mark.long
def test_a_poor_trial_of_a_real_sweep_is_pruned_and_the_figures_say_so(env: dict[str, str], tmp_path: Path) -> None:
    """Three settings that were drawn before the sweep was killed, two that learn and one that hardly does. The risk: a
    trial that was given up is trained to its end, is run again, or counts as one that failed.
    """
    config, store = tiny(tmp_path), tmp_path / "store"
    settings = {"pretrain.duration": "150 batches", "pretrain.evaluate_every": "10 batches"}
    options = {"sampler": "tpe", "pruner": "median", "trials": 3}
    sweep = define(Wishes(config, settings, read_space((f"{RATE}=1e-9..1e-1@log",)), {}, **options))  # type: ignore[arg-type]
    trials = Trials(store, sweep.id)
    trials.create()
    study = Drawn(sweep, trials).study
    for rate in (1e-2, 5e-3, 1e-9):
        study.enqueue_trial({RATE: rate})
        study.ask().suggest_float(RATE, 1e-9, 1e-1, log=True)

    command: list[Any] = ["sweep", config, "--key", f"{RATE}=1e-9..1e-1@log", "--trials", "3", "--pruner", "median"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    answer = stemma(*command, "--root", store, env=env)

    assert answer.document["status"] == "done", answer.document["errors"]
    found = answer.document["trials"]
    assert [(one["settings"][RATE], one["status"]) for one in found] == [
        (pytest.approx(1e-2), "done"),
        (pytest.approx(5e-3), "done"),
        (pytest.approx(1e-9), "pruned"),
    ]
    assert found[2]["value"] is None and answer.document["best"]["settings"][RATE] > 1e-3
    assert len([*(store / "pretrain").iterdir()]) == 2, "the poor one was trained to its end"
    assert "2 done, 1 pruned" in Path(answer.document["page"]).read_text()
    told = trials.all()[2]
    assert stemma(*command, "--root", store, env=env).document["trials"] == found, "what was pruned stays so"
    assert trials.all()[2] == told


@pytest.mark.long
def test_sixteen_trials_killed_twice_end_complete(tmp_path: Path, env: dict[str, str]) -> None:
    """Risk: a trial is lost or run twice when the sweep, its ranks or Optuna's storage are killed at any moment."""
    config, store = tiny(tmp_path), tmp_path / "store"
    command = ("sweep", config, "--key", f"{RATE}=1e-5..1e-1@log", "--trials", "16", "--pruner", "median")
    command = (*command, "--at-once", "2", "--root", store)
    for enough in (4, 9):
        process = start(*command, env=env)
        wait_until(lambda enough=enough: sum(one["status"] != "running" for one in _saved(store)) >= enough, 300)
        process.kill()
        finish_quietly(process)
    answer = stemma(*command, env=env, timeout_s=560)
    assert answer.document["status"] == "done", answer.document["errors"]
    trials = answer.document["trials"]
    assert [trial["number"] for trial in trials] == list(range(16))
    assert {trial["status"] for trial in trials} <= {"done", "pruned"}
    assert len({trial["run_id"] for trial in trials}) == 16
    assert len([*(store / "shard").iterdir()]) == 1
    reused = stemma(*command, env=env)
    assert reused.document["trials"] == trials


def found_rates(folder: Path, computes: tuple[float, ...]) -> None:
    """A finished sweep whose best rate is 2e-3 · (compute / 1e9)^-0.25 at each size, exactly."""

    def tried(compute: float) -> dict[float, float]:
        best = 2e-3 * (compute / 1e9) ** -0.25
        return {rate: 3 + math.log(rate / best) ** 2 for rate in (best / 3, best / 1.2, best * 2)}

    found_sweep(folder, RATE, {compute: tried(compute) for compute in computes})


def found_sweep(folder: Path, key: str, tried: Mapping[float, Mapping[Any, float]]) -> None:
    """A finished sweep: of each amount of compute the values of a key that were tried, with what they came to."""
    runs = []
    for size, (compute, values) in enumerate(tried.items()):
        for setting, value in values.items():
            settings = {key: setting, "pretrain.model.width": 16 * (size + 1)}
            runs.append({"settings": settings, "value": value, "parameters": compute / 6e5, "tokens": 1e5})
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps({"sweep": folder.name, "measure": "m", "maximise": False, "runs": runs}))


def test_a_batch_that_follows_compute_holds_whole_sequences(config: Path, tmp_path: Path) -> None:
    """The best batch is 2,560 tokens at 1e9 FLOPs and twice that at four times the compute."""

    def tried(compute: float) -> dict[int, float]:
        best = 2560 * (compute / 1e9) ** 0.5
        return {tokens: math.log(tokens / best) ** 2 for tokens in (1024, 2048, 4096, 8192, 16384)}

    found_sweep(tmp_path / "many", BATCH, {compute: tried(compute) for compute in (1e9, 2e9, 4e9)})
    pipeline = load(config, {BATCH: f"from sweep {tmp_path / 'many'}", "pretrain.duration": "100000 tokens"})
    shape = architecture_of(graph(pipeline), "pretrain")
    expected = 2560 * (6 * shape.parameters * 1e5 / 1e9) ** 0.5  # type: ignore[union-attr]
    found = pipeline.pretrain.global_batch_tokens  # type: ignore[attr-defined]
    assert (found % 1024, abs(found - expected) <= 512) == (0, True), (found, expected)


def test_the_id_of_a_sweep_is_looked_for_in_the_store_that_was_named(config: Path, tmp_path: Path) -> None:
    """It was looked for in the default one."""
    found_rates(tmp_path / "store" / "sweeps" / "73cc55af5137", (1e9,))
    settings = {RATE: "from sweep 73cc55af5137"}
    rate = load(config, settings, lambda: tmp_path / "store").pretrain.optimizer.learning_rate  # type: ignore[attr-defined]
    assert rate == pytest.approx(2e-3 / 1.2)
    answer = stemma("check", config, "--set", f"{RATE}={settings[RATE]}", "--root", tmp_path / "store")
    assert answer.document["errors"] == []


@pytest.mark.parametrize(
    ("figure", "more"),
    [
        ("validation_loss", False), ("heldout_accuracy", True), ("reward_gain", True), ("tokens_per_s", True),
        # Of these the worst was told as the best.
        ("improvement", True), ("ends_share_sft", True), ("heldout_judge_rlhf", True), ("prefers_chosen_policy", True),
        ("gsm8k_exact_match", True), ("squad_f1", True), ("accounting_bits_per_byte", False), ("brier", False),
        ("stereotype_score", False), ("reward_models_apart_rlhf", False), ("negation_failure_rate", False),
        ("bytes_per_token", True), ("honest_score", False), ("stereoset_icat", True), ("stereoset_lms", True),
    ],
)  # fmt: skip
def test_whether_more_is_better_follows_from_the_figure(figure: str, more: bool) -> None:
    assert more_is_better(figure) is more


def test_a_value_that_is_a_list_is_taken_over(config: Path, tmp_path: Path) -> None:
    """It ended in a TypeError: no key of a dict."""
    betas = "pretrain.optimizer.betas"
    runs = [
        {"settings": {betas: [0.9, second]}, "value": value, "parameters": 1e6, "tokens": 1e5}
        for second, value in ((0.95, 3.2), (0.98, 3.1), (0.99, 3.3))
    ]
    (tmp_path / "lists").mkdir()
    told = {"sweep": "lists", "measure": "m", "maximise": False, "runs": runs}
    (tmp_path / "lists" / FILE).write_text(json.dumps(told))
    pipeline = load(config, {betas: f"from sweep {tmp_path / 'lists'}"})
    assert list(pipeline.pretrain.optimizer.betas) == [0.9, 0.98]  # type: ignore[attr-defined]


def test_a_config_takes_over_what_a_sweep_found_and_follows_compute(config: Path, tmp_path: Path) -> None:
    asked = {RATE: f"from sweep {tmp_path / 'one'}"}
    found_rates(tmp_path / "one", (1e9,))
    rate = load(config, asked).pretrain.optimizer.learning_rate  # type: ignore[attr-defined]
    assert rate == pytest.approx(2e-3 / 1.2), "of one size the best that was tried"
    found_rates(tmp_path / "many", (1e9, 2e9, 5e9, 2e10))
    for tokens in (64_000, 6_400_000):
        settings = {RATE: f"from sweep {tmp_path / 'many'}", "pretrain.duration": f"{tokens} tokens"}
        pipeline = load(config, settings)
        shape = architecture_of(graph(pipeline), "pretrain")
        expected = 2e-3 * (6 * shape.parameters * tokens / 1e9) ** -0.25  # type: ignore[union-attr]
        assert pipeline.pretrain.optimizer.learning_rate == pytest.approx(expected, rel=1e-6)  # type: ignore[attr-defined]
    damaged = {"empty": b"", "cut": b'{"sweep": "a', "list": b"[]", "nul": b"\0\0"}
    damaged["another"] = b'{"sweep": "a", "measure": "x", "maximise": false, "runs": [3]}'
    for name, left in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(left)
    for settings, code, place in (
        ({RATE: "from sweep nowhere"}, "no_sweep", RATE),
        *(({RATE: f"from sweep {tmp_path / name}"}, "damaged_state", RATE) for name in damaged),
        ({"pretrain.seed": asked[RATE]}, "not_swept", "pretrain.seed"),
        (
            {RATE: f"from sweep {tmp_path / 'many'}", "pretrain.duration": "1 epoch"},
            "unknown_compute",
            "pretrain.duration",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load(config, settings)
        assert [(one.code, one.path) for one in caught.value.problems] == [(code, place)]
