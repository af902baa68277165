"""All targets by name."""

from __future__ import annotations

from tests.fuzz import configs, files, http, readers, store
from tests.fuzz.harness import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (*configs.TARGETS, *files.TARGETS, *store.TARGETS, *http.TARGETS, *readers.TARGETS)
}
