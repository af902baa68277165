"""python -m corpus.mix --config mix.yaml --input documents=DIR --out DIR"""

from __future__ import annotations

from corpus.mix.config import MixConfig
from corpus.mix.stage import mix
from infra.alone import main

main(mix, MixConfig)
