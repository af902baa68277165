"""The managed job of SkyPilot that runs a pipeline on the cheapest machine, and on another one after it was lost.

    python -m infra.launch.sky CONFIG --root s3://bucket/store > job.yaml
    sky jobs launch job.yaml --secret AWS_ACCESS_KEY_ID …

SkyPilot starts a machine, copies the project's folder to it, and runs `stemma run`. If it loses the machine, it runs
the same on another one. Artifacts of finished stages and the checkpoints of a training are in the bucket by then, so
the run reuses the first and continues from the newest of the second, to the same bits as an undisturbed run.

CONFIG is a path within the project's folder. Its sources must be reachable from the machine: in the folder or in a
bucket.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import PurePosixPath
from typing import Any

import yaml

from infra.io.s3 import SCHEME
from infra.launch.config import LaunchConfig
from infra.launch.kube.manifest import launch_of


def managed_job(
    launch: LaunchConfig, pipeline: str, config: str, root: str, arguments: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the task of a managed job.

    Args:
        launch: of the config.
        pipeline: its name.
        config: its path within the project's folder.
        root: the store, on S3.
        arguments: further arguments of `stemma run`.
    """
    sky = launch.skypilot
    # Next to the store, since everything within it is an artifact.
    checkpoints = launch.checkpoint_remote or f"{root.rstrip('/')}-checkpoints"
    command = ["run", config, "--root", root, "--set", f"launch.checkpoint_remote={checkpoints}", *arguments]
    resources: dict[str, Any] = {
        "use_spot": sky.spot,
        "disk_size": sky.disk_gb,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": sky.restarts_on_errors},
        **({"cpus": f"{sky.cpus}+"} if sky.cpus else {}),
        **({"memory": f"{sky.memory_gb:g}+"} if sky.memory_gb else {}),
        **({"image_id": sky.image} if sky.image else {}),
        # A mapping is a set of alternatives, of which SkyPilot takes the cheapest; a list would be an order.
        **({"accelerators": dict(map(_accelerator, sky.accelerators))} if sky.accelerators else {}),
        **({"any_of": [{"infra": infra} for infra in sky.infra]} if sky.infra else {}),
    }
    return {
        "name": pipeline,
        "workdir": ".",
        "num_nodes": 1,
        "resources": resources,
        "envs": {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **sky.envs},
        "secrets": dict.fromkeys(sky.secrets),
        "setup": sky.setup,
        "run": f"exec {shlex.join([*shlex.split(sky.program), *command])}\n",
    }


def _accelerator(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    return name, int(count or 1)


def _problem(launch: LaunchConfig, config: str, root: str) -> str:
    """Return the reason why no managed job can run this; empty if one can."""
    if launch.cluster != "local" or launch.nodes > 1:
        return f"{config}: launch: expected cluster: local and nodes: 1, since SkyPilot's machines share no folder"
    if not root.startswith(SCHEME) or "/" not in root.removeprefix(SCHEME).strip("/"):
        return f"--root: expected s3://bucket/prefix, not {root}: a folder is lost with its machine"
    if PurePosixPath(config).is_absolute() or ".." in PurePosixPath(config).parts:
        return f"{config}: expected a path within the project's folder, which is copied to the machine"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--root", required=True, help="the store: s3://bucket/prefix")
    parser.add_argument("arguments", nargs="*", help="further arguments of `stemma run`, after --")
    options = parser.parse_args()
    document, launch = launch_of(options.config)
    if problem := _problem(launch, options.config, options.root):
        sys.exit(problem)
    name = str(document.get("name") or "stemma")
    job = managed_job(launch, name, options.config, options.root, tuple(options.arguments))
    sys.stdout.write(yaml.safe_dump(job, sort_keys=False))


if __name__ == "__main__":
    main()
