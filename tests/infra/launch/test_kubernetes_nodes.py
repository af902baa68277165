"""Nodes of Kubernetes, behind an API on loopback whose pods are processes; ranks only meet."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml
from pydantic import ValidationError

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.launch.kube.api import KubeApi, KubeError
from infra.launch.kube.launcher import Kubernetes
from infra.launch.kube.manifest import manifest
from infra.launch.kube.pods import Pods
from infra.launch.kube.trainjob import runtime, trainjob
from infra.launch.machines import Over
from tests.infra.launch.cluster_launcher import on_cluster, rank_pids
from tests.support.kubernetes.cluster import KubernetesCluster, kubernetes_cluster
from tests.support.kubernetes.trainer import child_of, problem_of
from tests.support.programs.command import REPOSITORY
from tests.support.programs.processes import wait_until

SETTINGS: dict[str, Any] = {
    "cluster": "kubernetes",
    "kubernetes": {"image": "registry/stemma:1"},
    "lost_s": 10,
    "grace_s": 2,
}
EVERYTHING: dict[str, Any] = {
    "cluster": "kubernetes",
    "nodes": 4,
    "processes": 8,
    "threads": 6,
    "device": "gpu",
    "kubernetes": {
        "image": "registry/stemma:1",
        "namespace": "lab",
        "claims": {"/store": "store", "/home/data": "data"},
        "memory_gb": 512,
        "gpu_resource": "amd.com/gpu",
        "time_limit_h": 24,
        "service_account": "training",
        "priority_class": "high",
        "node_selector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "secrets": ["s3-keys"],
        "labels": {"kueue.x-k8s.io/queue-name": "lab"},
        "pod": {"runtimeClassName": "nvidia", "imagePullSecrets": [{"name": "registry"}]},
    },
}
ENDED = "[Ended(rank=0, code=0), Ended(rank=1, code=0)]"


@pytest.fixture
def cluster() -> Iterator[KubernetesCluster]:
    with kubernetes_cluster("n1", "n2", "n3") as made:
        yield made


def _validated(document: dict[str, Any]) -> dict[str, Any]:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    return document


def _at_work(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("done.*"))) > 1, timeout_s=300)


def _none_left(cluster: KubernetesCluster, folder: Path) -> None:
    wait_until(lambda: not cluster.jobs and not cluster.pods, timeout_s=60)
    assert not [pid for pid in rank_pids(folder) if psutil.pid_exists(pid)]


def test_a_job_asks_for_all_that_the_config_says() -> None:
    launch = LaunchConfig.model_validate(EVERYTHING)
    job = _validated(manifest(launch, "stemma-sft-1", "sft", "f" * 64, Path("/store/work"), ["bad-1", "bad-2"]))
    assert job["metadata"]["labels"]["stemma/build"] == "f" * 63 and job["metadata"]["labels"]["stemma/stage"] == "sft"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (4, 4, 0)
    assert job["spec"]["activeDeadlineSeconds"] == 24 * 3600
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "512000000000", "amd.com/gpu": "8"}
    assert container["resources"]["requests"]["cpu"] == "48"
    mounted = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {
        mount["mountPath"]: mounted[mount["name"]]["persistentVolumeClaim"]["claimName"]
        for mount in container["volumeMounts"]
        if "persistentVolumeClaim" in mounted[mount["name"]]
    }
    assert claims == {"/store": "store", "/home/data": "data"}
    fields = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [(one["operator"], one["values"]) for one in fields[0]["matchFields"]] == [
        ("NotIn", ["bad-1"]),
        ("NotIn", ["bad-2"]),
    ]
    assert pod["terminationGracePeriodSeconds"] > launch.grace_s
    assert pod["runtimeClassName"] == "nvidia" and pod["priorityClassName"] == "high"
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    empty = {mount["mountPath"] for mount in container["volumeMounts"] if "emptyDir" in mounted[mount["name"]]}
    assert empty == {"/tmp", "/home/stemma", "/dev/shm"}


def test_the_job_of_a_config_is_printed(tmp_path: Path) -> None:
    config = tmp_path / "pipeline.yaml"
    config.write_text(yaml.safe_dump({"name": "x", "launch": {**SETTINGS, "nodes": 3}}))
    command = [sys.executable, "-m", "infra.launch.kube.manifest", str(config), "reward_model"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    job = _validated(yaml.safe_load(told.stdout))
    assert job["spec"]["completions"] == 3 and job["metadata"]["name"].startswith("stemma-reward-model")
    config.write_text("name: x\nlaunch: {nodes: 2}\n")
    for wrong, said in ((config, "launch.kubernetes.image"), (tmp_path / "none", "No such file"), (None, "CONFIG")):
        told = subprocess.run([*command[:3], *([str(wrong)] if wrong else [])], capture_output=True, text=True)
        assert told.returncode and said in told.stderr and "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("kubernetes", "expected"),
    [
        ({}, "expected launch.kubernetes.image"),
        ({"image": "x", "pod": {"containers": []}}, "expected no containers"),
        ({"image": "x", "claims": {"store": "store"}}, "claims"),
    ],
)
def test_what_no_job_can_be_made_of_is_refused(kubernetes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        LaunchConfig.model_validate({"cluster": "kubernetes", "kubernetes": kubernetes})


@pytest.mark.parametrize(
    ("cluster", "user", "expected"),
    [
        ({"certificate-authority": "gone.crt"}, {}, "FileNotFoundError"),
        ({"certificate-authority-data": "bm8gY2VydGlmaWNhdGU="}, {}, "SSLError"),
        ({}, {"client-certificate-data": "bm8="}, "client-key"),
        (None, {}, "expected the context"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    cluster: dict[str, str] | None, user: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [] if cluster is None else [{"name": "lab", "cluster": {"server": "https://127.0.0.1:1", **cluster}}]
    document = {
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "clusters": known,
        "users": [{"name": "me", "user": user}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(StageError) as caught:
        KubeApi.find("lab")
    (problem,) = caught.value.problems
    assert problem.code == ("no_kubernetes" if cluster is None else "bad_kubeconfig")
    assert expected in problem.message and str(tmp_path / "config") in problem.path + problem.message and problem.fix


@pytest.mark.parametrize("answer", [b"<html>the proxy is busy</html>", b'{"kind": '])
def test_what_is_no_answer_of_the_api_is_taken_for_none(answer: bytes) -> None:
    """A training goes on while the API does not answer."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Not into the log of the tests."""

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api = KubeApi(f"http://127.0.0.1:{server.server_port}", {}, None, "lab")
        with pytest.raises(KubeError) as caught:
            api.call("GET", "/api/v1/pods")
        server.shutdown()
    assert caught.value.status == 0


