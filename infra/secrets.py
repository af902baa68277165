"""Secrets: they come from the environment, are refused in configs, and are removed from all output and files.

A secret is recognised by the name of its variable, word by word (`DB_PASS`, `GIT_PAT`, not `KEYBOARD`), or by its form
(`sk-…`, a signed URL).
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote, unquote

HIDDEN = "•••"
SHORTEST = 6
"""Shortest value that is hidden: `true` or `8080` are no secrets, and hiding them would garble every line."""

_SHORTEST_ENCODED = 8
_LONGEST_BEGUN = 1 << 16
"""Maximum characters of an unfinished line that a stream keeps."""

_SECRET_WORD = re.compile(
    "PASS|PASSWD|PASSWORDS?|PASSPHRASE|PW|PWD|SECRETS?|TOKEN|KEYS?|APIKEY|PAT|CREDENTIALS?|CREDS|AUTH|OAUTH"
    "|AUTHORIZATION|BEARER|JWT|COOKIES?|WEBHOOKS?|PASSCODES?|LOGIN|CONNSTR|DSN"
)
_SECRET_PARTS = re.compile(
    "PASSW(?:OR)?D|PASSPHRASE|SECRET(?!AR)|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|WEBHOOK|^STEMMA_NOTICE_"
    "|(?:AUTH|ACCESS|API|BOT|HF|GH)TOKEN|^(?:PG|SSH|MYSQL|DB)PASS(?![A-Z])|PASSCODE|CONN(?:ECTION)?_?STR(?:ING)?(?![A-Z])"
    "|(?:^|_)(?:MY|OUR|APP|ACCOUNT|AES|AUTH|CLIENT|ENC|ENCRYPTION|HMAC|LICEN[CS]E|MASTER|SERVICE|SIGNING|SSH|USER)KEYS?(?![A-Z])"
)
"""Parts that mark a name as a secret's also within a word: `PGPASSWORD`, `MYAPIKEY`."""
_HARMLESS = re.compile(
    # The shell's folders; keys that open nothing; the tokens of models; settings of an authentication, not its secret.
    r"^(?:OLD)?PWD$|(?:^|_)(?:PUBLIC|PRIMARY|FOREIGN|SORT|PARTITION|CACHE|HOT)_KEYS?$"
    r"|(?:^|_)(?:BOS|EOS|PAD|UNK|MASK|SEP|CLS|BEGIN|START|END|STOP|SPECIAL|ADDED)_TOKENS?$|(?:^|_)PASS_(?:THROUGH|RATE)"
    r"|_(?:FILE|PATH|DIR|HOME|SOCK|URI|ENDPOINT|HOST|PORT|TYPE|MODE|METHOD|ENABLED|TIMEOUT|TTL|LENGTH|LIMIT|COUNT|SIZE"
    r"|NAME|USER|USERNAME|ALGORITHM|FORMAT|VERSION|PARALLELISM)$"
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(r"[0-9][0-9_,.eE+]*")

_PLACEHOLDER = r"(?!PASSWORD\b|\$\{|\$[A-Z]|<\w|\{|•|…|\*\*\*)"
"""Placeholders for a secret in a hint, which do not match."""
_URL_PASSWORD = re.compile(rf"\w://[^/\s:@\"'\\]*:{_PLACEHOLDER}([^/\s@\"'\\]+)@")


class _SecretForm(NamedTuple):
    """Form of a secret. Every match contains one of the hints, which are in lower case and much faster to search for.

    kind: its description; "" for a form that is allowed in a config's text but not in a log.
    """

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    kind: str = ""


def _form(hints: str, pattern: str, kind: str = "") -> _SecretForm:
    return _SecretForm(tuple(hints.split()), re.compile(pattern), kind)


_KEY = (
    r"password|passwd|passphrase|passcode|_pwd|secret|api[_-]?key|secret[_-]?key|access[_-]?key|account[_-]?key"
    r"|private[_-]?key|(?:access|auth|refresh|session)[_-]?token"
)
_KEY_HINTS = (
    "password passwd passphrase passcode pwd secret apikey api_key api-key accesskey access_key access-key accountkey"
    " account_key account-key privatekey private_key private-key accesstoken access_token access-token authtoken"
    " auth_token auth-token refreshtoken refresh_token refresh-token sessiontoken session_token session-token"
)
_PWD = r"pwd(?![\"']?:\s*[\"']?/)"
"""`pwd`, except the shell's folder in a dump of variables."""
_NO_VALUE = r"(?!(?i:none|null|true|false|str|string|bytes|required|optional|secret|password)\b)"
_FORMS_OF_LINES = (
    # Includes the body, up to its end or as far as the text looks like one; line breaks may be escaped, as in JSON.
    _form(
        "begin",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:\\+[nr]|[\sA-Za-z0-9+/=:,]|-(?!----))*(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)?)",
        "a private key",
    ),
    _form("putty-user-key-file", r"(?s)PuTTY-User-Key-File-\d+:.*?(?:Private-MAC: \w+|$)", "a private key"),
)
"""Forms that span several lines."""
_FORMS = (
    _SecretForm(("://",), _URL_PASSWORD, "a URL with a password"),
    _form(
        "signature= credential= security-token= accesskeyid= sig= token= apikey= api_key= secret= password=",
        r"(?:[?&;]|\\u0026)(?i:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|token"
        rf"|access_token|auth_token|api_?key|secret|password)={_PLACEHOLDER}([^\s&;,#\"'<>\\]{{{SHORTEST},}})",
        "a signed URL",
    ),
    _form("akia asia abia acca a3t", r"\b(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[0-9A-Z]{16}\b", "an AWS access key"),
    _form("hf_", r"\bhf_[A-Za-z0-9]{30,}", "a Hugging Face token"),
    _form(
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"\b(?:gh[pousr]_[A-Za-z0-9_]{30,}|github_pat_\w{22,})",
        "a GitHub token",
    ),
    _form(
        "glpat- gldt- glft- glimt- glrt- glptt- glcbt- gloas- glsoat- glagent- gr1348941",
        r"\b(?:gl(?:pat|dt|ft|imt|rt|ptt|cbt|oas|soat|agent)-|GR1348941)[A-Za-z0-9_.-]{16,}",
        "a GitLab token",
    ),
    _form(
        "sk-",
        r"\bsk-(?:(?:ant|proj|svcacct|admin|or|live|test)[A-Za-z0-9]*-[\w-]{16,}|[\w-]*T3BlbkFJ[\w-]*|[A-Za-z0-9]{16,})",
        "an API key",
    ),
    _form(
        "k_live_ k_test_ aiza npm_ pypi-",
        r"\b[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}|\bAIza[\w-]{35}|\b(?:npm_|pypi-)[\w-]{32,}",
        "an API key",
    ),
    _form(
        "gsk_ nvapi- hvs. hvb. hvr. ya29. gocspx- dapi sg. dop_v1_ dor_v1_ shpat_ shpca_ shppa_ shpss_ glsa_ whsec_ r8_"
        " xai- pplx- sq0csp- sq0atp-",
        r"\b(?:gsk_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|hv[sbr]\.[\w-]{20,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
        r"|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}|do[pr]_v1_[0-9a-f]{64}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"
        r"|glsa_\w{32,}|whsec_[A-Za-z0-9+/=]{24,}|r8_[A-Za-z0-9]{37}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{40,}"
        r"|sq0(?:csp|atp)-[\w\\-]{22,})",
        "an API key",
    ),
    # Of Twilio, Mailchimp and Artifactory.
    _form("ac sk", r"\b(?:AC|SK)[a-z0-9]{32}\b", "an API key"),
    _form("-us", r"\b[0-9a-z]{32}-us[0-9]{1,2}\b", "an API key"),
    _form(
        "akc ap",
        r"(?<![^\s=:\"'])(?:AKC[a-zA-Z0-9]{10,}|AP[0-9A-F](?=\w*[0-9])[a-zA-Z0-9]{32,})(?![^\s\"',])",
        "an API key",
    ),
    _form(
        "discord.com/api/ discordapp.com/api/",
        r"\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/([\w-]{20,})",
        "a Discord webhook",
    ),
    _form(".", r"\b[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}(?![\w-])", "a Discord token"),
    _form(":", r"\b\d{8,10}:[\w-]{35}(?![\w-])", "a Telegram token"),
    _form(
        "accountkey= sharedaccesskey=",
        r"(?i:\b(?:account|sharedaccess)key)=([A-Za-z0-9+/=]{20,})",
        "a key of Azure",
    ),
    _form(
        "xox hooks.slack.com",
        r"\b(?i:xox[abeoprs]-(?:\d+-)+[a-z0-9]+)|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|(?i:hooks\.slack\.com/services/\w+/\w+/\w+)",
        "a Slack token",
    ),
    _form("eyj", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*", "a JSON web token"),
    # The forms from here on are allowed in a config's text.
    _form(
        "authorization",
        r"(?i:authorization)[\"']?\s?[:=]\s?[\"']?(?:Basic|Bearer|Token)\s([\w.~+/=-]{8,})",
    ),
    _form("bearer", r"\bBearer ([\w.~+/-]{20,}=*)"),
    # password=… as in a DSN, "api_key": "…" as in JSON.
    _form(
        _KEY_HINTS,
        rf"(?i:{_KEY}|pwd)(?:=[\"']?|[\"']\s?:\s?[\"'])(?!/){_PLACEHOLDER}([^\s\"'&;,<>\\(){{}}\[\]]{{{SHORTEST},}})",
    ),
    # password: … as in YAML, alone on its line, or with a value that is not a word of a sentence.
    _form(
        _KEY_HINTS,
        rf"(?m)^[ \t-]*[\"']?[\w.-]*(?i:{_KEY}|{_PWD})[\"']?:[ \t]+[\"']?{_NO_VALUE}{_PLACEHOLDER}"
        rf"([^\s\"'{{\[|>&*]{{{SHORTEST},}})[\"']?[ \t]*(?:#.*)?$",
    ),
    _form(
        _KEY_HINTS,
        rf"(?i:{_KEY}|\b{_PWD})[\"']?: {_PLACEHOLDER}[\"']?(?=[^\s\"',]*[0-9!@#$%^&*])"
        rf"([^\s\"',;<>(){{}}\[\]]{{{SHORTEST},}})",
    ),
    # Keys of fixed lengths after a word that is too common for the other forms.
    _form(
        "key pwd pw pass token",
        r"(?i:(?:key|pwd|pw|password|pass|token)[\"']?\]?\s*(?:=>|::|:=|=|:|\s)\s*[\"']?)"
        r"((?=[\w-]*[0-9])[\w-]{44}|[0-9a-fA-F]{48})(?![\w-])",
    ),
    _form(
        "aws",
        r"(?i:aws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?[\"']([0-9a-z/+]{40})[\"'])",
    ),
    _form(
        "cloudant clou cl_ cl- clkey clp clt clapi softlayer sl_ sl- slkey slp slt slapi",
        r"(?i:\b(?:cloudant|clou|cl|softlayer|sl)[_-]?(?:api)?[_-]?(?:key|pwd|pw|password|pass|token)"
        r"[\"']?\]?\s*(?:=>|::|:=|=|:|\s)\s*[\"']?([0-9a-z]{64}|[a-z]{24}))(?![\w-])",
    ),
    _form("softlayer", r"(?i:api.softlayer.com/soap/v3(?:.1)?/([a-z0-9]{64}))"),
    # --password … of a command line, or of its list of arguments.
    _form(
        "--",
        r"--(?:[\w-]+-)?(?:pass(?:word|wd|phrase|code)?|pwd|secret|token|(?:api|access|secret|private)[-_]?key)"
        rf"(?:[ =]|[\"'],\s?[\"'])[\"']?(?!-){_NO_VALUE}{_PLACEHOLDER}([^\s\"'<>(){{}}\[\],;`]{{{SHORTEST},}})",
    ),
    # curl -u user:…
    _form(
        "curl wget",
        r"\b(?:curl|wget)\b[^\n]*?[\s\"'](?:-u|-U|--user|--proxy-user)[\"',\s=]*[^\s:\"',]+:"
        rf"{_PLACEHOLDER}([^\s\"']{{{SHORTEST - 2},}})",
    ),
    _form("_authtoken", r":_authToken\s*=\s*([^\s\"']{6,})"),
    # X-Api-Key: … and other headers.
    _form(
        "x- api-key -token -subscription-key",
        r"(?i:\b(?:x-[\w-]*(?:key|token|secret|password)|api-key|private-token|job-token|[\w-]+-subscription-key))"
        rf"[\"']?\s?[:=]\s?[\"']?{_PLACEHOLDER}([\w.~+/=-]{{{SHORTEST},}})",
    ),
    _form("cookie", r"(?i:\b(?:set-)?cookie)[\"']?:\s?[\"']?(?=[\w.-]+=)([^\"'\n\\]{6,})"),
    # One line of a private key, since a stream handles lines one by one; not the 64 digits of a hash.
    _SecretForm(("",), re.compile(r"(?m)^((?=[0-9a-f]*[G-Zg-z+/])[A-Za-z0-9+/]{64})$")),
)


def hide(text: str) -> str:
    """Return a text without the secrets of this process's environment, and without anything that looks like one."""
    return _hider(tuple(os.environ.items())).hide(text)


@lru_cache(maxsize=1)
def _hider(environ: tuple[tuple[str, str], ...]) -> Hider:
    return Hider(dict(environ))


class Hider:
    """Removes from texts the secrets of the environment at its creation, and anything that looks like one."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        secrets = set(_secrets(os.environ if environ is None else environ))
        forms = {form for secret in secrets for form in _forms(secret)}
        longest_first = sorted((form for form in forms if len(form) >= SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def hide(self, text: str) -> str:
        text = self._pattern.sub(HIDDEN, text) if self._pattern else text
        text = _without(text, _FORMS_OF_LINES)
        return "".join(_without(line, _FORMS) for line in text.splitlines(keepends=True))

    def hide_in(self, value: Any) -> Any:
        """Return plain data with the secrets in all its texts hidden; keys stay."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {key: self.hide_in(item) for key, item in value.items()}
        return [self.hide_in(item) for item in value] if isinstance(value, list | tuple) else value


class HidingStream:
    """A text stream that hides secrets; the wrapped stream handles everything else.

    A line is written once it is complete or flushed, since a secret may arrive in several pieces.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._hider = Hider()
        self._lock = threading.RLock()
        self._begun = ""

    def write(self, text: str) -> int:
        with self._lock:
            pending = self._begun + text
            end = len(pending) if len(pending) > _LONGEST_BEGUN else 1 + max(pending.rfind("\n"), pending.rfind("\r"))
            self._begun = pending[end:]
            if end:
                self._stream.write(self._hider.hide(pending[:end]))
        return len(text)

    def flush(self) -> None:
        with self._lock:
            pending, self._begun = self._begun, ""
            if pending:
                self._stream.write(self._hider.hide(pending))
            self._stream.flush()

    def close(self) -> None:
        self.flush()
        self._stream.close()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def recognised(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, kind of secret) for each text in plain data that does not belong in a config file."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from recognised(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from recognised(item, f"{path}.{number}")
    elif isinstance(value, str):
        forms = (form for form in (*_FORMS_OF_LINES, *_FORMS) if form.kind)
        yield from ((path, form.kind) for form in forms if form.pattern.search(value))


def names_secret(name: str, value: str = "") -> bool:
    """Return True if a variable of this name holds a secret.

    Args:
        value: numbers of tokens are none (`MAX_TOKENS=4096`).
    """
    words = [word.upper() for word in _WORDS.findall(name)]
    joined = "_".join(words)
    if _HARMLESS.search(joined):
        return False
    if any(map(_SECRET_WORD.fullmatch, words)) or _SECRET_PARTS.search(joined):
        return True
    return "TOKENS" in words and not _NUMBER.fullmatch(value)


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        yield from _URL_PASSWORD.findall(value)
        if names_secret(name, value) and not _is_place(value):
            yield value
            user, colon, password = value.partition(":")
            if colon and user.isidentifier():
                yield password
                yield base64.b64encode(value.encode()).decode()  # as in an Authorization header


def _is_place(value: str) -> bool:
    """Return True for the path of a key, which occurs in many messages and does not reveal the key."""
    return value.startswith("/") and os.path.exists(value)


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms of a secret: unchanged, in a URL, in JSON, and in base64 at any offset in the encoded data."""
    yield from (secret, quote(secret, safe=""), unquote(secret), json.dumps(secret)[1:-1])
    data = secret.encode(errors="surrogatepass")
    yield base64.b64encode(data).decode().rstrip("=")
    for before in range(3):
        # The characters that depend only on this secret.
        first, bits = -(-8 * before // 6), 8 * (before + len(data))
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(bytes(before) + data).decode()[first : bits // 6]
            if len(encoded) >= _SHORTEST_ENCODED:
                yield encoded


def _without(text: str, forms: Sequence[_SecretForm]) -> str:
    lower = text.lower()
    for form in forms:
        for hint in form.hints:
            if hint in lower:
                text = form.pattern.sub(_hidden, text)
                break
    return text


def _hidden(match: re.Match[str]) -> str:
    """Replace the secret part of a match, which is the pattern's group, or all of it without a group."""
    if not match.re.groups:
        return HIDDEN
    start, end = (position - match.start() for position in match.span(1))
    return match[0][:start] + HIDDEN + match[0][end:]
