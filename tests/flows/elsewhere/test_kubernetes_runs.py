"""Runs of pipelines as pods that Prefect's own Kubernetes worker starts: the Job that is rendered, and real runs behind
an API of Kubernetes whose pods are processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from prefect.utilities.templating import apply_values

from flows.config.read import PipelineConfig, load
from flows.deployment.deploy import deploy_pipeline, deploy_stages
from flows.sweeps.from_page import deploy_sweep
from infra.errors import ConfigError
from infra.launch.kube import runs as kube_runs
from infra.servers.http import answers
from infra.servers.ports import any_free_port
from tests.support.kubernetes.api import NAMESPACE
from tests.support.kubernetes.cluster import KubernetesCluster, kubernetes_cluster
from tests.support.pipelines import data_config, short_config, trained_config
from tests.support.programs.command import REPOSITORY, Answer, environment, stemma, write_config
from tests.support.programs.elsewhere import run_module
from tests.support.programs.processes import COLD, gone, running, running_stage, wait_until

AUTH = "operator:a-password-for-tests"
MANIFESTS = REPOSITORY / "infra" / "kubernetes"


def _documents(name: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((MANIFESTS / name).read_text())}


def _validated(job: dict[str, Any]) -> dict[str, Any]:
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    return job


ASKED: dict[str, Any] = {
    "image": "registry/stemma:1",
    "namespace": NAMESPACE,
    "claims": {"/store": "store"},
    "memory_gb": 900,
    "secrets": ["s3-keys"],
    "priority_class": "high",
    "node_selector": {"gpu": "h100"},
    "labels": {"team": "lab"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "pod": {"imagePullSecrets": [{"name": "registry"}]},
}


def _printed(folder: Path, runs: dict[str, Any] | None, **launch: Any) -> subprocess.CompletedProcess[str]:
    kubernetes = {**ASKED, **({"runs": runs} if runs else {})}
    content = {"name": "x", "launch": {"device": "gpu", "processes": 8, "kubernetes": kubernetes, **launch}}
    config = write_config(folder / "pipeline.yaml", content)
    return run_module(["infra.launch.kube.runs", config, "--root", "/store/lab"], ["flows.config.read"])


def test_the_job_of_a_run_is_printed_with_what_its_training_needs_or_what_is_asked_for_it(tmp_path: Path) -> None:
    job = _validated(yaml.safe_load(_printed(tmp_path, {"pool": "pods"}).stdout))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "900000000000", "nvidia.com/gpu": "8"}
    assert container["args"] == ["flow-run", "--root", "/store/lab"]
    assert container["envFrom"] == [{"configMapRef": {"name": "stemma"}}, {"secretRef": {"name": "s3-keys"}}]
    named = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"]}
    assert named["STEMMA_AUTH"] == {"name": "stemma", "key": "auth"}
    assert named["STEMMA_DATABASE_URL"] == {"name": "stemma", "key": "database-url"}
    assert pod["nodeSelector"] == {"gpu": "h100"} and not pod["automountServiceAccountToken"]
    assert pod["priorityClassName"] == "high" and pod["imagePullSecrets"] == [{"name": "registry"}]
    assert job["metadata"]["namespace"] == NAMESPACE and job["metadata"]["labels"]["team"] == "lab"

    runs = {"pool": "pods", "installation": "lab", "cpus": 4, "memory_gb": 32, "service_account": "training"}
    job = _validated(yaml.safe_load(_printed(tmp_path, runs, cluster="kubernetes", nodes=4).stdout))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    asked = {"requests": {"cpu": "4", "memory": "32000000000"}, "limits": {"memory": "32000000000"}}
    assert container["resources"] == asked, "its trainings ask for themselves"
    assert container["envFrom"][0] == {"configMapRef": {"name": "lab"}}
    assert "nodeSelector" not in pod and "team" not in job["metadata"]["labels"]
    assert pod["serviceAccountName"] == "training" and pod["automountServiceAccountToken"]
    assert job["spec"]["completions"] == 1 and job["spec"]["backoffLimit"] == 0

    for wrong, said in ((None, "launch.kubernetes.runs"), ({"pool": "a/b"}, "pool"), ({"pods": "x"}, "pods")):
        told = _printed(tmp_path, wrong)
        assert told.returncode == 1 and said in told.stderr and "Traceback" not in told.stderr


@pytest.fixture
def pipeline(data_pipeline: Path, prefect_url: str) -> Iterator[Callable[..., PipelineConfig]]:
    """Makes configs whose runs go to a pool, on the Prefect server of this test session."""

    def make(name: str, pool: str | None, **asked: Any) -> PipelineConfig:
        launch = {"kubernetes": {**ASKED, **asked, **({"runs": {"pool": pool}} if pool else {})}}
        return load(
            write_config(
                data_pipeline / f"{name}.yaml", {**data_config(data_pipeline), "name": name} | {"launch": launch}
            )
        )

    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield make


@pytest.mark.cluster
def test_all_deployments_of_a_pipeline_go_to_its_pool_with_jobs_that_keep_to_the_schema(
    pipeline: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    pool = f"pods-{uuid4().hex[:8]}"
    config, other = pipeline(f"one-{pool}", pool), pipeline(f"two-{pool}", pool, image="registry/other:2")
    made = [deploy_pipeline(config, tmp_path, "x.yaml"), deploy_sweep(config, tmp_path, "x.yaml")]
    made += deploy_stages(config, tmp_path, "x.yaml").values()
    with get_client(sync_client=True) as client:
        found = client.read_work_pool(pool)
        assert (found.type, found.base_job_template) == ("kubernetes", kube_runs.template())
        deployments = [client.read_deployment(one) for one in made]
        deployments.append(client.read_deployment(deploy_pipeline(other, tmp_path, "x.yaml")))
        assert {one.work_pool_name for one in deployments} == {pool}
        images = []
        for one in deployments:
            job = _as_prefect_submits(found.base_job_template, one.job_variables)
            images.append(job["spec"]["template"]["spec"]["containers"][0]["image"])
        assert images == ["registry/stemma:1"] * len(made) + ["registry/other:2"]
        renewed = pipeline(f"one-{pool}", pool, image="registry/stemma:3")
        again = client.read_deployment(deploy_pipeline(renewed, tmp_path, "x.yaml"))
        job = _as_prefect_submits(found.base_job_template, again.job_variables)
        assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/stemma:3"
        moved = client.read_deployment(deploy_pipeline(pipeline(f"one-{pool}", None), tmp_path, "x.yaml"))
    assert (again.id, moved.id, moved.work_pool_name) == (made[0], made[0], "stemma")


def _as_prefect_submits(template: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
    """The Job that Prefect's worker makes of a pool and a deployment, held against the published schema."""
    job = apply_values(template["job_configuration"], variables)[kube_runs.MANIFEST]
    for name in ("parallelism", "completions"):  # Prefect insists on them, and Kubernetes leaves them out
        assert job["spec"]["template"]["spec"].pop(name) == 1
    return _validated(job)