@pytest.mark.cluster
def test_each_pod_has_a_rank_and_what_they_print_is_heard(cluster: KubernetesCluster, tmp_path: Path) -> None:
    out, err = on_cluster(tmp_path, 3, environment=cluster.variables, **SETTINGS).communicate(timeout=200)
    assert out.splitlines()[0].startswith("submitted: submitted as Kubernetes Job stemma-pretrain-"), (out, err)
    assert "training on n1@127.0.0.11, n2@127.0.0.12, which passed" in out and out.splitlines()[-1] == ENDED, (out, err)
    assert sorted(line for line in err.splitlines() if " here " in line) == [
        "[rank 0] here 0 2 0",
        "[rank 1] here 1 2 1",
    ]
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
def test_a_job_that_the_cluster_refuses_says_why(cluster: KubernetesCluster, tmp_path: Path) -> None:
    settings = {**SETTINGS, "kubernetes": {"image": "x", "pod": {"dnsPolicyy": "Default"}}}
    out, _ = on_cluster(tmp_path, 1, environment=cluster.variables, **settings).communicate(timeout=200)
    assert out.startswith("kubernetes_refused: launch.kubernetes: Kubernetes rejected the Job") and "dnsPolicyy" in out


def _ended_unseen(cluster: KubernetesCluster, end: Callable[[str], None]) -> None:
    """The pod on n2 ends, and with it the Job and the other pod, all between two looks."""
    wait_until(lambda: all(pod.process for pod in cluster.pods.values()), timeout_s=30)
    wait_until(lambda: ("watch", "pods") in cluster.asked, timeout_s=30)
    end(next(name for name, pod in cluster.pods.items() if pod.node == "n2"))
    wait_until(lambda: all(pod.is_finished for pod in cluster.pods.values()), timeout_s=60)


def _crash(cluster: KubernetesCluster, name: str) -> None:
    process = cluster.pods[name].process
    assert process is not None
    process.kill()


def _what_became(job: Kubernetes) -> str:
    found: list[Over] = []
    wait_until(lambda: found.extend(filter(None, [job.over({})])) or found, timeout_s=30)
    return f"{found[0].problem.code}: {found[0].problem.message}"


