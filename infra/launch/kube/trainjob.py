"""The TrainJob of Kubeflow Trainer (2.2 and later) that brings a training onto nodes, and its TrainingRuntime.

    python -m infra.launch.kube.trainjob CONFIG [STAGE]       prints the TrainJob of a training stage
    python -m infra.launch.kube.trainjob --runtime CONFIG     prints the TrainingRuntime, to be applied once

Both hold what the Job of `infra.launch.kube.manifest` holds. The runtime has the parts of the pods that are the same
for all trainings of a config: volumes, user, secrets, priority, the time to end. A TrainJob has the rest: the command,
the number and the resources of nodes, and the nodes to avoid. Kubeflow's controller makes a JobSet of the two, with one
Indexed Job, whose pods run the agent as those of our own Job do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from infra.launch.config import LaunchConfig
from infra.launch.kube.manifest import job_name, launch_of, manifest

GROUP = "trainer.kubeflow.org"
VERSION = f"{GROUP}/v1alpha1"
_REPLICATED_JOB = "node"
"""Name by which Kubeflow Trainer knows the Job of the trainer, and its container."""
_OF_TRAINJOB = ("image", "command", "env", "resources")
"""Parts of our container that a TrainJob sets; the others are in the runtime."""
_PATCHES = ("affinity", "nodeSelector", "tolerations")
"""Parts of our pod's spec that a TrainJob sets."""


def trainjob(launch: LaunchConfig, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the TrainJob of a training that `job` describes, a document of `manifest`."""
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = job["metadata"]["labels"]
    patch = {"metadata": {"labels": labels}, "spec": {key: pod["spec"][key] for key in _PATCHES if key in pod["spec"]}}
    jobs = [{"name": _REPLICATED_JOB, "template": {"spec": {"template": patch}}}]
    limit_s = job["spec"].get("activeDeadlineSeconds")
    return {
        "apiVersion": VERSION,
        "kind": "TrainJob",
        "metadata": job["metadata"],
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": launch.kubernetes.training_runtime},
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "env": container["env"],
                "numNodes": launch.nodes,
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {"manager": "stemma/training", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
            ],
            **({"activeDeadlineSeconds": limit_s} if limit_s else {}),
        },
    }


def runtime(launch: LaunchConfig) -> dict[str, Any]:
    """Return the TrainingRuntime for the TrainJobs of a config."""
    job_manifest = manifest(launch, "unused", "unused", "unused", Path("/unused"))
    spec = {key: value for key, value in job_manifest["spec"]["template"]["spec"].items() if key not in _PATCHES}
    (container,) = spec["containers"]
    kept = {key: value for key, value in container.items() if key not in _OF_TRAINJOB}
    spec["containers"] = [{**kept, "name": _REPLICATED_JOB, "image": container["image"]}]
    job = {
        "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
        # A pod that fails or is taken away ends the TrainJob; the stage decides whether another one continues.
        "spec": {"completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": spec}},
    }
    return {
        "apiVersion": VERSION,
        "kind": "TrainingRuntime",
        "metadata": {"name": launch.kubernetes.training_runtime, "labels": {"app": "stemma", "part": "training"}},
        "spec": {
            "mlPolicy": {"numNodes": launch.nodes},
            "template": {
                "spec": {
                    "ttlSecondsAfterFinished": job_manifest["spec"]["ttlSecondsAfterFinished"],
                    "replicatedJobs": [{"name": _REPLICATED_JOB, "template": job}],
                }
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("stage", nargs="?", default="pretrain")
    parser.add_argument("--runtime", action="store_true")
    options = parser.parse_args()
    _, launch = launch_of(options.config, cluster="kubernetes")
    if launch.kubernetes.training_runtime is None:
        sys.exit(f"{options.config}: launch.kubernetes.training_runtime: expected the name of a TrainingRuntime")
    name = job_name(options.stage, "example")
    document = (
        runtime(launch)
        if options.runtime
        else trainjob(launch, manifest(launch, name, options.stage, "fingerprint", Path("/WORK/FOLDER")))
    )
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False))


if __name__ == "__main__":
    main()
