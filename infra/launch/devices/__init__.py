"""Devices of a machine: whether torch can use them, whether they are fit for training, and how busy they are."""
