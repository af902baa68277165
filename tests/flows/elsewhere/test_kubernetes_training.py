"""A pipeline whose pretraining is a Job behind an API of Kubernetes, whose pods are processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launch.config import LaunchConfig
from infra.launch.kube.trainjob import runtime
from tests.support.kubernetes.cluster import KubernetesCluster, kubernetes_cluster
from tests.support.pipelines import trained_config
from tests.support.programs.command import Answer, finish, start, stemma, write_config
from tests.support.programs.processes import wait_until

CHECKPOINTS = ".work/pretrain/*/scratch/checkpoints/ba*"
pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _config(folder: Path, name: str, **launch: Any) -> Path:
    return write_config(folder / f"{name}.yaml", trained_config(folder, 600, **launch))


def _built_on(
    cluster: KubernetesCluster, config: Path, root: Path, env: dict[str, str], interrupt: Callable[[], None]
) -> Answer:
    """Pretrain again on the cluster, with an interruption after the first checkpoint of this build."""
    before = set(root.glob(CHECKPOINTS))
    command = start("run", config, "--root", root, "--force", "pretrain", env={**env, **cluster.variables})
    wait_until(lambda: set(root.glob(CHECKPOINTS)) - before, command=command)
    interrupt()
    there = finish(command)
    assert there.code == 0, (there.document["errors"], there.stderr[-3000:])
    assert not cluster.jobs and not cluster.trainjobs
    assert there.statuses()["pretrain"] == "built"
    assert "continuing pretrain at batch" in there.stderr
    return there


def test_jobs_that_are_interrupted_end_with_the_bits_of_local_ranks(env: dict[str, str], tmp_path: Path) -> None:
    """A Job loses a node, then a TrainJob's pod is evicted. The risk: the next one comes back on the lost node, ranks
    of two write into one folder, or pods get another place or batch than local ranks."""
    root = tmp_path / "store"
    here = stemma("run", _config(tmp_path, "here", processes=2), "--root", root, env=env)
    assert here.code == 0, here.document["errors"]
    digest = here.rows()["pretrain"]["digest"]

    asked = {"image": "registry/stemma:1", "claims": {str(root): "store"}}
    launch: dict[str, Any] = {"cluster": "kubernetes", "nodes": 2, "lost_s": 10, "grace_s": 2, "kubernetes": asked}
    with kubernetes_cluster("n1", "n2", "n3") as cluster:
        job = _config(tmp_path, "job", **launch)
        there = _built_on(cluster, job, root, env, lambda: cluster.lose("n2"))
        first, second = (job["spec"]["template"]["spec"]["affinity"] for job in cluster.submitted)
        assert "nodeAffinity" not in first and "'n2'" in str(second["nodeAffinity"])
        row = there.rows()["pretrain"]
        assert cluster.submitted[0]["metadata"]["labels"]["stemma/build"] == row["fingerprint"][:63]
        assert row["digest"] == digest, "the same bytes"
        assert "node n2@127.0.0.12 was lost" in there.stderr
        assert "training on n1@127.0.0.11, n3@127.0.0.13" in there.stderr

    launch["kubernetes"] = {**asked, "training_runtime": "stemma"}
    with kubernetes_cluster("n1", "n2") as cluster:
        cluster.runtimes["stemma"] = runtime(LaunchConfig.model_validate(launch))
        trainjob = _config(tmp_path, "trainjob", **launch)
        there = _built_on(cluster, trainjob, root, env, lambda: cluster.evict(next(iter(cluster.pods))))
        assert [document["kind"] for document in cluster.submitted] == ["TrainJob", "TrainJob"]
        assert there.rows()["pretrain"]["digest"] == digest, "the same bytes"
        assert "PreemptionByScheduler" in there.stderr
