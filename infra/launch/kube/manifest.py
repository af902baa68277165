"""The Job of Kubernetes (batch/v1) that brings a training onto nodes, from `launch:`.

    python -m infra.launch.kube.manifest CONFIG [STAGE]

prints what a training stage of this pipeline would submit, with a folder in place of its work folder.

The Job is an Indexed Job with one pod per node. Each pod is on a separate machine and runs `infra.launch.agent`. Pods
find each other by the addresses that their agents write into the work folder, so no service is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from infra.io.yaml import BadYaml, read_plain, read_text
from infra.launch.config import LaunchConfig
from infra.project import PROJECT

# Seconds for processes to end, after the time that ranks have to save.
_ENDING_S = 30
# Seconds after the end of its pods at which Kubernetes removes a Job whose stage died.
KEPT_S = 3600
_INDEX = "JOB_COMPLETION_INDEX"
_NODE, _ADDRESS = "STEMMA_NODE", "STEMMA_POD_ADDRESS"
_HOSTNAME = "kubernetes.io/hostname"


def manifest(
    launch: LaunchConfig,
    job: str,
    stage: str,
    build: str,
    folder: Path,
    excluded: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the Job of a training.

    job: its name. build: the fingerprint of what it trains. folder: see `infra.launch.node_files`.
    excluded: names of nodes that get no pod. environment: further variables of the agents.
    """
    kubernetes = launch.kubernetes
    labels = {**kubernetes.labels, "app": "stemma", "part": "training"}
    labels |= {"stemma/stage": label(stage), "stemma/build": label(build), "stemma/job": job}
    spec = {
        **pod_spec(
            launch,
            _container(launch, job, folder, environment or {}),
            service_account=kubernetes.service_account,
            node_selector=kubernetes.node_selector,
        ),
        "affinity": _affinity(job, sorted(excluded)),
    }
    pods = {"metadata": {"labels": labels}, "spec": spec}
    limit_s = {"activeDeadlineSeconds": round(kubernetes.time_limit_h * 3600)} if kubernetes.time_limit_h else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.nodes,
            "parallelism": launch.nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_S,
            **limit_s,
            "template": pods,
        },
    }


def job_name(stage: str, tail: str) -> str:
    """Return a Job name that the API accepts: the names of its pods are some letters longer."""
    return f"stemma-{re.sub(r'[^a-z0-9-]', '-', stage.lower())[:32]}-{tail}"


