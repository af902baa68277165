"""Nested sections of `launch:`: the requests of a training to Slurm and to Kubernetes, and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from infra.config import Config

SLURM_NOTICE_S = 30
"""Seconds, in addition to `launch.grace_s`, by which Slurm's notice to a job precedes its time limit: for its processes
to end."""
_OUR_POD_FIELDS = {"affinity", "containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds"}


class SlurmConfig(Config):
    """Slurm resources of a training, in addition to the nodes and processes of `launch`."""

    partition: str | None = None
    """Slurm partition; by default the cluster's default."""
    time_limit_h: float | None = Field(None, gt=0)
    """Time limit of a job in hours; by default the partition's. Training saves `launch.grace_s` and half a minute
    before it and continues in another job, as often as necessary."""
    cpus_per_process: int | None = Field(None, ge=1)
    """Cores of a training process; by default `launch.threads`, or what the cluster gives."""
    gpus_per_process: int | None = Field(None, ge=0)
    """By default 1 with `launch.device: gpu`, else none is asked for."""
    requeue: bool = True
    """Let Slurm requeue a job, under its number, after a pre-emption or the loss of a node. false: submit another job
    instead."""
    arguments: tuple[str, ...] = ()
    """Further arguments of sbatch, such as --account=lab, --constraint=h100 or --mem=0."""


class CostConfig(Config):
    """Rates by which `stemma cost` computes money, energy and emissions, for one device: the GPU of a training process,
    or the CPU threads that a stage has. The defaults are estimates, see docs/cost.md."""

    usd_per_hour: float | None = Field(None, ge=0)
    """Price in USD per hour; by default the mean rent of this GPU, or 0.045 for each CPU thread."""
    watts: float | None = Field(None, ge=0)
    """Power where the driver does not report it; by default the GPU's maximum, or 3.5 W for each CPU thread."""
    overhead: float | None = Field(None, ge=1)
    """Power of host and data centre per watt of the device (host's share times PUE); by default 1.21."""
    kg_per_kwh: float | None = Field(None, ge=0)
    """Emissions of the grid in kg CO2 equivalent per kWh; by default 0.48, the world's mean."""


class KubernetesRunsConfig(Config):
    """Runs of this pipeline in separate pods, started by Prefect's Kubernetes worker: runs from the page, from a
    schedule, and of `stemma run` when servers run. Image, namespace, claims, secrets, tolerations, priority_class and
    `pod` are those of `launch.kubernetes`."""

    pool: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Work pool, of Prefect's type kubernetes, for all deployments of this pipeline. It is created if it is missing;
    `prefect worker start --type kubernetes --pool NAME` starts a worker for it."""
    installation: str = "stemma"
    """The config map and the secret, both of this name, from which pods know servers (STEMMA_PREFECT_URL,
    STEMMA_MLFLOW_URL), credentials (auth) and database (database-url), as in infra/kubernetes/."""
    cpus: int | None = Field(None, ge=1)
    """Cores that a pod requests. If training runs in this pod (cluster: local), this key and the next two default to
    its request per node, otherwise to none."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory of a pod in gigabytes (10^9 bytes), as request and limit."""
    gpus: int | None = Field(None, ge=0)
    """GPUs of a pod, as `launch.kubernetes.gpu_resource`."""
    node_selector: dict[str, str] | None = None
    """Labels of nodes that may be used."""
    labels: dict[str, str] | None = None
    """Labels of Job and pod."""
    service_account: str | None = None
    """Service account of the pods; by default that of the namespace. They get its token only with cluster: kubernetes,
    to create the Jobs of trainings: infra/kubernetes/training.yaml has one named `training`."""


