"""The licence of a downloaded model folder goes with what is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus.model_folders.licence import carry_licence, keep_licence, licence_files, stated_licence


def test_files_and_the_stated_licence_are_carried_along(tmp_path: Path) -> None:
    downloaded, base, tuned = tmp_path / "downloaded", tmp_path / "base", tmp_path / "tuned"
    downloaded.mkdir()
    for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md", "model.safetensors"):
        (downloaded / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (downloaded / "LICENSE.link").symlink_to(tmp_path / "secret")
    (downloaded / "README.md").write_text(
        "---\nlicense: other\nlicense_name: llama3.2\nlicense_link: LICENSE\ntags: [a]\n---\n# Model\n"
    )
    names = ["LICENSE", "NOTICE.txt", "USE_POLICY.md"]
    assert keep_licence(downloaded, base) == names
    carry_licence(base, tuned)
    assert [path.read_text() for path in licence_files(tuned)] == names
    assert stated_licence(tuned) == {"license": "other", "license_name": "llama3.2", "license_link": "LICENSE"}
    assert keep_licence(tuned, tmp_path / "again") == names  # an artifact that is imported


@pytest.mark.parametrize(
    "card", ["# Model", "---\nlicense: [\n---\n", "---\n- a\n---\n", "---\nlicense: [mit]\n---\n", ""]
)
def test_a_folder_that_states_none_has_none(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert keep_licence(tmp_path, tmp_path / "base") == [] and stated_licence(tmp_path / "base") == {}
    assert not (tmp_path / "base").exists()
