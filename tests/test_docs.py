"""What README and guides show is what the code at hand says: the picture of the DAG, configs, tables, messages."""

from __future__ import annotations

from flows.config import load
from flows.graph import graph
from flows.picture import pipeline_picture
from tests.command import REPOSITORY

DOCS = REPOSITORY / "docs"


def test_the_picture_of_the_quickstart_is_that_of_its_config() -> None:
    """After a change of its stages: python -m flows.picture configs/quickstart.yaml > docs/pictures/quickstart.svg"""
    nodes = graph(load(REPOSITORY / "configs" / "quickstart.yaml"))
    drawn = pipeline_picture(nodes)
    assert drawn == (DOCS / "pictures" / "quickstart.svg").read_text(encoding="utf8")
    assert not [name for name in nodes if f"{name}: {nodes[name].stage.about}" not in drawn]
