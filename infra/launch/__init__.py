"""Launch of a training's ranks: on this machine, by Slurm, on Ray or on Kubernetes.

Public: `config.LaunchConfig`, `ranks`, `launchers`, `devices.gpus` (what is installed against what a device needs).
"""
