"""Basics of every training: ranks, devices, the state of a loop and its callbacks.

Public: `ranks` (this process among those that train together), `hardware.Hardware`, `train_state.TrainState` and
`Clock`, `callbacks.Callback`, `plan.Plan` (length of a training).
"""
