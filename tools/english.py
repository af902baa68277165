"""Check the project's English: python -m tools.english [PATH…]; --lower writes ceilings that have fallen.

Rules, with what to write instead, are in english.toml. They apply to prose (docstrings, comments, strings that are
sentences, Markdown and page templates outside of code) and to names (variables, parameters, functions, classes).

What the repository had when the check was written is held by ceilings, one per package and kind of text
(english_ceilings.json). A count above its ceiling fails, as does a count below it until the ceiling is lowered: the
counts can only fall. With PATHs, every violation in these files is printed, and ceilings are not looked at.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RULES = Path(__file__).with_name("english.toml")
CEILINGS = Path(__file__).with_name("english_ceilings.json")
TEXT_SUFFIXES = {".md", ".j2", ".html"}
# A string is a sentence if it has this many words; shorter ones are keys, labels and parts of commands.
SENTENCE_WORDS = 3
# Strings in these folders are inputs of tests and expected outputs; their docstrings, comments and names are checked.
WITHOUT_STRINGS = ("tests", "benchmarks")
# Parameters whose string is a help text, and so begins like a docstring.
HELP_KEYWORDS = {"help", "short_help", "description", "epilog"}


@dataclass(frozen=True)
class Violation:
    """One word in one file that a rule objects to."""

    path: str
    line: int
    kind: str  # "prose" or "names"
    word: str
    write: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: write {self.write}"


@dataclass(frozen=True)
class Text:
    """A passage of prose, with the line of its beginning; `opens` if its first word is held by the rule of openings."""

    line: int
    text: str
    opens: bool = False


class Rules:
    """The compiled word list and its exceptions.

    Args:
        path: a TOML file in the form of english.toml.
    """

    def __init__(self, path: Path = RULES) -> None:
        rules = tomllib.loads(path.read_text(encoding="utf8"))
        self.prose = [
            (re.compile(rf"\b(?:{'|'.join(rule['words'])})\b", re.IGNORECASE), rule["write"]) for rule in rules["prose"]
        ]
        self.opening = re.compile(rf"\s*({'|'.join(rules['opening']['words'])})\b")
        self.opening_write = rules["opening"]["write"]
        self.names: dict[str, str] = rules["names"]
        self.exceptions = [(entry["path"], set(entry["words"])) for entry in rules.get("exceptions", [])]

    def allows(self, path: str, word: str) -> bool:
        """True if an exception covers this word in this file."""
        return any(path.startswith(prefix) and words & {"*", word.lower()} for prefix, words in self.exceptions)

    def check_text(self, path: str, passage: Text) -> Iterator[Violation]:
        """Yield the violations in one passage of prose."""
        if passage.opens and (match := self.opening.match(passage.text)) and not self.allows(path, match[1]):
            yield Violation(path, passage.line, "prose", f"{match[1]} …", self.opening_write)
        for pattern, write in self.prose:
            for match in pattern.finditer(passage.text):
                word = " ".join(match[0].split())
                if not self.allows(path, word):
                    line = passage.line + passage.text.count("\n", 0, match.start())
                    yield Violation(path, line, "prose", word, write)

    def check_name(self, path: str, line: int, name: str) -> Iterator[Violation]:
        """Yield a violation if `name` names nothing."""
        word = name.strip("_").lower()
        if word in self.names and not self.allows(path, word):
            yield Violation(path, line, "names", name, self.names[word])


def string_text(node: ast.expr) -> str | None:
    """Return the text of a literal or f-string, with {} for what is filled in; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def python_comments(source: str, string_lines: set[int]) -> Iterator[Text]:
    """Yield comments; `string_lines` are the lines on which a string of several lines is, where # begins none."""
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line and number not in string_lines and (match := re.search(r"(?:^\s*|\s{2})#(?!!)\s?(.*)$", line)):
            yield Text(number, match[1])


