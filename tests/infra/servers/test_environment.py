from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infra.servers.environment import environment, server_environ


def test_a_process_finds_the_project_from_any_folder(tmp_path: Path) -> None:
    code = "import infra.run, corpus.config, os; print(os.environ['HF_HUB_OFFLINE'])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "1"


def test_an_asked_for_server_is_named_with_its_page(tmp_path: Path) -> None:
    variables = environment(tmp_path, prefect_api_url="http://127.0.0.1:4321/api")
    assert variables["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"
    assert variables["PREFECT_UI_URL"] == "http://127.0.0.1:4321"
    assert "PREFECT_API_URL" not in environment(tmp_path)


def test_loopback_is_reached_past_a_proxy_and_its_exceptions_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    assert environment(tmp_path)["NO_PROXY"] == "example.org,127.0.0.1,localhost"


def test_servers_do_not_inherit_what_points_at_other_servers(monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "for the cloud")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    variables = server_environ({"PREFECT_HOME": "/x"})
    assert "PREFECT_API_KEY" not in variables
    assert "MLFLOW_TRACKING_URI" not in variables
    assert variables["PREFECT_HOME"] == "/x"
