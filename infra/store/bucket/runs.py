"""Records of pipeline runs that the machines of a root on an object store share.

<url>/runs/<run id>.json         the journal and the result of a run that ended
<url>/runs/going/<run id>.json   a run that has not ended: its host and its artifacts, see `infra.store.at_work`
<url>/runs/trials/<run id>.json   the sweep of which a run that has not ended is a trial
<url>/runs/best/<sweep>/<who>.json   the best trial of a sweep on a machine
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from infra.io.json import parse_own_json
from infra.io.s3 import list_objects, object_at, read_object, side_by_side
from infra.io.s3_write import put, remove

RUNS = "runs"
GOING = "going"
BEST = "best"
TRIALS = "trials"
RUN_FILES = ("journal.jsonl", "result.json")


class RemoteRuns:
    """The runs of a root. url: of the root. Every call raises StageError as `infra.io.s3.persistently` does."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/{RUNS}"

    def begin(self, run_id: str, about: dict[str, Any]) -> None:
        put(json.dumps(about).encode(), self._going(run_id))

    def end(self, run_id: str) -> None:
        remove([object_at(self._going(run_id)), object_at(self._trial(run_id))])

    def put_trial(self, run_id: str, facts: dict[str, str]) -> None:
        """Record that a run that is about to begin, on any machine, is a trial of a sweep."""
        put(json.dumps(facts).encode(), self._trial(run_id))

    def trial(self, run_id: str) -> dict[str, str] | None:
        """Return the facts given to `put_trial`; None for a run that is not a trial."""
        stored = read_object(self._trial(run_id))
        facts: dict[str, str] | None = parse_own_json(stored[0]) if stored else None
        return facts

    def going(self) -> list[dict[str, Any]]:
        """Return the last record of each run that has not ended, with `run_id` and `modified`, its Unix time."""
        runs = []
        for item in list_objects(f"{self._url}/{GOING}/"):
            if content := read_object(str(item)):
                facts = {"run_id": item.name.removesuffix(".json"), "modified": item.modified}
                runs.append({"artifacts": [], **parse_own_json(content[0]), **facts})
        return runs

    def best(self) -> list[tuple[str, str]]:
        """Return (sweep, run id) of the best trial of each sweep, one per machine that ran the sweep."""
        best_runs = []
        for item in list_objects(f"{self._url}/{BEST}/"):
            if content := read_object(str(item)):
                best_runs.append((item.key.rsplit("/", 2)[-2], str(parse_own_json(content[0])["run_id"])))
        return best_runs

    def put_best(self, sweep: str, who: str, run_id: str) -> None:
        """who: tells machines apart that run the same sweep."""
        put(json.dumps({"run_id": run_id}).encode(), f"{self._url}/{BEST}/{sweep}/{who}.json")

    def put(self, folder: Path) -> None:
        """Publish the journal and the result of a pipeline run for other machines. folder: of its journal."""
        files = {name: (folder / name).read_text(encoding="utf8") for name in RUN_FILES}
        put(json.dumps(files).encode(), f"{self._url}/{folder.name}.json")

    def fetch(self, runs: Path) -> None:
        """Fetch the ended runs of other machines into the local folder of journals."""

        def fetch(url: str) -> None:
            if (stored := read_object(url)) is None:
                return
            folder = runs / url.rpartition("/")[2].removesuffix(".json")
            folder.mkdir(parents=True, exist_ok=True)
            for name in RUN_FILES:  # the result last: it stands for all of them
                hidden = folder / f".{name}.{os.getpid()}"
                hidden.write_text(parse_own_json(stored[0])[name], encoding="utf8")
                hidden.replace(folder / name)

        beginning = object_at(f"{self._url}/").key
        items = [item for item in list_objects(f"{self._url}/") if "/" not in item.key.removeprefix(beginning)]
        new = [str(item) for item in items if not (runs / item.name.removesuffix(".json") / RUN_FILES[-1]).exists()]
        side_by_side(fetch, new)

    def _trial(self, run_id: str) -> str:
        return f"{self._url}/{TRIALS}/{run_id}.json"

    def _going(self, run_id: str) -> str:
        return f"{self._url}/{GOING}/{run_id}.json"
