"""What is done with a finished pipeline whose artifacts are in a bucket, by machines that have built nothing of it."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName

from infra.servers.ports import any_free_port
from tests.flows.schedules.test_feedback_round import aligned, client, lines  # noqa: F401
from tests.support.lab import ROOT, Lab, opened_lab, publish
from tests.support.pipelines import full_config, short_config, trained_config
from tests.support.programs.command import Answer, execute, finish, start, stemma, typed, write_config
from tests.support.programs.processes import wait_until
from tests.support.services.object_store import failing_proxy
from tests.support.services.postgres import postgres

pytestmark = pytest.mark.cluster
RATE = "pretrain.optimizer.learning_rate"


@pytest.fixture(scope="module")
def lab(s3_port: int, env: dict[str, str], built_full: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With the models of the whole tiny pipeline in the bucket, and what they were asked."""
    folder = tmp_path_factory.mktemp("lab")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        failing_proxy(s3_port, monkeypatch) as proxy,
        postgres() as database,
        opened_lab(s3_port, proxy, env, database, folder, monkeypatch) as found,
    ):
        publish(built_full / "store", folder / "publisher", "sft", "rlhf", "instructions", "register")
        yield found


@pytest.mark.long
def test_a_model_is_talked_to_and_exported(lab: Lab, tmp_path: Path) -> None:
    said = lab.ask("b", "chat", "sft", "--prompt", "What does this return?", "--max-new-tokens", "4")
    assert [message["role"] for message in said["messages"]] == ["user", "assistant"]
    exported = lab.ask("b", "export", "rlhf", tmp_path / "hub")
    assert exported["card_from"].startswith("register/"), "its card is that of the registration, which is not here"


@pytest.mark.long
def test_a_model_is_asked_judged_and_served(lab: Lab, tmp_path: Path) -> None:
    """The risk: one of the commands looks for a model in the cache of its machine alone."""
    evaluated = lab.ask("b", "eval", "sft", "rlhf", "--failure-classes", "negation", "--limit", "2")
    assert [answer["model"] for answer in evaluated["models"]] == ["sft", "rlhf"] and evaluated["comparisons"]

    out = tmp_path / "round"
    drawn = ("--out", out, "--pairs", "2", "--max-new-tokens", "4", "--temperature", "1")
    assert lab.ask("c", "feedback", "export", "sft", "rlhf", *drawn)["pairs"] == 2
    key = json.loads((out / "key.json").read_text())
    known = {name: one["artifact"].partition("/")[0] for name, one in key["models"].items()}
    assert known == {"sft": "sft", "rlhf": "rlhf"}
    pairs = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    rows = [{"pair": pair["id"], "annotator": "ann", "choice": "a"} for pair in pairs]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lab.ask("d", "feedback", "import", out, tmp_path / "said.jsonl")["preferences"] == 2

    port = any_free_port()
    served = start("serve", "sft", "--root", ROOT, "--port", str(port), env=lab.on("c"))
    try:
        wait_until(lambda: _models(port), command=served)
        assert [name.partition("/")[0] for name in _models(port)] == ["sft"]
    finally:
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=60)


