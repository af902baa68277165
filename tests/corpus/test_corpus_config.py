"""Corpus configs: cheap to import, strict, stable defaults of what is shared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from corpus.cleaning.config import CleanConfig
from corpus.config import (
    IngestConfig,
    InstructionsConfig,
    PreferencesConfig,
    ShardConfig,
    TokenizerConfig,
)


def test_importing_the_configs_imports_nothing_heavy():
    heavy = ("torch", "pyarrow", "pandas", "streaming", "great_expectations", "transformers", "tokenizers", "numpy")
    code = f"import sys, corpus.config; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_all_stages_hold_out_the_same_share():
    shares = {c().heldout_share for c in (TokenizerConfig, ShardConfig, InstructionsConfig, PreferencesConfig)}
    assert shares == {0.05}


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (IngestConfig, {"read": []}, "at least one item"),
        (IngestConfig, {"read": [{"kind": "web"}]}, "docstrings"),
        (IngestConfig, {"read": [{"kind": "files", "paths": []}]}, "at least one item"),
        (IngestConfig, {"read": [{"kind": "files", "paths": ["a"], "encoding": "utf-7-bit"}]}, "latin-1"),
        (IngestConfig, {"read": [{"kind": "docstrings", "packages": ["oci"]}]}, "exclude_packages"),
        (InstructionsConfig, {"read": [{"kind": "docstrings", "min_characters": 200}]}, "at most max_characters (160)"),
        (CleanConfig, {"gopher_quality": {"min_mean_word_length": 11}}, "at most max_mean_word_length (10)"),
        (CleanConfig, {"gopher_quality": {"stop_words": []}}, "1 to 64 words"),
        (CleanConfig, {"personal_data": {"phone_regions": ["US", "Germany"]}}, "US or DE, not Germany"),
        (CleanConfig, {"classifier": {"good": ["a"], "bad": ["a", "b"]}}, "a is also listed in bad"),
        (CleanConfig, {"c4": {"line_ends": [".", "?!"]}}, "single characters"),
        (CleanConfig, {"min_characters": 6_000_000}, "at most max_characters"),
        (ShardConfig, {"heldout_share": 0}, "greater than 0"),
    ],
)
def test_mistakes_say_what_was_expected(config, values, words):
    with pytest.raises(ValidationError) as caught:
        config(**values)
    assert words in str(caught.value) and caught.value.error_count() == 1


def test_files_are_sources_by_content_and_docstrings_by_digest(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    config = IngestConfig(
        read=[
            {"kind": "files", "paths": [f"{tmp_path}/*.txt", f"{tmp_path}/gone.txt"]},
            {"kind": "docstrings", "packages": ["click"]},
        ]
    )
    files, docstrings = config.sources()
    assert [path.name for path in files.paths] == ["a.txt", "b.txt", "gone.txt"] and files.derive is None
    assert docstrings.paths == () and docstrings.derive is not None and len(docstrings.derive()) == 64
    assert (files.key, docstrings.key) == ("ingest.read.0", "ingest.read.1")
