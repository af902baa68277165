from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from infra.lineage.messages import Message, PipelineFinished, from_json
from infra.lineage.outbox import Outbox
from infra.servers.environment import server_environ

SEND_MANY = """
import sys
from infra.lineage.messages import PipelineFinished
from infra.lineage.outbox import Outbox
outbox = Outbox(sys.argv[1])
for number in range(200):
    outbox.send(PipelineFinished(sys.argv[2], "FINISHED", float(number)))
"""


def read_all(outbox: Outbox) -> list[Message]:
    return [from_json(outbox.read(path).content) for path in outbox.paths()]


def test_processes_that_send_at_once_lose_nothing_and_keep_their_order(root: Path) -> None:
    senders = [
        subprocess.Popen([sys.executable, "-c", SEND_MANY, str(root), name], env=server_environ({})) for name in "abc"
    ]
    assert [sender.wait(timeout=60) for sender in senders] == [0, 0, 0]
    messages = read_all(Outbox(root))
    for name in "abc":
        times = [m.time for m in messages if isinstance(m, PipelineFinished) and m.build_id == name]
        assert times == list(map(float, range(200)))


def test_order_survives_a_clock_that_is_set_back(root: Path, monkeypatch) -> None:
    outbox = Outbox(root)
    outbox.send(PipelineFinished("first", "FINISHED", 1.0))
    monkeypatch.setattr("time.time_ns", lambda: 1)
    outbox.send(PipelineFinished("second", "FINISHED", 2.0))
    assert [message.build_id for message in read_all(outbox)] == ["first", "second"]


def test_a_half_written_message_is_not_seen(root: Path) -> None:
    outbox = Outbox(root)
    outbox.send(PipelineFinished("p", "FINISHED", 1.0))
    (outbox.folder / ".00000000000000000001-1-0.json").write_text('{"mess')
    assert outbox.pending() == 1
