"""Does a fault to a running pipeline."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from flows.drill import layer
from flows.drill.kinds import Fault
from flows.drill.power import lose_power, notes_of
from flows.drill.site import Site

HOUR_S = 3600
Target = tuple[psutil.Process, str]


def inject(fault: Fault, site: Site, target: Target | None, stages: list[str]) -> str:
    """Do it, and return when it is over: what was hit, in words."""
    action = fault.kind.name.partition("-")[0]
    if target is not None:
        process = target[0]
        name = f"pid {process.pid}"
        with suppress(psutil.Error):
            _signal(action, process, fault.lasts_s, site)
        return name
    return _MACHINE[fault.kind.name](fault, site, stages)


def _signal(action: str, process: psutil.Process, lasts_s: float, site: Site) -> None:
    if action == "kill":
        process.send_signal(signal.SIGKILL)
    elif action == "term":
        process.send_signal(signal.SIGTERM)
    else:
        process.send_signal(signal.SIGSTOP)
        try:
            _let_pass(lasts_s, site)
        finally:
            process.send_signal(signal.SIGCONT)


def _let_pass(seconds: float, site: Site) -> None:
    """Wait, while the run goes on."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and site.run and site.run.code is None:
        site.look()
        time.sleep(0.1)


def _layered(site: Site, lasts_s: float, **orders: int) -> None:
    assert site.layer
    site.layer.order(**orders)  # type: ignore[arg-type]
    try:
        _let_pass(lasts_s, site)
    finally:
        site.layer.order()


def _full(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, error=layer.FULL)
    return f"no room for {fault.lasts_s:.1f} s"


def _read_only(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, error=layer.READ_ONLY)
    return f"read-only for {fault.lasts_s:.1f} s"


def _broken(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, error=layer.BROKEN, reads=True)
    return f"EIO for {fault.lasts_s:.1f} s"


def _clock_ahead(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, clock_s=HOUR_S)
    return f"an hour ahead for {fault.lasts_s:.1f} s"


def _clock_behind(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, clock_s=-HOUR_S)
    return f"an hour behind for {fault.lasts_s:.1f} s"


def _network_cut(fault: Fault, site: Site, stages: list[str]) -> str:
    _layered(site, fault.lasts_s, cut=True)
    return f"no network for {fault.lasts_s:.1f} s"


def _power_loss(fault: Fault, site: Site, stages: list[str]) -> str:
    assert site.layer
    site.layer.order(records=True)
    _let_pass(fault.lasts_s, site)
    site.kill_everything()
    site.layer.order()
    notes = notes_of(site.layer.notes)
    lost = lose_power(notes, site.layer.folder, site.layer.graves, random.Random(fault.seed))
    site.layer.notes.unlink(missing_ok=True)
    shutil.rmtree(site.layer.graves)
    site.layer.graves.mkdir()
    # A machine that starts again has none of these.
    shutil.rmtree(site.temporary)
    site.temporary.mkdir()
    site.watch = type(site.watch)(site.root)
    return f"{lost['files']} files and {lost['names']} names lost of {len(notes)} changes"


def _two_operators(fault: Fault, site: Site, stages: list[str]) -> str:
    """One starts a second run, one forces a stage that runs, and one cancels the first run."""
    assert site.run
    forced = stages[0]
    others = [site.start("run", *site.config)]
    others.append(site.start("run", *site.config, "--force", forced, "--until", forced))
    _let_pass(fault.lasts_s, site)
    with suppress(ProcessLookupError):
        site.run.process.send_signal(signal.SIGINT)
    if fault.choice < 0.5:
        others[0].process.send_signal(signal.SIGINT)
    site.others = others
    return f"a second run{' cancelled' if fault.choice < 0.5 else ''}, --force {forced}, the first cancelled"


_MACHINE: dict[str, Callable[[Fault, Site, list[str]], str]] = {
    "full-disk": _full,
    "read-only-disk": _read_only,
    "broken-disk": _broken,
    "clock-ahead": _clock_ahead,
    "clock-behind": _clock_behind,
    "network-cut": _network_cut,
    "power-loss": _power_loss,
    "two-operators": _two_operators,
}
