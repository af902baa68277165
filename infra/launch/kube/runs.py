"""The Job of Kubernetes (batch/v1) in which Prefect's own Kubernetes worker starts a run of a pipeline: a pod a run.

    python -m infra.launch.kube.runs CONFIG      prints that Job
    python -m infra.launch.kube.runs --template  prints the base job template of work pools for such runs, as JSON

The Job is rendered here whole, as that of a training is, and goes with each deployment, so that pipelines of different
images and volumes may share a pool. Its template only passes the Job on.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import yaml

from infra.launch.config import LaunchConfig
from infra.launch.kube.manifest import KEPT_S, container_of, label, launch_of, pod_spec, resources, training_resources
from infra.launch.launchers import KubernetesConfig
from infra.project import PROJECT, default_root
from infra.store.roots import root_folder, shown_root

TYPE = "kubernetes"
"""Prefect's type of such work pools, and of the workers that serve them."""
MANIFEST = "job_manifest"
_FROM_SECRET = {"STEMMA_AUTH": "auth", "STEMMA_DATABASE_URL": "database-url"}
"""Variables by the key of the installation's secret, as in infra/kubernetes/."""


def run_manifest(launch: LaunchConfig, pipeline: str, root: str) -> dict[str, Any]:
    """Return the Job of a run. pipeline: its name. root: the store, as the pod sees it."""
    kubernetes, runs = launch.kubernetes, launch.kubernetes.runs
    assert runs is not None
    # If training runs in this pod, its requests apply to the pod.
    by_default = kubernetes if launch.trains_here else KubernetesConfig()
    base_labels = by_default.labels if runs.labels is None else runs.labels
    labels = {**base_labels, "app": "stemma", "part": "run", "stemma/pipeline": label(pipeline)}
    pod = pod_spec(
        launch,
        _container(launch, root),
        service_account=runs.service_account,
        node_selector=by_default.node_selector if runs.node_selector is None else runs.node_selector,
        # Its training stages create their own Jobs.
        has_token=launch.cluster == "kubernetes",
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "stemma-run-", "namespace": kubernetes.namespace, "labels": dict(labels)},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            # Prefect decides whether a run is retried; the Job must not start a second pod for it.
            "backoffLimit": 0,
            # A pod that is taken away exits with success once its run has saved (`infra.servers.prefect.flow_pod`).
            # Otherwise Kubernetes would report the Job as failed until then, and Prefect the run as crashed.
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def job_variables(launch: LaunchConfig, pipeline: str, root: str) -> dict[str, Any]:
    """Return a deployment's job variables, for a pool with `template`."""
    job = run_manifest(launch, pipeline, root)
    # Prefect's worker refuses a Job without these two in the pod's spec. Kubernetes knows no such fields there and
    # drops them.
    job["spec"]["template"]["spec"] |= {"parallelism": 1, "completions": 1}
    return {"namespace": launch.kubernetes.namespace, MANIFEST: job}


def template() -> dict[str, Any]:
    """Return the base job template of a work pool, which passes on the Job of `job_variables`."""
    properties = {
        "name": {"type": "string", "title": "Name"},
        "command": {"type": "string", "title": "Command"},
        "env": {"type": "object", "title": "Environment Variables", "additionalProperties": {"type": "string"}},
        "labels": {"type": "object", "title": "Labels", "additionalProperties": {"type": "string"}},
        "namespace": {"type": "string", "title": "Namespace"},
        MANIFEST: {"type": "object", "title": "Job", "description": "Rendered by Stemma from launch.kubernetes"},
    }
    return {
        "job_configuration": {name: f"{{{{ {name} }}}}" for name in properties},
        "variables": {"type": "object", "properties": properties, "required": [MANIFEST, "namespace"]},
    }


def _container(launch: LaunchConfig, root: str) -> dict[str, Any]:
    runs = launch.kubernetes.runs
    assert runs is not None
    common = container_of(launch)
    secret = {"name": runs.installation}
    return container_of(
        launch,
        # Prefect's worker insists on this name.
        name="prefect-job",
        command=[sys.executable, "-m", "infra.servers.foreground"],
        # Set here, since Prefect's worker would otherwise insert its own command.
        args=["flow-run", "--root", root],
        env=[
            {"name": "PYTHONPATH", "value": str(PROJECT)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {**secret, "key": key}}}
                for name, key in _FROM_SECRET.items()
            ),
        ],
        envFrom=[{"configMapRef": secret}, *common["envFrom"]],
        resources=_resources(launch),
    )


def _resources(launch: LaunchConfig) -> dict[str, Any]:
    kubernetes, runs = launch.kubernetes, launch.kubernetes.runs
    assert runs is not None
    requested = resources(runs.cpus, runs.memory_gb, {kubernetes.gpu_resource: runs.gpus or 0})
    inherited = training_resources(launch) if launch.trains_here else resources(None, None, {})
    if runs.gpus == 0:
        for part in inherited.values():
            part.pop(kubernetes.gpu_resource, None)
    return {part: {**inherited[part], **requested[part]} for part in inherited}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("config", nargs="?")
    group.add_argument("--template", action="store_true")
    parser.add_argument("--root")
    options = parser.parse_args()
    if options.template:
        sys.stdout.write(json.dumps(template(), indent=2) + "\n")
        return
    document, launch = launch_of(options.config)
    if launch.kubernetes.runs is None:
        guide = "docs/clusters/kubernetes.md"
        sys.exit(f"{options.config}: launch.kubernetes.runs: expected a section with `pool`, see {guide}")
    root = root_folder(options.root) if options.root else default_root()
    run_document = run_manifest(launch, str(document.get("name") or ""), shown_root(root))
    sys.stdout.write(yaml.safe_dump(run_document, sort_keys=False))


if __name__ == "__main__":
    main()
