"""Ranks: told who they are, heard with their number, ended together, and named when they fail."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.launch.ranks import ClusterNode
from tests.infra.launch.launcher import launch
from tests.support.programs.processes import gone, wait_until


def _pids(folder: Path) -> list[psutil.Process]:
    files = [folder / "0", folder / "1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in files))
    return [psutil.Process(int(path.read_text())) for path in files]


def test_each_rank_is_told_who_it_is_and_heard_with_its_number(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "")
    out, err = launcher.communicate(timeout=60)
    assert sorted(err.splitlines()) == ["[rank 0] here 0 2 0", "[rank 1] here 1 2 1"]
    assert out.strip() == "[Ended(rank=0, code=0), Ended(rank=1, code=0)]"


@pytest.mark.parametrize("deaf", [False, True])
def test_the_first_failing_rank_ends_the_others(tmp_path: Path, deaf: bool) -> None:
    """Also one that waits in a collective and does not hear SIGTERM."""
    action = f"""
        import signal
        if {deaf}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == "1":
            while not Path(sys.argv[1], "0").exists():
                time.sleep(0.01)
            sys.exit(7)
        time.sleep(600)
    """
    launcher = launch(tmp_path, action)
    out, _ = launcher.communicate(timeout=60)
    assert "Ended(rank=1, code=7)" in out and "rank=0" not in out
    assert not psutil.pid_exists(int((tmp_path / "0").read_text()))


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_none_outlives_a_killed_launcher_or_a_killed_rank(tmp_path: Path, victim: str) -> None:
    launcher = launch(tmp_path, "time.sleep(600)")
    ranks = _pids(tmp_path)
    (launcher if victim == "launcher" else ranks[1]).send_signal(signal.SIGKILL)
    out, _ = launcher.communicate(timeout=60)
    wait_until(lambda: all(map(gone, ranks)), timeout_s=60)
    if victim == "rank":
        assert f"Ended(rank=1, code={-signal.SIGKILL})" in out


def test_a_node_leaves_the_signs_of_life_of_another_in_their_shared_work_folder_alone(tmp_path: Path) -> None:
    program = """
        Path(os.environ["STEMMA_HEARTBEATS"], f"beat{rank}").touch()
        time.sleep(600)
    """

    def beats() -> list[str]:
        return sorted(path.name for path in (tmp_path / "work").rglob("beat*") if path.is_file())

    nodes = []
    for number in range(2):
        node = {"NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1"}
        nodes.append(launch(tmp_path, program, environment=node, nodes=2))
        expected = [f"beat{rank}" for rank in range(2 * number + 2)]
        assert wait_until(lambda expected=expected: beats() == expected)
    (tmp_path / "stop").touch()
    for node in nodes:
        node.communicate(timeout=60)


@pytest.mark.parametrize(
    "environment",
    [
        {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
        {"SLURM_NODEID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
        {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "10.0.0.1"},
    ],
)
def test_a_scheduler_says_which_node_this_is(environment: dict[str, str]) -> None:
    config = LaunchConfig(nodes=2, processes=4)
    told = ClusterNode.of(config, environment).rank_environment(config, local_rank=3)
    assert (told["RANK"], told["WORLD_SIZE"], told["NODE_RANK"]) == ("7", "8", "1")
    assert told["MASTER_ADDR"] == "10.0.0.1"
    assert told["MASTER_PORT"] == environment.get("MASTER_PORT", "29400")


@pytest.mark.parametrize("environment", [{}, {"NODE_RANK": "1"}, {"NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1"}])
def test_several_nodes_without_a_scheduler_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(StageError, match="identify this node among 2"):
        ClusterNode.of(LaunchConfig(nodes=2), environment)


@pytest.mark.parametrize("grace_s", [60.0, 0.1])
def test_ranks_that_are_told_to_stop_get_the_time_to_save(tmp_path: Path, grace_s: float) -> None:
    action = """
        import signal
        folder = Path(sys.argv[1])
        def save(*_):
            (folder / f"told{rank}").touch()
            while not (folder / "saved").exists():
                time.sleep(0.01)
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        (folder / f"ready{rank}").touch()
        time.sleep(600)
    """
    launcher = launch(tmp_path, action, grace_s=grace_s)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    ranks = _pids(tmp_path)
    (tmp_path / "stop").touch()
    wait_until(lambda: len(list(tmp_path.glob("told*"))) == 2)
    if grace_s > 1:
        (tmp_path / "saved").touch()
    out, _ = launcher.communicate(timeout=30)
    assert out.strip() == ("[Ended(rank=0, code=0), Ended(rank=1, code=0)]" if grace_s > 1 else "[]")
    assert all(map(gone, ranks))
