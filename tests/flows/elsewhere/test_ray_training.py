"""Pipelines whose stages run on a real Ray cluster: a pretraining that loses a machine, rounds of RLHF."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.conftest import make_model
from tests.support.pipelines import trained_config
from tests.support.programs.command import REPOSITORY, finish, start, stemma, write_config
from tests.support.programs.processes import wait_until
from tests.support.services.ray_cluster import RayCluster, launch_on, ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as made:
        yield made


def _config(folder: Path, name: str, **launch: Any) -> Path:
    return write_config(folder / f"{name}.yaml", trained_config(folder, 600, **launch))


def test_a_training_on_ray_that_loses_a_machine_ends_with_the_bits_of_local_ranks(
    cluster: RayCluster, env: dict[str, str], tmp_path: Path
) -> None:
    """The risk: the loss is taken for a crash, ranks of two starts write into one folder, or the batches between the
    last checkpoint and the loss count twice."""
    root = tmp_path / "store"
    here = stemma("run", _config(tmp_path, "local", processes=2), "--root", root, env=env)
    assert here.code == 0, here.document["errors"]

    on_ray = _config(tmp_path, "ray", nodes=2, lost_s=10, **launch_on(cluster))
    command = start("run", on_ray, "--root", root, "--force", "pretrain", env={**env, **cluster.variables})
    wait_until(lambda: list(root.glob(".work/pretrain/*/scratch/checkpoints/ba*")), command=command)
    journal = next(root.glob(".work/pretrain/*/scratch/journal.jsonl"))
    lost = next(node for node in cluster.nodes if f"@{node}" in journal.read_text())
    cluster.lose(lost)
    there = finish(command)
    assert there.code == 0, (there.document["errors"], there.stderr[-3000:])
    assert there.statuses()["pretrain"] == "built"
    assert there.rows()["pretrain"]["digest"] == here.rows()["pretrain"]["digest"], "the same bytes"
    assert f"@{lost} was lost" in there.stderr and "(1 of 2)" in there.stderr
    assert "continuing pretrain at batch" in there.stderr
    first, second = (line for line in there.stderr.splitlines() if "training on" in line)
    assert f"@{lost}" in first and f"@{lost}" not in second


def words(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward: the longer, the better."""
    return [float(len(answer.split())) for answer in answers]


def test_rounds_of_rlhf_on_ray_write_and_learn_what_local_ranks_do(
    cluster: RayCluster, env: dict[str, str], tmp_path: Path
) -> None:
    """The risk: answers that each node writes for its part of the prompts are drawn as one process draws them, or a
    node has no reward."""
    rows = [{"instruction": f"Say {number}.", "output": f"It is {number}."} for number in range(40)]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(tmp_path / "model", seed=1)

    def config(name: str, **launch: Any) -> Path:
        sampled = {"uses": "rlhf", "inputs": {"model": "base_model", "prompts": "instructions"}, "rollouts": 3}
        sampled |= {"rollout_prompts": 8, "minibatch_answers": 8, "answers_per_prompt": 2, "answer_max_tokens": 8}
        said = {
            "name": "rounds",
            "base_model": {"path": str(model)},
            "instructions": {
                "read": [{"kind": "files", "paths": [str(tmp_path / "said.jsonl")]}],
                "heldout_share": 0.3,
            },
            "steps": {"aligned": sampled | {"reward_functions": {f"{__name__}:words": 1.0}}},
            "launch": {"device": "cpu", "threads": 1, "precision": "fp32", **launch},
        }
        return write_config(tmp_path / f"{name}.yaml", said)

    variables = {**env, **cluster.variables, "PYTHONPATH": str(REPOSITORY)}
    here = stemma("run", config("local", processes=2), "--root", tmp_path / "here", env=variables)
    assert here.code == 0, here.document["errors"]
    there = stemma("run", config("ray", nodes=2, **launch_on(cluster)), "--root", tmp_path / "there", env=variables)
    assert there.code == 0, (there.document["errors"], there.stderr[-3000:])
    assert there.rows()["aligned"]["digest"] == here.rows()["aligned"]["digest"], "the same bytes"
    events = (Path(there.rows()["aligned"]["path"]) / "aux" / "events.jsonl").read_text()
    assert "training on" in events, (events, there.stderr[-6000:])
