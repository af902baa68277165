"""Inputs from outside, damaged at every level, to every reader of this program: `make fuzz`.

`harness` runs a target and keeps what fails, `damage` has the strategies that damage valid inputs, `targets` and the
files next to it define what is read. `test_slice` is the part of it in `make test`.
"""
