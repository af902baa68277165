"""A stand-in for a Kubernetes cluster on loopback: the few calls of the API that a training makes, over TLS with a
token, a scheduler, a Job controller, and kubelets that start each pod's container as a process of this machine.

What is submitted is held against the published schema of its kind. Images, volumes and limits are not looked at.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import yaml

from infra.process import signal_group

NAMESPACE = "lab"
_POLL_S = 0.05


@dataclass
class Pod:
    """One pod: its object, and the process that is its container."""

    document: dict[str, Any]
    grace_s: float
    process: subprocess.Popen[bytes] | None = None
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None
    kill_at: float = 0.0

    @property
    def status(self) -> dict[str, Any]:
        return self.document["status"]

    @property
    def node(self) -> str:
        return self.document["spec"].get("nodeName", "")

    @property
    def is_finished(self) -> bool:
        return self.status["phase"] in ("Succeeded", "Failed")


class KubernetesCluster:
    """nodes: by name, with whether each can be reached. All of them have room for one pod."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder = folder
        self.nodes = {name: f"127.0.0.{11 + place}" for place, name in enumerate(nodes)}
        self.lost: set[str] = set()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self.pods: dict[str, Pod] = {}
        self.token = secrets.token_hex(16)
        self.may_watch = True
        self.looks = 0
        self._changes: list[str] = []
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.socket = _with_tls(self._server.socket, folder)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._controller = threading.Thread(target=self._control, daemon=True)
        self._controller.start()

    @property
    def variables(self) -> dict[str, str]:
        """What a client's environment has."""
        path = self.folder / "kubeconfig"
        server = f"https://127.0.0.1:{self._server.server_address[1]}"
        # The token comes from a program, as for managed clusters.
        credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        told = json.dumps({**credential, "status": {"token": self.token}})
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
        with self._lock:
            self.lost.add(node)
            for pod in self.pods.values():
                if pod.node == node and pod.process is not None:
                    signal_group(pod.process.pid, signal.SIGKILL)

    def evict(self, name: str) -> None:
        """As for a pod of higher priority, or a node that is drained."""
        with self._lock:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            message = "default-scheduler: preempting to accommodate a higher priority pod"
            self.pods[name].status["conditions"].append({**condition, "message": message})
            self._tell("MODIFIED", self.pods[name])
            self._end(name)

    def delete_pod(self, name: str) -> None:
        """As by `kubectl delete pod`, which leaves no reason."""
        with self._lock:
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

    def create(self, job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            try:
                kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as error:
                return 422, _status(f"Job is invalid: {error.message}")
            name = job["metadata"]["name"]
            if name in self.jobs:
                return 409, _status(f'jobs.batch "{name}" already exists')
            self.submitted.append(job)
            self.jobs[name] = {**job, "status": {}}
            for index in range(job["spec"]["completions"]):
                self._create_pod(job, index)
            return 201, self.jobs[name]

    def find(self, kind: str, name: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            found = self.jobs.get(name) if kind == "jobs" else (pod := self.pods.get(name)) and pod.document
            return (200, found) if found else (404, _status(f'{kind} "{name}" not found'))

    def list_pods(self, selector: str) -> tuple[int, dict[str, Any]]:
        key, _, value = selector.partition("=")
        with self._lock:
            self.looks += 1
            items = [pod.document for pod in self.pods.values() if pod.document["metadata"]["labels"].get(key) == value]
            return 200, {"apiVersion": "v1", "kind": "PodList", "items": items}

    def delete(self, name: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if self.jobs.pop(name, None) is None:
                return 404, _status(f'jobs.batch "{name}" not found')
            for pod in self._pods_of(name):
                self._end(pod)
            return 200, _status("deleted")

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

    def watch(self, selector: str, since: str) -> Iterator[str]:
        """What changes after `since`, a resourceVersion; without one, first the pods that are there."""
        key, _, value = selector.partition("=")
        with self._lock:
            sent = int(since or len(self._changes))
            there = (
                [] if since else [json.dumps({"type": "ADDED", "object": one.document}) for one in self.pods.values()]
            )
        while not self._closed.is_set():
            with self._lock:
                new = self._changes[sent:]
                sent += len(new)
            for line in there + new:
                if json.loads(line)["object"]["metadata"]["labels"].get(key) == value:
                    yield line
            there = []
            time.sleep(_POLL_S)

    def _tell(self, kind: str, pod: Pod) -> None:
        """Those who watch hear of each change, with the pod as it was then."""
        pod.document["metadata"]["resourceVersion"] = str(len(self._changes) + 1)
        self._changes.append(json.dumps({"type": kind, "object": pod.document}))

    def _pods_of(self, job: str) -> list[str]:
        return [name for name, pod in self.pods.items() if pod.document["metadata"]["labels"]["stemma/job"] == job]

    def _create_pod(self, job: dict[str, Any], index: int) -> None:
        template = json.loads(json.dumps(job["spec"]["template"]))
        spec = template["spec"]
        (container,) = spec["containers"]
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})  # as the controller does
        name = f"{job['metadata']['name']}-{index}-{secrets.token_hex(3)}"
        labels = {**template["metadata"]["labels"], "job-name": job["metadata"]["name"]}
        document = {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {}}
        document["status"] = {"phase": "Pending", "conditions": [], "containerStatuses": []}
        self.pods[name] = Pod(document, spec["terminationGracePeriodSeconds"])
        self._tell("ADDED", self.pods[name])

    def _control(self) -> None:
        while not self._closed.wait(_POLL_S):
            with self._lock:
                for name, pod in list(self.pods.items()):
                    if pod.status["phase"] == "Pending" and "deletionTimestamp" not in pod.document["metadata"]:
                        self._schedule(pod)
                    self._look_after(name, pod)
                for name, job in self.jobs.items():
                    self._reconcile(name, job)

    def _schedule(self, pod: Pod) -> None:
        """One pod a node: the first that its affinity allows."""
        spec = pod.document["spec"]
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = spec["affinity"].get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", [])
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
                self._tell("MODIFIED", pod)
            return
        spec["nodeName"] = free[0]
        pod.status.update(phase="Running", podIP=self.nodes[free[0]], conditions=[])
        self._tell("MODIFIED", pod)
        self._begin(pod)

    def _begin(self, pod: Pod) -> None:
        """As the kubelet: the container's own environment, with what it says of the pod."""
        (container,) = pod.document["spec"]["containers"]
        fields = {"spec.nodeName": pod.node, "status.podIP": pod.status["podIP"]}
        variables = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container["command"]]
        pod.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables},
            cwd=container["workingDir"],
            start_new_session=True,
        )
        pod.reader = threading.Thread(target=_read, args=(pod,), daemon=True)
        pod.reader.start()

    def _look_after(self, name: str, pod: Pod) -> None:
        if pod.node in self.lost:
            return
        if pod.process is not None and not pod.is_finished and (code := pod.process.poll()) is not None:
            signal_group(pod.process.pid, signal.SIGKILL)  # a container ends as a whole
            reason = "Completed" if code == 0 else "Error"
            code = 128 - code if code < 0 else code
            pod.status["phase"] = "Failed" if code else "Succeeded"
            pod.status["containerStatuses"] = [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]
            self._tell("MODIFIED", pod)
        elif pod.process is not None and pod.kill_at and time.monotonic() > pod.kill_at:
            signal_group(pod.process.pid, signal.SIGKILL)
        if "deletionTimestamp" in pod.document["metadata"] and (pod.is_finished or pod.process is None):
            del self.pods[name]
            self._tell("DELETED", pod)

    def _end(self, name: str) -> None:
        """Deletes a pod: its process hears SIGTERM, and goes by SIGKILL after its grace period."""
        pod = self.pods[name]
        if "deletionTimestamp" not in pod.document["metadata"]:
            pod.document["metadata"]["deletionTimestamp"] = _now()
            pod.kill_at = time.monotonic() + pod.grace_s
            self._tell("MODIFIED", pod)
            if pod.process is not None and pod.process.poll() is None and pod.node not in self.lost:
                pod.process.send_signal(signal.SIGTERM)

    def _reconcile(self, name: str, job: dict[str, Any]) -> None:
        """A pod counts as failed as soon as it is deleted. The Job has failed once the others have ended too."""
        conditions = job["status"].get("conditions", [])
        if any(one["type"] in ("Failed", "Complete") for one in conditions):
            return
        pods = {pod: self.pods[pod] for pod in self._pods_of(name)}
        if not conditions and (len(pods) < job["spec"]["completions"] or any(map(_counts_as_failed, pods.values()))):
            conditions = [_job_condition("FailureTarget")]
            for pod in pods:
                if not pods[pod].is_finished:
                    self._end(pod)
        if conditions and all(pod.is_finished for pod in pods.values()):
            conditions = [*conditions, _job_condition("Failed")]
        elif not conditions and all(pod.status["phase"] == "Succeeded" for pod in pods.values()):
            conditions = [{"type": "Complete", "status": "True"}]
        job["status"] = {"conditions": conditions} if conditions else {}


