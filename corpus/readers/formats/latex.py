"""Text of LaTeX documents: commands give way to what they print, and formulas stay as written.

No library of the lock reads LaTeX. This reads the commands of ordinary papers and books; of others the names go and
their arguments stay. Macros without arguments give way to their definitions; files of \\input are not followed.
`format: text` takes the markup itself.
"""

from __future__ import annotations

import re
import unicodedata

from corpus.readers.formats.formulas import raised

MAX_DEPTH = 40
"""Groups inside each other; of deeper ones only the braces go."""
MAX_DEFINITION = 200
"""Characters of a macro that is replaced by its definition."""

_TOKEN = re.compile(
    r"""(?P<command>\\(?:[A-Za-z@]+\*?|.))
    |(?P<formula>\$\$.+?\$\$|\$(?:[^$\\]|\\.)+\$)
    |(?P<space>\s+)|(?P<dashes>-{2,3})|(?P<quotes>``|''|`)|(?P<brace>[{}])|(?P<tie>~)|(?P<column>&)
    |(?P<text>[^\\$\s{}~&`'-]+|.)""",
    re.DOTALL | re.VERBOSE,
)
_SIGNS = {"--": "–", "---": "—", "``": "“", "''": "”", "`": "‘"}
_ACCENTS = {
    "'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "=": "\u0304", ".": "\u0307",
    "u": "\u0306", "v": "\u030c", "H": "\u030b", "c": "\u0327", "k": "\u0328", "r": "\u030a", "d": "\u0323",
    "b": "\u0331",
}  # fmt: skip
_SYMBOLS = {
    **{sign: sign for sign in "%&_#${}"},
    " ": " ", "\n": " ", ",": " ", ";": " ", ":": " ", "!": "", "/": "", "-": "", "@": "", "\\": "\n", "newline": "\n",
    "tabularnewline": "\n", "quad": " ", "qquad": " ", "space": " ", "par": "\n\n", "ldots": "…", "dots": "…",
    "ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø", "l": "ł", "L": "Ł", "aa": "å", "AA": "Å",
    "i": "i", "j": "j", "S": "§", "P": "¶", "copyright": "©", "pounds": "£", "euro": "€", "dag": "†", "ddag": "‡",
    "TeX": "TeX", "LaTeX": "LaTeX", "LaTeXe": "LaTeX2e", "BibTeX": "BibTeX", "slash": "/", "textbackslash": "\\",
    "textasciitilde": "~", "textasciicircum": "^", "textendash": "–", "textemdash": "—", "textquoteright": "’",
    "textquoteleft": "‘", "textbar": "|", "textless": "<", "textgreater": ">", "textdegree": "°", "textellipsis": "…",
}  # fmt: skip
_PRINTED = {
    **dict.fromkeys(
        ("part", "chapter", "section", "subsection", "subsubsection", "title", "caption", "author"), "\n\n{}\n\n"
    ),
    "paragraph": "\n\n{} ", "footnote": " ({})", "url": "{}",
}  # fmt: skip
"""Commands whose argument is printed, and in what."""
_RAISED = {"textsuperscript": "sup", "textsubscript": "sub"}
_LABEL = re.compile(r"\s*\\label\{[^}]*\}")
_REFERENCES = re.compile(r"(no)?cite\w*|(auto|page|eq|name|c|C|v)?ref")
_LEFT_OUT = {
    "end": 1, "label": 1, "index": 1, "input": 1, "include": 1, "includegraphics": 1,
    "bibliography": 1, "bibliographystyle": 1,
    "usepackage": 1, "documentclass": 1, "vspace": 1, "hspace": 1, "setlength": 2, "addtolength": 2, "setcounter": 2,
    "addtocounter": 2, "pagestyle": 1, "thispagestyle": 1, "pagenumbering": 1, "hypersetup": 1, "graphicspath": 1,
    "newcommand": 2, "renewcommand": 2, "providecommand": 2, "newtheorem": 2, "DeclareMathOperator": 2, "color": 1,
    "addcontentsline": 3, "bibitem": 1, "captionsetup": 1, "vskip": 0, "hskip": 0, "cmidrule": 1, "cline": 1,
    "newenvironment": 3, "renewenvironment": 3,
}  # fmt: skip
"""Commands that print nothing, and how many of their arguments go with them."""
_LAST_OF = {"href": 2, "textcolor": 2, "colorbox": 2, "multicolumn": 3, "multirow": 3, "parbox": 2, "raisebox": 2}
"""Commands with their number of arguments, of which the last one is printed."""
_FORMULAS = frozenset({
    "equation", "align", "gather", "multline", "eqnarray", "displaymath", "math", "flalign", "alignat", "subequations",
})  # fmt: skip
_CODE = frozenset({"verbatim", "Verbatim", "lstlisting", "minted", "alltt"})
_NO_TEXT = frozenset({"comment", "thebibliography", "tikzpicture", "pgfpicture", "picture", "filecontents", "CCSXML"})
_TABLES = {"tabular": 1, "tabularx": 2, "tabulary": 2, "longtable": 1, "array": 1}
_SPEC = {**_TABLES, "minipage": 1, "multicols": 1, "minted": 1, "wrapfigure": 2, "spacing": 1, "adjustwidth": 2}
"""Environments and how many of their arguments describe a layout."""
_FLOATS = frozenset({"figure", "table", "wrapfigure", "enumerate", "itemize", "description", "minipage", "algorithm"})
_BODY = re.compile(r"\\begin\{document\}(.*?)(?:\\end\{document\}|\Z)", re.DOTALL)
_MACRO = re.compile(r"\\(?:(?:re)?newcommand\*?\s*\{?\\([A-Za-z]+)\}?|def\s*\\([A-Za-z]+))\s*(?=\{)")
_TITLE = re.compile(r"\\title\s*(?=\{)")
_STRUCTURE = re.compile(r"\\(begin|end)\s*\{([A-Za-z]+\*?)\}|\\.|[{}]", re.DOTALL)
_OPTION = re.compile(r"\\.|[{}\]]", re.DOTALL)
_LONGEST_OPTION = 2_000
_LETTER = re.compile(r"\\[A-Za-z]+|.", re.DOTALL)
_SPACES = re.compile(r"[ \t]*(?:\n[ \t]*(?!\n))?")
_KEPT = re.compile("\x00(\\d+)\x00")


