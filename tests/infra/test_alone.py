"""A stage on the command line, without the pipeline around it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from corpus.documents.parts import DocumentWriter, make_document, read_documents
from tests.support.programs.command import REPOSITORY
from tests.support.programs.elsewhere import run_module


def test_a_forgotten_input_is_named(tmp_path: Path) -> None:
    stage = [sys.executable, "-m", "corpus.dedupe.stage"]
    command = [*stage, "--out", str(tmp_path / "out"), "--input", f"text={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected an input named documents, got text (add --input documents=DIR)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("changed", ["config", "input documents", "ingest.read.0", "nothing"])
def test_the_work_of_a_run_with_another_config_or_input_is_refused_and_its_own_goes_on(
    tmp_path: Path, changed: str
) -> None:
    text, section = tmp_path / "a.txt", tmp_path / "section.yaml"
    stage = "ingest" if changed == "ingest.read.0" else "clean"
    files = json.dumps({"read": [{"kind": "files", "paths": [str(text)]}]})
    rules = "{min_characters: 1, gopher_quality: null, gopher_repetition: null, personal_data: null}"

    def write(content: str) -> None:
        text.write_text(content)
        with DocumentWriter(tmp_path / "in" / "documents") as writer:
            writer.write(make_document(content, "here"))

    def run() -> subprocess.CompletedProcess[str]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        words = [f"corpus.{stage}", "--config", section, "--out", tmp_path / "out"]
        words += ["--input", f"documents={tmp_path / 'in'}"] if stage == "clean" else []
        return run_module(words, ["infra.alone", "corpus.ingest", "corpus.clean"])

    section.write_text(files if stage == "ingest" else rules)
    write("old text")
    assert run().returncode == 0
    if changed == "config":
        section.write_text(rules.replace("min_characters: 1", "min_characters: 2"))
    elif changed != "nothing":
        write("new text")
    again = run()
    if changed == "nothing":
        assert again.returncode == 0 and "1 of 1 partitions are done" in again.stderr
        return
    assert again.returncode == 1 and "Traceback" not in again.stderr
    assert f"out.work: it contains the work of a run with another {changed} (remove it" in again.stderr
    shutil.rmtree(tmp_path / "out.work")
    assert run().returncode == 0
    expected = "old text" if changed == "config" else "new text"
    assert [document.text for document in read_documents(tmp_path / "out")] == [expected]
