"""A pod of the stand-in for a cluster (`tests.support.kubernetes.cluster`): its container is a local process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.process.lifetime import signal_group


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
    def metadata(self) -> dict[str, Any]:
        return self.document["metadata"]

    @property
    def status(self) -> dict[str, Any]:
        return self.document["status"]

    @property
    def node(self) -> str:
        return self.document["spec"].get("nodeName", "")

    @property
    def is_finished(self) -> bool:
        return self.status["phase"] in ("Succeeded", "Failed")

    @property
    def is_deleted(self) -> bool:
        """Whether it is told to go."""
        return "deletionTimestamp" in self.metadata

    def begin(self, config_maps: Mapping[str, Mapping[str, str]], secrets: Mapping[str, Mapping[str, str]]) -> None:
        """As the kubelet: the container's own environment, with what it says of the pod, and of maps and secrets."""
        (container,) = self.document["spec"]["containers"]
        told = _variables(self, container, {"configMap": config_maps, "secret": secrets})
        words = [*container["command"], *container.get("args", ())]
        self.process = subprocess.Popen(
            [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **told},
            cwd=container["workingDir"],
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def look_after(self) -> bool:
        """Whether its process has ended since, of which its status tells then."""
        if self.process is None or self.is_finished:
            return False
        code = self.process.poll()
        if code is None:
            if self.kill_at and time.monotonic() > self.kill_at:
                signal_group(self.process.pid, signal.SIGKILL)
            return False
        signal_group(self.process.pid, signal.SIGKILL)  # a container ends as a whole
        reason = "Completed" if code == 0 else "Error"
        code = 128 - code if code < 0 else code
        self.status["phase"] = "Failed" if code else "Succeeded"
        self.status["containerStatuses"] = [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]
        return True

    def end(self, *, is_reached: bool) -> None:
        """Its first process hears SIGTERM, and all of them go by SIGKILL after the grace period."""
        over = datetime.now(UTC) + timedelta(seconds=self.grace_s)
        self.metadata["deletionTimestamp"] = f"{over:%Y-%m-%dT%H:%M:%SZ}"
        self.metadata["deletionGracePeriodSeconds"] = self.grace_s
        self.kill_at = time.monotonic() + self.grace_s
        if self.process is not None and self.process.poll() is None and is_reached:
            self.process.send_signal(signal.SIGTERM)

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{now()} {line.decode('utf8', errors='replace')}".rstrip("\n"))


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def _variables(
    pod: Pod, container: Mapping[str, Any], stores: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> dict[str, str]:
    fields = {"spec.nodeName": pod.node, "status.podIP": pod.status["podIP"]}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        ((kind, reference),) = source.items()
        found |= stores[kind.removesuffix("Ref")][reference["name"]]
    for one in container.get("env", ()):
        if "valueFrom" not in one:
            found[one["name"]] = one["value"]
            continue
        ((kind, reference),) = one["valueFrom"].items()
        if kind == "fieldRef":
            found[one["name"]] = fields[reference["fieldPath"]]
        else:
            found[one["name"]] = stores[kind.removesuffix("KeyRef")][reference["name"]][reference["key"]]
    return found
