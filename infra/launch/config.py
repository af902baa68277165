"""`launch:`, the only part of a config that speaks of machines. None of it bears on identity."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import Config


class LaunchConfig(Config):
    processes: int = Field(1, ge=1)
    """Training processes a node, one a device."""
    nodes: int = Field(1, ge=1)
    """Machines that train together."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes a GPU where there is one."""
    hardware: str | None = None
    """The device that `stemma check` plans for, such as a100-80 or h100 (training/planner/devices.py): a step that it
    does not hold is refused. By default the one of the machine at hand, which refuses nothing."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is bf16 where the device computes in it natively, else fp32; fp16 has a dynamic loss scale."""
    microbatch: int | Literal["auto"] = "auto"
    """Sequences a device computes at once; gradients accumulate to the global batch."""
    threads: int | None = Field(None, ge=1)
    """CPU threads a process; by default the machine's cores shared out among the processes."""
    sharding: Literal["ddp", "fsdp"] = "ddp"
    """How several ranks share a model: each holds all of it (ddp), or its part of weights, gradients and optimizer
    state (fsdp: FSDP2, ZeRO stage 3)."""
    offload: bool = False
    """Whether weights, gradients and optimizer state wait in CPU memory between uses; needs sharding: fsdp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: the backward pass computes a layer's activations again instead of keeping them: all of
    them (full, Chen et al. 2016: up to a third more time), or all but the results of matrix products and attention
    (selective, Korthikanti et al. 2022)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile in pretraining; it moves the result by rounding. auto compiles where the run is long enough to save
    twice the time that compiling costs; models sharded by FSDP never."""
    attention: Literal["auto", "eager", "causal_blocks", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """Attention kernel of the training stages; it moves the result by rounding. auto: eager up to 256 tokens on a CPU,
    causal_blocks up to 2,048, else sdpa; on a GPU, for packed documents in pretraining, flash_attention_2 where the
    package flash-attn is installed, else flex_attention, else sdpa. Refused where it would cross documents."""
    loader_workers: int | None = Field(None, ge=0)
    """Processes of a rank that read and collate packed sequences ahead of pretraining; order and result are the same
    for any number. By default 2 with a GPU and none without, where a batch is read in less than a hundredth of its
    step."""
    scratch: str | None = Field(None, pattern="^/")
    """A folder on a disk of each machine, into which every node unpacks compressed shards for itself. By default the
    stage's work folder for one node; for several the temporary folder of each ($TMPDIR), where it has room for them."""
    trainer: Literal["composer", "native"] = "composer"
    """The loop that trains: MosaicML Composer's, or a plain one of our own (training/backends/native.py) for versions
    of torch that Composer refuses. Both take each other's checkpoints, and on a CPU end with the same bits."""
    profile: int = Field(0, ge=0)
    """Steps of each training that are profiled, after its first two: a Chrome trace, a table by operator and memory
    over time go into aux/ and MLflow. The result stays the same; profiled steps are slower, and take some MB each."""
    hang_s: float = Field(600.0, gt=0)
    """Seconds that a rank may give no sign of life during training, before all are ended and started again from the
    newest checkpoint; NCCL gives up after as many. Must be longer than an evaluation during training takes."""
    restarts: int = Field(2, ge=0)
    """How often ranks are started again after one hung."""
    grace_s: float = Field(60.0, gt=0)
    """Seconds that a stage has to save and end once SIGTERM tells that its machine is taken back, before it is killed.
    Must be shorter than the scheduler's own patience. A run that a person cancels has 8."""
    stages_at_once: int = Field(2, ge=1)
    """Stages of one pipeline that may run side by side where the DAG allows it."""
    workers: int | None = Field(None, ge=1)
    """Processes a corpus stage works on, partition by partition; by default one for each core. The result is the same
    for any number."""
    ray: str | None = None
    """A Ray cluster for the partitions instead: its address, e.g. auto (the one that this machine is part of) or
    ray://head:10001, or local for one of `workers` workers that is started here. Its machines share the store's file
    system."""
    retries: int = Field(2, ge=0)
    """How often a stage is tried again, from its checkpoint, after a fault of a machine: a killed process, a source
    that does not answer, a failing device, ranks that lost each other, a hang, want of memory. Faults of config or data
    are never tried again."""
    retry_wait_s: float = Field(10.0, ge=0)
    """Seconds before the first of these tries; each further wait is four times as long."""

    @property
    def ranks(self) -> int:
        """Processes that train together, over all nodes."""
        return self.processes * self.nodes

    @model_validator(mode="after")
    def _offload_is_sharded(self) -> Self:
        if self.offload and self.sharding != "fsdp":
            raise ValueError("expected sharding: fsdp with offload: true")
        return self

    @model_validator(mode="after")
    def _compiled_is_not_sharded(self) -> Self:
        if self.compile == "on" and self.sharding == "fsdp":
            raise ValueError("expected compile: auto or off with sharding: fsdp; compiling sharded models did not work")
        return self