def _counts_as_failed(pod: Pod) -> bool:
    phase = pod.status["phase"]
    return phase == "Failed" or ("deletionTimestamp" in pod.document["metadata"] and phase != "Succeeded")


def _job_condition(kind: str) -> dict[str, str]:
    said = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
    return {"type": kind, "status": "True", **said}


def _read(pod: Pod) -> None:
    assert pod.process is not None and pod.process.stdout is not None
    for line in pod.process.stdout:
        pod.lines.append(f"{_now()} {line.decode('utf8', errors='replace')}".rstrip("\n"))


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}000Z"


def _status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "message": message}


def _with_tls(socket: Any, folder: Path) -> Any:
    """With a certificate of our own, which is its own authority."""
    names = [str(folder / "key.pem"), str(folder / "ca.pem")]
    subject = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-days", "2", *subject, "-keyout", names[0], "-out", names[1]]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    return context.wrap_socket(socket, server_side=True, do_handshake_on_connect=False)


def _handler(cluster: KubernetesCluster) -> type[BaseHTTPRequestHandler]:
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query))
            kind = "pods" if url.path.startswith(pods) else "jobs"
            name = url.path.removeprefix(pods if kind == "pods" else jobs).strip("/")
            if not self._is_known():
                return
            if name.endswith("/log"):
                self._send_log(name.removesuffix("/log"), query)
            elif name:
                self._answer(*cluster.find(kind, name))
            elif query.get("watch") == "true":
                self._send_changes(query)
            else:
                self._answer(*cluster.list_pods(query["labelSelector"]))

        def do_POST(self) -> None:
            if self._is_known():
                self._answer(*cluster.create(self._body()))

        def do_DELETE(self) -> None:
            if self._is_known():
                self._body()
                self._answer(*cluster.delete(urlsplit(self.path).path.removeprefix(jobs).strip("/")))

        def _is_known(self) -> bool:
            is_known = self.headers.get("Authorization") == f"Bearer {cluster.token}"
            if not is_known:
                self._answer(401, _status("Unauthorized"))
            return is_known

        def _body(self) -> dict[str, Any]:
            return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def _send_changes(self, query: Mapping[str, str]) -> None:
            if not cluster.may_watch:
                return self._answer(403, _status('pods is forbidden: User cannot watch resource "pods"'))
            return self._send_lines(cluster.watch(query["labelSelector"], query.get("resourceVersion", "")))

        def _send_log(self, name: str, query: Mapping[str, str]) -> None:
            if name not in cluster.pods:
                return self._answer(404, _status(f'pods "{name}" not found'))
            return self._send_lines(cluster.log(name, query.get("sinceTime", ""), query.get("follow") == "true"))

        def _send_lines(self, lines: Iterator[str]) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for line in lines:
                    self.wfile.write(line.encode() + b"\n")
                    self.wfile.flush()

        def _answer(self, code: int, document: Mapping[str, Any]) -> None:
            with cluster._lock:
                data = json.dumps(document).encode()
            with suppress(OSError):
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Tests print what they need."""

    return Handler


@contextmanager
def kubernetes_cluster(*nodes: str) -> Iterator[KubernetesCluster]:
    with tempfile.TemporaryDirectory(prefix="stemma-kubernetes-") as folder:
        cluster = KubernetesCluster(Path(folder), list(nodes))
        try:
            yield cluster
        finally:
            cluster.close()
