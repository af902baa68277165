"""Counts the memory of tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_BEGIN = "tests.support.programs.peak"
_GLOO_S = 60.0


class Peak:
    """What torch's allocator of the CPU has handed out at once, from one `begin` to the next: `most` bytes, of the time
    when that was least."""

    most = 0

    def begin(self) -> None:
        """What came and went before does not count."""
        with record_function(_BEGIN):
            pass


@contextmanager
def counted() -> Iterator[Peak]:
    """Every allocation of this thread and of its backward passes counts, also inside of torch: DDP's buckets, the
    layers that FSDP2 has gathered.

    Threads of gloo free what they sent last, and are not watched: what they freed counts until its place is taken
    again. So a step is counted several times, and the least is the truest; and all-to-alls, of which a layer has many,
    return when gloo has let go of what it sent.
    """
    peak, exchange = Peak(), distributed.all_to_all_single
    distributed.all_to_all_single = _released(exchange)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield peak
    finally:
        distributed.all_to_all_single = exchange
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted(_below(results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    sizes: dict[int, int] = {}
    now, most = 0, []
    for event in events:
        if event.name == _BEGIN:
            most.append(now)
        elif event.tag == _EventType.Allocation:
            place, size = event.typed[1].ptr, event.typed[1].alloc_size
            now -= sizes.pop(place, 0)
            if size > 0:
                sizes[place] = size
                now += size
            if most:
                most[-1] = max(most[-1], now)
    peak.most = min(most)


def _released(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """`exchange`, which returns when nobody else holds more of its tensors than before."""

    def exchanged(output: Tensor, given: Tensor, *others: Any, **options: Any) -> Any:
        tensors: tuple[Any, ...] = (output, given)
        held, patience = [one._use_count() for one in tensors], time.monotonic() + _GLOO_S
        done = exchange(output, given, *others, **options)
        while any(one._use_count() > before for one, before in zip(tensors, held, strict=True)):
            assert time.monotonic() < patience, "gloo holds on to what it has sent"
            time.sleep(0)
        return done

    return exchanged


def _below(events: Any) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
