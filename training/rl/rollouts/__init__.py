"""Rollouts that do not wait: samplers beside the trainer, which answer later rounds while it learns from earlier ones.

    trainer    update(r): weights of round r ─────► versions ─────► sampler 0, 1, …   threads that each feed one process
               take(r): answers to learn from ◄──── schedule ◄───── parts of rounds   (`sampler`) or a vLLM server

Public: `pool.SamplerPool` (the samplers, and the trainer's side of them), `schedule` (which weights write which part of
a round, and which answers a round learns from), `correction` (importance weights of answers that earlier weights
wrote). With `order: fixed` nothing depends on a clock.
"""
