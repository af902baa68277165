"""The corpus: from files of any kind to packed shards, and to pairs for tuning.

Stages are in this folder (`ingest`, `validate`, `clean`, `tokenizer`, `shard`, `instructions`, `preferences`) or in
packages that contain a `stage` (`dedupe`, `decontaminate`, `mix`). They are based on `readers`, `recognition`,
`documents`, `cleaning`, `tokens`, `pairs`, `validation` and `model_folders`; `demo` is the text of the quickstart.
"""
