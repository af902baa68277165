"""Documents of other programs: read as their text, or refused by name; no markup and no bytes become prose."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest

from corpus.config import IngestConfig
from corpus.documents.quarantine import Rejected
from corpus.readers.config import FileDocuments
from corpus.readers.plan import FilePart
from corpus.readers.texts import read_texts
from corpus.readers.unread import UNREAD
from corpus.recognition.first_records import first_record_problems
from flows.planning.first_config import look
from infra.errors import StageError

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def texts(path: Path, **options: object) -> list[str]:
    source = FileDocuments.model_validate({"paths": [str(path)], **options})
    found = list(read_texts(source, FilePart(path, path.stat().st_size), "ingest.read.0"))
    assert not any(isinstance(one, Rejected) for one in found), found
    return [one.text for one in found if not isinstance(one, Rejected)]


def rejected(path: Path, **options: object) -> str:
    source = FileDocuments.model_validate({"paths": [str(path)], **options})
    [found] = read_texts(source, FilePart(path, path.stat().st_size), "ingest.read.0")
    assert isinstance(found, Rejected)
    return found.reason


def packed(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_cells_of_a_notebook_without_their_outputs(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A pump\n", "It has two valves."]},
        {"cell_type": "code", "source": "print(1)", "outputs": [{"data": {"image/png": "iVBORw0KGgo"}}]},
        {"cell_type": "code", "source": []},
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4}
    (tmp_path / "a.ipynb.gz").write_bytes(gzip.compress(json.dumps(notebook).encode()))
    assert texts(tmp_path / "a.ipynb.gz") == ["# A pump\nIt has two valves.\n\n```python\nprint(1)\n```"]
    (tmp_path / "b.ipynb").write_text("{'cells': []}")
    assert "not a readable notebook" in rejected(tmp_path / "b.ipynb")


def test_chapters_of_a_book_in_reading_order(tmp_path: Path) -> None:
    page = (
        "<?xml version='1.0'?><html><head><title>T</title></head><body><h1>{}</h1><p>Two\n words, 10<sup>2</sup>.</p>{}"
    )
    spine = "<itemref idref='b'/><itemref idref='a'/>"
    items = "<item id='a' href='a%20one.xhtml'/><item id='b' href='text/b.xhtml'/><item id='c' href='c.css'/>"
    book = packed(
        tmp_path / "a.epub",
        {
            "mimetype": "application/epub+zip",
            "OEBPS/content.opf": f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>",
            "OEBPS/a one.xhtml": page.format("Second", "<script>x()</script></body></html>"),
            "OEBPS/text/b.xhtml": page.format("First", "<p>Café</p></body></html>"),
            "OEBPS/c.css": "p {color: red}",
        },
    )
    assert texts(book) == ["First\n\nTwo words, 10².\n\nCafé\n\nSecond\n\nTwo words, 10²."]


def test_paragraphs_and_tables_of_a_word_document(tmp_path: Path) -> None:
    def paragraph(*runs: str) -> str:
        return "<w:p>" + "".join(f"<w:r>{run}</w:r>" for run in runs) + "</w:p>"

    raised = '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>2</w:t>'
    body = (
        paragraph("<w:t>Ten is 10</w:t>", raised, "<w:instrText>PAGE</w:instrText>")
        + "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>kept</w:t></w:r></w:ins></w:p>"
        + f"<w:tbl><w:tr><w:tc>{paragraph('<w:t>a</w:t>')}</w:tc>"
        + f"<w:tc>{paragraph('<w:t>b</w:t>')}</w:tc></w:tr></w:tbl>"
    )
    document = f'<?xml version="1.0"?><w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    letter = packed(tmp_path / "a.docx", {"word/document.xml": document})
    assert texts(letter) == ["Ten is 10²\n\nkept\n\na\tb"]
    # As Word writes it: a prefix that every XML has, and text with colons.
    words = '<w:t xml:space="preserve">The ferry leaves at 10:30, see urn:isbn</w:t>'
    moved = f"<w:p><w:moveFrom><w:r><w:t>gone</w:t></w:r></w:moveFrom></w:p>{paragraph(words)}"
    written = packed(tmp_path / "c.docx", {"word/document.xml": document.replace("</w:tbl>", f"</w:tbl>{moved}")})
    assert texts(written) == ["Ten is 10²\n\nkept\n\na\tb\n\nThe ferry leaves at 10:30, see urn:isbn"]
    # As some programs write it.
    bare = packed(tmp_path / "b.docx", {"word/document.xml": document.replace(f' xmlns:w="{WORD}"', "")})
    assert texts(bare) == texts(letter)
    times = document.replace("<w:t>a</w:t>", '<w:t xml:space="preserve">at 10:30</w:t>')
    bare = packed(tmp_path / "d.docx", {"word/document.xml": times.replace(f' xmlns:w="{WORD}"', "")})
    assert texts(bare) == ["Ten is 10²\n\nkept\n\nat 10:30\tb"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.srt",
            "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>Who is\r\nthere?</i>\r\n\r\n"
            "2\r\n00:00:03,000 --> 00:00:04,000\r\n{\\an8}Me.\r\n",
            "Who is there?\nMe.",
        ),
        (
            "a.vtt",
            "WEBVTT\n\nNOTE made by hand\n\nSTYLE\n::cue {color: red}\n\nintro\n00:01.000 --> 00:02.000 align:start\n"
            "<v Ann>Tom &amp; I</v>\n",
            "Tom & I",
        ),
        (
            "a.tex",
            "\\documentclass{article}\n% note to self\n\\begin{document}\nIt is 5\\% of $x^2$. % really?\n% no\nEnd.\n"
            "\\begin{thebibliography}{9}\\bibitem{a} A.\\end{thebibliography}\n\\end{document}\n",
            "It is 5% of $x^2$. End.",
        ),
        ("a.md", "---\ntitle: One\n---\n# One\n\n- a *b*\n", "# One\n\n- a *b*"),
        ("a.eml", "From: a@b.example\nReceived: by x\nSubject: Pears\n\nThey are ripe.\n", "Pears\n\nThey are ripe."),
        (
            "a.mhtml",
            'MIME-Version: 1.0\nContent-Type: multipart/related; boundary="b"\n\n--b\n'
            "Content-Type: text/html; charset=utf-8\n"
            "Content-Transfer-Encoding: quoted-printable\n\n<html><body><p>The pump has two valves, and "
            "=E2=80=9Cboth=E2=80=9D of them leak.</p></body></html>\n--b\n"
            "Content-Type: text/css\n\np {color: red}\n--b--\n",
            "The pump has two valves, and “both” of them leak.",
        ),
    ],
)
def test_text_without_what_stands_around_it(name: str, content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert texts(tmp_path / name) == [text]


PAPER = r"""\documentclass{article}
\newcommand{\ie}{\emph{i.e.}}
\def\R{\mathbb{R}}
\title{On \textbf{pumps}}
\begin{document}
\maketitle
\section*{Introduction}\label{sec:intro}
Caf\'e, na\"{\i}ve, Stra\ss e: ``both'' valves leak---see \cite{ann,bob} and
Figure~\ref{fig:pump}\footnote{Or \emph{not}.}, \ie{} a {\bf bold} claim about H\textsubscript{2}O.