@pytest.fixture
def job(cluster: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    """Of two pods whose agents wait for orders."""
    monkeypatch.setenv("KUBECONFIG", cluster.variables["KUBECONFIG"])
    (tmp_path / "nodes").mkdir()
    made = Kubernetes(LaunchConfig(nodes=2, **SETTINGS), tmp_path / "nodes", "pretrain", "f" * 64)
    yield made
    made.release()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (
            KubernetesCluster.evict,
            r"preempted: .* lost a pod: stemma-pretrain-\w+-1-\w+ on n2: PreemptionByScheduler: "
            r"default-scheduler: preempting to accommodate a higher priority pod",
        ),
        (KubernetesCluster.delete_pod, r"preempted: .* lost a pod: stemma-pretrain-\w+-1-\w+ on n2: it was deleted"),
        (_crash, r"job_failed: .* failed: BackoffLimitExceeded .*; exit codes of its pods: 137; .*"),
    ],
)
def test_what_ended_a_job_is_told_though_its_pods_are_gone_at_the_next_look(
    end: Callable[[KubernetesCluster, str], None], expected: str, cluster: KubernetesCluster, job: Kubernetes
) -> None:
    """The risk: the pod that was taken away is not named, or one that Kubernetes ended after it is."""
    job.request({})
    _ended_unseen(cluster, lambda name: end(cluster, name))
    assert re.fullmatch(expected, _what_became(job), re.DOTALL)


@pytest.mark.cluster
def test_pods_that_are_gone_are_told_where_the_cluster_lets_nobody_watch(
    cluster: KubernetesCluster, job: Kubernetes
) -> None:
    cluster.refused.add(("watch", "pods"))
    job.request({})
    # The list before a watch is one of them.
    wait_until(lambda: job.over({}) is None and cluster.looks > 1, timeout_s=30)
    _ended_unseen(cluster, cluster.evict)
    told = _what_became(job)
    assert told.startswith("preempted: ") and " on n2: it is gone" in told


def test_of_pods_that_were_deleted_before_anybody_looked_the_first_is_named() -> None:
    """The risk: those that Kubernetes ended after it are named, where the API answers late."""

    class Api(KubeApi):
        """Whose pods were deleted a second apart: the last of the list first, with more time to end."""

        def call(self, *_: object, **__: object) -> dict[str, Any]:
            ends = {"a": ("00:00:31", 30), "b": ("00:00:31", 30), "c": ("00:01:00", 60)}
            items = [
                {
                    "metadata": {
                        "name": name,
                        "deletionTimestamp": f"2026-01-01T{end}Z",
                        "deletionGracePeriodSeconds": grace_s,
                    },
                    "spec": {"nodeName": f"n-{name}"},
                    "status": {"phase": "Failed"},
                }
                for name, (end, grace_s) in ends.items()
            ]
            return {"metadata": {"resourceVersion": "7"}, "items": items}

        def lines(self, *_: object, **__: object) -> Iterator[str]:
            return iter(())

    pods = Pods(Api("http://127.0.0.1", {}, None, "lab"), "/api/v1/pods", "stemma/job=x")

    def taken() -> str:
        pods.note([])
        return pods.taken(by_controller=False)

    wait_until(taken, timeout_s=30)
    pods.close()
    assert taken() == "c on n-c: it was deleted"


