"""python -m corpus.decontaminate --config x.yaml --input documents=DIR --input benchmark_text=DIR --out DIR"""

from __future__ import annotations

from corpus.decontaminate.config import DecontaminateConfig
from corpus.decontaminate.stage import decontaminate
from infra.alone import main

main(decontaminate, DecontaminateConfig)