def latex_text(source: str) -> str:
    """The text of a LaTeX document, from its body if it has one."""
    source = source.replace("\x00", "")
    source = re.sub(r"^[ \t]*(?<!\\)%.*\n?", "", source, flags=re.MULTILINE)  # a line of comment leaves no blank one
    source = re.sub(r"(?<!\\)((?:\\\\)*)%.*", r"\1", source)
    macros, rest = _macros(source)
    body = _BODY.search(rest)
    text = body[1] if body else rest
    if body and (title := _TITLE.search(rest)):
        braces = _Source(rest[title.end() : body.start()])
        text = text.replace("\\maketitle", f"\\title{{{braces.text[slice(*braces.argument(0))]}}}", 1)
    for _ in range(2 if macros else 0):  # a macro may name another one
        pattern = rf"\\({'|'.join(map(re.escape, macros))})(?![A-Za-z])"
        text = re.sub(pattern, lambda match: macros[match[1]], text)
    return _Document(_Source(text)).rendered()


def _macros(source: str) -> tuple[dict[str, str], str]:
    """Macros without arguments by name, and the source without their definitions."""
    braces = _Source(source)
    macros: dict[str, str] = {}
    parts: list[str] = []
    position = 0
    for macro in _MACRO.finditer(source):
        begin, end = braces.argument(macro.end())
        name, definition = macro[1] or macro[2], source[begin:end]
        if macro.start() < position or begin == end:
            continue
        if len(definition) <= MAX_DEFINITION and f"\\{name}" not in definition:
            macros[name] = definition
        parts.append(source[position : macro.start()])
        position = end + 1
    return macros, "".join(parts) + source[position:]


