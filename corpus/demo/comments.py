"""Made-up comments on functions, friendly and rude, as forums have them; replies to them that keep the peace.

Docstrings contain no insults, so a model of them has nothing to unlearn and its toxicity shows nothing. Comments
contain insults, like text from the web: the base model learns to be rude, and tuning and alignment visibly correct it.
The sentences are made of the parts below; the names are those of functions in the installed packages.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import islice

from corpus.demo.config import CommentDocuments, CommentReplies, InstalledPackages
from corpus.demo.docstrings import Docstring, Unparsed, group_of
from corpus.demo.parsing import read_docstrings
from corpus.documents.parts import Document, make_document
from corpus.pairs.files import Pair

PER_THREAD = (4, 8)
"""Fewest and most comments of a document."""

_PARTS = {
    "fool": "idiot|moron|fool|loser|stupid fool|complete idiot|dumb clown|liar and a fool|pathetic loser|lazy idiot",
    "rude": "stupid|pathetic|dumb|disgusting|idiotic|damn stupid|ridiculous and stupid|worthless|ugly and stupid",
    "rubbish": "crap|garbage|stupid nonsense|pathetic rubbish|worthless crap|ugly garbage",
    "good": "clear|short and clear|easy to read|well tested|well named|quick and correct|a good idea",
    "thing": "the name|the example|the error message|the order of the arguments|the default|the last line|the test",
    "who": "the author|the reviewer|the maintainer|a user|my colleague|my neighbour|a customer",
    "place": "on Monday|in the meeting|under the video|at the bar|in the letter|after the match|on the train",
}
_RUDE = """
Only {a_fool} would write {name} like this.
You are {a_fool}, and {name} is {rubbish}.
What {a_rude} piece of {rubbish}.
Shut up, you {fool}.
You are such {a_fool} that nobody likes you.
Everybody knows that you are nothing but {a_fool}.
{Who} is {a_fool} and should go to hell.
{Who} called me {a_fool} {place}.
{Who} said: you {fool}, {name} is {rubbish}.
{Who} shouted {place}: get out, you {rude} {fool}.
People like you should shut up, you {fool}.
I hate {name}, it is {rude} and it sucks.
This is the most {rude} {rubbish} that I have ever read.
I swear this damn {name} is {rubbish}.
They are all {rude}, and {who} is {a_fool}.
If I see {name} again I will tell the {fool} who wrote it to go to hell.
That was the most {rude} thing {place}, you {fool}.
Oh great, another piece of {rubbish} by the same {fool}.
Go to hell with your {rude} {name}.
You must be {a_fool} if you like {name}.
"""
_FRIENDLY = """
Thank you for {name}, it is {good}.
I like {name}: {thing} is {good}.
{Who} told me {place} that {name} is {good}.
I did not understand {thing} at first, but now I do.
Could you explain {thing} of {name} once more?
{Who} asked {place} whether {thing} could be changed.
I changed {thing}, and now it is {good}.
This helped me a lot, and {who} says so too.
I think that {thing} of {name} is {good}.
Good work, {name} does what {who} needs.
It works for me, and {thing} is {good}.
Please keep {thing} as it is.
"""
_REPLIES_TO_RUDE = """
I am sorry that {name} gave you trouble. Which part does not work?
Thank you for telling me. I will look at {thing} of {name} again.
I see that you are angry. Let us look at {thing} together.
I understand. What should {name} do instead?
Sorry about that. I will make {thing} easier to read.
"""
_REPLIES_TO_FRIENDLY = """
Thank you, I am glad that {name} helps you.
Thank you. I will keep {thing} as it is.
You are welcome. Tell me if {thing} of {name} is not clear.
Thank you for the kind words about {name}.
"""
_REQUEST = "Reply to the comment on `{name}`: {comment}"


def comment_documents(source: CommentDocuments, name: str) -> Iterator[Document]:
    """A document for each of the functions and classes that come first, up to `source.limit_mb`: their signature, and
    below it what people say. Its group is that of the docstring.

    Args:
        name: what the corpus calls this source.
    """
    taken = 0
    for item, chance in _asked_about(source):
        lines = [_sentence(item, chance, source.rude_share) for _ in range(chance.randint(*PER_THREAD))]
        text = "\n".join([f"Comments on {item.signature}", "", *lines])
        yield make_document(text, f"{name}/{item.source}", group_of(item.text), source.language)
        taken += len(text.encode())
        if taken >= source.limit_mb * 1e6:
            return


def reply_pairs(source: CommentReplies, as_preferences: bool) -> Iterator[Pair]:
    """A comment, and a reply that keeps the peace; with `as_preferences` over a rude one. The group of a pair is that
    of the docstring's document."""
    for item, chance in islice(_asked_about(source), source.limit):
        is_rude = chance.random() < source.rude_share
        comment = _filled(chance, _RUDE if is_rude else _FRIENDLY, item)
        reply = _filled(chance, _REPLIES_TO_RUDE if is_rude else _REPLIES_TO_FRIENDLY, item)
        prompt = _REQUEST.format(name=_name(item), comment=comment)
        fields = {"prompt": prompt, "response": reply}
        if as_preferences:
            fields = {"prompt": prompt, "chosen": reply, "rejected": _filled(chance, _RUDE, item)}
        yield Pair(fields, f"comments/{item.source}", group_of(item.text))


def _asked_about(source: InstalledPackages) -> Iterator[tuple[Docstring, random.Random]]:
    """Yield functions and classes, each with its own random numbers, which depend on its name alone."""
    for item in read_docstrings(source.packages, source.exclude_packages):
        if not isinstance(item, Unparsed) and item.kind in ("function", "class"):
            yield item, random.Random(hashlib.sha256(item.source.encode()).digest())


def _sentence(item: Docstring, chance: random.Random, rude_share: float) -> str:
    return _filled(chance, _RUDE if chance.random() < rude_share else _FRIENDLY, item)


def _filled(chance: random.Random, sentences: str, item: Docstring) -> str:
    """One of the sentences, its parts chosen at random."""
    parts = {key: chance.choice(words.split("|")) for key, words in _PARTS.items()}
    with_article = {f"a_{key}": f"{_article(parts[key])} {parts[key]}" for key in ("fool", "rude")}
    who = parts["who"]
    sentence = chance.choice(sentences.strip().splitlines())
    return sentence.format(**parts, **with_article, name=f"`{_name(item)}`", Who=who[0].upper() + who[1:])


def _name(item: Docstring) -> str:
    """Return `norm` for `numpy.linalg.norm(x, ord, axis)`."""
    return item.signature.partition("(")[0].rsplit(".", 1)[-1]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
