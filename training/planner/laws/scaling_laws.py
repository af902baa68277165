"""Optimal model size and number of tokens for a compute budget, by published fits and by fits of the user's runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import ConfigError, Problem
from infra.io.json import read_json

PF_DAY = 8.64e19
_CHINCHILLA_FLOPS, _CHINCHILLA_TOKENS = 5.76e23, 1.4e12


@dataclass(frozen=True)
class Law:
    """Parameters that compute C is best spent on: `size` · (C / `at`)^`grows`. Tokens follow from C = 6 N D.

    parts: E, A, B, alpha, beta of L(N, D) = E + A / N^alpha + B / D^beta (nats per token), if the law has them.
    """

    name: str
    description: str
    size: float
    at: float
    grows: float
    parts: tuple[float, float, float, float, float] | None = None

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return (parameters, tokens) with the lowest loss for `flops` of compute."""
        parameters = self.size * (flops / self.at) ** self.grows
        return parameters, flops / (6 * parameters)

    def loss(self, parameters: float, tokens: float) -> float | None:
        """Loss in nats per token of the text that the law was fitted on (MassiveText); None for a law without parts."""
        if self.parts is None:
            return None
        e, a, b, alpha, beta = self.parts
        return e + a / parameters**alpha + b / tokens**beta

    def tokens_for(self, parameters: float) -> float:
        """Tokens for which `parameters` are optimal."""
        return self.at * (parameters / self.size) ** (1 / self.grows) / (6 * parameters)

    def size_for(self, tokens: float) -> float:
        """Parameters that are optimal for `tokens`: 6 N D = C(N), solved for N."""
        return _solve(lambda parameters: self.tokens_for(parameters) - tokens, 1e3, 1e16)


def parametric(name: str, description: str, parts: tuple[float, float, float, float, float]) -> Law:
    """The law whose optimum follows from L(N, D) (Hoffmann et al. 2022, equation 4)."""
    _, a, b, alpha, beta = parts
    grows = beta / (alpha + beta)
    size = (alpha * a / (beta * b)) ** (1 / (alpha + beta)) / 6**grows
    return Law(name, description, size, 1.0, grows, parts)


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        # Table 2 has the exponents; the sizes at Gopher's budget are those of table 3 and A3.
        Law("chinchilla-1", "Hoffmann et al. 2022, approach 1: fixed sizes, lengths varied", 67e9, 5.76e23, 0.50),
        Law("chinchilla-2", "Hoffmann et al. 2022, approach 2: IsoFLOP profiles", 61.3e9, 5.76e23, 0.49),
        parametric(
            "chinchilla-3",
            "Hoffmann et al. 2022, approach 3: parametric fit, with the unrounded values of the paper's source",
            (1.6934, 406.4, 410.7, 0.3392, 0.2849),
        ),
        parametric(
            "besiroglu",
            "Besiroglu et al. 2024: approach 3 fitted again, to the end",
            (1.8172, 482.01, 2085.43, 0.3478, 0.3658),
        ),
        # Appendix A: N = 1.3e9 · C^0.73, C in PF-days; parameters without embeddings.
        Law("kaplan", "Kaplan et al. 2020: earlier, sizes grow too fast since learning rates were not tuned for length",
            1.3e9, PF_DAY, 0.73),
    )
}  # fmt: skip

DEFAULT_LAW = "besiroglu"


def own_law(path: Path) -> Law:
    """Read a custom law: JSON with E, A, B, alpha, beta. Raises ConfigError `bad_law`."""
    try:
        fitted: Any = read_json(path)
        values = [float(fitted[key]) for key in ("E", "A", "B", "alpha", "beta")]
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        message = f"expected a JSON file with the numbers E, A, B, alpha and beta of L(N, D): {error}"
        raise ConfigError(Problem("bad_law", str(path), message, "see docs/planning/index.md")) from None
    if not all(math.isfinite(value) for value in values) or min(values[1:]) <= 0:
        raise ConfigError(Problem("bad_law", str(path), "expected A, B, alpha and beta above zero", "fit again"))
    return parametric("own", f"your own fit, {path.name}", (values[0], values[1], values[2], values[3], values[4]))


def find_law(name: str) -> Law:
    """Return a law by name, or from a custom file. Raises ConfigError `unknown_law`."""
    if name in LAWS:
        return LAWS[name]
    if name.endswith(".json") or Path(name).exists():
        return own_law(Path(name))
    known = ", ".join(LAWS)
    raise ConfigError(
        Problem(
            "unknown_law",
            "--law",
            f"expected one of {known}, or a JSON file, not {name!r}",
            "see docs/planning/index.md",
        )
    )


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a rising function between two positive numbers, by halving in the logarithm."""
    for _ in range(200):
        middle = math.sqrt(low * high)
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
