"""What MLflow's page is told at a first visit: training instead of chatbots, no assistant, no notices."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from infra.lineage.page import VIEW, run_path
from infra.lineage.server import FIRST_VISIT, FirstVisit

PAGE = b"<!doctype html><html><head><title>MLflow</title></head><body></body></html>"


def answer(path: str, method: str = "GET") -> tuple[dict[bytes, bytes], bytes]:
    """(headers, body) of a page of PAGE in two parts, which is asked for as by a browser that has it already."""
    sent: list[Any] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        fresh = not any(name == b"if-none-match" for name, _ in scope["headers"])
        length = str(len(PAGE)).encode()
        await send(
            {"type": "http.response.start", "status": 200 if fresh else 304, "headers": [(b"content-length", length)]}
        )
        await send({"type": "http.response.body", "body": PAGE[:20] if fresh else b"", "more_body": True})
        await send({"type": "http.response.body", "body": PAGE[20:] if fresh else b""})

    async def keep(message: Any) -> None:
        sent.append(message)

    async def nothing() -> Any:
        return {}

    scope = {"type": "http", "path": path, "method": method, "headers": [(b"if-none-match", b"x")]}
    asyncio.run(FirstVisit(page)(scope, nothing, keep))
    return dict(sent[0]["headers"]), b"".join(one.get("body", b"") for one in sent[1:])


def test_a_first_visit_opens_on_training_without_notices_and_keeps_what_somebody_set() -> None:
    headers, body = answer("/")
    assert int(headers[b"content-length"]) == len(body)
    assert re.sub(rb"<head>.*</script>", b"<head>", body, flags=re.DOTALL) == PAGE
    script = body.partition(b"<script>")[2].partition(b"</script>")[0].decode()
    assert "=== null" in script
    told = json.loads(script.partition("Object.entries(")[2].partition("))\n")[0])
    assert {key: json.loads(value) for key, value in told.items()} == FIRST_VISIT
    assert FIRST_VISIT["mlflow.workflowType_v1"] in VIEW


def test_nothing_else_is_touched() -> None:
    for path, method in (("/ajax-api/2.0/mlflow/runs/search", "GET"), ("/", "POST"), ("/static-files/index.js", "GET")):
        headers, body = answer(path, method)
        assert (int(headers[b"content-length"]), body) == (len(PAGE), b"")


def test_a_link_to_a_run_or_its_file_opens_the_view_of_training() -> None:
    assert run_path("1", "abc") == f"#/experiments/1/runs/abc{VIEW}"
    assert run_path("1", "abc", "report.html") == f"#/experiments/1/runs/abc/artifacts/report.html{VIEW}"
