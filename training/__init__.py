"""Training: from packed shards to an aligned model.

Stages are in this folder, one file each: `adopt` (a model of others), `pretrain`, `sft`, `reward_model`,
`preference_tuning`, `rlhf`. What they are built on is in packages: `config`, `core`, `model`, `distributed`, `data`,
`chat`, `objectives`, `train_modules`, `trainer` with its `backends`, `checkpoint`, `guard`, `validation`,
`generation`, `rl`, `sandbox`, `serving` and `planner`.
"""