\begin{itemize}
\item first
\item[b)] second
\end{itemize}
\begin{equation}\label{eq:a}
a = b \in \R
\end{equation}
\begin{figure}[ht]\includegraphics[width=2cm]{a.pdf}\caption{The pump.}\label{fig:pump}\end{figure}
\begin{tabular}{l|r}\hline Name & kg \\ Ann & 5 \\[2pt] \end{tabular}
\begin{lstlisting}[language=Python]
return {x} #  5
\end{lstlisting}
\href{http://a.example/~c}{This page} has \verb|a_b{| and \unknown[option]{what} $5 < \vec x$ is.
\end{document}
"""
PAPER_TEXT = r"""On pumps

Introduction

Café, naïve, Straße: “both” valves leak—see [ann, bob] and Figure [fig:pump] (Or not.), i.e. a bold claim about H₂O.

- first
b) second

\begin{equation}
a = b \in \mathbb{R}
\end{equation}

The pump.

Name	kg
Ann	5

return {x} #  5

This page has a_b{ and what $5 < \vec x$ is.""".replace("\\t", "\t")


def test_commands_of_latex_give_way_to_what_they_print(tmp_path: Path) -> None:
    (tmp_path / "a.tex").write_text(PAPER)
    assert texts(tmp_path / "a.tex") == [PAPER_TEXT]
    assert texts(tmp_path / "a.tex", format="text") == [PAPER]


@pytest.mark.parametrize("piece", ["{", "\\emph{", "\\section{", "\\begin{b}", "\\item[", "$", "\\", "\\begin{"])
def test_latex_that_is_never_closed_loses_no_words(piece: str, tmp_path: Path) -> None:
    (tmp_path / "a.tex").write_text("A pump. " + piece * 500 + " Two valves.")
    [text] = texts(tmp_path / "a.tex")
    assert text.startswith("A pump.") and text.endswith("Two valves.")


def test_lines_and_fields_that_a_source_asks_for_are_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\nTwo\n")
    assert texts(tmp_path / "a.md", text_unit="line") == ["# One", "Two"]
    (tmp_path / "a.eml").write_text("Subject: Pears\n\nThey are ripe: all.\n")
    assert texts(tmp_path / "a.eml", content="email") == ["Pears\n\nThey are ripe: all."]


@pytest.mark.parametrize("suffix", sorted(UNREAD))
def test_other_formats_are_refused_by_name(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_text("plain words only")
    with pytest.raises(StageError) as refused:
        texts(tmp_path / f"a{suffix}")
    [problem] = refused.value.problems
    assert problem.code == "unread_format" and UNREAD[suffix][0] in problem.message and problem.fix
    assert "broken file" in rejected(tmp_path / f"a{suffix}", broken_files="quarantine")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>", "PDF"),
        (b"{\\rtf1\\ansi Hello\\par}", "RTF"),
        (b"PK\x03\x04", "ZIP"),
    ],
)
@pytest.mark.parametrize("file", ["a.txt", "a", "a.jsonl", "a.csv", "a.md", "a.html"])
def test_their_bytes_are_no_text_under_any_name(content: bytes, name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content + b" words of a document" * 20)
    with pytest.raises(StageError, match=f"found an? {name}"):
        texts(tmp_path / file)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.txt", "a.csv", "a"])
def test_a_pointer_of_git_lfs_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123\n")
    with pytest.raises(StageError, match=r"Git LFS pointer.*git lfs pull"):
        texts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.txt", '<?xml version="1.0"?><doc><p>Plain words of prose.</p></doc>', "unread_format"),
        ("a", '<?xml version="1.0"?>\n<html><body><p>Plain words.</p></body></html>', "misnamed_file"),
        ("a.parquet", "Plain words of prose are no table.", "misnamed_file"),
        ("a.json", "Plain words of prose are no table.", "misnamed_file"),
    ],
)
def test_other_contents_are_named(name: str, content: str, code: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(StageError) as refused:
        texts(tmp_path / name)
    [problem] = refused.value.problems
    assert problem.code == code and problem.fix
    if code == "misnamed_file":
        [inspected], _ = look(str(tmp_path / name))
        source = FileDocuments(**{**inspected.source, **inspected.keys})
        assert first_record_problems(IngestConfig(read=[source])) == []


def test_their_bytes_are_no_text_in_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "%PDF-1.4\n1 0 obj << /Type /Catalog >>"}))
    assert "holds PDF" in rejected(tmp_path / "a.jsonl")


def test_a_small_archive_cannot_fill_the_memory(tmp_path: Path) -> None:
    bomb = packed(tmp_path / "a.docx", {"word/document.xml": " " * 9_000_000})
    assert bomb.stat().st_size < 20_000
    assert "max_document_mb" in rejected(bomb, max_document_mb=1)
    entities = '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><w:document>&c;</w:document>'
    assert "document type" in rejected(packed(tmp_path / "b.docx", {"word/document.xml": entities}))
    (tmp_path / "c.epub").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(StageError, match="not a complete EPUB"):
        texts(tmp_path / "c.epub")


CELL = {"cell_type": "code", "source": "print(1)"}


def items(path: Path) -> list[object]:
    source = FileDocuments.model_validate({"paths": [str(path)]})
    return list(read_texts(source, FilePart(path, path.stat().st_size), "ingest.read.0"))


@pytest.mark.parametrize(
    "notebook",
    [
        {"cells": [None, CELL]},
        {"cells": [{"source": ["a", None]}]},
        {"cells": [{"source": None}]},
        {"worksheets": [3]},
        {"worksheets": 3},
        {"cells": 3},
        [],
    ],
    ids=str,
)
def test_a_notebook_of_another_form_is_put_aside(notebook: object, tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook))
    [item] = items(path)
    assert isinstance(item, Rejected) and "not a notebook" in item.reason


@pytest.mark.parametrize("metadata", [[], {"kernelspec": []}, {"kernelspec": None, "language_info": 3}], ids=str)
def test_the_language_of_a_notebook_may_be_anything(metadata: object, tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [CELL], "metadata": metadata}))
    [item] = items(path)
    assert not isinstance(item, Rejected)


@pytest.mark.parametrize(("name", "member"), [("a.docx", "word/document.xml"), ("a.epub", "a.xhtml")])
def test_an_archive_that_lacks_its_beginning_is_refused_by_name(name: str, member: str, tmp_path: Path) -> None:
    """zipfile raises ValueError for it: "negative seek value"."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, "<p>a</p>")
    path = tmp_path / name
    for cut in (1, 20):
        path.write_bytes(file.getvalue()[cut:])
        with pytest.raises(StageError, match=name):
            items(path)


def test_a_word_document_that_is_nested_too_deep_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "<w:a>" * 5_000 + "</w:a>" * 5_000)
    [item] = items(path)
    assert isinstance(item, Rejected) and "nested" in item.reason
