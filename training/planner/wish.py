"""The request of a user: two of size, tokens and a budget; the third follows from a scaling law."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from infra.errors import ConfigError, Problem
from training.planner.architecture import MOST, Architecture, of_parameters
from training.planner.laws.scaling_laws import Law

_FEWEST = 1e5
"""Parameters of the smallest model that is planned."""
_SPENT = 0.5
"""Share of a budget below which a plan reports the devices, and not the budget, as its limit."""


LEAST, MOST_ASKED = 1e-9, 1e40
"""Bounds of sensible requests; results from numbers beyond them do not fit into a float."""


@dataclass(frozen=True)
class Budget:
    """Limit on one of them: model FLOPs, USD, or days on the available devices."""

    flops: float | None = None
    money: float | None = None
    days: float | None = None

    @property
    def given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def spent(self, flops: float, hours: float, device_hours_usd: float) -> float:
        """Share of the budget that a training takes;

        Args:
            device_hours_usd: the price of all devices for an hour.
        """
        if self.flops is not None:
            return flops / self.flops
        if self.money is not None:
            return hours * device_hours_usd / self.money
        assert self.days is not None
        return hours / 24 / self.days


@dataclass(frozen=True)
class Size:
    """A model and how much it reads, and where the two come from."""

    arch: Architecture
    tokens: float
    because: str


def check(preset: str | None, parameters: float | None, of_config: bool, tokens: float | None, budget: Budget) -> None:
    """Raise ConfigError with all contradictions in the request.

    Args:
        of_config: True if a config names the model.
    """
    problems = []
    named = [option for option, given in (("--preset", preset), ("--parameters", parameters)) if given]
    if len(named) + of_config > 1:
        message = f"expected one size, not {' and '.join([*named, *(['that of CONFIG'] if of_config else [])])}"
        problems.append(Problem("two_sizes", named[0], message, "leave all but one out"))
    if len(budget.given) > 1:
        budgets = " and ".join(flag for flag, _ in _flags(budget))
        problems.append(Problem("two_budgets", "", f"expected one budget, not {budgets}", "leave all but one out"))
    size = preset or parameters or of_config
    if size and tokens and budget.given:
        message = "size, tokens and a budget are given, of which any two determine the third"
        problems.append(Problem("too_much", "", message, "leave one out, and the plan computes it"))
    if not (size or tokens or budget.given):
        fix = "for example --preset gpt-1.3b --tokens 20e9, or --money 5000"
        problems.append(
            Problem("nothing_to_plan", "", "expected two of a size, tokens and a budget, or one of them", fix)
        )
    for flag, value in (("--parameters", parameters), ("--tokens", tokens), *_flags(budget)):
        if value is not None and not LEAST <= value <= MOST_ASKED:
            expected = "a number above zero" if not value > 0 else f"a number between {LEAST:g} and {MOST_ASKED:g}"
            problems.append(Problem("not_positive", flag, f"expected {expected}, not {value:g}"))
    if problems:
        raise ConfigError(*problems)


def _flags(budget: Budget) -> list[tuple[str, float]]:
    return [(f"--{'compute' if name == 'flops' else name}", value) for name, value in budget.given.items()]


def resolve(
    arch: Architecture | None,
    tokens: float | None,
    budget: Budget,
    law: Law,
    vocabulary: int | None,
    share_of: Callable[[Architecture, float], float],
) -> Size:
    """The model and its tokens.

    Args:
        arch: the model, if it was named.
        share_of: what share of the budget a model and its tokens take.

    Raises ConfigError where the budget buys nothing.
    """
    if arch and tokens:
        return Size(arch, tokens, "as asked for")
    if arch and budget.given:
        return Size(arch, _tokens_within(arch, share_of), "as many tokens as the budget pays for")
    if arch:
        return Size(arch, law.tokens_for(arch.of_a_token), f"tokens: the optimum for this size by {law.name}")
    if tokens and not budget.given:
        sized = of_parameters(law.size_for(tokens), vocabulary)
        return Size(sized, tokens, f"size: the optimum for this number of tokens by {law.name}")

    def read(count: float) -> float:
        return tokens if tokens else law.tokens_for(count)

    if share_of(of_parameters(_FEWEST, vocabulary), read(_FEWEST)) > 1:
        message = f"the budget does not pay for the smallest model of {_FEWEST:,.0f} parameters"
        raise ConfigError(
            Problem("budget_too_small", _flags(budget)[0][0], message, "raise the budget, or lower --tokens")
        )
    grows = 1.0 if tokens else 2.0
    count = _largest(lambda count: share_of(of_parameters(count, vocabulary), read(count)), grows)
    sized = of_parameters(count, vocabulary)
    because = "the largest that the budget pays for" if tokens else f"the optimum for the budget by {law.name}"
    if (spent := share_of(sized, read(sized.parameters))) < _SPENT:
        more = f"{1 / spent:,.0f}" if spent > 1e-6 else f"{1 / spent:.0e}"
        because = f"the largest that these devices hold; the budget pays for {more} times as much, so name more --gpus"
    return Size(sized, read(sized.parameters), f"size: {because}")


def _tokens_within(arch: Architecture, share_of: Callable[[Architecture, float], float]) -> float:
    share_of_billion = share_of(arch, 1e9)
    tokens = 1e9 / share_of_billion
    # The batch, and so the pace, may depend on the length of the training.
    for _ in range(4):
        tokens /= share_of(arch, tokens)
    return tokens


def _largest(share: Callable[[float], float], grows: float) -> float:
    """Parameters that take the whole budget, or the most that fit; the share grows as their power `grows`."""
    count, fits, fits_not = 1e9, _FEWEST, MOST
    for _ in range(30):
        used = share(count)
        if math.isinf(used):
            fits_not = count
        else:
            fits = max(fits, count) if used <= 1 else fits
            if abs(math.log(used)) < 0.02 or fits_not / fits < 1.05:
                return count if used <= 1.05 else fits
            count *= used ** (-1 / grows)
        if math.isinf(used) or count >= fits_not:
            count = math.sqrt(fits * fits_not)
            if fits_not / fits < 1.05:
                return fits
    return fits
