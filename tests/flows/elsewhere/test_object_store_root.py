"""`--root s3://…` through the command: machines with a cache each that share the artifacts of one bucket."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import ROOT, Lab, opened_lab
from tests.support.pipelines import short_config, trained_config
from tests.support.programs.command import Answer, finish, stemma, write_config
from tests.support.programs.processes import wait_until
from tests.support.services.postgres import postgres

pytestmark = pytest.mark.cluster
STAGES = {"ingest", "clean", "tokenizer"}


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def lab(
    s3_port: int,
    proxy: Any,
    env: dict[str, str],
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    with opened_lab(s3_port, proxy, env, database, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.yaml", short_config(tmp_path))


@pytest.mark.long
def test_what_one_machine_built_the_next_reuses_by_manifests_and_downloads_what_it_needs(
    lab: Lab, config: Path, built_data: Path
) -> None:
    built = lab.run("a", config)
    assert (built.code, built.document["root"], built.with_status("built")) == (
        0,
        ROOT,
        STAGES,
    ), built.document["errors"]
    assert set(lab.manifests()) == STAGES
    # As under a root in a folder: `built_data` has another file of the same bytes.
    local = {path.parent.parent.name: path.parent.name for path in (built_data / "store").glob("*/*/manifest.json")}
    assert {name: row["fingerprint"] for name, row in built.rows().items()} == {name: local[name] for name in STAGES}

    lab.proxy.requests.clear()
    reused = lab.run("b", config)
    assert (reused.code, set(reused.statuses().values())) == (0, {"reused"})
    assert lab.downloaded() == set()
    assert not (lab.cache("b") / "clean").exists()

    _readers_see_it(lab, config, built)
    lab.proxy.requests.clear()
    forced = lab.run("b", config, "--force", "tokenizer")
    assert (forced.code, forced.with_status("built")) == (0, {"tokenizer"})
    assert lab.downloaded() == {"clean"}
    assert "downloading s3://models/lab/clean/" in forced.stderr


@pytest.mark.long
def test_what_no_run_of_any_machine_needs_goes(lab: Lab, config: Path) -> None:
    """The risk: what another machine needs is removed, or what nobody needs stays.

    It is the first config's tokenizer, once another machine has run a second one, unless a third has pinned it.
    """
    built = lab.run("a", config)
    tokenizer = f"tokenizer/{built.rows()['tokenizer']['fingerprint']}"

    def gc(host: str, *arguments: str) -> Answer:
        return stemma("gc", *arguments, "--root", ROOT, env=lab.on(host))

    smaller = {**short_config(config.parent), "tokenizer": {"vocab_size": 300}}
    assert lab.run("b", write_config(config.with_name("smaller.yaml"), smaller)).code == 0
    pinned = gc("c", "--pin", tokenizer)
    assert (pinned.code, pinned.document.get("garbage")) == (0, []), pinned.document["errors"]
    assert gc("a", "--unpin", tokenizer).code == 0
    # Of a run that goes on elsewhere nobody here knows what it is about to read.
    going = {"Bucket": "models", "Key": "lab/runs/going/other.json"}
    lab.client.put_object(**going, Body=b'{"pipeline": "other", "host": "far", "since": "now"}')
    assert [error["code"] for error in gc("a", "--yes").document["errors"]] == ["in_use"]
    lab.client.delete_object(**going)
    removed = gc("a", "--yes")
    assert removed.code == 0, removed.document["errors"]
    assert [row["artifact"] for row in removed.document["garbage"] if row["removed"]] == [tokenizer]
    assert [key for key in lab.objects() if tokenizer in key] == []
    assert not (lab.cache("a") / tokenizer).exists()


def _readers_see_it(lab: Lab, config: Path, built: Answer) -> None:
    """On a machine that has built nothing of it."""

    def ask(*arguments: str) -> dict[str, Any]:
        answer = stemma(*arguments, "--root", ROOT, env=lab.on("c"))
        assert answer.code == 0, (arguments, answer.document["errors"])
        return answer.document

    assert {row["status"] for row in ask("check", str(config))["stages"]} == {"reuse"}
    assert {row["status"] for row in ask("status", str(config))["stages"]} == {"reuse"}
    listed = {**ask("ls"), **ask("ls", "artifacts")}
    assert {row["artifact"].partition("/")[0] for row in listed["artifacts"]} == set(built.rows())
    assert built.document["run_id"] in [row["run_id"] for row in listed["runs"]]
    lineage = ask("lineage", "tokenizer")
    assert {node.get("url", "").rpartition("/")[0] for node in lineage["nodes"] if node["kind"] == "artifact"} == {
        f"{ROOT}/{stage}" for stage in STAGES
    }
    assert any("dropped" in node for node in lineage["nodes"])
    assert lab.downloaded() <= {"ingest", "clean"}
    assert ask("verify", "tokenizer", "--ancestry")["artifacts"]
    assert ask("logs", "tokenizer")["said"]
    assert ask("why", str(config), "tokenizer")["did"] == "reused"
    assert ask("compare", built.document["run_id"], str(config))["figures"]
    assert (lab.cache("c") / "clean").exists()
    assert ask("check", str(config))["stages"], "what was downloaded is still a cache"


@pytest.mark.long
def test_two_machines_that_start_at_once_build_each_artifact_once(lab: Lab, config: Path) -> None:
    """The risk: leases of two caches are not those of one root, so that two machines build one artifact."""
    answers = [finish(process) for process in [lab.start("a", config), lab.start("b", config)]]
    assert [answer.code for answer in answers] == [0, 0], [answer.document["errors"] for answer in answers]
    for stage in STAGES:
        assert sorted(answer.statuses()[stage] for answer in answers) == ["built", "reused"], stage
    assert {one["build_id"] for one in lab.manifests().values()} == {
        key.split("/")[4] for key in lab.objects() if "/.files/" in key
    }


@pytest.mark.long
def test_a_run_that_is_killed_in_an_upload_leaves_no_artifact_and_the_next_one_ends_it(lab: Lab, config: Path) -> None:
    """The risk: what a dead machine left half is taken for an artifact, or keeps the next run from its end."""
    lab.proxy.tears = "/.files/clean/"
    killed = lab.start("a", config)
    wait_until(lambda: [path for path in lab.proxy.requests if path.startswith("PUT") and "/.files/clean/" in path])
    killed.kill()
    killed.communicate()
    lab.proxy.tears = "nothing"
    assert "clean" not in lab.manifests()
    shown = stemma("check", config, "--root", ROOT, env=lab.on("b"))
    assert shown.statuses()["clean"] == "build"
    cleaned = stemma("gc", "--yes", "--root", ROOT, env=lab.on("b"))
    assert (cleaned.code, cleaned.document.get("garbage")) == (0, []), cleaned.document["errors"]

    went_on = lab.run("a", config)
    assert went_on.code == 0, went_on.document["errors"]
    assert "continuing the upload to s3://models/lab/clean/" in went_on.stderr
    assert {key.split("/")[4] for key in lab.objects() if "/.files/clean/" in key} == {
        lab.manifests()["clean"]["build_id"]
    }
    elsewhere = lab.run("b", config, "--force", "tokenizer")
    assert elsewhere.code == 0, elsewhere.document["errors"]
    assert elsewhere.rows()["tokenizer"]["digest"] == went_on.rows()["tokenizer"]["digest"]


@pytest.mark.long
def test_nothing_is_committed_whose_input_is_gone_and_the_work_is_kept(lab: Lab, config: Path) -> None:
    """The risk: a run that was suspended, and taken for dead by the gc of another machine, leaves an artifact that
    nobody can trace back, or loses days of training when it sees that."""
    lab.proxy.tears = "/.files/clean/"
    run = lab.start("a", config)
    wait_until(lambda: [path for path in lab.proxy.requests if path.startswith("PUT") and "/.files/clean/" in path])
    lab.client.delete_object(Bucket="models", Key=lab.objects("/manifest.json")[0])
    lab.proxy.tears = "nothing"
    answer = finish(run)
    assert answer.code == 1
    assert {error["code"] for error in answer.document["errors"]} == {"input_removed"}
    assert lab.objects("/manifest.json") == []
    again = lab.run("a", config)
    assert again.code == 0, again.document["errors"]
    assert "continuing the upload to s3://models/lab/clean/" in again.stderr


def test_what_a_root_on_an_object_store_needs_is_said_before_anything_runs(lab: Lab, config: Path) -> None:
    def refusal(root: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        env = {name: value for name, value in {**lab.on("a"), **variables}.items() if value != "unset"}
        answer = stemma(*(arguments or ("run", str(config))), "--root", root, env=env)
        (error,) = answer.document["errors"]
        assert error["fix"]
        return answer.code, error["code"], error["path"]

    assert refusal(ROOT, STEMMA_DATABASE_URL="unset") == (2, "leases_need_postgres", "STEMMA_DATABASE_URL")
    nobody = {"AWS_ACCESS_KEY_ID": "unset", "AWS_SECRET_ACCESS_KEY": "unset", "AWS_EC2_METADATA_DISABLED": "true"}
    assert refusal(ROOT, **nobody) == (2, "s3_credentials", "--root")
    assert refusal("s3://nobodys/lab") == (2, "missing_source", "--root")
    assert refusal("gs://models/lab") == (2, "bad_root", "--root")
    assert refusal(ROOT, "gc", "--states") == (2, "local_root_only", "--root")
    assert lab.objects() == []


@pytest.mark.long
def test_a_training_is_gone_on_with_registered_and_used_on_another_machine(lab: Lab, tmp_path: Path) -> None:
    """The risk: what only the machine that built it has (a kept state, the records that a card tells from, a copy for
    MLflow) is missing elsewhere, or makes the same stage come out otherwise there."""
    base = trained_config(tmp_path, 40)
    base["pretrain"] |= {"keep_state": {"every": "20 batches"}, "schedule": {"decay": "constant"}}
    judged = {"benchmarks": {"limit": 4, "shots": [0]}, "register": {"name": "demo"}, "report": {}}
    longer = {"continues": {"step": "pretrain", "at": "20 batches"}, "duration": "60 batches"}
    whole = {**base, **judged, "steps": {"longer": longer}}
    first, all_of_it = (
        write_config(tmp_path / f"{name}.yaml", one) for name, one in (("first", base), ("whole", whole))
    )

    trained = lab.run("a", first)
    assert trained.code == 0, trained.document["errors"]
    here = stemma("run", all_of_it, "--root", tmp_path / "here", env=lab.env)
    assert here.code == 0, here.document["errors"]
    lab.proxy.requests.clear()
    there = stemma("run", all_of_it, "--root", ROOT, env={**lab.on("b"), "STEMMA_RELAY": "on"})
    assert there.code == 0, there.document["errors"]
    assert there.with_status("reused") == {*("ingest", "clean", "tokenizer", "shard", "pretrain", "measure_pretrain")}
    digests = [{name: row["digest"] for name, row in one.rows().items()} for one in (here, there)]
    assert digests[0].keys() == digests[1].keys()
    # These tell of speeds and runs; the card does not.
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} <= {"register", "report"}
    cards = [Path(one.rows()["register"]["path"]) / "MODEL_CARD.md" for one in (here, there)]
    assert cards[0].read_text() == cards[1].read_text()

    def ask(host: str, *arguments: str) -> dict[str, Any]:
        answer = stemma(*arguments, "--root", ROOT, env=lab.on(host))
        assert answer.code == 0, (arguments, answer.document["errors"])
        return answer.document

    assert ask("c", "promote")["promoted"]["digest"] == there.rows()["pretrain"]["digest"]
    model = there.rows()["longer"]
    exported = ask("c", "export", f"pretrain/{model['fingerprint']}", str(tmp_path / "exported"))
    assert exported["loaded"]["parameters"] > 0
    opened = ask("c", "open", "report")
    assert Path(opened["url"].removeprefix("file://")).is_file()
    nodes = {node["id"]: node for node in ask("c", "lineage", f"pretrain/{model['fingerprint']}")["nodes"]}
    assert nodes[f"pretrain/{model['fingerprint']}"]["continues"]["batch"] == 20
    assert ask("c", "compare", f"pretrain/{model['fingerprint']}", "pretrain")["figures"]
    _mlflow_names_the_urls(lab.cache("b"), there)


def _mlflow_names_the_urls(root: Path, answer: Answer) -> None:
    def urls() -> set[str]:
        with closing(sqlite3.connect(root / "mlflow" / "mlflow.db")) as database:
            return {row[0] for row in database.execute("SELECT value FROM tags WHERE key = 'stemma.artifact'")}

    row = answer.rows()["longer"]
    wait_until(lambda: (root / "mlflow" / "mlflow.db").exists() and f"{ROOT}/pretrain/{row['fingerprint']}" in urls())
    assert all(url.startswith(f"{ROOT}/") for url in urls())
