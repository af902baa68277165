"""Seeds that are derived from others: within every library's range, and independent of each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from evaluation.generation.random_state import seeded
from infra.config import Seed, derived_seed

SEEDS = (0, 17, 429_197, 20_261_127, 2**31 - 1, 2**31, 2**63 - 1)


def test_every_library_takes_a_derived_seed() -> None:
    for seed, key in product(SEEDS, (0, 1, 2**40)):
        with seeded(derived_seed(seed, key), torch.device("cpu")):
            assert np.random.get_state()[1][0] == derived_seed(seed, key)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_states_begin_from_any_seed(seed: int) -> None:
    """Rounds of RLHF draw seeds of 62 bits, of which numpy takes 32."""
    drawn = []
    for _ in range(2):
        with seeded(seed, torch.device("cpu")):
            drawn.append((np.random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_derived_seeds_of_neighbours_do_not_meet() -> None:
    """The risk: by a sum or a product a seed's second use has the numbers of the next seed's first."""
    found = [derived_seed(seed, *keys) for seed in (*range(50), *SEEDS[2:]) for keys in ((), (0,), (1,), (2,), (1, 2))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("seed", "fits"), [(20_261_127, True), (2**31 - 1, True), (2**31, False), (-1, False)])
def test_a_config_takes_seeds_below_two_to_the_31(seed: int, fits: bool) -> None:
    if fits:
        assert TypeAdapter(Seed).validate_python(seed) == seed
    else:
        with pytest.raises(ValidationError):
            TypeAdapter(Seed).validate_python(seed)