def walk(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module, in no particular order; three times as fast as `ast.walk`."""
    nodes: list[ast.AST] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        nodes.append(node)
        for value in node.__dict__.values():
            if type(value) is list:
                stack += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.expr | ast.stmt | ast.arguments | ast.arg):
                stack.append(value)
    return nodes


def python_prose(nodes: list[ast.AST], source: str, with_strings: bool) -> Iterator[Text]:
    """Yield the docstrings, comments and, if `with_strings`, sentences of one module."""
    docstrings: set[int] = set()
    parts: set[int] = set()
    helps: set[int] = set()
    string_lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in node.values)
        elif isinstance(node, ast.keyword) and node.arg in HELP_KEYWORDS:
            helps.add(id(node.value))
    for node in nodes:
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in parts:
            continue
        text = string_text(node)
        if text is None:
            continue
        if node.end_lineno != node.lineno:
            string_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if id(node) in docstrings:
            yield Text(node.lineno, text, opens=True)
        elif id(node) in helps or (with_strings and len(re.findall(r"[A-Za-z]{2,}", text)) >= SENTENCE_WORDS):
            yield Text(node.lineno, text, opens=id(node) in helps)
    yield from python_comments(source, string_lines)


def python_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield each binding of a name, with its line: assignments, parameters, functions and classes."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def document_prose(source: str) -> Iterator[Text]:
    """Yield the lines of a Markdown file or page template, without code, links' targets and template expressions."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield Text(number, re.sub(r"`[^`]*`|\]\([^)]*\)|\{\{.*?\}\}|\{%.*?%\}|<[^>]*>", " ", line))


def check_file(path: str, rules: Rules, root: Path = REPOSITORY) -> list[Violation]:
    """Return the violations in one file, in order of lines.

    Args:
        path: relative to `root`, with forward slashes.
        rules: word list and exceptions.
        root: folder that `path` starts from.

    Raises:
        SyntaxError: if a Python file cannot be parsed.
    """
    source = (root / path).read_text(encoding="utf8")
    violations: list[Violation] = []
    if path.endswith(".py"):
        nodes = walk(ast.parse(source, path))
        for passage in python_prose(nodes, source, path.split("/")[0] not in WITHOUT_STRINGS):
            violations += rules.check_text(path, passage)
        for line, name in python_names(nodes):
            violations += rules.check_name(path, line, name)
    else:
        for passage in document_prose(source):
            violations += rules.check_text(path, passage)
    return sorted(violations, key=lambda violation: violation.line)


def checked_paths(root: Path = REPOSITORY) -> list[str]:
    """Return the tracked and the new files that the rules apply to."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(
        path
        for path in set(listing.split("\0"))
        if Path(path).suffix in {".py", *TEXT_SUFFIXES} and (root / path).is_file()
    )


def check_files(paths: list[str], rules: Rules) -> list[Violation]:
    """Return the violations in files of the repository, checked in parallel."""
    with ProcessPoolExecutor() as pool:
        per_file = pool.map(partial(check_file, rules=rules), paths, chunksize=25)
        return [violation for violations in per_file for violation in violations]


def changed_paths(root: Path = REPOSITORY) -> set[str]:
    """Return the files that differ from the parent of the current commit; empty if there is none."""
    command = ["git", "diff", "--name-only", "-z", "HEAD~1"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    return set(listing.split("\0")) - {""}


def ceiling_key(violation: Violation) -> str:
    """Return the ceiling that a violation counts against: its top folder (or file) and kind."""
    return f"{violation.path.split('/')[0]}: {violation.kind}"


def compare(counts: Counter[str], ceilings: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return the keys whose count is above its ceiling, and those whose ceiling can be lowered."""
    keys = sorted({*counts, *ceilings})
    return (
        [key for key in keys if counts[key] > ceilings.get(key, 0)],
        [key for key in keys if counts[key] < ceilings.get(key, 0)],
    )


def main(arguments: list[str] | None = None) -> int:
    """Print violations and return the exit status: 0, or 1 if there is something to mend or a ceiling to lower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders to list every violation of")
    parser.add_argument("--lower", action="store_true", help="write the ceilings that have fallen; none is ever raised")
    options = parser.parse_args(arguments)
    rules = Rules()

    if options.paths:
        prefixes = tuple(Path(path).resolve().relative_to(REPOSITORY).as_posix() for path in options.paths)
        selected = [path for path in checked_paths() if any(path == p or path.startswith(f"{p}/") for p in prefixes)]
        violations = check_files(selected, rules)
        sys.stdout.writelines(f"{violation}\n" for violation in violations)
        return int(bool(violations))

    violations = check_files(checked_paths(), rules)
    counts = Counter(ceiling_key(violation) for violation in violations)
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf8"))
    risen, fallen = compare(counts, ceilings)
    if options.lower and fallen:
        lowered = {key: min(counts[key], ceiling) for key, ceiling in ceilings.items()}
        lowered = {key: ceiling for key, ceiling in lowered.items() if ceiling}
        CEILINGS.write_text(json.dumps(lowered, indent=2, sort_keys=True) + "\n", encoding="utf8")
        fallen = []
    changed = changed_paths() if risen else set()
    for key in risen:
        # The file whose edit raised the count is most likely one that has just been changed.
        listed = [violation for violation in violations if ceiling_key(violation) == key]
        listed = [violation for violation in listed if violation.path in changed] or listed
        sys.stdout.writelines(f"{violation}\n" for violation in listed)
        sys.stdout.write(
            f"english: {key}: {counts[key]} violations, at most {ceilings.get(key, 0)} are allowed; above are those in "
            f"files changed last, python -m tools.english {key.split(':')[0]} lists all\n"
        )
    for key in fallen:
        sys.stdout.write(
            f"english: {key}: {counts[key]} violations, fewer than the ceiling of {ceilings[key]}: "
            "lower it with python -m tools.english --lower\n"
        )
    return int(bool(risen or fallen))


if __name__ == "__main__":
    sys.exit(main())