class _Source:
    """A source with the ends of its groups and environments.

    closing: of each opening brace. ends: of each \\begin, from its backslash, the place of its \\end.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.closing: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        braces: list[int] = []
        open_names: list[tuple[str, int]] = []
        for match in _STRUCTURE.finditer(text):
            if match[0] == "{":
                braces.append(match.start())
            elif match[0] == "}":
                if braces:
                    self.closing[braces.pop()] = match.start()
            elif match[1] == "begin":
                open_names.append((match[2], match.start()))
            elif match[1] == "end" and any(name == match[2] for name, _ in open_names[-MAX_DEPTH:]):
                while open_names:
                    name, start = open_names.pop()
                    self.ends[start] = match.start()
                    if name == match[2]:
                        break
        for match in re.finditer(r"\\(?:begin|end)\s*\{", text):
            if (name_end := text.find("}", match.end())) >= 0:
                self.closing[match.end() - 1] = name_end

    def behind_spaces(self, position: int) -> int:
        """The place behind spaces and at most one line break."""
        match = _SPACES.match(self.text, position)
        return match.end() if match else position

    def argument(self, position: int) -> tuple[int, int]:
        """Begin and end of the argument in braces at a position; (position, position) where there is none."""
        start = self.behind_spaces(position)
        if self.text[start : start + 1] == "{" and start in self.closing:
            return start + 1, self.closing[start]
        return position, position

    def option(self, position: int) -> tuple[str | None, int]:
        """The argument in brackets at a position, and the place behind it; None and the position without one."""
        start = self.behind_spaces(position)
        if self.text[start : start + 1] != "[":
            return None, position
        depth = 0
        for match in _OPTION.finditer(self.text, start + 1, start + _LONGEST_OPTION):
            if match[0] == "]" and not depth:
                return self.text[start + 1 : match.start()], match.end()
            depth += {"{": 1, "}": -1}.get(match[0], 0)
            if depth < 0:
                break
        return None, position


class _Document:
    """The text of a source, and the formulas and programs in it, which stay unchanged."""

    def __init__(self, source: _Source, depth: int = 0) -> None:
        self._source, self._depth = source, depth
        self._kept: list[str] = []

    def rendered(self) -> str:
        text = self._range(0, len(self._source.text), self._depth)
        text = re.sub(r"[ \t]{2,}", lambda run: "\t" if "\t" in run[0] else " ", text)
        text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]*\n[ \t]*", "\n", text))
        return _KEPT.sub(lambda match: self._kept[int(match[1])], text).strip()

    def _range(self, position: int, end: int, depth: int, is_table: bool = False) -> str:
        """The text of a part of the source."""
        source = self._source.text
        if depth > MAX_DEPTH:
            return re.sub(r"[{}]", "", source[position:end])
        parts: list[str] = []
        while position < end and (token := _TOKEN.match(source, position, end)):
            position = token.end()
            value = token[0]
            match token.lastgroup:
                case "command":
                    text, position = self._command(position, end, value[1:].rstrip("*") or "*", depth)
                    parts.append(text)
                case "formula":
                    parts.append(self._keep(value))
                case "space":
                    parts.append("\n\n" if value.count("\n") > 1 else " ")
                case "dashes" | "quotes":
                    parts.append(_SIGNS[value])
                case "tie":
                    parts.append(" ")
                case "column":
                    parts.append("\t" if is_table else value)
                case "text":
                    parts.append(value)
        return "".join(parts)

    def _keep(self, text: str) -> str:
        self._kept.append(text)
        return f"\x00{len(self._kept) - 1}\x00"

    def _option_text(self, option: str, depth: int) -> str:
        return _Document(_Source(option), depth).rendered()

    def _command(self, position: int, end: int, name: str, depth: int) -> tuple[str, int]:
        """The text of the command before a position, and where the source goes on."""
        source = self._source.text
        if name in ("(", "["):
            closing = source.find("\\)" if name == "(" else "\\]", position, end)
            if closing >= 0:
                return self._keep(source[position - 2 : closing + 2]), closing + 2
        if name == "begin" and self._source.argument(position) != (position, position):
            return self._environment(position, end, depth)
        if name == "verb" and position < end:
            closing = source.find(source[position], position + 1, end)
            return (self._keep(source[position + 1 : closing]), closing + 1) if closing > 0 else ("", position)
        if name in _ACCENTS and (not name.isalpha() or source[position : position + 1] in ("{", " ")):
            return self._accented(position, name, depth)
        if name in _SYMBOLS:
            if name == "\\":
                _, position = self._source.option(position)
            return _SYMBOLS[name], self._source.behind_spaces(position) if name.isalpha() else position
        return self._word(position, name, depth)

    def _accented(self, position: int, accent: str, depth: int) -> tuple[str, int]:
        """The letter at a position (in a group, as a command such as \\i, or plain) with its accent."""
        begin, closing = self._source.argument(position)
        behind = closing + 1
        if begin == position:
            begin = self._source.behind_spaces(position)
            letter = _LETTER.match(self._source.text, begin)
            closing = behind = letter.end() if letter else begin
        text = self._range(begin, closing, depth + 1)
        return unicodedata.normalize("NFC", text[:1] + _ACCENTS[accent]) + text[1:], behind

    def _word(self, position: int, name: str, depth: int) -> tuple[str, int]:
        option, position = self._source.option(position)
        if name == "item":
            return "\n" + (f"{self._option_text(option, depth + 1)} " if option is not None else "- "), position
        is_reference = _REFERENCES.fullmatch(name) is not None
        if not (is_reference or any(name in known for known in (_LEFT_OUT, _LAST_OF, _PRINTED, _RAISED))):
            return "", position if option is not None else self._source.behind_spaces(position)
        begin = closing = position
        for _ in range(_LEFT_OUT.get(name, _LAST_OF.get(name, 1))):
            _, position = self._source.option(position)
            begin, closing = self._source.argument(position)
            if begin == position:
                break
            position = closing + 1
        if name in _LEFT_OUT or name == "nocite":
            return "", position
        last = self._source.text[begin:closing]
        if is_reference:
            return f"[{', '.join(key.strip() for key in last.split(','))}]", position
        if name == "url":
            return self._keep(last), position
        text = self._range(begin, closing, depth + 1)
        return raised(text, _RAISED[name]) if name in _RAISED else _PRINTED.get(name, "{}").format(text), position

    def _environment(self, position: int, end: int, depth: int) -> tuple[str, int]:
        source = self._source.text
        start = source.rfind("\\begin", 0, position)
        name_begin, name_end = self._source.argument(position)
        name = source[name_begin:name_end].rstrip("*")
        position = name_end + 1
        closing = min(end, self._source.ends.get(start, end))
        close_begin, close_end = self._source.argument(closing + len("\\end"))
        behind = min(end, close_end + 1) if close_begin < close_end else closing
        if name in _NO_TEXT:
            return "", behind
        if name in _FORMULAS:
            return f"\n\n{self._keep(re.sub(_LABEL, '', source[start:behind]))}\n\n", behind
        option, position = self._source.option(position)
        for _ in range(_SPEC.get(name, 0)):
            begin, group_end = self._source.argument(position)
            position = group_end + (begin < group_end)
        if name in _CODE:
            program = source[position:closing].strip("\n")
            return f"\n\n{self._keep(program)}\n\n", behind
        has_title = option is not None and name not in _FLOATS and name not in _TABLES
        title = f"({self._option_text(option or '', depth + 1)}) " if has_title else ""
        text = self._range(position, closing, depth + 1, is_table=name in _TABLES)
        return f"\n\n{title}{text.strip()}\n\n", behind
