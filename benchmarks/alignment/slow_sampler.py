"""A sampler process that takes at least $BENCH_SAMPLING_S seconds for each part of a round, as one on another machine
does; for benchmarks.alignment.bench_async."""

from __future__ import annotations

import os
import time
from typing import Any

from training.rl.rollouts.sampler import Sampler, serve


class SlowSampler(Sampler):
    """A sampler that waits out its time once it has its answers."""

    def answer(self, **question: Any) -> dict[str, Any]:
        began = time.monotonic()
        reply = super().answer(**question)
        time.sleep(max(0.0, float(os.environ["BENCH_SAMPLING_S"]) - (time.monotonic() - began)))
        return {**reply, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    serve(SlowSampler)
