"""Kubeflow Trainer 2.2 of the stand-in for a cluster (`tests.support.kubernetes.cluster`): its API, and its controller,
which makes a Job of a TrainJob and a TrainingRuntime.

The schemas are written from the documentation of trainer.kubeflow.org/v1alpha1. They allow no other fields. What they
leave open, pods and their containers, is held against Kubernetes' own schema in the Job that is made of both.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema

NODE = "node"
_STRING, _NUMBER, _ANY = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}, {"type": "object"}
_DNS = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    kept = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**kept, "required": required.split()}


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


_META = _closed(labels=_ANY, annotations=_ANY)
_CONTAINER = _closed("name", name=_STRING, volumeMounts=_list(_ANY, 128), securityContext=_ANY)
_POD_PATCH = _closed(
    serviceAccountName=_STRING,
    volumes=_list(_ANY, 128),
    containers=_list(_CONTAINER, 64),
    imagePullSecrets=_list(_ANY, 64),
    securityContext=_ANY,
    nodeSelector=_ANY,
    affinity=_ANY,
    tolerations=_list(_ANY, 128),
)
_JOB_PATCH = _closed(
    "name",
    name={**_STRING, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    template=_closed(metadata=_META, spec=_closed(template=_closed(metadata=_META, spec=_POD_PATCH))),
)
_PATCH = _closed(
    "manager",
    manager=_STRING,
    trainingRuntimeSpec=_closed(template=_closed(metadata=_META, spec=_closed(replicatedJobs=_list(_JOB_PATCH, 100)))),
)


def _resource(kind: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind={"const": kind},
        metadata=_closed("name", name=_DNS, labels=_ANY, **metadata),
        spec=spec,
    )


_TRAINJOB = _resource(
    "TrainJob",
    annotations=_ANY,
    spec=_closed(
        "runtimeRef",
        runtimeRef=_closed("name", name=_STRING, apiGroup=_STRING, kind=_STRING),
        trainer=_closed(
            image=_STRING,
            command=_list(_STRING, 128),
            args=_list(_STRING, 128),
            env=_list(_ANY, 128),
            numNodes=_NUMBER,
            resourcesPerNode=_ANY,
            numProcPerNode=_NUMBER,
        ),
        runtimePatches=_list(_PATCH, 16),
        suspend={"type": "boolean"},
        activeDeadlineSeconds=_NUMBER,
        managedBy=_STRING,
    ),
)
_RUNTIME = _resource(
    "TrainingRuntime",
    spec=_closed(
        "template",
        mlPolicy=_closed(numNodes=_NUMBER),
        podGroupPolicy=_ANY,
        template=_closed(
            "spec",
            metadata=_META,
            spec=_closed(
                "replicatedJobs",
                ttlSecondsAfterFinished=_NUMBER,
                replicatedJobs=_list(
                    _closed(
                        "name template",
                        name=_STRING,
                        template=_closed("spec", metadata=_META, spec=_ANY),
                    ),
                    100,
                ),
            ),
        ),
    ),
)


def problem_of(document: dict[str, Any]) -> str:
    """Return the reason for which the API would refuse a TrainJob or TrainingRuntime; empty if it would not."""
    schema = _TRAINJOB if document.get("kind") == "TrainJob" else _RUNTIME
    errors = sorted(jsonschema.Draft202012Validator(schema).iter_errors(document), key=str)
    return f"{errors[0].json_path}: {errors[0].message}" if errors else ""


def child_name(trainjob: str) -> str:
    """The Job of a TrainJob: JobSet names it after itself, the replicated Job and its place."""
    return f"{trainjob}-{NODE}-0"


def child_of(trainjob: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    """The Job that the controller creates, by way of a JobSet."""
    spec = trainjob["spec"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    job = json.loads(json.dumps(replicated["template"]["spec"]))
    pod = job["template"]
    (container,) = pod["spec"]["containers"]
    trainer = spec["trainer"]
    container |= {"image": trainer["image"], "command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    container["env"] = [*container.get("env", ()), *trainer["env"]]
    labels: dict[str, str] = {}
    for patch in spec.get("runtimePatches", ()):
        for patched in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            assert patched["name"] == replicated["name"]
            labels |= patched["template"]["spec"]["template"].get("metadata", {}).get("labels", {})
            pod["spec"] |= patched["template"]["spec"]["template"]["spec"]
    nodes = trainer.get("numNodes") or runtime["spec"]["mlPolicy"]["numNodes"]
    name = trainjob["metadata"]["name"]
    pod["metadata"] = {"labels": {**labels, "jobset.sigs.k8s.io/jobset-name": name}}
    limit = {"activeDeadlineSeconds": spec["activeDeadlineSeconds"]} if "activeDeadlineSeconds" in spec else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": child_name(name), "labels": {"jobset.sigs.k8s.io/jobset-name": name}},
        "spec": {**job, **limit, "completions": nodes, "parallelism": nodes},
    }


def with_status(trainjob: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """A TrainJob with the conditions that follow from its Job: it has failed once the Job has."""
    ended = {condition["type"] for condition in job["status"].get("conditions", ())} & {"Failed", "Complete"}
    reasons = {"Failed": "FailedJobs", "Complete": "AllJobsCompleted"}
    conditions = [
        {"type": kind, "status": "True", "reason": reasons[kind], "message": f"jobset {kind.lower()}"} for kind in ended
    ]
    return {**trainjob, "status": {"conditions": conditions} if conditions else {}}
