"""What is left of a command when it has done its work: its exit code, whatever a library's threads do then."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, os, sys, threading, time
import cli.commands
from cli.main import main

class Library:
    def __del__(self, abort=os.abort):
        abort()

library = Library()  # taken apart by the interpreter alone, as native code with threads is

def run():
    atexit.register(print, "cleaned up")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
    print("worked")
    return 2

cli.commands.run = run
main()
"""


def test_a_library_that_aborts_at_the_end_of_the_interpreter_changes_no_exit_code() -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (answer.returncode, answer.stdout.split("\n")) == (2, ["worked", "thread ended", "cleaned up", ""]), answer
