"""Code and its tests, run in the confined process of a sandbox (`training.sandbox.process`).

Nothing of this project is imported here, and the code finds none of it.
"""

from __future__ import annotations

import os
from typing import Any


def main(question: dict[str, Any], answer: int) -> None:
    """Write the question's word into `answer` if its code and then its tests run to their end."""
    # The code may put its own functions in the place of these.
    write, run = os.write, exec
    try:
        code = compile(question["code"], "answer", "exec", dont_inherit=True)
        tests = compile(question["tests"], "tests", "exec", dont_inherit=True)
        scope = {"__name__": "answer"}
        run(code, scope)
        run(tests, scope)
    except BaseException:  # SystemExit too
        return
    write(answer, question["word"])
