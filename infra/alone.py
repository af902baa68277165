"""Runs one stage function by hand, without flows, store or servers.

python -m corpus.clean --config clean.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from infra.config import StageConfig
from infra.errors import StemmaError
from infra.run import Result, Run

C = TypeVar("C", bound=StageConfig)


def main(function: Callable[[C, Mapping[str, Path], Path, Run], Result], config_class: type[C]) -> None:
    """Parses the command line, runs the function in the foreground, prints its figures, exits as the command would."""
    parser = argparse.ArgumentParser(description=(function.__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--config", type=Path, help="a YAML file with this stage's section; defaults where left out")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=DIR", help="an input artifact")
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder for the result")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty")
    pairs = [text.partition("=") for text in options.input]
    if any(not folder for _, _, folder in pairs):
        parser.error("--input wants NAME=DIR")
    options.out.mkdir(parents=True, exist_ok=True)
    section = yaml.safe_load(options.config.read_text(encoding="utf8")) if options.config else {}
    run = Run.alone(options.out.parent / f"{options.out.name}.work")
    try:
        config = config_class.model_validate(section or {})
        result = function(config, {name: Path(folder) for name, _, folder in pairs}, options.out, run)
    except ValidationError as error:
        sys.exit(str(error))
    except StemmaError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(result.headline)
    for name, value in result.figures.items():
        print(f"{name}: {value:.6g}")