def label(text: str) -> str:
    """Return a text as the value of a label: at most 63 letters, digits, dots, underscores and dashes."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("._-")


def pod_spec(
    launch: LaunchConfig,
    container: dict[str, Any],
    *,
    service_account: str | None,
    node_selector: Mapping[str, str],
    has_token: bool = False,
) -> dict[str, Any]:
    """Return the spec of a pod: its nodes, user, priority and volumes. container: result of `container_of`.

    has_token: True if the pod may call the cluster's API as its service account.
    """
    kubernetes = launch.kubernetes
    return {
        **kubernetes.pod,
        "restartPolicy": "Never",
        "automountServiceAccountToken": has_token,
        "terminationGracePeriodSeconds": round(launch.grace_s) + _ENDING_S,
        "securityContext": kubernetes.pod.get("securityContext", _USER),
        "containers": [container],
        "volumes": list(_mounts(launch).values()),
        **({"priorityClassName": kubernetes.priority_class} if kubernetes.priority_class else {}),
        **({"serviceAccountName": service_account} if service_account else {}),
        **({"nodeSelector": dict(node_selector)} if node_selector else {}),
        **(
            {"tolerations": [dict(toleration) for toleration in kubernetes.tolerations]}
            if kubernetes.tolerations
            else {}
        ),
    }


def container_of(launch: LaunchConfig, **its_own: Any) -> dict[str, Any]:
    """Return the only container of a pod, with the code, the volumes and the secrets that all pods have."""
    kubernetes = launch.kubernetes
    return {
        "image": kubernetes.image,
        "workingDir": str(PROJECT),
        "envFrom": [{"secretRef": {"name": name}} for name in kubernetes.secrets],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": kubernetes.read_only_root,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": volume["name"], "mountPath": path} for path, volume in _mounts(launch).items()],
        **its_own,
    }


def resources(cores: int | None, memory_gb: float | None, gpus: Mapping[str, int]) -> dict[str, Any]:
    """Return the resources of a pod. GPUs and memory are limits too; CPUs are not, so that idle ones can be used."""
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if cores:
        requests["cpu"] = str(cores)
    if memory_gb:
        requests["memory"] = limits["memory"] = str(round(memory_gb * 1e9))
    for name, count in gpus.items():
        if count:
            requests[name] = limits[name] = str(count)
    return {"requests": requests, "limits": limits}


# The user of the image and the folder of its caches, see infra/Dockerfile.
_HOME = "/home/stemma"
_USER: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def _container(launch: LaunchConfig, job: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    # The kubelet substitutes the variables.
    names = [f"{job}.$({_INDEX})", f"$({_NODE})@$({_ADDRESS})"]
    fields = {_NODE: "spec.nodeName", _ADDRESS: "status.podIP"}
    return container_of(
        launch,
        name="agent",
        command=[sys.executable, "-m", "infra.launch.agent", str(folder), *names],
        env=[
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
            *({"name": name, "value": value} for name, value in sorted(environment.items())),
        ],
        resources=training_resources(launch),
    )


def training_resources(launch: LaunchConfig) -> dict[str, Any]:
    """Return the resources for the processes of one node."""
    kubernetes = launch.kubernetes
    cores = kubernetes.cpus_per_process or launch.threads
    gpus = kubernetes.gpus_per_process if kubernetes.gpus_per_process is not None else int(launch.device == "gpu")
    return resources(
        cores and cores * launch.processes, kubernetes.memory_gb, {kubernetes.gpu_resource: gpus * launch.processes}
    )


def _mounts(launch: LaunchConfig) -> dict[str, dict[str, Any]]:
    """Return the volumes by the path under which a pod sees them."""
    claims = enumerate(sorted(launch.kubernetes.claims.items()))
    shared = {
        path: {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (path, claim) in claims
    }
    writable = {"/tmp": {"name": "tmp", "emptyDir": {}}, _HOME: {"name": "home", "emptyDir": {}}}
    # Loaders and NCCL pass data through shared memory; the default of 64 MiB is too small.
    return {**writable, **shared, "/dev/shm": {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}}


def _affinity(job: str, excluded: list[str]) -> dict[str, Any]:
    """Return the affinity that puts each pod on a separate machine, and none on an excluded one."""
    anti_affinity = {"labelSelector": {"matchLabels": {"stemma/job": job}}, "topologyKey": _HOSTNAME}
    affinity: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]}}
    if excluded:
        # An expression may compare a field with one value only, so each node has its own expression.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in excluded]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return affinity


def launch_of(config: str, **forced: Any) -> tuple[dict[str, Any], LaunchConfig]:
    """Return a config file's content and its `launch:`; exit if it cannot be read. forced: keys of `launch:` to set."""
    try:
        document = read_plain(read_text(Path(config)))
        document = document if isinstance(document, dict) else {}
        return document, LaunchConfig.model_validate({**(document.get("launch") or {}), **forced})
    except (OSError, UnicodeDecodeError, ValidationError, BadYaml) as error:
        sys.exit(f"{config}: {error}")


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        sys.exit("expected python -m infra.launch.kube.manifest CONFIG [STAGE]")
    config, stage = arguments[0], (*arguments, "pretrain")[1]
    _, launch = launch_of(config, cluster="kubernetes")
    name = job_name(stage, "example")
    document = manifest(launch, name, stage, "fingerprint", Path("/WORK/FOLDER"))
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False))


if __name__ == "__main__":
    main(sys.argv[1:])
