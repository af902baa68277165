"""Runs a module as a program that ends with its starter: python -m infra.servers.tethered MODULE …

The starter passes the read end of a pipe, see `infra.process.hold_lifeline`.
"""

from __future__ import annotations

import runpy
import sys

from infra.process import hold_lifeline

if __name__ == "__main__":
    hold_lifeline()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
