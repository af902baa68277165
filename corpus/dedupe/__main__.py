"""python -m corpus.dedupe --config dedupe.yaml --input documents=DIR --out DIR"""

from __future__ import annotations

from corpus.dedupe.config import DedupeConfig
from corpus.dedupe.stage import dedupe
from infra.alone import main

main(dedupe, DedupeConfig)