@pytest.mark.cluster
def test_a_pool_that_would_start_other_jobs_is_refused(pipeline: Callable[..., PipelineConfig], tmp_path: Path) -> None:
    own = f"own-{uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=f"{own}-process", type="process"))
        client.create_work_pool(WorkPoolCreate(name=own, type="kubernetes", base_job_template=OTHER_TEMPLATE))
    for pool, said in ((f"{own}-process", "the type process"), (own, "its own Job"), ("stemma", "Stemma's own")):
        with pytest.raises(ConfigError) as caught:
            deploy_pipeline(pipeline(f"refused-{own}", pool), tmp_path, "x.yaml")
        [problem] = caught.value.problems
        assert (problem.code, problem.path) == (
            "foreign_pool",
            "launch.kubernetes.runs.pool",
        ) and said in problem.message


OTHER_TEMPLATE: dict[str, Any] = {
    "job_configuration": {"image": "{{ image }}", "job_manifest": {"apiVersion": "batch/v1", "kind": "Job"}},
    "variables": {"type": "object", "properties": {"image": {"type": "string"}}},
}


@dataclass
class Lab:
    """A Prefect server with a password, a cluster, and Prefect's worker for its pool, by the manifests' own words."""

    folder: Path
    cluster: KubernetesCluster
    client: SyncPrefectClient
    env: dict[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "store"

    def config(self, name: str, content: dict[str, Any], **launch: Any) -> Path:
        runs = {"pool": "pods", "service_account": "training"}
        asked = {
            "image": "registry/stemma:1",
            "namespace": NAMESPACE,
            "claims": {str(self.root): "store"},
            "runs": runs,
        }
        launch = {**content.get("launch", {}), "kubernetes": asked, **launch}
        return write_config(self.folder / f"{name}.yaml", {**content, "name": name, "launch": launch})

    def ask(self, *arguments: str | Path) -> Answer:
        return stemma(*arguments, "--root", self.root, env=self.env)

    def begin(self, name: str, folder: Path) -> FlowRun:
        """A run of a pipeline with text of its own, as the page's button begins it."""
        content = short_config(folder)
        with (folder / "text.jsonl").open("a") as text:
            text.write(json.dumps({"text": f"Only the pipeline {name} reads this."}) + "\n")
        answer = self.ask("deploy", self.config(name, content))
        assert answer.code == 0, answer.document["errors"]
        found = self.client.read_deployment_by_name(f"{name}/pipeline")
        return self.client.create_flow_run_from_deployment(found.id)

    def caught(self, name: str, folder: Path) -> tuple[FlowRun, psutil.Process, str]:
        """Such a run while it cleans, with the process that does, and its pod."""
        run = self.begin(name, folder)
        child = wait_until(lambda: running_stage(self.root, "clean"))
        assert isinstance(child, psutil.Process)
        return run, child, self.pod_of(run)

    def pod_of(self, run: FlowRun) -> str:
        """The pod that works on a run now."""
        label = "prefect.io/flow-run-id"

        def found() -> list[str]:
            pods = self.cluster.pods.items()
            return [name for name, pod in pods if pod.process and pod.metadata["labels"].get(label) == str(run.id)]

        return wait_until(found)[0]  # type: ignore[no-any-return,index]

    def ended(self, run: FlowRun) -> FlowRun:
        def final() -> FlowRun | None:
            now = self.client.read_flow_run(run.id)
            return now if now.state and now.state.is_final() else None

        return wait_until(final, timeout_s=900)  # type: ignore[return-value]

    def logs(self) -> str:
        return "\n".join((self.folder / name).read_text()[-3000:] for name in ("worker.log", "prefect.log"))

    def jobs_of(self, run: FlowRun) -> list[str]:
        """Names of the Jobs that were created for a run, those that are gone too."""
        ids = [(job["metadata"]["labels"].get("prefect.io/flow-run-id"), job) for job in self.cluster.submitted]
        return [job["metadata"]["name"] for found, job in ids if found == str(run.id)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if importlib.util.find_spec("prefect_kubernetes") is None:
        pytest.skip("prefect-kubernetes is not installed: see infra/kubernetes/worker.lock")
    folder = tmp_path_factory.mktemp("lab")
    url = f"http://127.0.0.1:{(port := any_free_port())}"
    env = environment(STEMMA_AUTH=AUTH, STEMMA_PREFECT_URL=url, **COLD)
    with ExitStack() as stack:
        serve = [sys.executable, "-m", "infra.servers.foreground", "prefect", "--root", str(folder / "servers")]
        stack.enter_context(running([*serve, "--port", str(port)], env, folder / "prefect.log"))
        cluster = stack.enter_context(kubernetes_cluster("n1", "n2", "n3"))
        trains = cluster.user(_documents("training.yaml")["Role"]["rules"])
        cluster.config_maps["stemma"] = {"STEMMA_PREFECT_URL": url, "STEMMA_RELAY": "off", **COLD, **trains}
        cluster.secrets["stemma"] = {"auth": AUTH, "database-url": "sqlite"}
        wait_until(lambda: answers(f"{url}/api/health"))
        stack.enter_context(running(*_worker(cluster, folder, url), folder / "worker.log"))
        stack.enter_context(temporary_settings({PREFECT_API_URL: f"{url}/api", PREFECT_API_AUTH_STRING: AUTH}))
        yield Lab(folder, cluster, stack.enter_context(get_client(sync_client=True)), env)


def _worker(cluster: KubernetesCluster, folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of infra/kubernetes/runs.yaml, with the rights of its role."""
    found = _documents("runs.yaml")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    command = [word.replace("/tmp", str(folder)) for word in container["command"]]
    told = {"PREFECT_API_AUTH_STRING": AUTH, "PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES": NAMESPACE}
    for one in container["env"]:
        told.setdefault(one["name"], one.get("value", ""))
    told |= {"PREFECT_API_URL": f"{url}/api", "PREFECT_HOME": str(folder / "home")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "HOME": os.environ["HOME"], "PYTHONPATH": str(REPOSITORY)}
    return command, {**own, **told, **cluster.user(found["Role"]["rules"])}


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_goes_to_its_end_in_a_pod_and_its_training_in_a_job_of_its_own(lab: Lab) -> None:
    """The risk: Prefect's worker refuses the Job, the run in the pod finds neither servers nor cluster, a right is
    missing, or a password stands in a Job."""
    training = {"cluster": "kubernetes", "nodes": 2, "lost_s": 10, "grace_s": 2}
    config = lab.config("trained", trained_config(lab.folder, 40), **training)
    answer = lab.ask("run", config)
    assert answer.code == 0, (answer.document["errors"], answer.stderr[-3000:], lab.logs())
    assert answer.statuses()["pretrain"] == "built"
    assert (Path(answer.rows()["pretrain"]["path"]) / "manifest.json").exists()
    run, trains = lab.cluster.submitted
    assert run["metadata"]["labels"]["stemma/pipeline"] == "trained"
    assert trains["spec"]["completionMode"] == "Indexed"
    assert AUTH.partition(":")[2] not in str(lab.cluster.submitted)
    assert not lab.cluster.forbidden


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_that_is_cancelled_ends_its_stages_and_its_pod(lab: Lab, tmp_path: Path) -> None:
    """The risk: the pod goes on for a run that the page calls cancelled, or is started again."""
    run, child, pod = lab.caught("cancelled", tmp_path)
    lab.client.set_flow_run_state(run.id, Cancelling(), force=True)
    ended = lab.ended(run)
    assert ended.state is not None and ended.state.is_cancelled(), ended.state
    wait_until(lambda: gone(child))
    wait_until(lambda: lab.cluster.pods[pod].is_finished)
    assert lab.jobs_of(run) == [lab.cluster.pods[pod].metadata["labels"]["job-name"]]


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_whose_pod_is_taken_away_goes_on_in_another(lab: Lab, tmp_path: Path) -> None:
    """The risk: an eviction counts as a crash or as a cancellation, or two pods work on one run."""
    run, child, pod = lab.caught("evicted", tmp_path)
    lab.cluster.evict(pod)
    wait_until(lambda: gone(child))
    wait_until(lambda: len(lab.jobs_of(run)) == 2)
    ended = lab.ended(run)
    assert ended.state is not None and ended.state.is_completed(), (ended.state, lab.logs())
    assert len(lab.jobs_of(run)) == 2
    names = [state.name for state in lab.client.read_flow_run_states(run.id)]
    assert "AwaitingRetry" in names and "Crashed" not in names


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_that_is_cancelled_while_no_node_takes_it_builds_nothing(lab: Lab, tmp_path: Path) -> None:
    """The risk: its pod begins in the end, and runs what nobody wants any more."""
    lab.cluster.lost |= lab.cluster.nodes.keys()
    try:
        run = lab.begin("waits", tmp_path)
        wait_until(lambda: lab.client.read_flow_run(run.id).infrastructure_pid)
        lab.client.set_flow_run_state(run.id, Cancelling(), force=True)
    finally:
        lab.cluster.lost.clear()
    ended = lab.ended(run)
    assert ended.state is not None and ended.state.is_cancelled(), ended.state
    assert len(lab.jobs_of(run)) == 1
    assert not any(state.is_running() for state in lab.client.read_flow_run_states(run.id))


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_whose_pod_dies_before_it_begins_is_told_as_crashed(lab: Lab, tmp_path: Path) -> None:
    """The risk: the page says Pending for ever. Prefect's observer tells, which needs rights of its own."""
    run = lab.begin("dies", tmp_path)
    pod = lab.pod_of(run)
    process = lab.cluster.pods[pod].process
    assert process is not None
    process.kill()
    ended = lab.ended(run)
    assert ended.state is not None and ended.state.is_crashed(), ended.state
    assert lab.cluster.asked >= {("watch", "jobs"), ("watch", "pods"), ("get", "pods/log")}
    assert not lab.cluster.forbidden
