"""Makes prompts with their responses for instruction tuning.

python -m corpus.instructions --config instructions.yaml --out DIR
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from corpus.config import InstructionsConfig
from corpus.demo.config import DocstringInstructions, DocstringLengths, DocstringSignatures
from corpus.demo.texts import instruction_pairs, verifiable_pairs
from corpus.pairs import Pair, prompt_of, records_of_files, write_pairs
from corpus.quarantine import Rejected
from corpus.readers.config import FileInstructions
from infra.run import Result, Run
from infra.sources import Place


def instructions(config: InstructionsConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Writes train.jsonl and heldout.jsonl with lines {"id", "prompt", "response", "source"}, and "verify" where a
    rule tells whether an answer is right.

    A pair from a file has its prompt as group.
    Raises StageError as `corpus.pairs.write_pairs` and the readers do.
    """
    figures = write_pairs(
        config.read, "instructions", _pairs, config.heldout_share, config.max_quarantine_share, out_dir, run
    )
    return Result(figures, f"{figures['train_pairs']:,} pairs, {figures['heldout_pairs']:,} held out")


def _pairs(
    source: DocstringInstructions | DocstringSignatures | DocstringLengths | FileInstructions, key: str
) -> Iterator[Pair | Rejected]:
    if isinstance(source, FileInstructions):
        return islice(file_pairs(source, source.places(), key), source.limit)
    if isinstance(source, DocstringInstructions):
        return instruction_pairs(source)
    return verifiable_pairs(source)


def file_pairs(source: FileInstructions, places: Iterable[Place], key: str) -> Iterator[Pair | Rejected]:
    """The pairs in these files of a source. key: its dotted config key. Raises StageError as the readers do."""
    fields = {"prompt_field": source.prompt_field, "response_field": source.response_field}
    for item in records_of_files(source, places, fields, key):
        if isinstance(item, Rejected):
            yield item
        else:
            prompt = prompt_of(item, source)
            response = str(item.value[source.response_field]).strip()
            yield Pair({"prompt": prompt, "response": response}, item.file.name, prompt, source.verify)


if __name__ == "__main__":
    from infra.alone import main

    main(instructions, InstructionsConfig)
