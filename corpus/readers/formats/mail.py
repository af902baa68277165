"""The text of e-mails as they were sent (RFC 5322)."""

from __future__ import annotations

import email
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage, Message
from email.policy import default

from corpus.readers.encodings import decode, web_name
from corpus.readers.formats.web import main_text
from corpus.readers.record import Unreadable

MAX_HEADER_CHARACTERS = 20_000
_PARSED = {"subject", "content-type", "content-disposition", "content-transfer-encoding", "mime-version"}


def mail_text(message: str) -> str:
    """Subject and body of an e-mail. Of several forms of the body the plain one is taken, else the HTML one's text;
    attachments and all other headers are left out. A text without headers is returned unchanged.

    Raises Unreadable for a mail that the parser fails on, with headers longer than any mail program writes, or nested
    too deeply.
    """
    with parsed(message) as mail:
        if not mail.keys():
            return message
        subject = _header(mail, "subject")
        body = "\n\n".join(filter(None, (_part_text(part) for part in _bodies(mail))))
    return f"{subject}\n\n{body}".strip()


@contextmanager
def parsed(text: str, name: str = "mail") -> Iterator[EmailMessage]:
    """A message of RFC 5322. Raises Unreadable for what Python's parser fails on, also within the block, since it
    parses much of a message later.

    Args:
        name: what a message calls it.
    """
    try:
        # surrogateescape keeps bytes that the string could not say; the parser wants them so.
        mail = email.message_from_bytes(text.encode("utf-8", "surrogateescape"), policy=default)
        assert isinstance(mail, EmailMessage)
        for part in mail.walk():
            _check_headers(part)
        yield mail
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(f"not a readable {name}: its parts are nested too deeply") from None
    except Exception as error:  # the parser raises a different error for every kind of malformed input
        raise Unreadable(f"not a readable {name}: {type(error).__name__}: {error}") from None


def _check_headers(part: Message) -> None:
    """Raise Unreadable where one of the headers that are looked at is too long to parse: that takes the square of its
    length in time, and for 700 kB gigabytes of memory."""
    for name, value in part.raw_items():
        if name.lower() in _PARSED and len(value) > MAX_HEADER_CHARACTERS:
            raise Unreadable(f"not a readable mail: its header {name} is {len(value):,} characters long")


def _bodies(message: EmailMessage) -> list[EmailMessage]:
    """The parts that a mail program would show, one of each set of alternatives."""
    if message.get_content_type() == "multipart/alternative":
        parts = [part for part in message.iter_parts() if isinstance(part, EmailMessage)]
        plain = [part for part in parts if part.get_content_type() == "text/plain"]
        return _bodies(plain[0]) if plain else [body for part in parts[-1:] for body in _bodies(part)]
    if message.is_multipart():
        return [body for part in message.iter_parts() if isinstance(part, EmailMessage) for body in _bodies(part)]
    is_body = message.get_content_maintype() == "text" and message.get_content_disposition() != "attachment"
    return [message] if is_body else []


def _part_text(part: EmailMessage) -> str:
    content = part.get_payload(decode=True)
    if not isinstance(content, bytes):
        return ""
    text, _ = decode(content, "auto", web_name(part.get_content_charset() or ""))
    return main_text(text) if part.get_content_type() == "text/html" else text.strip()


def _header(message: EmailMessage, name: str) -> str:
    try:
        return str(message[name] or "").strip()
    except (ValueError, IndexError, AttributeError):
        # The parser stumbles over some headers of real spam.
        return ""
