"""A pipeline whose pretraining runs on a real Ray cluster, which loses a machine while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import finish, start, stemma, write_config
from tests.pipelines import trained_config
from tests.processes import wait_until
from tests.ray_cluster import RayCluster, launch_on, ray_cluster

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
