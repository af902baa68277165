"""Whole numbers of YAML: those that no table, array or float takes are refused where they are read."""

from __future__ import annotations

import pytest

from infra.io.yaml import BadYaml, read_plain


@pytest.mark.parametrize(
    "text", ["9223372036854775808", "-9223372036854775808", "0xffffffffffffffff", "1" * 400, "1" * 5_000]
)
def test_a_number_of_over_64_bits_is_refused(text: str) -> None:
    with pytest.raises(BadYaml, match=r"is larger than 9,223,372,036,854,775,807"):
        read_plain(f"a: {text}")


@pytest.mark.parametrize("number", [0, 2**63 - 1, -(2**63) + 1])
def test_a_number_of_64_bits_is_read(number: int) -> None:
    assert read_plain(f"a: {number}") == {"a": number}
