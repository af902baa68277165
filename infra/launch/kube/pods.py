"""Fate of the pods of a Job: the pods that were taken away, and the reasons.

An evicted pod may be gone between two looks, and the Job's controller then deletes the others. So every change is
received from the API as it happens (a list, and a watch from there on). If the API permits no watch, only the results
of looks are known.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from infra.io.json import parse_json
from infra.launch.kube.api import KubeApi, KubeError

_AGAIN_S = 1.0
"""Seconds between the end of a watch and the next one."""
_WATCH_S = 90
"""Seconds that a watch lasts; less than the silence that ends a connection."""
_BEHIND_S = 1.0
"""Seconds that the watch may take to report what a look has already found."""
_BY_KUBELET = ("Evicted", "Preempting", "Terminated", "Shutdown", "NodeShutdown", "NodeLost")
"""Reasons in a pod's own status, also by versions that set no condition."""


class Pods:
    """The pods of one Job, from its creation on. path: of the namespace's pods in the API."""

    def __init__(self, api: KubeApi, path: str, selector: str) -> None:
        self._api, self._path, self._selector = api, path, selector
        self._nodes: dict[str, str] = {}
        self._disrupted: dict[str, str] = {}
        self._deleted: dict[str, str] = {}
        self._ended: set[str] = set()
        self._gone: set[str] = set()
        self._versions: set[str] = set()
        self._one_failed = False
        self._heard: queue.SimpleQueue[tuple[str, list[dict[str, Any]]]] = queue.SimpleQueue()
        self._is_watched = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pods", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def note(self, pods: Sequence[dict[str, Any]]) -> None:
        """Record the pods that a look at the API just found, after everything that the watch has reported."""
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        versions = {pod["metadata"].get("resourceVersion", "") for pod in pods}
        earlier = (
            self._nodes.keys() - by_name.keys()
        )  # before this look, so that one just created is not taken for gone
        end = time.monotonic() + _BEHIND_S
        while True:
            self._apply_changes()
            is_behind = bool(versions - self._versions or earlier - self._gone)
            if not is_behind or not self._is_watched or time.monotonic() > end:
                break
            time.sleep(0.02)
        self._note([*by_name.values()], earlier - self._gone)

    def taken(self, *, by_controller: bool) -> str:
        """Return the pods that were taken away by an eviction, a pre-emption or the loss of their node, with node and
        reason, once one of them has ended; empty before.

        by_controller: True if the Job's own controller deletes its pods, and not because one failed."""
        disrupted = self._disrupted or ({} if by_controller else self._deleted)
        ended = [name for name in disrupted if name in self._ended]
        return "; ".join(f"{name}{self._nodes.get(name, '')}: {disrupted[name]}" for name in ended)

    def _note(self, pods: Iterable[dict[str, Any]], missing: Iterable[str] = ()) -> None:
        """Record pods that were found at the same time. gone: names of pods that no longer exist."""
        lost = dict.fromkeys(sorted(missing), "it is gone")
        self._gone |= lost.keys()
        self._ended |= lost.keys()
        deleted: dict[str, datetime] = {}
        for pod in pods:
            name = pod["metadata"]["name"]
            node = pod.get("spec", {}).get("nodeName")
            self._nodes[name] = f" on {node}" if node else self._nodes.get(name, "")
            if is_finished(pod):
                self._ended.add(name)
            if reason := _disruption(pod):
                self._disrupted[name] = reason
            elif "deletionTimestamp" in pod["metadata"]:
                deleted[name] = _deleted_at(pod["metadata"])
            elif pod.get("status", {}).get("phase") == "Failed" and not self._deleted:
                self._one_failed = True
        # The controller deletes all pods once one has failed or was deleted, so the first one shows the cause.
        if not self._deleted and not self._one_failed:
            first = [name for name, deleted_at in deleted.items() if deleted_at == min(deleted.values())]
            self._deleted = lost | dict.fromkeys(first, "it was deleted")

    def _apply_changes(self) -> None:
        with suppress(queue.Empty):
            while True:
                change, pods = self._heard.get_nowait()
                self._versions |= {pod["metadata"].get("resourceVersion", "") for pod in pods}
                self._note(pods, [pod["metadata"]["name"] for pod in pods] if change == "DELETED" else ())

    def _watch(self) -> None:
        since = ""
        while not self._closed.is_set():
            try:
                since = since or self._list()
                self._is_watched = True
                since = self._follow(since)
            except KubeError as error:
                if error.status in (403, 404, 405):
                    break
                since = "" if error.status else since
            except (ValueError, LookupError, TypeError, AttributeError):
                since = ""  # it was cut off, or a proxy gave it
            self._is_watched = False
            self._closed.wait(_AGAIN_S)
        self._is_watched = False

    def _list(self) -> str:
        """Queue the current pods; return the version of the list, from which a watch continues."""
        listing = self._api.call("GET", self._path, labelSelector=self._selector)
        self._heard.put(("LIST", listing["items"]))
        return str(listing["metadata"]["resourceVersion"])

    def _follow(self, since: str) -> str:
        """Queue each change after a version until the watch ends. Return the version of the last change.

        Empty if the API no longer knows the changes since that version.
        """
        query = {"watch": "true", "labelSelector": self._selector, "timeoutSeconds": str(_WATCH_S)}
        query |= {"allowWatchBookmarks": "true", "resourceVersion": since}
        for line in self._api.lines(self._path, **query):
            if self._closed.is_set():
                break
            change = parse_json(line, f"{self._api.server}{self._path}")
            if change["type"] == "ERROR":
                return ""
            since = change["object"]["metadata"]["resourceVersion"]
            if change["type"] != "BOOKMARK":
                self._heard.put((change["type"], [change["object"]]))
        return since


def condition(of: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a condition of an object if it is true, else None."""
    conditions = of.get("status", {}).get("conditions") or ()
    return next((dict(entry) for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def is_finished(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _disruption(pod: Mapping[str, Any]) -> str:
    """Return Kubernetes' reason for taking a pod away; empty if it does not."""
    status = pod.get("status", {})
    cause = condition(pod, "DisruptionTarget") or (status if status.get("reason") in _BY_KUBELET else {})
    return " ".join(f"{cause.get('reason', '')}: {cause.get('message', '')}".split()).strip(": ")


def _deleted_at(metadata: Mapping[str, Any]) -> datetime:
    """Return the time of the request to delete: the API gives the time at which the pod's grace period is over."""
    end = datetime.fromisoformat(metadata["deletionTimestamp"])
    return end - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