@pytest.mark.cluster
@pytest.mark.long
def test_pods_that_no_node_takes_are_told_and_a_cancelled_run_takes_its_job_away(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    """The risk: a run that waits for ever without a word, or pods that wait for nobody."""
    cluster.lost |= {"n2", "n3"}
    stage = on_cluster(tmp_path, 3, environment=cluster.variables, **SETTINGS)
    assert stage.stdout is not None
    stage.stdout.readline()
    said = stage.stdout.readline()
    assert said.startswith("waiting: pods of Kubernetes Job") and "0/3 nodes are available" in said
    stage.terminate()
    stage.communicate(timeout=200)
    _none_left(cluster, tmp_path)


def _with_runtime(cluster: KubernetesCluster) -> dict[str, Any]:
    """Settings for TrainJobs, whose runtime is applied."""
    settings = {**SETTINGS, "kubernetes": {**SETTINGS["kubernetes"], "training_runtime": "stemma"}}
    cluster.runtimes["stemma"] = runtime(LaunchConfig.model_validate(settings))
    return settings


def test_a_trainjob_and_its_runtime_ask_for_what_the_job_asks() -> None:
    """The risk: a field that Kubeflow Trainer does not know, or a part of the pods that is in neither."""
    named = {**EVERYTHING, "kubernetes": {**EVERYTHING["kubernetes"], "training_runtime": "stemma"}}
    launch = LaunchConfig.model_validate(named)
    arguments = (
        launch,
        "stemma-sft-1",
        "sft",
        "f" * 64,
        Path("/store/work"),
        ["bad-1", "bad-2"],
        {"PYTHONPATH": "/code"},
    )
    document, its_runtime = trainjob(launch, manifest(*arguments)), runtime(launch)
    assert problem_of(document) == problem_of(its_runtime) == ""
    assert problem_of({**document, "spec": {**document["spec"], "backoffLimit": 0}})
    child, job = _validated(child_of(document, its_runtime)), manifest(*arguments)
    for document in (child, job):
        document["spec"].pop("ttlSecondsAfterFinished", None)
        (container,) = document["spec"]["template"]["spec"]["containers"]
        del container["name"], document["metadata"]
    assert child["spec"]["template"]["metadata"]["labels"].pop("jobset.sigs.k8s.io/jobset-name") == "stemma-sft-1"
    assert child == job


@pytest.mark.cluster
def test_a_trainjob_whose_pod_is_evicted_is_followed_by_another(cluster: KubernetesCluster, tmp_path: Path) -> None:
    """The risk: the TrainJob that failed for an eviction is taken for a crash, or is left behind."""
    settings = _with_runtime(cluster)
    stage = on_cluster(tmp_path, 40, environment=cluster.variables, **settings, restarts=0)
    _at_work(tmp_path)
    cluster.evict(next(iter(cluster.pods)))
    out, err = stage.communicate(timeout=300)
    assert out.startswith("submitted: submitted as Kubeflow TrainJob stemma-pretrain-"), (out, err)
    (restart,) = (line for line in out.splitlines() if line.startswith("restarted: "))
    assert " lost a pod: " in restart and "PreemptionByScheduler" in restart, (out, err)
    assert restart.endswith("; going on from the newest checkpoint") and out.splitlines()[-1] == ENDED, (out, err)
    first, second = cluster.submitted
    assert first["kind"] == second["kind"] == "TrainJob"
    assert not cluster.trainjobs
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
def test_a_pod_that_is_evicted_is_followed_by_another_job(cluster: KubernetesCluster, tmp_path: Path) -> None:
    """The risk: ranks are killed before they saved, or a pre-emption counts as a restart."""
    stage = on_cluster(tmp_path, 150, environment=cluster.variables, **SETTINGS, restarts=0)
    _at_work(tmp_path)
    cluster.evict(next(iter(cluster.pods)))
    out, err = stage.communicate(timeout=300)
    (told,) = (line for line in out.splitlines() if line.startswith("restarted: "))
    assert re.search(r" lost a pod: stemma-pretrain-\w+-0-\w+ on n1: PreemptionByScheduler: ", told), (out, err)
    assert told.endswith("; going on from the newest checkpoint"), (out, err)
    assert out.splitlines()[-1] == ENDED
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
def test_a_job_that_is_deleted_from_outside_fails_by_its_name(cluster: KubernetesCluster, tmp_path: Path) -> None:
    """The risk: the deletion is taken for a crash of the ranks, which is not tried again."""
    stage = on_cluster(tmp_path, 900, environment=cluster.variables, **SETTINGS)
    _at_work(tmp_path)
    (job,) = cluster.jobs
    cluster.delete("jobs", job)
    out, err = stage.communicate(timeout=200)
    said = f"job_cancelled: pretrain: Kubernetes Job {job} was deleted from outside"
    assert out.splitlines()[-1].startswith(said), (out, err)
    _none_left(cluster, tmp_path)


@pytest.mark.cluster
@pytest.mark.long
def test_whoever_continues_a_killed_stage_takes_its_job_away_first(cluster: KubernetesCluster, tmp_path: Path) -> None:
    """The risk: two Jobs that write into one work folder."""
    first = on_cluster(tmp_path, 60, environment=cluster.variables, **SETTINGS)
    _at_work(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out, err = on_cluster(tmp_path, 60, environment=cluster.variables, **SETTINGS).communicate(timeout=300)
    assert out.splitlines()[-1] == ENDED, (out, err)
    assert len(cluster.submitted) == 2
    _none_left(cluster, tmp_path)
