"""Nodes of Kubernetes: a Job with an agent in each pod, submitted, queried and deleted through the API."""

from __future__ import annotations

import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import Problem, StageError
from infra.launch.config import LaunchConfig
from infra.launch.kube.api import KubeApi, KubeError
from infra.launch.kube.manifest import job_name, manifest
from infra.launch.kube.pods import Pods, condition, is_finished
from infra.launch.kube.trainjob import VERSION, trainjob
from infra.launch.machines import OneJob, Over
from infra.process.tail import last_lines
from infra.project import PROJECT

_ASK_S = 2.0
"""Seconds between two queries about a Job."""
_ENDING_S = 60.0
"""Seconds that the pods of a deleted Job may take to end, in addition to the time that ranks have to save."""
_RECORD = "kubernetes-job"
_POD_FAILED = ("BackoffLimitExceeded", "FailedJobs")
"""Reasons of a failed Job, and of a failed TrainJob, if one of its pods failed or was taken away."""


class Kubernetes(OneJob):
    """At most one Job at a time. Its name is stored in the work folder, so that the next attempt deletes a Job that was
    left.

    build: the fingerprint of what is trained. say: called with (name, message) for what the Job waits for.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        folder: Path,
        name: str,
        build: str,
        say: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._launch = launch
        self._folder = folder
        self._name = name
        self._build = build
        self._say = say
        self._api = KubeApi.find(launch.kubernetes.context)
        namespace = launch.kubernetes.namespace or self._api.namespace
        if launch.kubernetes.training_runtime:
            self._kind = "Kubeflow TrainJob"
            self._jobs = f"/apis/{VERSION}/namespaces/{namespace}/trainjobs"
        else:
            self._kind = "Kubernetes Job"
            self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._record = folder.parent / _RECORD
        self._job = ""
        self._asked = 0.0
        self._known: Pods | None = None
        self._said = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log = folder / "job.log"
        self._followed: set[str] = set()
        if self._record.exists():
            self._job = self._record.read_text().strip()
            self.release()

    def is_ours(self, name: str) -> bool:
        return bool(self._job) and name.startswith(f"{self._job}.")

    def over(self, excluded: Mapping[str, str]) -> Over | None:
        """Return the outcome of the Job, queried every few seconds.

        None while it waits or runs, or the API does not answer.
        """
        if not self._job or time.monotonic() - self._asked < _ASK_S:
            return None
        try:
            job, pods = self._poll()
        except KubeError:
            return None
        subject = f"{self._kind} {self._job}"
        if job is None and not all(map(is_finished, pods)):
            return None  # its pods still have their time to save
        if job is None:
            self._remove_record()
            fix = f"run again, or raise launch.retries; `stemma logs {self._name}`"
            return Over(Problem("job_cancelled", self._name, f"{subject} was deleted from outside", fix), None)
        failed = condition(job, "Failed")
        reason = (failed or condition(job, "FailureTarget") or {}).get("reason", _POD_FAILED[0])
        by_controller = reason not in _POD_FAILED or "deletionTimestamp" in job["metadata"]
        assert self._known is not None
        self._known.note(pods)
        if disruption := self._known.taken(by_controller=by_controller):
            outcome = Over(Problem("preempted", self._name, f"{subject} lost a pod: {disruption}", "run again"), False)
        elif failed is not None:
            outcome = self._failed(subject, failed, pods)
        else:
            self._report_waiting(pods)
            return None
        self.release()
        return outcome

    def cancel(self) -> None:
        """Make Kubernetes end the pods: SIGTERM, and SIGKILL after their grace period."""
        with suppress(KubeError):
            self._delete()

    def release(self, leaving_s: float = 0.0) -> None:
        """Delete the Job, and return when its pods are gone.

        Pods of excluded nodes are not waited for: a node that gives no sign does not report its pod's end either.
        leaving_s: seconds in which the pods may first end by themselves.
        """
        if not self._job:
            return
        end = time.monotonic() + leaving_s
        with suppress(KubeError):
            while time.monotonic() < end and any(not is_finished(pod) for pod in self._poll()[1]):
                time.sleep(0.2)
        end = time.monotonic() + self._launch.grace_s + _ENDING_S
        is_deleted = False
        while time.monotonic() < end:
            with suppress(KubeError):
                if not is_deleted:
                    self._delete()
                    is_deleted = True
                job, pods = self._poll()
                if job is None and all(pod["spec"].get("nodeName") in self._bad_nodes() for pod in pods):
                    break
            time.sleep(0.2)
        self._remove_record()

    def pass_on_log(self) -> None:
        """Write the new output of the pods to this process's log."""
        lines = []
        with suppress(queue.Empty):
            while True:
                lines.append(self._lines.get_nowait() + "\n")
        if lines:
            with open(self._log, "a", encoding="utf8") as log:
                log.writelines(lines)
            sys.stderr.writelines(lines)
            sys.stderr.flush()

    def _has_job(self) -> bool:
        return bool(self._job)

    def _submit(self) -> None:
        job = job_name(self._name, secrets.token_hex(4))
        variables = {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"}
        body = manifest(self._launch, job, self._name, self._build, self._folder, self._bad_nodes(), variables)
        if self._launch.kubernetes.training_runtime:
            body = trainjob(self._launch, body)
        # Written before the Job exists: if the answer is lost, the next attempt finds the name and deletes the Job.
        self._record.write_text(job)
        try:
            self._api.call("POST", self._jobs, body, fieldValidation="Strict")
        except KubeError as error:
            self._record.unlink()
            code = "kubernetes_refused" if 400 <= error.status < 500 else "scheduler_unreachable"
            message = f"Kubernetes rejected the {self._kind.split()[1]}: {error}"
            raise StageError(
                Problem(code, "launch.kubernetes", message, "correct launch.kubernetes as the message says")
            ) from None
        self._job, self._asked = job, time.monotonic()
        self._known, self._said = Pods(self._api, self._pods, f"stemma/job={job}"), ""
        self._say("submitted", f"submitted as {self._kind} {job}")

    def _bad_nodes(self) -> set[str]:
        return {machine.rpartition("@")[0] for machine in self._excluded}

    def _poll(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Return the Job, None if it is gone, and its pods. Raises KubeError if the API does not answer."""
        self._asked = time.monotonic()
        try:
            job = self._api.call("GET", f"{self._jobs}/{self._job}")
        except KubeError as error:
            if error.status != 404:
                raise
            job = None
        pods = self._api.call("GET", self._pods, labelSelector=f"stemma/job={self._job}")["items"]
        for pod in pods:
            self._follow(pod)
        return job, pods

    def _follow(self, pod: Mapping[str, Any]) -> None:
        """Follow the output of a pod from its beginning, once the pod has started."""
        name = pod["metadata"]["name"]
        if name in self._followed or pod["status"].get("phase") in (None, "Pending", "Unknown"):
            return
        self._followed.add(name)

        def read() -> None:
            since = ""
            while name in self._followed:
                query = {"follow": "true", "timestamps": "true", **({"sinceTime": since} if since else {})}
                try:
                    for line in self._api.lines(f"{self._pods}/{name}/log", **query):
                        stamp, _, text = line.partition(" ")
                        if stamp > since:  # sinceTime is read in whole seconds: lines of that second come twice
                            since = stamp
                            self._lines.put(text)
                    if self._is_done(name):
                        return
                except KubeError as error:
                    if error.status == 404:
                        return
                time.sleep(_ASK_S)

        threading.Thread(target=read, name=f"log {name}", daemon=True).start()

    def _is_done(self, name: str) -> bool:
        try:
            return is_finished(self._api.call("GET", f"{self._pods}/{name}"))
        except KubeError as error:
            return error.status == 404

    def _delete(self) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self._api.call("DELETE", f"{self._jobs}/{self._job}", options)
        except KubeError as error:
            if error.status != 404:
                raise

    def _remove_record(self) -> None:
        self.pass_on_log()
        self._followed.clear()
        if self._known is not None:
            self._known.close()
        self._job, self._known = "", None
        self._record.unlink(missing_ok=True)

    def _failed(self, subject: str, failed: Mapping[str, Any], pods: list[dict[str, Any]]) -> Over:
        reason, message = failed.get("reason", ""), failed.get("message", "")
        if reason == "DeadlineExceeded":
            fix = "raise launch.kubernetes.time_limit_h, or lower checkpoint_every"
            problem = Problem("time_limit", "launch.kubernetes.time_limit_h", f"{subject} reached its time limit", fix)
            return Over(problem, False)
        ends = [end for pod in pods if (end := _end_of(pod))]
        if any(end.get("reason") == "OOMKilled" for end in ends):
            fix = "a smaller launch.microbatch needs less; launch.kubernetes.memory_gb asks for more"
            problem = Problem("out_of_memory", self._name, f"Kubernetes ended {subject}, which ran out of memory", fix)
            return Over(problem, None)
        self.pass_on_log()
        codes = ", ".join(str(end.get("exitCode")) for end in ends if end.get("exitCode"))
        words = last_lines(self._log, 2)
        message = f"{subject} failed: {reason} {message}; exit codes of its pods: {codes or 'none'}; {words}"
        return Over(Problem("job_failed", self._name, message, f"stemma logs {self._name}"), None)

    def _report_waiting(self, pods: list[dict[str, Any]]) -> None:
        """Report pods that do not start, once for each change of the reasons."""
        reasons = sorted({reason for pod in pods if (reason := _waiting_reason(pod))})
        summary = "; ".join(reasons)
        if summary != self._said:
            self._said = summary
            if summary:
                self._say("waiting", f"pods of {self._kind} {self._job} wait: {summary}")


def _end_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terminated state of the agent's container; empty while it runs."""
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next(
        (dict(status["state"]["terminated"]) for status in statuses if status.get("state", {}).get("terminated")), {}
    )


def _waiting_reason(pod: Mapping[str, Any]) -> str:
    """Return the reason why a pod does not start: no node takes it, or its image or volume is missing.

    Empty if it is starting.
    """
    if pod.get("status", {}).get("phase") != "Pending":
        return ""
    conditions = pod["status"].get("conditions") or ()
    for entry in conditions:
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return str(entry.get("message") or entry.get("reason") or "not scheduled yet")
    for entry in pod["status"].get("containerStatuses") or ():
        waiting = entry.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""