def _models(port: int) -> list[str]:
    """What a server offers; nothing while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
            return [row["id"] for row in json.load(answer)["data"]]
    except urllib.error.URLError:
        return []


@pytest.mark.long
def test_a_gate_holds_a_model_against_one_that_another_machine_promoted(
    lab: Lab, built_full: Path, tmp_path: Path
) -> None:
    """The risk: a gate says of a promoted model that is not here that it has no such figure, and lets another pass."""
    publish(built_full / "store", lab.folder / "publisher")
    first = lab.ask("b", "promote")["promoted"]

    def release(host: str, *gates: dict[str, Any]) -> Answer:
        """Of the model that the promoted one was made from, by the same name. Its evaluation is called as the promoted
        one's is: gates find the other's figure by it."""
        inputs = {"model": "sft", "benchmarks_rlhf": "benchmarks_sft"}
        step = {"uses": "register", "name": "tiny", "inputs": inputs, "gates": list(gates)}
        config = write_config(tmp_path / f"{host}.yaml", full_config() | {"steps": {"release": step}})
        return lab.run(host, config, "--until", "release")

    accuracy = {"figure": "benchmarks_rlhf.cloze_accuracy", "against": "promoted"}
    of_model = {"figure": "model.ends_share_sft", "against": "promoted", "at_least": -1.0}
    kept = release("e", {**accuracy, "at_least": -1.0}, of_model)
    assert kept.code == 0, kept.document["errors"]
    assert kept.with_status("built") == {"release"}
    found = json.loads((Path(kept.rows()["release"]["path"]) / "registration.json").read_text())["gates"]
    assert [gate["difference"]["registration"] for gate in found] == [first["registration"]] * 2
    assert (lab.cache("e") / "benchmarks_rlhf").exists(), "what is compared over the same items came here"
    assert not (lab.cache("e") / "rlhf").exists(), "the model that it is held against did not"
    later = f"register/{kept.rows()['release']['fingerprint']}"
    second = lab.ask("d", "promote", later, "--force")
    assert (second["promoted"]["registration"], second["before"]) == (later, first)
    assert (lab.cache("d") / "benchmarks_sft").exists(), "promoted models are compared over the same items too"
    assert lab.ask("c", "rollback")["promoted"] == first
    refused = release("d", {**accuracy, "at_least": 1.1})
    assert (refused.code, refused.document["status"]) == (3, "refused"), refused.document["errors"]
    address = f"register/{refused.rows()['release']['fingerprint']}"
    (error,) = stemma("promote", address, "--root", ROOT, env=lab.on("b")).document["errors"]
    assert error["code"] == "rejected"

    reused = ("run", str(built_full / "config.yaml"), "--only", "report", "--root", ROOT)
    said = typed(*reused, env=lab.on("f"), cwd=tmp_path)
    assert f"stemma open report --root {ROOT}" in said.stdout, "no path that is not there"
    assert Path(lab.ask("f", "open")["url"].removeprefix("file://")).is_file()


@pytest.mark.long
def test_what_one_machine_adopts_all_of_them_use(lab: Lab, built_full: Path, tmp_path: Path) -> None:
    """The risk: an adopted artifact, which no machine can build, stays in the cache of the one that adopted it."""
    (clean,) = (built_full / "store" / "clean").iterdir()
    shutil.copytree(clean / "documents", tmp_path / "corpus" / "documents")
    adopted = lab.ask("b", "adopt", "clean", tmp_path / "corpus")
    again = lab.ask("c", "adopt", "clean", tmp_path / "corpus")
    assert (adopted["new"], again["new"], again["fingerprint"]) == (True, False, adopted["fingerprint"])
    sections = {"ingest": {"read": [{"kind": "files", "paths": ["gone.txt"]}]}, "tokenizer": {"vocab_size": 300}}
    config = {"name": "adopting", **sections, "validate": None, **yaml.safe_load(adopted["config"])}
    used = lab.run("d", write_config(tmp_path / "config.yaml", {**config, "clean": None}))
    assert used.code == 0, used.document["errors"]
    assert (used.with_status("built"), used.statuses()["clean"]) == ({"validate_clean", "tokenizer"}, "reused")
    lost = write_config(tmp_path / "lost.yaml", {**config, "clean": None, "adopted": {"clean": "0" * 16}})
    (error,) = lab.run("d", lost).document["errors"]
    assert (error["code"], ROOT in error["message"]) == ("adopted_missing", True)


@pytest.mark.long
def test_a_sweep_of_one_machine_is_gone_on_with_by_another_and_its_best_trial_stays(lab: Lab, tmp_path: Path) -> None:
    """The risk: trials are trained twice, or the page lacks those that another machine trained, or `gc` of a machine
    that knows nothing of the sweep takes its best trial away."""
    config = trained_config(tmp_path, 4)
    config["pretrain"]["evaluate_every"] = "2 batches"
    command = ("sweep", write_config(tmp_path / "config.yaml", config), "--key", f"{RATE}=1e-4,1e-2")
    swept = lab.ask("b", *command)
    assert swept["status"] == "done"
    again = lab.ask("c", *command)
    assert [one["value"] for one in again["trials"]] == [one["value"] for one in swept["trials"]]
    built = [result["stages"] for one in again["trials"] if (result := _result(lab, "c", one["run_id"]))]
    assert {row["status"] for rows in built for row in rows} == {"reused"}
    pages = [Path(one["page"]).read_text() for one in (swept, again)]
    assert pages[1].count("<polyline") == pages[0].count("<polyline") > 0, "curves of what another machine trained"

    (best, other) = sorted(swept["trials"], key=lambda one: one["value"])
    shown = lab.ask("d", "gc")
    kept = {row["artifact"] for row in shown["needed"] if "sweep" in row["reason"]}
    assert _pretrained(lab, best) in kept
    assert _pretrained(lab, other) not in kept


def _pretrained(lab: Lab, trial: dict[str, Any]) -> str:
    (row,) = [row for row in _result(lab, "b", trial["run_id"])["stages"] if row["stage"] == "pretrain"]
    return f"pretrain/{row['fingerprint']}"


def _result(lab: Lab, host: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((lab.cache(host) / "runs" / run / "result.json").read_text())
    return found


@pytest.mark.long
def test_a_round_of_feedback_is_drawn_judged_and_learnt_from(
    lab: Lab,
    client: SyncPrefectClient,  # noqa: F811
    prefect_url: str,
    built_full: Path,
    tmp_path: Path,
) -> None:
    """The risk: a worker that is given the bucket's URL looks for the round, its model or its judgements elsewhere, and
    another machine cannot read the policy that learnt from them."""
    (model,) = (path.parent for path in (built_full / "store" / "sft").glob("*/manifest.json"))
    config = write_config(tmp_path / "config.yaml", aligned(tmp_path, model))
    env = {**lab.on("w"), "STEMMA_PREFECT_URL": prefect_url.removesuffix("/api")}

    def ask(*words: str | Path) -> dict[str, Any]:
        answer = stemma("feedback", *words, "--root", ROOT, env=env)
        assert answer.code == 0, (answer.document["errors"], answer.stderr)
        return answer.document

    def state_after(run: str) -> str:
        told = execute(run, lab.on("w"))
        state = client.read_flow_run(UUID(run)).state
        assert state is not None, told
        return f"{state.name}{told if state.is_failed() else ''}"

    made = lab.run("w", config, "--only", "base_model,instructions")
    assert made.code == 0, made.document["errors"]
    sizes = ("--pairs", "6", "--max-new-tokens", "6", "--temperature", "1")
    run = ask("round", config, "--model", "base_model", *sizes)["flow_run_id"]
    assert state_after(run) == "Suspended"
    (folder,) = (lab.cache("w") / "feedback").glob(f"*-{run[:8]}")
    rows = [{"pair": pair["id"], "annotator": "ann", "choice": "b"} for pair in lines(folder / "pairs.jsonl")]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run in ask("import", folder, tmp_path / "said.jsonl")["resumed"]
    assert state_after(run) == "Completed"
    assert json.loads((folder / "comparison.json").read_text())["before"].startswith("base_model/")

    learnt = lab.ask("v", "lineage", "policy")["nodes"]
    assert {"reward_model", "preferences", "base_model"} <= {node.get("stage") for node in learnt}
    (pairs,) = (node["id"] for node in learnt if node.get("stage") == "preferences")
    read = [file["path"] for node in learnt for file in node.get("files", [])]
    assert str(folder / "judged" / "preferences.jsonl") in read
    assert lab.ask("v", "verify", pairs, "--ancestry")["artifacts"]


@pytest.mark.long
def test_the_trials_of_a_sweep_run_on_a_worker_of_another_machine(
    lab: Lab,
    client: SyncPrefectClient,  # noqa: F811
    prefect_url: str,
    tmp_path: Path,
) -> None:
    """The risk: a worker with a cache of its own takes a trial for a run of the pipeline, or the sweep does not find
    what the worker built."""
    config = write_config(tmp_path / "config.yaml", {**short_config(tmp_path), "name": "elsewhere"})
    env = {**lab.on("x"), "STEMMA_PREFECT_URL": prefect_url.removesuffix("/api")}
    values = ("--key", "tokenizer.vocab_size=300,320", "--measure", "tokenizer.vocab_size")
    sweep = start("sweep", config, *values, "--root", ROOT, env=env)
    taken: set[str] = set()

    def waiting_trials() -> list[str]:
        flow_runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["elsewhere"])))
        return [str(run.id) for run in flow_runs if str(run.id) not in taken]

    while wait_until(lambda: sweep.poll() is not None or waiting_trials()) is not True:
        for trial in waiting_trials():
            taken.add(trial)
            execute(trial, lab.on("y"))
    answer = finish(sweep)
    assert answer.code == 0, answer.document["errors"]
    assert [one["value"] for one in answer.document["trials"]] == [300.0, 320.0]
    assert len(taken) == 2
    begun = [
        json.loads((lab.cache("y") / "runs" / one["run_id"] / "journal.jsonl").read_text().splitlines()[0])["pipeline"]
        for one in answer.document["trials"]
    ]
    assert begun == [f"elsewhere sweep {answer.document['sweep'][:6]}"] * 2
