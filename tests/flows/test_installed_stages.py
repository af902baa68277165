"""A stage of a package that is installed next to the project: found by its entry point, known to every command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config.described import described, stage_list
from flows.config.pipeline_config import PipelineConfig
from flows.config.steps import OWN_KEYS
from flows.config.wiring import Joint, joint_of, wiring_problems
from infra.store.manifest import Manifest, SourceRecord
from infra.store.store import Store
from tasks.building.build import build_request
from tasks.building.explain import BuildRequest, changes
from tasks.installed import installed_stages
from tasks.stage import KINDS, STEP_KEYS, Node
from tasks.stages import OUR_STAGES, SECTIONS, STAGES, USUAL_STEPS, usable_stages
from tests.support.guides import stage_package
from tests.support.pipelines import data_config
from tests.support.programs.command import Answer, finish, start_new, write_config

NAME = "stemma-longest"


class Package:
    """A package of one stage in a folder of its own, as pip would install it; `files` are those of the guide."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], str(folder)])}
        for path, text in stage_package().items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf8")
        self.install("0.1.0", {"longest": "longest_documents.stages:LONGEST"})

    def install(self, version: str, points: dict[str, str]) -> None:
        """Writes the metadata that an installer writes."""
        for old in self.folder.glob("*.dist-info"):
            shutil.rmtree(old)
        info = self.folder / f"stemma_longest-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[stemma.stages]", *lines]) + "\n")

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / "longest_documents" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def stemma(self, *arguments: str | Path) -> Answer:
        return finish(start_new(*arguments, env=self.env))

    def python(self, code: str) -> Any:
        done = subprocess.run([sys.executable, "-c", code], env=self.env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


@pytest.fixture
def package(tmp_path: Path, env: dict[str, str]) -> Package:
    return Package(tmp_path / "site", env)


def request_of(package: Package, monkeypatch: pytest.MonkeyPatch, store: Store) -> BuildRequest:
    """The build request of a step of the package as it is now, read as a new process reads it."""
    monkeypatch.syspath_prepend(str(package.folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "longest_documents"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    stage = installed_stages(OUR_STAGES).stages["longest"]
    node = Node("long_ones", stage, stage.config.model_validate({"documents": 7}), {"documents": "clean"})
    (_, documents), *_ = store.manifests("clean")
    return build_request(node, {"documents": documents}, store)


@pytest.mark.slow
def test_a_stage_of_an_installed_package_is_built_reused_and_traced(package: Package, data_pipeline: Path) -> None:
    step = {"uses": "longest", "inputs": {"documents": "clean"}, "documents": 7}
    data = data_config(data_pipeline) | {"steps": {"long_ones": step}, "report": {}}
    config, store = write_config(data_pipeline / "config.yaml", data), data_pipeline / "store"

    first = package.stemma("run", config, "--root", store, "--only", "long_ones,report")
    assert first.code == 0, (first.document["errors"], first.stderr)
    assert first.statuses() == {"long_ones": "built", "report": "built"}
    built = first.rows()["long_ones"]
    assert built["headline"] == "kept 7 of 60 documents"
    report = (Path(first.rows()["report"]["path"]) / "report.html").read_text(encoding="utf8")
    assert "kept 7 of 60 documents" in report and f"{NAME} 0.1.0" in report

    manifest = json.loads((Path(built["path"]) / "manifest.json").read_text())
    assert (manifest["makes"], manifest["package"]) == ("documents", f"{NAME} 0.1.0")
    node = next(
        node
        for node in package.stemma("lineage", built["path"], "--root", store).document["nodes"]
        if node.get("key") == f"code of {NAME}"
    )
    assert {Path(one["path"]).name for one in node["files"]} == {"__init__.py", "longest.py", "stages.py"}

    again = package.stemma("run", config, "--root", store, "--only", "long_ones")
    assert again.statuses() == {"long_ones": "reused"}
    checked = package.stemma("check", config, "--root", store).rows()["long_ones"]
    assert (checked["uses"], checked["status"]) == ("longest", "reuse")
    why = package.stemma("why", config, "long_ones", "--root", store)
    assert why.code == 0 and why.document["did"] == "reused"


def test_code_version_and_package_of_an_installed_stage_are_in_its_fingerprint(
    package: Package, built_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(built_data / "store", reading=True)

    def changed() -> tuple[bool, list[str]]:
        """Whether the fingerprint differs from that of the package as it was, and what `check` would report."""
        request = request_of(package, monkeypatch, store)
        return request.fingerprint != first.fingerprint, [str(one) for one in changes(request, [built])]

    first = request_of(package, monkeypatch, store)
    sources = tuple(SourceRecord(key, digest) for key, digest in first.sources.items())
    inputs = {"documents": next(store.manifests("clean"))[1]}
    built = Manifest(
        stage="longest",
        version=1,
        fingerprint=first.fingerprint,
        digest="",
        build_id="",
        config=first.config,
        identity=first.identity,
        inputs={name: one.as_input() for name, one in inputs.items()},
        requires={},
        sources=sources,
        files=(),
        result={},
    )
    assert changed() == (False, ["its artifact is gone"])
    package.edit("longest.py", "len(document.text), document.id", "len(document.text), document.source, document.id")
    assert changed() == (True, [f"the content of the source code of {NAME} changed"])
    package.edit("longest.py", "len(document.text), document.source, document.id", "len(document.text), document.id")
    assert changed()[0] is False
    package.install("0.2.0", {"longest": "longest_documents.stages:LONGEST"})
    assert changed() == (True, [f"package changed: {NAME} 0.1.0 → {NAME} 0.2.0"])
    package.install("0.1.0", {"longest": "longest_documents.stages:LONGEST"})
    package.edit("stages.py", "version=1", "version=2")
    assert changed()[1][0] == "the stage's version changed from 1 to 2"


def test_commands_forms_and_schema_know_an_installed_stage(package: Package, tmp_path: Path) -> None:
    shown = package.stemma("step", "show", "longest").document
    assert shown["package"] == {"name": NAME, "version": "0.1.0"}
    assert (shown["makes"], shown["inputs"][0]["input"]) == ("documents", "documents")
    assert "clean" in shown["inputs"][0]["made_by"]
    key = next(key for key in shown["keys"] if key["key"] == "documents")
    assert (key["type"], key["default"], key["required"]) == ("integer", 1000, False)
    assert key["description"] == "Number of documents that are kept."
    assert yaml.safe_load(shown["example"]) == {
        "steps": {"my_longest": {"uses": "longest", "inputs": {"documents": "ingest"}}}
    }
    listed = package.stemma("step", "list").document["stages"]
    assert next(row for row in listed if row["stage"] == "longest")["makes"] == "documents"

    wrong = {"name": "x", "ingest": {}, "steps": {"long_ones": {"uses": "longest", "document": 3}}}
    answer = package.stemma("check", write_config(tmp_path / "config.yaml", wrong), "--root", tmp_path / "store")
    assert answer.code == 2
    assert {(one["code"], one["path"]) for one in answer.document["errors"]} == {
        ("unknown_key", "steps.long_ones.document"),
        ("missing_input", "steps.long_ones.inputs.documents"),
    }
    known = package.python(
        "import json, flows.stage as s; from flows.config.schema import schema\n"
        "print(json.dumps(['LongestStep' in json.loads(schema())['$defs'], s.longest is s.FLOWS['longest']]))"
    )
    assert known == [True, True]


@pytest.mark.parametrize(
    ("points", "code", "text"),
    [
        ({"longest": "longest_documents.nowhere:LONGEST"}, "bad_stage_package", "ModuleNotFoundError"),
        ({"clean": "longest_documents.stages:LONGEST"}, "stage_name_taken", "declares the stage clean"),
        ({"longer": "longest_documents.stages:LONGEST"}, "bad_stage_package", "the stage 'longest'"),
        ({"longest": "longest_documents.longest:longest"}, "bad_stage_package", "expected a tasks.stage.Stage"),
    ],
    ids=["import", "collision", "name", "kind"],
)
def test_a_faulty_entry_point_is_a_plain_error_that_names_its_package(
    package: Package, points: dict[str, str], code: str, text: str
) -> None:
    """Each with its cause, reported with the config's own problems; commands that read no config go on."""
    package.install("0.1.0", points)
    problems = package.python(
        "import json; from flows.config.read import parse; from infra.errors import ConfigError\n"
        "try: parse({'name': 'x', 'clean': {}})\n"
        "except ConfigError as error: print(json.dumps([one.as_json() for one in error.problems]))"
    )
    assert [one["code"] for one in problems] == [code, "missing_section"]
    assert NAME in problems[0]["message"] and text in problems[0]["message"]
    assert NAME in problems[0]["fix"]


@pytest.mark.parametrize("name", usable_stages())
def test_the_minimal_config_of_a_stage_is_a_config(name: str) -> None:
    """With what it reads made by sections, the only problems left are files and addresses of the examples."""
    data = yaml.safe_load(described(name)["example"])
    assert PipelineConfig.model_validate({"name": "x", **data})
    steps = {key: joint_of(step) for key, step in data.get("steps", {}).items()}
    assert wiring_problems(steps, {key: Joint(stage) for key, stage in STAGES.items() if key in SECTIONS}) == []


def test_every_step_of_the_usual_pipeline_reads_what_is_declared_and_made_before_it() -> None:
    made: dict[str, str] = {}
    for step in USUAL_STEPS.values():
        stage = STAGES[step.section]
        for name, candidates in step.inputs.items():
            declared = stage.input(name)
            assert declared and {made[one] for one in candidates} <= set(declared.takes), (step.id, name)
        for name, other in step.from_step.items():
            declared = stage.input(name)
            assert declared and STAGES[other].makes in declared.takes, (step.id, name)
        assert not step.adds or step.adds in step.inputs
        assert set(step.requires) | set(step.further) <= made.keys()
        assert set(step.needs) | set(step.only_if) <= step.inputs.keys()
        assert set(step.only_if.values()) <= set(stage.config.model_fields)
        made[step.id] = stage.makes
    assert {stage.makes for stage in STAGES.values()} <= set(KINDS)
    assert {row["stage"] for row in stage_list()} == usable_stages().keys()
    assert set(OWN_KEYS) == STEP_KEYS
