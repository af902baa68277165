"""A pipeline whose pretraining is a Job behind an API of Kubernetes, whose pods are processes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes.cluster import kubernetes_cluster
from tests.support.pipelines import trained_config
from tests.support.programs.command import finish, start, stemma, write_config
from tests.support.programs.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _config(folder: Path, name: str, **launch: Any) -> Path:
    return write_config(folder / f"{name}.yaml", trained_config(folder, 600, **launch))


def test_a_job_that_loses_a_node_ends_with_the_bits_of_local_ranks(env: dict[str, str], tmp_path: Path) -> None:
    """The risk: the next Job comes back on the lost node, ranks of two Jobs write into one folder, or pods are told
    another place or batch than local ranks."""
    root = tmp_path / "store"
    here = stemma("run", _config(tmp_path, "here", processes=2), "--root", root, env=env)
    assert here.code == 0, here.document["errors"]

    asked = {"image": "registry/stemma:1", "claims": {str(root): "store"}}
    launch = {"cluster": "kubernetes", "nodes": 2, "lost_s": 10, "grace_s": 2, "kubernetes": asked}
    with kubernetes_cluster("n1", "n2", "n3") as cluster:
        config = _config(tmp_path, "there", **launch)
        command = start("run", config, "--root", root, "--force", "pretrain", env={**env, **cluster.variables})
        wait_until(lambda: list(root.glob(".work/pretrain/*/scratch/checkpoints/ba*")), command=command)
        cluster.lose("n2")
        there = finish(command)
        assert there.code == 0, (there.document["errors"], there.stderr[-3000:])
        assert not cluster.jobs
        first, second = (job["spec"]["template"]["spec"]["affinity"] for job in cluster.submitted)
        assert "nodeAffinity" not in first and "'n2'" in str(second["nodeAffinity"])
        row = there.rows()["pretrain"]
        assert cluster.submitted[0]["metadata"]["labels"]["stemma/build"] == row["fingerprint"][:63]
    assert there.statuses()["pretrain"] == "built"
    assert row["digest"] == here.rows()["pretrain"]["digest"], "the same bytes"
    assert "node n2@127.0.0.12 was lost" in there.stderr and "continuing pretrain at batch" in there.stderr
    assert "training on n1@127.0.0.11, n3@127.0.0.13" in there.stderr
