"""Which model is promoted is one file, changed as a whole, by one at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.errors import StageError
from infra.store.promotions import Promotion, Promotions


def promotion(name: str) -> Promotion:
    return Promotion(f"register/{name}", f"rlhf/{name}", f"digest of {name}", 1.0)


def test_a_rollback_goes_back_to_the_one_before(tmp_path: Path) -> None:
    promotions = Promotions(tmp_path)
    first, second = promotion("first"), promotion("second")
    promotions.promote("demo", first, None)
    promotions.promote("demo", second, first)
    assert promotions.all() == {"demo": second}
    assert promotions.rollback("demo") == (first, second)
    assert promotions.promoted("demo") == first
    with pytest.raises(StageError, match="no earlier promotion"):
        promotions.rollback("demo")


def test_of_several_that_promote_at_once_one_does(tmp_path: Path) -> None:
    names = [f"model{number}" for number in range(12)]

    def promote(name: str) -> bool:
        try:
            Promotions(tmp_path).promote("demo", promotion(name), None)
        except StageError as error:
            assert error.problems[0].code == "promoted_meanwhile"
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(promote, names)) == 1
    assert len(Promotions(tmp_path).history("demo")) == 1


@pytest.mark.parametrize("text", ["{bad", "[]", "7", '{"demo": [5]}', '{"demo": {}}', '{"demo": [{"model": "a"}]}'])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "promotions.json").write_text(text)
    with pytest.raises(StageError) as caught:
        Promotions(tmp_path).rollback("demo")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("damaged_state", str(tmp_path / "promotions.json"))
