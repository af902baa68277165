"""`launch:`, the only part of a config that describes machines. None of it affects identity."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Config
from infra.errors import Problem
from infra.launch.launchers import (
    SLURM_NOTICE_S,
    CostConfig,
    KubernetesConfig,
    SamplersConfig,
    SkyPilotConfig,
    SlurmConfig,
    VllmConfig,
)


class LaunchConfig(Config):
    processes: int = Field(1, ge=1)
    """Training processes per node, one per device."""
    nodes: int = Field(1, ge=1)
    """Machines that train together."""
    cluster: Literal["local", "hosts", "slurm", "ray", "kubernetes"] = "local"
    """Location of the ranks: local, on this machine; hosts, on `hosts` over a remote shell; slurm or kubernetes, on
    nodes of that cluster, in a job that the stage submits, follows and cancels; ray, on nodes of the cluster that `ray`
    names. Nodes share the store's file system and this environment, under the same paths. With local and several nodes,
    start the stage on each node (NODE_RANK)."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of machines, with cluster: hosts. Training uses the first `nodes` of them that pass their
    checks; the others replace machines that are lost."""
    remote_shell: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "{host}")
    """The program, and its arguments, that runs a command line, its last argument, on {host}."""
    slurm: SlurmConfig = SlurmConfig()
    """Resources of a job, with cluster: slurm."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Resources of a Job, with cluster: kubernetes."""
    skypilot: SkyPilotConfig = SkyPilotConfig()
    """Machine for an entire run that SkyPilot starts."""
    vllm: VllmConfig = VllmConfig()
    """Program and arguments of vLLM, for stages that use it."""
    samplers: SamplersConfig = SamplersConfig()
    """Processes that sample answers in parallel with training, with `rlhf.async`."""
    cost: CostConfig = CostConfig()
    """Price and power of the devices, for `stemma cost`."""
    lost_s: float = Field(60.0, ge=5)
    """Seconds without a heartbeat after which a node of a cluster counts as lost; a node without a heartbeat from the
    stage for that long ends its ranks. Must be longer than stalls of the shared file system."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto uses a GPU if there is one."""
    hardware: str | None = None
    """Device that `stemma check` plans for, such as a100-80 or h100 (training/core/devices.py): a step that does not
    fit on it is refused. By default this machine's device, and no step is refused."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """auto is bf16 where the device computes in it natively, else fp32; fp16 has a dynamic loss scale. fp8 is auto with
    the products of pretraining's linear layers in 8 bits (Micikevicius et al. 2022), on GPUs since Ada and Hopper; on a
    CPU they are emulated, to try a config. Needs the package torchao, and neither tensor, context, pipeline nor
    expert_parallel."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences that a device processes at once; gradients are accumulated up to the global batch."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per process; by default the machine's cores divided among the processes."""
    sharding: Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"] = "ddp"
    """Sharding of a model among ranks (Rajbhandari et al. 2020). ddp: each rank holds a full replica. zero1: each holds
    its part of the optimizer state. zero2: of the gradients too; full weights exist only from a batch's forward to the
    end of its backward pass. fsdp: of the weights too (FSDP2, ZeRO stage 3); layers are gathered one by one. hsdp: like
    fsdp within groups of `shard_ranks` ranks, each of which holds a replica."""
    shard_ranks: int | None = Field(None, ge=1)
    """Number of adjacent ranks that share one model with sharding: hsdp; must divide all ranks. By default those of
    one node, so that layers are gathered within it and only gradients are exchanged between nodes."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of adjacent ranks that share every layer (Shoeybi et al. 2019), and between layers the sequence
    (Korthikanti et al. 2022), in pretraining of Llama, Mistral, Qwen2 and Qwen3 and, together with expert_parallel, of
    Mixtral and Qwen3-MoE; in other stages every rank has its own part of a batch. Needs trainer: native and, with more
    ranks than this, sharding: zero2, fsdp or hsdp to shard each part; ddp together with pipeline_parallel or
    expert_parallel."""
    context_parallel: int = Field(1, ge=1)
    """Number of adjacent ranks that split every sequence along its tokens, in pretraining with objective: causal; in
    other stages every rank has its own part of a batch. Each rank computes its tokens, and attention gathers the keys
    and values of all (Grattafiori et al. 2024, section 3.3.2). For sequences whose activations do not fit on one
    device. Works with any sharding and with tensor_parallel, whose groups of ranks are nested within these; needs
    trainer: native."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of pipeline stages, each of which holds consecutive layers of the model on one rank (Narayanan et al.
    2021, section 2.2), in pretraining of Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE; in other stages every
    rank has its own part of a batch and the whole model. Microbatches pass through them by the 1F1B schedule. For
    models that do not fit on a device, over links that are too slow for tensor_parallel or sharding. Needs trainer:
    native and sharding: ddp or zero1; with tensor_parallel or context_parallel, each pipeline stage is a group of
    ranks, and sharding must be ddp."""
    pipeline_pieces: int = Field(1, ge=1)
    """Model chunks per pipeline rank, in the interleaved 1F1B schedule (Narayanan et al. 2021, section 2.2): with N
    chunks, ranks idle 1/N as long and send N times as much. Needs a multiple of pipeline_parallel microbatches."""
    expert_parallel: int = Field(1, ge=1)
    """Number of adjacent ranks, each of which holds a part of every layer's experts (Lepikhin et al. 2020, section
    3.2), in pretraining of Mixtral, OLMoE and Qwen3-MoE; in other stages every rank has the whole model. Each rank
    sends its tokens to the experts that the router chose. Its tokens are a part of the batch, of the sequences that
    context_parallel splits, or of those that tensor_parallel splits between layers. In a pipeline, these are ranks of
    one pipeline stage. Needs trainer: native and sharding: ddp or zero1; ddp together with tensor_parallel."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory between uses; needs sharding: zero2, fsdp or hsdp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: the backward pass computes a layer's activations again instead of keeping them: all of
    them (full, Chen et al. 2016: up to a third more time), or all but the results of matrix products and attention
    (selective, Korthikanti et al. 2022)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile in pretraining, layer by layer; results change by rounding. auto compiles if the run is long enough
    to save twice the compile time; models with sharding: zero2, fsdp or hsdp are compiled on CPUs only."""
    attention: Literal["auto", "eager", "causal_blocks", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Attention kernel of the training stages; results change by rounding. auto: on a CPU, eager up to 256 tokens,
    causal_blocks up to 2,048, else sdpa; on a GPU, for packed documents in pretraining, flash_attention_2 if the
    package flash-attn is installed, else flex_attention, else sdpa. Refused if it would attend across documents."""
    share_prompts: Literal["auto", "on", "off"] = "auto"
    """Compute a prompt once for all of its answers, in reward models, RLHF and the scoring of answers (Wang & Hegde
    2024); results change by rounding. auto: only on a CPU, where it was measured to be faster. Never used with a flash
    kernel or flex attention."""
    loader_workers: int | None = Field(None, ge=0)
    """Processes of a rank that read and collate packed sequences ahead of pretraining; order and result are the same
    for any number. By default 2 with a GPU and none without, where a batch is read in less than a hundredth of its
    step."""
    scratch: str | None = Field(None, pattern="^/")
    """A folder on a disk of each machine, into which every node unpacks compressed shards for itself. By default the
    stage's work folder for one node; for several the temporary folder of each ($TMPDIR), where it has room for them."""
    shard_cache_gb: float | None = Field(None, gt=0)
    """Maximum size in gigabytes (10^9 bytes) of the remote shards that each node caches during training; the least
    recently used are evicted. By default no limit."""
    checkpoint_remote: str | None = Field(None, pattern=r"^s3://[^/*?\[]+(/[^*?\[]*)?$")
    """Folder on S3 (s3://bucket/prefix) to which each checkpoint is uploaded during training. A training without a
    checkpoint on its machine continues from the newest complete one of the same build there. Remote checkpoints are
    removed like those of the work folder, and all of them once the model is built. By default none."""
    trainer: Literal["composer", "native"] = "composer"
    """Training loop: MosaicML Composer's, or the project's plain one (training/backends/native.py). Each reads the
    other's checkpoints, and on a CPU both end with the same bits. A step takes equally long; the native loop starts
    slightly faster and needs about 100 MB less."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "none"] = "auto"
    """Sandbox for code written by models (`verify: tests`). bubblewrap: the program bwrap. namespaces: Linux
    namespaces, entered without it. auto uses the first of these that works on the machine; if none does, a stage that
    runs such code stops. none: no sandbox, with the user's rights."""
    profile: int = Field(0, ge=0)
    """Steps of each training that are profiled, after its first two: a Chrome trace, a table by operator and memory
    over time go into aux/ and MLflow. The result stays the same; profiled steps are slower, and take some MB each."""
    hang_s: float = Field(600.0, gt=0)
    """Seconds without a heartbeat from a rank during training, after which all ranks are stopped and restarted from
    the newest checkpoint; also NCCL's timeout. Must be longer than an evaluation during training."""
    restarts: int = Field(2, ge=0)
    """Maximum number of restarts of a stage's ranks, per attempt, from the newest checkpoint, after a rank hung or a
    node of a cluster was lost."""
    grace_s: float = Field(60.0, gt=0)
    """Seconds in which a stage may save and exit after SIGTERM announces that its machine is taken back; then it is
    killed. Must be shorter than the scheduler's own grace period. A run cancelled by a user has 8."""
    stages_at_once: int = Field(2, ge=1)
    """Maximum number of stages of one pipeline that run in parallel, if the DAG allows it."""
    gpu_stages_at_once: int = Field(1, ge=1)
    """Maximum number of these stages that train or generate on this machine's GPUs at once; each uses all the GPU
    memory that is free."""
    workers: int | None = Field(None, ge=1)
    """Processes of a corpus stage, which work partition by partition; by default one per core. The result is the same
    for any number."""
    ray: str | None = Field(None, min_length=1)
    """Address of a Ray cluster that processes partitions and benchmark tasks instead: e.g. auto (the cluster of this
    machine), ray://head:10001, or local for a cluster of `workers` workers started here. Its machines share the
    store's file system. With cluster: ray, training also uses `nodes` of its machines, with `processes` × `threads`
    CPUs on each (one per process if `threads` is not set) and, with device: gpu, one GPU per process."""
    retries: int = Field(2, ge=0)
    """Maximum number of retries of a stage, from its checkpoint, after a fault of a machine: a killed process, a source
    that does not answer, a failing device, ranks that lost each other, a hang, lack of memory. Faults of config or data
    are never retried."""
    retry_wait_s: float = Field(10.0, ge=0)
    """Seconds before the first retry; each further wait is four times as long."""

    def missing_packages(self) -> Iterator[Problem]:
        """Yield problems for optional Python packages that the config needs and that are not installed."""
        for key, package, extra, is_required in (
            ("ray", "ray", "ray", self.ray is not None),
            ("precision", "torchao", "fp8", self.precision == "fp8"),
        ):
            if is_required and importlib.util.find_spec(package) is None:
                message, fix = (
                    f"expected the package {package}, which is not installed",
                    f"pip install -e '.[{extra}]' in the project's folder",
                )
                yield Problem("missing_package", f"launch.{key}", message, f"{fix}, or leave launch.{key} out")

    def checkpoint_place(self, build: str) -> str:
        """Return the place of a build's uploaded checkpoints, empty for none.

        Args:
            build: <stage>/<fingerprint>.
        """
        return f"{self.checkpoint_remote.rstrip('/')}/{build}" if self.checkpoint_remote else ""

    @property
    def ranks(self) -> int:
        """Processes that train together, over all nodes."""
        return self.processes * self.nodes

    @property
    def trains_here(self) -> bool:
        """True if training's ranks start on the machine of its stage."""
        return self.cluster == "local"

    @property
    def shares_of_examples(self) -> tuple[int, int, int]:
        """Numbers of ranks that share layers, that share sequences, and that hold some of a model's layers each."""
        return self.tensor_parallel, self.context_parallel, self.pipeline_parallel

    @property
    def shards_weights(self) -> bool:
        """True if each rank holds only its part of the weights between batches."""
        return self.sharding in ("zero2", "fsdp", "hsdp")

    @field_validator("microbatch")
    @classmethod
    def _a_microbatch_has_a_sequence(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"expected 1 or more, or auto, got {value}")
        return value

    @model_validator(mode="after")
    def _hosts_are_enough(self) -> Self:
        if self.cluster == "hosts" and len(set(self.hosts)) < self.nodes:
            raise ValueError(f"expected at least {self.nodes} different hosts for nodes: {self.nodes}")
        if self.cluster == "hosts" and not any("{host}" in word for word in self.remote_shell):
            raise ValueError(
                "expected {host} in a word of launch.remote_shell, or all nodes would start on one machine"
            )
        return self

    @model_validator(mode="after")
    def _jobs_have_time_to_train(self) -> Self:
        """Check that jobs train before Slurm's notice of the time limit, which otherwise comes at their start."""
        limit_h, ahead_s = self.slurm.time_limit_h, self.grace_s + SLURM_NOTICE_S
        if self.cluster == "slurm" and limit_h is not None and limit_h * 3600 <= ahead_s:
            raise ValueError(
                f"expected a launch.slurm.time_limit_h beyond the {ahead_s:g} s that ranks have to save and end "
                f"(launch.grace_s and {SLURM_NOTICE_S} s), not {limit_h:g} hours"
            )
        return self

    @model_validator(mode="after")
    def _pods_have_an_image(self) -> Self:
        if self.cluster == "kubernetes" and not self.kubernetes.image:
            raise ValueError("expected launch.kubernetes.image, the image of the pods, with cluster: kubernetes")
        if self.kubernetes.runs and not (self.kubernetes.image and self.kubernetes.namespace):
            # Prefect's worker takes the namespace `default`, wherever it runs itself.
            raise ValueError("expected launch.kubernetes.image, and its namespace, with launch.kubernetes.runs")
        return self

    @model_validator(mode="after")
    def _ray_is_named(self) -> Self:
        if self.cluster == "ray" and self.ray in (None, "local"):
            raise ValueError(
                "expected the address of a Ray cluster in launch.ray with cluster: ray, such as auto or head:6379"
            )
        return self

    @model_validator(mode="after")
    def _fp8_fits(self) -> Self:
        if self.precision == "fp8":
            shared = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
            if wrong := [f"{key}: 1" for key in shared if getattr(self, key) > 1]:
                raise ValueError(f"expected with precision: fp8 {'; '.join(wrong)}, since they do not go together")
        return self

    def _uneven(self, *keys: str) -> list[str]:
        """Return the error if nested groups of ranks, outer ones first, do not divide the ranks; empty otherwise."""
        sizes = {key: getattr(self, key) for key in keys if getattr(self, key) > 1 or key == keys[0]}
        if self.ranks % math.prod(sizes.values()) == 0:
            return []
        first, *other_sizes = sizes.items()
        times = "".join(f" times {key}: {size}" for key, size in other_sizes)
        return [f"a divisor of the {self.ranks} ranks, not {first[1]}{times}"]

    @model_validator(mode="after")
    def _tensor_parallel_fits(self) -> Self:
        if self.tensor_parallel == 1:
            return self
        wrong = []
        if self.trainer != "native":
            wrong.append("trainer: native, since Composer's loop does not support it")
        wrong += self._uneven("tensor_parallel")
        averaged = self.shards_weights or self.pipeline_parallel > 1 or self.expert_parallel > 1
        if self.ranks > self.tensor_parallel and not averaged:
            wrong.append(
                f"sharding: zero2, fsdp or hsdp for more than {self.tensor_parallel} ranks, not {self.sharding}"
            )
        if self.compile == "on":
            wrong.append("compile: auto or off")
        if wrong:
            raise ValueError("expected with tensor_parallel " + "; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _context_parallel_fits(self) -> Self:
        if self.context_parallel == 1:
            return self
        wrong = []
        if self.trainer != "native":
            wrong.append("trainer: native, since Composer's loop does not support it")
        wrong += self._uneven("context_parallel", "tensor_parallel")
        if self.compile == "on":
            wrong.append("compile: auto or off")
        if self.attention not in ("auto", "sdpa", "causal_blocks"):
            wrong.append(f"attention: auto, sdpa or causal_blocks, not {self.attention}")
        if wrong:
            raise ValueError("expected with context_parallel " + "; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _pipeline_parallel_fits(self) -> Self:
        if self.pipeline_parallel == 1:
            if self.pipeline_pieces > 1:
                raise ValueError("expected pipeline_parallel: 2 or more with pipeline_pieces")
            return self
        wrong = []
        if self.trainer != "native":
            wrong.append("trainer: native, since Composer's loop does not support it")
        wrong += self._uneven("pipeline_parallel", "context_parallel", "tensor_parallel")
        grouped = [key for key in ("tensor_parallel", "context_parallel") if getattr(self, key) > 1]
        if grouped and self.sharding != "ddp":
            wrong.append(f"sharding: ddp together with {' and '.join(grouped)}, not {self.sharding}")
        elif self.shards_weights:
            wrong.append(f"sharding: ddp or zero1, not {self.sharding}")
        if self.compile == "on":
            wrong.append("compile: auto or off")
        if wrong:
            raise ValueError("expected with pipeline_parallel " + "; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _expert_parallel_fits(self) -> Self:
        if self.expert_parallel == 1:
            return self
        wrong = []
        if self.trainer != "native":
            wrong.append("trainer: native, since Composer's loop does not support it")
        stage_ranks = self.ranks // self.pipeline_parallel
        if stage_ranks % self.expert_parallel:
            wrong.append(
                f"a divisor of the {stage_ranks} ranks that have the same layers, not {self.expert_parallel}"
                if self.pipeline_parallel > 1
                else f"a divisor of the {stage_ranks} ranks, not {self.expert_parallel}"
            )
        if self.tensor_parallel > 1 and self.sharding != "ddp":
            wrong.append(f"sharding: ddp together with tensor_parallel, not {self.sharding}")
        elif self.shards_weights:
            wrong.append(f"sharding: ddp or zero1, not {self.sharding}")
        if self.compile == "on":
            wrong.append("compile: auto or off")
        if wrong:
            raise ValueError("expected with expert_parallel " + "; ".join(wrong))
        return self

    @model_validator(mode="after")
    def _offload_is_sharded(self) -> Self:
        if self.offload and not self.shards_weights:
            raise ValueError("expected sharding: zero2, fsdp or hsdp with offload: true")
        return self

    @model_validator(mode="after")
    def _shard_ranks_divide_the_ranks(self) -> Self:
        if self.sharding != "hsdp":
            if self.shard_ranks is not None:
                raise ValueError("expected sharding: hsdp with shard_ranks")
            return self
        parts = self.ranks // self.tensor_parallel
        group_size = self.shard_ranks or max(1, self.processes // self.tensor_parallel)
        if parts % group_size:
            by_default = "" if self.shard_ranks else ", by default those of a node"
            raise ValueError(f"expected shard_ranks that divide {parts} ranks, not {group_size}{by_default}")
        return self
