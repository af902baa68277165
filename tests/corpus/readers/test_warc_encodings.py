"""Pages of WARC files in every coding that servers use; error pages and binary data are no documents."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib

import brotli
import pyarrow as pa
import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from corpus.readers.encodings import no_text

PAGE = (
    "<html><body><p>" + "The lamp went out, and the ferry waited for the tide. " * 8 + "</p></body></html>"
).encode()
SEEN = "The lamp went out"


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:  # of unknown length, as a server streams it
        stream.write(data)
    return out.getvalue().to_pybytes()


def chunked(data: bytes) -> bytes:
    pieces = [data[begin : begin + 100] for begin in range(0, len(data), 100)]
    return b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


def archive(*responses: tuple[str, list[tuple[str, str]], bytes]) -> bytes:
    """responses: (status line, headers, body)."""
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=False)
    for number, (status, headers, body) in enumerate(responses):
        http = StatusAndHeaders(status, [("Content-Type", "text/html"), *headers], protocol="HTTP/1.1")
        writer.write_record(
            writer.create_warc_record(f"http://a/{number}", "response", payload=io.BytesIO(body), http_headers=http)
        )
    return out.getvalue()


CODINGS = {
    "zstd": ([("Content-Encoding", "zstd")], zstd(PAGE)),
    "x-gzip": ([("Content-Encoding", "X-GZip")], gzip.compress(PAGE)),
    "stacked": ([("Content-Encoding", "gzip, br")], brotli.compress(gzip.compress(PAGE))),
    "stacked with zstd": ([("Content-Encoding", "deflate, identity, zstd")], zstd(zlib.compress(PAGE))),
    "in two lines": ([("Content-Encoding", "gzip"), ("content-encoding", "gzip")], gzip.compress(gzip.compress(PAGE))),
    "of the transfer": ([("Transfer-Encoding", "gzip, chunked")], chunked(gzip.compress(PAGE))),
    "chunked": ([("Transfer-Encoding", "Chunked")], chunked(PAGE)),
    "both": ([("Transfer-Encoding", "CHUNKED"), ("Content-Encoding", "zstd")], chunked(zstd(PAGE))),
    "a coding that is none": ([("Content-Encoding", "UTF-8")], PAGE),
    "zstd that is none": ([("Content-Encoding", "zstd")], PAGE),
}


@pytest.mark.parametrize(("headers", "body"), CODINGS.values(), ids=CODINGS)
def test_pages_in_every_coding_are_read(build, write, headers, body):
    path = write("a.warc", archive(("200 OK", headers, body)))
    out = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    [document] = read_documents(out)
    assert document.text.startswith(SEEN)
    assert document.text.count("ferry") == 8 and "\r\n" not in document.text


@pytest.mark.parametrize(
    ("declared", "actual", "word"),
    [
        ("ISO-8859-1", "utf-8", "río"),
        ("gb2312", "utf-8", "北方沼泽的地图和渡船"),
        ("ISO-8859-1", "cp1252", "río"),
        ("gb2312", "gb18030", "北方沼泽的地图和渡船"),
        ("iso-2022-jp", "iso-2022-jp", "北の地図"),
    ],
)
def test_a_page_of_utf8_is_read_as_such_whatever_it_declares(build, write, declared, actual, word):
    head = f'<html><meta charset="{declared}">'.encode()
    body = PAGE.replace(b"ferry", word.encode(actual), 1).replace(b"<html>", head)
    path = write("a.warc", archive(("200 OK", [], body)))
    [document] = read_documents(build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}])))
    assert word in document.text


@pytest.mark.parametrize("is_converted", [False, True], ids=["written so", "converted"])
def test_lines_that_end_with_lf_alone_lose_no_record(build, write, is_converted):
    """An archive that a program for text files converted has records shorter than their headers say."""
    body = PAGE.replace(b". ", b".\r\n").decode() if is_converted else PAGE.decode()
    line_end = "\r\n" if is_converted else "\n"

    def record(number):
        page = body.replace("lamp", f"lamp {number}")
        http = line_end.join(["HTTP/1.1 200 OK", "Content-Type: text/html", "", page])
        head = ["WARC/1.0", "WARC-Type: response", f"WARC-Target-URI: http://a/{number}"]
        return line_end.join([*head, f"Content-Length: {len(http)}", "", http, "", ""])

    content = "".join(map(record, range(3))).encode()
    path = write("a.warc", content.replace(b"\r\n", b"\n"))
    out = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    texts = [document.text for document in read_documents(out)]
    assert [text.split()[2] for text in texts] == ["0", "1", "2"]
    assert all(text.count("ferry") == 8 and "WARC" not in text for text in texts)


def test_error_pages_are_skipped_and_counted_unless_asked_for(build, write):
    gone = ("404 Not Found", [], PAGE.replace(b"lamp", b"page"))
    moved = ("301 Moved Permanently", [], PAGE.replace(b"lamp", b"link"))
    path = write("a.warc", archive(("200 OK", [], PAGE), gone, gone, moved))
    out = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    assert [document.text[:17] for document in read_documents(out)] == [SEEN]
    [row] = json.loads((out / "aux" / "sources.json").read_text())
    assert row["skipped_records"] == {"HTTP status 404": 2, "HTTP status 301": 1}
    assert row["quarantined"] == 0
    every = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path], "error_pages": "read"}]))
    assert len(list(read_documents(every))) == 4


@pytest.mark.parametrize("headers", [[("Content-Encoding", "compress")], []], ids=["unknown coding", "none"])
def test_bytes_that_are_no_text_are_put_aside(build, write, headers):
    noise = random.Random(3).randbytes(4_000).replace(b"\0", b"\1").replace(b"<", b"(")
    path = write("a.warc", archive(("200 OK", [], PAGE), ("200 OK", headers, noise)))
    config = IngestConfig(read=[{"kind": "files", "paths": [path]}], max_quarantine_share=0.5)
    out = build(ingest, config)
    assert [document.text[:17] for document in read_documents(out)] == [SEEN]
    [row] = (out / "aux" / "quarantine.jsonl").read_text().splitlines()
    assert "not text" in json.loads(row)["reason"] or "not HTML" in json.loads(row)["reason"]


def test_records_that_hold_binary_data_are_put_aside(build, write):
    noise = random.Random(4).randbytes(2_000).decode("latin-1").replace("\0", "\1")
    lines = [json.dumps({"text": text}) for text in ("A good text, and a long one.", noise, "Another good text.")]
    path = write("a.jsonl", "\n".join(lines))
    config = IngestConfig(read=[{"kind": "files", "paths": [path]}], max_quarantine_share=0.5)
    assert len(list(read_documents(build(ingest, config)))) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp437", "koi8-r", "utf-16-le", "gb18030"])
def test_random_bytes_are_no_text_in_any_encoding(encoding):
    noise = random.Random(5).randbytes(4_000)
    assert no_text(noise.decode(encoding, "replace"))


PROSE = "The ferry captain measured the wheel of the mill in the early morning.\n" * 90


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp1251"])
def test_bytes_without_control_characters_are_no_text_either(encoding):
    generator = random.Random(6)
    high = bytes(generator.randrange(0xA0, 0x100) for _ in range(2_000)).decode(encoding, "replace")
    letters = b" ".join(bytes(generator.choices(range(0xC0, 0x100), k=6)) for _ in range(300)).decode(encoding)
    assert no_text(letters) and (no_text(high) or encoding == "cp1251")
    signs = bytes(generator.choices(range(0xA1, 0xC0), k=500)).decode("latin-1").replace("\xad", "")
    assert "signs of Latin-1" in no_text(signs)


@pytest.mark.parametrize("script", ["block", "hangul", "gb2312", "big5", "euc_jp", "euc_kr"])
def test_random_chinese_and_korean_characters_are_no_text(script):
    """All of them are assigned, and what an encoding of several bytes makes of bytes from 0xA1 on."""
    generator = random.Random(8)
    for _ in range(50):
        if script in ("block", "hangul"):
            first, last = (0x4E00, 0x9FFF) if script == "block" else (0xAC00, 0xD7A3)
            noise = "".join(chr(generator.randint(first, last)) for _ in range(120))
        else:
            pairs = [bytes((generator.randint(0xA5, 0xF4), generator.randint(0xA1, 0xFE))) for _ in range(500)]
            noise = "".join(c for c in b"".join(pairs).decode(script, "ignore") if "\u4e00" <= c <= "\ud7a3")
        assert "frequent ones" in no_text(noise)


def test_a_few_binary_bytes_in_a_long_text_are_found():
    noise = random.Random(7).randbytes(400).decode("cp1252", "replace").replace("\0", "")
    assert "within 256 at character" in no_text(PROSE + noise)


@pytest.mark.parametrize(
    "text",
    [
        "Kapitel 1 ·········· 5\n" * 40,
        "¿Qué? «Sí», dijo él; ½ l a 5 °C, 3 × 4 ± 2 µm² — § 7, © 2024 ®, £5 ¥6, ¶ ¦ ª º ¹ ³. " + PROSE,
        "Он измерил глубину, и ОАО «Ромашка» (МГУ) записало её в журнал.\n" * 20,
        "Ο καπετάνιος μέτρησε το βάθος της ΔΕΗ και το έγραψε στο ημερολόγιο.\n" * 20,
        PROSE + "\x01",
        "",
        "One line.\n\tAnd another.\r\n\fA page.",
        "\x1b[31mred\x1b[0m " * 50,
        "N\bNA\bAM\bME\bE",
        "naïve café, ожидание, 尽管说明, 🎉👩‍👩‍👧, \u200e\u00adsoft",
        "A text with one bad \x01 character, as they are. " * 3,
        PROSE[:1000] + "".join(map(chr, range(0x4E00, 0x9FA0, 97))),
        # Family names, the Thousand Character Classic, the Analects, a rhapsody of rare fish and stones, a menu.
        "赵钱孙李周吴郑王冯陈褚卫蒋沈韩杨朱秦尤许何吕施张孔曹严华金魏陶姜戚谢邹喻柏水窦章云苏潘葛奚范彭郎鲁韦昌马苗凤花方俞任袁柳酆鲍史唐费廉岑薛雷贺倪汤滕殷罗"
        "毕郝邬安常乐于时傅皮卞齐康伍余元卜顾孟平黄和穆萧尹姚邵湛汪祁毛禹狄米贝明臧计伏成戴谈宋茅庞熊纪舒屈项祝董梁",
        "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈剑号巨阙珠称夜光果珍李柰菜重芥姜海咸河淡鳞潜羽翔龙师火帝"
        "鸟官人皇始制文字乃服衣裳推位让国有虞陶唐吊民伐罪周发殷汤坐朝问道垂拱平章爱育黎首臣伏戎羌遐迩一体率宾归王",
        "子曰學而時習之不亦說乎有朋自遠方來不亦樂乎人不知而不慍不亦君子乎有子曰其為人也孝弟而好犯上者鮮矣不好犯上而好作亂者未之有也君子務本本立而道生孝弟也者其為仁"
        "之本與子曰巧言令色鮮矣仁曾子曰吾日三省吾身為人謀而不忠乎",
        "於是乎蛟龍赤螭漸離掉尾振鱗奮翼潛處乎深巖魚鱉讙聲萬物眾夥明月珠子的皪江靡蜀石黃碝水玉磊砢磷磷爛爛采色澔汗叢積乎其中鴻鵠鷫鴇鴐鵝屬玉交精旋目煩鶩庸渠箴疵鵁盧"
        "群浮乎其上泛淫泛濫隨風澹淡與波搖蕩奄薄水渚唼喋菁藻咀嚼菱藕",
        "宫保鸡丁麻婆豆腐鱼香肉丝糖醋排骨红烧狮子头清蒸鲈鱼回锅肉水煮牛肉蒜蓉西兰花酸辣土豆丝干煸四季豆地三鲜木须肉葱爆羊肉蚂蚁上树东坡肉叫花鸡佛跳墙剁椒鱼头毛血旺口"
        "水鸡夫妻肺片担担面炸酱面扬州炒饭小笼包饺子馄饨烧卖春卷豆浆油条皮蛋瘦肉粥",
        # Chemical elements and Korean names.
        "氢氦锂铍硼碳氮氧氟氖钠镁铝硅磷硫氯氩钾钙钪钛钒铬锰铁钴镍铜锌镓锗砷硒溴氪铷锶钇锆铌钼锝钌铑钯银镉铟锡锑碲碘氙铯钡镧铈镨钕钷钐铕钆铽镝钬铒铥镱镥铪钽钨铼锇铱"
        "铂金汞铊铅铋钋砹氡钫镭锕钍镤铀镎钚镅锔锫锎锿镄钔锘铹",
        "김민준이서연박지훈최수빈정하은강도윤조예준윤서준장지우임하윤한지호오주원서시우신지아권유나황민서안건우송채원류현우전소율홍예은고은우문다은양준서손지안배시윤"
        "백하린허승현남유진심재윤노태민하윤아곽도현성민재차은서주하율우지원구본승민경훈유승호나은채진수아지현우",
    ],
)
def test_texts_with_odd_characters_are_text(text):
    assert no_text(text) == ""
