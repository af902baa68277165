from __future__ import annotations

import json
import subprocess
import sys

import pytest

from infra.lineage.messages import from_json
from infra.servers.environment import server_environ


def test_every_message_reads_back_from_json_as_it_was(story) -> None:
    for message in story.beginning() + story.ending():
        assert from_json(json.loads(json.dumps(message.to_json()))) == message


def test_a_message_of_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="smoke_signal"):
        from_json({"kind": "smoke_signal", "build_id": "x"})


def test_sending_imports_neither_mlflow_nor_prefect() -> None:
    code = (
        "import sys, infra.lineage.relay, infra.lineage.ledger, infra.lineage.outbox, infra.servers.services\n"
        "print([name for name in ('mlflow', 'prefect', 'httpx', 'pandas') if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], env=server_environ({}), capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"
