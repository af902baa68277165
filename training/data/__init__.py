"""Data of a training, from its files to batches.

Public: `pretrain_data.PretrainData`, the packed text of a pretraining, and `open_shards.OpenShards`, shards that are
read by number. Behind them: `shard_index`, `mixture`, `packed_shards`, `packed_batches`, `remote_shards`,
`node_storage`.

For tuning: `rows` (rows of instructions and preferences, and those that fit), `conversations` and `preferences` (the
examples made of them, and their batches), `examples.example_loader` (their order).
"""
