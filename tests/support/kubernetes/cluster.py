"""A stand-in for a Kubernetes cluster on loopback: the few calls of the API (`tests.support.kubernetes.api`) that a
training and Prefect's Kubernetes worker make, over TLS with a token, a scheduler, a Job controller, and kubelets that
start each pod's container as a process of this machine (`tests.support.kubernetes.pods`).

What is submitted is held against the published schema of its kind. Images, volumes and limits are not looked at.
"""

from __future__ import annotations

import json
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from infra.process.lifetime import signal_group
from tests.support.kubernetes.api import NAMESPACE, handler, status, with_tls
from tests.support.kubernetes.jobs import Job
from tests.support.kubernetes.pods import Pod, now
from tests.support.kubernetes.trainer import child_name, child_of, problem_of, with_status

Rules = list[dict[str, Any]]
"""Of a Role."""
_POLL_S = 0.05
_NAME = "job-name"
_LEFT_OUT = ("parallelism", "completions")
"""What Prefect's worker puts into a pod's spec, and the API leaves out unless it is asked to be strict."""


class KubernetesCluster:
    """nodes: by name, with whether each can be reached. All of them have room for one pod."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder = folder
        self.nodes = {name: f"127.0.0.{11 + place}" for place, name in enumerate(nodes)}
        self.lost: set[str] = set()
        self.jobs: dict[str, Job] = {}
        self.submitted: list[dict[str, Any]] = []
        self.runtimes: dict[str, dict[str, Any]] = {}
        self.trainjobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.users: dict[str, Rules | None] = {}
        self.refused: set[tuple[str, str]] = set()
        self.asked: set[tuple[str, str]] = set()
        self.forbidden: set[tuple[str, str]] = set()
        self.config_maps: dict[str, dict[str, str]] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.looks = 0
        self._changes: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self._server.daemon_threads = True
        self._server.socket = with_tls(self._server.socket, folder)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._controller = threading.Thread(target=self._control, daemon=True)
        self._controller.start()

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of a client has that may do everything."""
        return self.user(None)

    def user(self, rules: Rules | None) -> dict[str, str]:
        """What the environment of a client has that may do what a role says."""
        token = secrets.token_hex(16)
        self.users[token] = rules
        path = self.folder / f"kubeconfig-{len(self.users)}"
        server = f"https://127.0.0.1:{self._server.server_address[1]}"
        # The token comes from a program, as for managed clusters.
        credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        told = json.dumps({**credential, "status": {"token": token}})
        program = {"apiVersion": credential["apiVersion"], "command": "echo", "args": [told]}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": "ca.pem"}}],
            "users": [{"name": "test", "user": {"exec": program}}],
        }
        path.write_text(yaml.safe_dump(document))
        return {"KUBECONFIG": str(path)}

    def lose(self, node: str) -> None:
        """As when a machine dies: its processes are gone, and for some minutes the API says that they run."""
        with self.lock:
            self.lost.add(node)
            for pod in self.pods.values():
                if pod.node == node and pod.process is not None:
                    signal_group(pod.process.pid, signal.SIGKILL)

    def evict(self, name: str) -> None:
        """As for a pod of higher priority, or a node that is drained."""
        with self.lock:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            message = "default-scheduler: preempting to accommodate a higher priority pod"
            self.pods[name].status["conditions"].append({**condition, "message": message})
            self._tell("MODIFIED", self.pods[name].document)
            self._end(name)

    def delete_pod(self, name: str) -> None:
        """As by `kubectl delete pod`, which leaves no reason."""
        with self.lock:
            self._end(name)

    def close(self) -> None:
        self._closed.set()
        self._controller.join()
        self._server.shutdown()
        self._server.server_close()
        for pod in self.pods.values():
            if pod.process is not None:
                signal_group(pod.process.pid, signal.SIGKILL)
                pod.process.wait()

    def create(self, job: dict[str, Any], *, is_strict: bool) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if job.get("kind") == "TrainJob":
                return self._create_trainjob(job)
            if not is_strict:
                for name in _LEFT_OUT:
                    job["spec"]["template"]["spec"].pop(name, None)
            try:
                kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as error:
                return 422, status(f"Job is invalid: {error.message}")
            about = job["metadata"]
            name = about.setdefault("name", f"{about.get('generateName')}{secrets.token_hex(3)}")
            if name in self.jobs:
                return 409, status(f'jobs.batch "{name}" already exists')
            self.submitted.append(job)
            self.jobs[name] = Job({**job, "metadata": {**about, **_born()}, "status": {}})
            self._tell("ADDED", self.jobs[name].document)
            for index in range(self.jobs[name].pods):
                self._create_pod(job, index)
            return 201, self.jobs[name].document

    def find(self, kind: str, name: str) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if kind == "trainjobs" and name in self.trainjobs:
                return 200, with_status(self.trainjobs[name], self.jobs[child_name(name)].document)
            found = self.jobs.get(name) if kind == "jobs" else self.pods.get(name)
            return (200, found.document) if found else (404, status(f'{kind} "{name}" not found'))

    def list(self, kind: str, selector: str) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.looks += kind == "pods"
            about = {"resourceVersion": str(len(self._changes))}
            items = [one for one in self._documents(kind) if _is_selected(one, selector)]
            return 200, {"apiVersion": "v1", "kind": "List", "metadata": about, "items": items}

    def delete(self, kind: str, name: str) -> tuple[int, dict[str, Any]]:
        with self.lock:
            if kind == "trainjobs":
                if self.trainjobs.pop(name, None) is None:
                    return 404, status(f'trainjobs "{name}" not found')
                name = child_name(name)
            job = self.jobs.pop(name, None)
            if job is None:
                return 404, status(f'jobs.batch "{name}" not found')
            self._tell("DELETED", job.document)
            for pod in self._pods_of(name):
                self._end(pod)
            return 200, status("deleted")

    def log(self, name: str, since: str, follow: bool) -> Iterator[str]:
        """Lines as the API gives them, each with its time; `since` counts whole seconds."""
        pod, sent = self.pods[name], 0
        while True:
            is_over = pod.reader is not None and not pod.reader.is_alive()
            for line in pod.lines[sent:]:
                sent += 1
                if line[:19] >= since[:19]:
                    yield line
            if self._closed.is_set() or not follow or (is_over and sent == len(pod.lines)):
                return
            time.sleep(_POLL_S)

    def watch(self, kind: str, selector: str, since: str) -> Iterator[str]:
        """What changes after `since`, a resourceVersion; without one, first what is there."""
        with self.lock:
            sent = int(since or len(self._changes))
            there = [] if since else [json.dumps({"type": "ADDED", "object": one}) for one in self._documents(kind)]
        while not self._closed.is_set():
            with self.lock:
                new = [line for changed, line in self._changes[sent:] if changed == kind]
                sent = len(self._changes)
            for line in there + new:
                if _is_selected(json.loads(line)["object"], selector):
                    yield line
            there = []
            time.sleep(_POLL_S)

    def _create_trainjob(self, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """As Kubeflow's controller: the Job of a TrainJob and its runtime, which ends as the Job does."""
        if problem := problem_of(document):
            return 422, status(f"TrainJob is invalid: {problem}")
        runtime = self.runtimes.get(document["spec"]["runtimeRef"]["name"])
        if runtime is None:
            return 403, status("admission webhook denied the request: TrainingRuntime not found")
        name = document["metadata"]["name"]
        self.submitted.append(document)
        code, answer = self.create(child_of(document, runtime), is_strict=True)
        self.submitted.pop()
        if code == 201:
            self.trainjobs[name] = {**document, "metadata": {**document["metadata"], **_born()}}
            return 201, self.trainjobs[name]
        return code, answer

    def _documents(self, kind: str) -> list[dict[str, Any]]:
        return [one.document for one in (self.jobs if kind == "jobs" else self.pods).values()]

    def _tell(self, change: str, document: dict[str, Any]) -> None:
        """Those who watch hear of each change, with the object as it was then."""
        document["metadata"]["resourceVersion"] = str(len(self._changes) + 1)
        kind = "jobs" if document["kind"] == "Job" else "pods"
        self._changes.append((kind, json.dumps({"type": change, "object": document})))

    def _pods_of(self, job: str) -> list[str]:
        return [name for name, pod in self.pods.items() if pod.metadata["labels"][_NAME] == job]

    def _create_pod(self, job: dict[str, Any], index: int) -> None:
        template = json.loads(json.dumps(job["spec"]["template"]))
        spec = template["spec"]
        (container,) = spec["containers"]
        if job["spec"].get("completionMode") == "Indexed":  # as the controller does
            container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        name = f"{job['metadata']['name']}-{index}-{secrets.token_hex(3)}"
        labels = {**template["metadata"]["labels"], _NAME: job["metadata"]["name"]}
        about = {"name": name, "namespace": NAMESPACE, "labels": labels, **_born()}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec, "status": {}}
        document["status"] = {"phase": "Pending", "conditions": [], "containerStatuses": []}
        self.pods[name] = Pod(document, spec["terminationGracePeriodSeconds"])
        self._tell("ADDED", document)

    def _control(self) -> None:
        while not self._closed.wait(_POLL_S):
            with self.lock:
                for name, pod in list(self.pods.items()):
                    if pod.status["phase"] == "Pending" and not pod.is_deleted:
                        self._schedule(pod)
                    self._look_after(name, pod)
                for name, job in self.jobs.items():
                    if job.reconcile(self.pods[pod] for pod in self._pods_of(name)):
                        self._tell("MODIFIED", job.document)
                    if job.is_failing:
                        for pod in self._pods_of(name):
                            if not self.pods[pod].is_finished:
                                self._end(pod)

    def _schedule(self, pod: Pod) -> None:
        """One pod a node: the first that its affinity allows."""
        spec = pod.document["spec"]
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", [])
        excluded = set()
        for expression in [one for term in terms for one in term["matchFields"]]:
            assert (expression["key"], expression["operator"]) == ("metadata.name", "NotIn")
            (node,) = expression["values"]  # the API refuses more
            excluded.add(node)
        used = {other.node for other in self.pods.values() if other.node and not other.is_finished}
        free = [node for node in self.nodes if node not in excluded | used | self.lost]
        if not free:
            message = f"0/{len(self.nodes)} nodes are available: {len(used)} Insufficient nvidia.com/gpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            if pod.status["conditions"] != [condition]:
                pod.status["conditions"] = [condition]
                self._tell("MODIFIED", pod.document)
            return
        spec["nodeName"] = free[0]
        pod.status.update(phase="Running", podIP=self.nodes[free[0]], conditions=[])
        self._tell("MODIFIED", pod.document)
        pod.begin(self.config_maps, self.secrets)

    def _look_after(self, name: str, pod: Pod) -> None:
        if pod.node in self.lost:
            return
        if pod.look_after():
            self._tell("MODIFIED", pod.document)
        if pod.is_deleted and (pod.is_finished or pod.process is None):
            del self.pods[name]
            if job := self.jobs.get(pod.metadata["labels"][_NAME]):
                job.gone.append(pod.status["phase"])
            self._tell("DELETED", pod.document)

    def _end(self, name: str) -> None:
        """Deletes a pod: its process hears SIGTERM, and goes by SIGKILL after its grace period."""
        pod = self.pods[name]
        if not pod.is_deleted:
            pod.end(is_reached=pod.node not in self.lost)
            self._tell("MODIFIED", pod.document)


def _born() -> dict[str, str]:
    return {"uid": secrets.token_hex(8), "creationTimestamp": now()}


def _is_selected(document: dict[str, Any], selector: str) -> bool:
    """selector: empty for all, else one label with or without its value."""
    key, equals, value = selector.partition("=")
    labels = document["metadata"].get("labels", {})
    return not key or (labels.get(key) == value if equals else key in labels)


@contextmanager
def kubernetes_cluster(*nodes: str) -> Iterator[KubernetesCluster]:
    with tempfile.TemporaryDirectory(prefix="stemma-kubernetes-") as folder:
        cluster = KubernetesCluster(Path(folder), list(nodes))
        try:
            yield cluster
        finally:
            cluster.close()
