"""A round of feedback: it waits for judgements and learns from those of all rounds; rounds that begin by themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.pipelines import full_config
from tests.support.programs.command import Answer, execute, stemma, write_config

pytestmark = pytest.mark.cluster
Ask = Callable[..., Answer]


@pytest.fixture
def client(prefect_url: str) -> Iterator[SyncPrefectClient]:
    """Of the session's server, which has no worker, nor the pool that one makes."""
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as found:
        yield found


@pytest.fixture
def ask(run: Ask, prefect_url: str) -> Ask:
    """The command, for which the session's server is the one of `stemma up`."""
    return lambda *words: run("feedback", *words, STEMMA_PREFECT_URL=prefect_url.removesuffix("/api"))


def test_rounds_begin_by_a_schedule(ask: Ask, client: SyncPrefectClient, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", full_config() | {"name": "weekly-rounds"})
    words = ("round", config, "--root", tmp_path / "store", "--pairs", "7")
    for cron in ("0 6 * *", ""):  # the empty one, as of a variable that is not set, began a round at once
        assert ask(*words, "--cron", cron).document["errors"][0]["code"] == "bad_cron"
    answer = ask(*words, "--cron", "0 6 * * 1")
    assert answer.code == 0, answer.document["errors"]
    assert (answer.document["flow_run_id"], answer.document["last_round"]) == ("", None)
    found = client.read_deployment(answer.document["deployment"])
    (planned,) = found.schedules
    assert (planned.active, planned.schedule.cron, planned.schedule.timezone) == (True, "0 6 * * 1", "UTC")  # type: ignore[union-attr]
    assert (found.parameters["pairs"], found.parameters["config_path"]) == (7, str(config))


ANSWERS = {"rollout_prompts": 4, "minibatch_answers": 4, "max_prompt_tokens": 64, "answer_max_tokens": 6}
TAUGHT: dict[str, Any] = {"max_length": 64, "heldout_limit": 4, "global_batch_pairs": 8}


def aligned(folder: Path, model: Path) -> dict[str, Any]:
    """From a model that is there to a policy, by a reward model of a few pairs."""
    asked = [{"instruction": f"What is the number {n}?", "output": f"It is {n}."} for n in range(40)]
    pairs = [{"prompt": row["instruction"], "chosen": row["output"], "rejected": "No."} for row in asked]
    for name, rows in (("asked", asked), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = {
        name: {"read": [{"kind": "files", "paths": [str(folder / f"{name}.jsonl")]}]} for name in ("asked", "pairs")
    }
    start = {"model": "base_model"}
    return {
        "name": "rounds",
        "base_model": {"path": str(model)},
        "instructions": {**read["asked"], "heldout_share": 0.3},
        "preferences": {**read["pairs"], "heldout_share": 0.3},
        "steps": {
            "taste": {"uses": "reward_model", **TAUGHT, "inputs": {**start, "preferences": "preferences"}},
            "policy": {
                **{"uses": "rlhf", "rollouts": 1, "heldout_prompts": 2, **ANSWERS},
                "inputs": {**start, "prompts": "instructions", "reward_model": "taste"},
            },
        },
    }


@pytest.fixture
def judged_round(ask: Ask, env: Mapping[str, str], client: SyncPrefectClient) -> Callable[..., Path]:
    """A round from its beginning to its end, in which one person always says the same of the answers of a model, in the
    processes that Prefect's worker would start. Its folder."""

    def call(config: Path, root: Path, model: str, choice: str) -> Path:
        def state_after(run: str) -> str:
            told = execute(run, env)
            state = client.read_flow_run(run).state
            assert state is not None, told
            return f"{state.name}{told if state.is_failed() else ''}"

        sizes = ("--pairs", "6", "--max-new-tokens", "6", "--temperature", "1")
        begun = ask("round", config, "--root", root, "--model", model, *sizes)
        assert begun.code == 0, begun.document["errors"]
        run = begun.document["flow_run_id"]
        assert state_after(run) == "Suspended"
        (folder,) = (root / "feedback").glob(f"*-{run[:8]}")
        rows = [{"pair": pair["id"], "annotator": "ann", "choice": choice} for pair in lines(folder / "pairs.jsonl")]
        (folder / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        imported = ask("import", folder, folder / "said.jsonl", "--root", root)
        assert imported.code == 0 and run in imported.document["resumed"], imported.document
        assert state_after(run) == "Completed"
        return folder

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _pairs_learnt(root: Path, rlhf: str) -> list[dict[str, Any]]:
    """The training pairs of the reward model that a policy followed."""
    made = json.loads((root / "rlhf" / rlhf / "manifest.json").read_text())
    taste = root / "reward_model" / made["inputs"]["reward_model"]["fingerprint"]
    pairs = json.loads((taste / "manifest.json").read_text())["inputs"]["preferences"]["fingerprint"]
    return lines(root / "preferences" / pairs / "train.jsonl")


@pytest.mark.long
def test_a_round_waits_for_judgements_and_a_policy_follows_them(
    judged_round: Callable[..., Path], built_full: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    """Answers are drawn and the run is suspended; judgements are imported, which resumes it; it makes a reward model of
    old pairs and new ones, and a policy."""
    (model,) = (path.parent for path in (built_full / "store" / "sft").glob("*/manifest.json"))
    config, root = write_config(tmp_path / "config.yaml", aligned(tmp_path, model)), tmp_path / "store"
    assert stemma("run", config, "--root", root, "--only", "base_model,instructions", env=env).code == 0
    folder = judged_round(config, root, "base_model", "b")
    (policy,) = (root / "rlhf").iterdir()
    learnt, judged = _pairs_learnt(root, policy.name), lines(folder / "judged" / "preferences.jsonl")
    assert len(judged) == 6 and [row["votes"] for row in learnt if "votes" in row]
    assert {row["chosen"] for row in learnt if "votes" in row} <= {row["b"] for row in lines(folder / "pairs.jsonl")}
    assert len([row for row in learnt if "votes" not in row]) > 10
    assert json.loads((folder / "comparison.json").read_text())["before"].startswith("base_model/")


@pytest.mark.long
def test_a_round_learns_from_the_judgements_of_all_before_and_compares_its_policy(
    judged_round: Callable[..., Path], built_full: Path, env: Mapping[str, str], tmp_path: Path
) -> None:
    """The risk: a round that forgets the labels of the one before, or one whose labels are all held out."""
    (model,) = (path.parent for path in (built_full / "store" / "sft").glob("*/manifest.json"))
    config, root = write_config(tmp_path / "config.yaml", aligned(tmp_path, model)), tmp_path / "store"
    first = stemma("run", config, "--root", root, env=env)
    assert first.code == 0, (first.document["errors"], first.stderr)
    policies, known = [first.rows()["policy"]["fingerprint"]], [0]
    for number, choice in enumerate("ab", 1):
        found = json.loads((judged_round(config, root, "policy", choice) / "comparison.json").read_text())
        assert found["before"] == f"rlhf/{policies[-1]}" and len(found["labels"]) == number
        policies.append(found["after"].removeprefix("rlhf/"))
        known.append(len([row for row in _pairs_learnt(root, policies[-1]) if "votes" in row]))
    assert len(set(policies)) == 3 and known == sorted(set(known))
