"""PDF files are read with the extra `pdf`, refused by name without it, and never become prose from scans or glyphs."""

from __future__ import annotations

import codecs

import pytest

from corpus.documents.quarantine import Rejected
from corpus.readers import unread
from corpus.readers.config import FileDocuments
from corpus.readers.plan import FilePart
from corpus.readers.texts import read_texts
from infra.errors import StageError

needs_pdfium = pytest.mark.skipif(
    not unread.reads_pdf(), reason="the extra pdf is not installed: pip install pypdfium2"
)

PROSE = [
    "The harbour master measured the mill and wrote a short report about it for the",
    "museum, which had asked for one. A young geologist restored the letter, so that the",
    "children could see how it had worked.",
    "When the train from the coast arrived, nobody in the parish was there to meet it,",
    "because the road along the river had been closed since the storm of the winter.",
]


def make_pdf(pages: list[list[str]]) -> bytes:
    """Return a PDF file with lines of Helvetica on each page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        shown = b" T* ".join(b"(%s) Tj" % line.encode("cp1252").replace(b"(", rb"\(") for line in lines)
        content = b"BT /F1 11 Tf 14 TL 50 780 Td %s ET" % shown if lines else b"50 50 400 600 re f"
        kids.append(b"%d 0 R" % (len(objects) + 1))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >> "
            b"/Contents %d 0 R >>" % (len(objects) + 2)
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(pages))
    file = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(file))
    return file + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + trailer


def read(folder, content, **options):
    file = folder / "a.pdf"
    file.write_bytes(content)
    source = FileDocuments(paths=(str(file),), **options)
    return list(read_texts(source, FilePart(file, len(content)), "ingest.read.0"))


@needs_pdfium
def test_paragraphs_are_joined_and_margins_left_out(tmp_path):
    pages = [["Annals of the parish", *PROSE, f"{number}"] for number in range(1, 5)]
    (text,) = read(tmp_path, make_pdf(pages))
    first, second = " ".join(PROSE[:3]), " ".join(PROSE[3:])
    assert text.text == "\n\n".join([f"{first}\n\n{second}"] * 4)


@needs_pdfium
@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ([PROSE[:1], [], [], []], "1 of 4 pages of the PDF file contain text: a scan"),
        ([[codecs.encode(line, "rot13") for line in PROSE * 3]], "its fonts map to wrong letters"),
    ],
    ids=["scan", "glyphs"],
)
def test_scans_and_wrong_letters_are_put_aside(tmp_path, pages, reason):
    (rejected,) = read(tmp_path, make_pdf(pages))
    assert isinstance(rejected, Rejected)
    assert reason in rejected.reason


@needs_pdfium
def test_a_cut_file_is_put_aside(tmp_path):
    (rejected,) = read(tmp_path, b"%PDF-1.7 and no more")
    assert "not a complete PDF file" in rejected.reason


@pytest.mark.parametrize("options", [{}, {"format": "pdf"}])
def test_without_the_extra_it_is_named(tmp_path, monkeypatch, options):
    monkeypatch.setattr(unread, "find_spec", lambda name: None)
    unread.reads_pdf.cache_clear()
    try:
        with pytest.raises(StageError) as raised:
            read(tmp_path, make_pdf([PROSE]), **options)
    finally:
        monkeypatch.undo()
        unread.reads_pdf.cache_clear()
    [problem] = raised.value.problems
    assert problem.code == "unread_format"
    assert "pip install pypdfium2" in problem.fix