class KubernetesConfig(Config):
    """Kubernetes resources of a training, in addition to the nodes and processes of `launch`: one pod per node."""

    image: str | None = None
    """The image of the pods: this code and its environment, under the paths that they have where the stage runs."""
    namespace: str | None = None
    """Namespace; by default that of the pod in which the stage runs, or of the kubeconfig's context."""
    context: str | None = None
    """A context of the kubeconfig; by default its current one, or the cluster of the pod in which the stage runs."""
    claims: dict[Annotated[str, Field(pattern="^/")], str] = Field(default_factory=dict)
    """Volume claims by mount path, such as /store: store. The store's folder must be in a claim that many pods may
    write (ReadWriteMany), mounted at the same path as here."""
    cpus_per_process: int | None = Field(None, ge=1)
    """Cores requested per training process; by default `launch.threads`, or none."""
    gpus_per_process: int | None = Field(None, ge=0)
    """By default 1 with `launch.device: gpu`, else none is asked for."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory of a pod in gigabytes (10^9 bytes), shared memory included, as request and limit."""
    training_runtime: str | None = Field(None, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
    """Name of a TrainingRuntime of Kubeflow Trainer in the namespace: trainings are then submitted as TrainJobs, which
    refer to it, instead of Jobs. `python -m infra.launch.kube.trainjob --runtime CONFIG` prints it."""
    time_limit_h: float | None = Field(None, gt=0)
    """Time limit of a Job in hours, including the wait for nodes; by default none. Training continues in further Jobs
    from the newest checkpoint, as often as necessary."""
    service_account: str | None = None
    """Service account of the pods, which do not get its token; by default that of the namespace."""
    priority_class: str | None = None
    """Priority class of the pods; by default the cluster's default."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of nodes that may be used, such as cloud.example.com/pool: h100."""
    tolerations: tuple[dict[str, str | int], ...] = ()
    """Taints of nodes that may be used, as in a pod's spec."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become variables of the training, such as AWS_ACCESS_KEY_ID."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of Job and pods, such as kueue.x-k8s.io/queue-name: lab."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a pod's spec, such as imagePullSecrets, runtimeClassName or securityContext."""
    read_only_root: bool = True
    """Mount the image read-only in pods, except for /tmp, /home/stemma and the claims. Set false for an image with
    another home folder, or one that writes elsewhere."""
    runs: KubernetesRunsConfig | None = None
    """The pods of whole runs, for any `launch.cluster`. By default runs are processes of Stemma's own workers."""

    @model_validator(mode="after")
    def _pod_has_nothing_of_ours(self) -> Self:
        if reserved := sorted(set(self.pod) & _OUR_POD_FIELDS):
            raise ValueError(f"expected no {', '.join(reserved)} in launch.kubernetes.pod: training sets them itself")
        return self


class SamplersConfig(Config):
    """Processes that sample answers in parallel with the trainer (`rlhf.async`), each with a copy of the policy."""

    count: int = Field(1, ge=1)
    """Number of samplers. With rlhf.sampler: vllm these are servers, which divide the GPUs of `launch.vllm.gpus`."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each sampler; by default as many as training has, which reproduces its rounding."""
    gpus: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """Indices of the GPUs for samplers, assigned round-robin, such as 6,7; by default they share training's GPU."""


class SkyPilotConfig(Config):
    """Machine of a whole run as a managed job of SkyPilot, which `python -m infra.launch.sky CONFIG` renders."""

    infra: tuple[str, ...] = ()
    """Clouds or regions among which SkyPilot picks the cheapest, such as aws, gcp/us-central1 or k8s/lab; by default
    all that its user has access to."""
    accelerators: tuple[str, ...] = ()
    """Acceptable GPUs, such as H100:8 or A100-80GB:8; SkyPilot picks the cheapest. By default none."""
    cpus: int | None = Field(None, ge=1)
    """Minimum number of cores."""
    memory_gb: float | None = Field(None, gt=0)
    """Minimum memory in gigabytes."""
    disk_gb: int = Field(256, ge=1)
    """Size of the disk in gigabytes."""
    image: str | None = None
    """Image of the machine, such as docker:registry.example.com/stemma:2026-11; by default SkyPilot's own."""
    spot: bool = True
    """Use spot instances. A job that loses its machine continues on another one from the newest checkpoint."""
    restarts_on_errors: int = Field(0, ge=0)
    """Number of times that SkyPilot starts the command again after it failed, in addition to lost machines."""
    setup: str = "make .venv/.installed"
    """Commands that install the environment on a new machine, in the project's folder."""
    program: str = ".venv/bin/stemma"
    """The command `stemma` on the machine, from the project's folder."""
    secrets: tuple[Annotated[str, Field(pattern="^[A-Z_][A-Z0-9_]*$")], ...] = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "STEMMA_DATABASE_URL",
    )
    """Variables whose values `sky jobs launch --secret NAME` takes from the environment of its user."""
    envs: dict[Annotated[str, Field(pattern="^[A-Z_][A-Z0-9_]*$")], str] = Field(default_factory=dict)
    """Further variables of the run, such as AWS_ENDPOINT_URL. No secrets."""


class VllmConfig(Config):
    """vLLM, from a separate environment, for the stages whose config selects it (`rlhf.sampler`, `benchmarks.engine`):
    a server that the stage starts, queries over a socket of its user, and ends."""

    program: str | None = None
    """The program `vllm` of that environment, such as /opt/vllm/bin/vllm; by default what $STEMMA_VLLM names, else the
    one on the PATH."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, such as --gpu-memory-utilization=0.4, --tensor-parallel-size=2 or
    --enforce-eager."""
    gpus: str | None = Field(None, pattern=r"^\d+(,\d+)*$")
    """Indices of the GPUs for vLLM, such as 6,7, preferably not those of training; by default the GPUs that the stage
    sees, whose memory it then shares."""
    start_s: float = Field(900.0, gt=0)
    """Maximum seconds to load a model and answer."""
    silent_s: float = Field(300.0, gt=0)
    """Seconds without an answer to any request, after which vLLM is ended and the stage fails."""
