"""Minimal pairs: sentences that differ in one point of grammar, in the English of documentation.

Writes minimal_pairs.jsonl beside this file:  python -m evaluation.data.generate
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pair = tuple[str, str]


def _swap(templates: Sequence[str], good: str, bad: str) -> list[Pair]:
    return [(template.format(good), template.format(bad)) for template in templates]


AGREEMENT = [
    *((f"{head} {s} {rest}", f"{head} {p} {rest}") for head, s, p, rest in [
        ("The function", "returns", "return", "a list of names."),
        ("This method", "takes", "take", "two arguments."),
        ("The server", "sends", "send", "a reply to each client."),
        ("A test", "fails", "fail", "when the result is wrong."),
        ("The parser", "reads", "read", "one line at a time."),
        ("Each worker", "writes", "write", "its own log file."),
        ("The window", "has", "have", "a title and a border."),
        ("The teacher", "was", "were", "late this morning."),
        ("My sister", "plays", "play", "the piano every evening."),
    ]),
    *((f"{head} {p} {rest}", f"{head} {s} {rest}") for head, s, p, rest in [
        ("The arguments", "is", "are", "checked before the call."),
        ("These classes", "shares", "share", "a common base class."),
        ("Both files", "contains", "contain", "the same text."),
        ("The results", "was", "were", "stored in a table."),
        ("All tests", "passes", "pass", "on this machine."),
        ("The children", "walks", "walk", "to school together."),
        ("Two of them", "has", "have", "a different name."),
        ("The values", "does", "do", "not change during the loop."),
    ]),
]  # fmt: skip

DISTANT_AGREEMENT = [
    *_swap(
        [
            "The keys of the dictionary {} sorted.",
            "The names in this list {} unique.",
            "The options for the command {} described below.",
            "The lines before the header {} ignored.",
            "The errors in the last file {} reported.",
            "The shapes of the input array {} checked.",
            "The rows that hold a missing value {} dropped.",
            "The pages of the old book {} yellow.",
        ],
        "are",
        "is",
    ),
    *_swap(
        [
            "The list of all names {} sorted.",
            "The number of open files {} limited.",
            "The order of the arguments {} important.",
            "The size of the two arrays {} the same.",
            "The path to the log files {} absolute.",
            "The cost of these operations {} small.",
            "The type of the returned values {} checked.",
            "The colour of the flowers {} red.",
        ],
        "is",
        "are",
    ),
]

DETERMINER_NOUN = [
    *((f"{good} {rest}", f"{bad} {rest}") for good, bad, rest in [
        ("These values", "This values", "are rounded to two digits."),
        ("This option", "These option", "is off by default."),
        ("Those files", "That files", "can be deleted."),
        ("That argument", "Those argument", "must be a string."),
        ("These two methods", "This two methods", "do the same."),
        ("This module", "These module", "provides a simple parser."),
        ("Those names", "That names", "are reserved."),
        ("That line", "Those line", "is too long."),
    ]),
    *_swap(["Apply the function to each {}.", "Print every {} on its own line.", "Visit each {} once."],
           "element", "elements"),
    *_swap(["Return all {} of the object.", "Remove several {} at once.", "It accepts both {} of the item."],
           "attributes", "attribute"),
    *_swap(["There are many {} in the file.", "Only a few {} are left."], "lines", "line"),
]  # fmt: skip

ARTICLE = [
    *_swap(
        [
            "Return {} integer.",
            "Raise {} error if the file is missing.",
            "The result is {} array of numbers.",
            "Create {} empty list.",
            "This is {} abstract class.",
            "It needs {} open connection.",
            "She ate {} apple.",
            "Use {} iterator over the rows.",
        ],
        "an",
        "a",
    ),
    *_swap(
        [
            "Return {} string.",
            "Write {} message to the log.",
            "The result is {} tuple of numbers.",
            "Create {} new list.",
            "This is {} private method.",
            "It needs {} valid key.",
            "He bought {} bicycle.",
            "Use {} function of one argument.",
        ],
        "a",
        "an",
    ),
]

WORD_ORDER = [
    ("Return the first element of the list.", "Return first the element of list the."),
    ("The default value is used.", "The value default used is."),
    ("Open the file for reading.", "Open for the reading file."),
    ("This method must not be called twice.", "This method not must be twice called."),
    ("Convert a string to an integer.", "Convert to a string integer an."),
    ("The name of the new column.", "The name the new of column."),
    ("Check whether the path exists.", "Check the path whether exists."),
    ("Wait until the thread is done.", "Wait the thread until done is."),
    ("If there is no such key, raise an error.", "If such there is no key, raise an error."),
    ("The given text is split into words.", "The text given split is words into."),
    ("Remove all items from the set.", "Remove items all the from set."),
    ("It is usually enough to call this once.", "It is to call usually this enough once."),
    ("The cat sleeps on the old chair.", "The cat on sleeps the chair old."),
    ("We have never seen such a big ship.", "We have seen never a such big ship."),
    ("What does this option mean?", "What this option does mean?"),
    ("The two strings are compared character by character.", "The strings two compared are character by character."),
]

VERB_FORM = [
    *((f"{a} {good} {b}", f"{a} {bad} {b}") for a, good, bad, b in [
        ("This can be", "used", "use", "to open a file."),
        ("The option has been", "removed", "remove", "in this version."),
        ("The name must", "start", "starts", "with a letter."),
        ("The file will be", "closed", "close", "at the end."),
        ("It is possible to", "add", "adds", "new fields later."),
        ("The value should", "be", "is", "positive."),
        ("The data were", "written", "wrote", "to the disk."),
        ("The rows are", "chosen", "chose", "at random."),
        ("It does not", "change", "changes", "the input."),
        ("The key was not", "found", "find", "in the table."),
        ("It may", "take", "takes", "some time."),
        ("The function is", "called", "calls", "once for each item."),
        ("They have already", "gone", "went", "home."),
        ("She is", "reading", "reads", "a long letter."),
        ("After", "reading", "read", "the header, the body is parsed."),
        ("An error is", "raised", "raise", "if the value is negative."),
        ("He wants to", "learn", "learns", "a new language."),
    ]),
]  # fmt: skip

PREPOSITION = [
    *((f"{a} {good} {b}", f"{a} {bad} {b}") for a, good, bad, b in [
        ("The result depends", "on", "of", "the order of the items."),
        ("A list consists", "of", "at", "zero or more elements."),
        ("The text is converted", "to", "at", "lower case."),
        ("The array is divided", "into", "of", "two halves."),
        ("The value is equal", "to", "from", "zero."),
        ("This is different", "from", "into", "the old behaviour."),
        ("The server listens", "on", "of", "this port."),
        ("The name is followed", "by", "from", "a colon."),
        ("Iterate", "over", "of", "the rows of the table."),
        ("The module is responsible", "for", "at", "the cache."),
        ("Words are separated", "by", "at", "spaces."),
        ("The file is read", "from", "of", "the disk."),
        ("The method belongs", "to", "by", "the base class."),
        ("The string is compared", "with", "into", "the pattern."),
        ("The meeting starts", "at", "of", "nine."),
        ("She is afraid", "of", "at", "dogs."),
    ]),
]  # fmt: skip

DOCSTRING_PHRASE = [
    ("Return the number of items in the list.", "Return of the the number items in list."),
    ("Returns True if the object is callable.", "Returns if True object the callable is."),
    ("Defaults to None.", "Defaults None to."),
    ("The name of the file to open.", "The name the of file open to."),
    ("Raises ValueError if the input is empty.", "Raises if ValueError the empty input is."),
    ("A list of strings.", "A of list strings."),
    ("Return a copy of the object.", "Return a of copy object the."),
    ("Get the current working directory.", "Get the the working of directory."),
    ("Optional. The default is False.", "Optional. The is default False."),
    ("This function is deprecated.", "This deprecated function."),
    ("The number of bytes to read.", "The of number bytes read to."),
    ("If True, the result is sorted.", "If the True, result sorted is."),
    ("See the documentation for more details.", "See for the documentation details more."),
    ("Base class for all exceptions.", "Base for class exceptions all."),
    ("Set the value of the given option.", "Set of the the value given option."),
    ("Compute the mean along the given axis.", "Compute along the mean the axis given."),
    ("The dictionary is updated in place.", "The dictionary updated place in."),
    ("Return an iterator over the lines of the file.", "Return over an iterator lines the file of."),
]

REPEATED_WORD = [
    (good, bad)
    for good, bad in [
        ("Close the connection to the server.", "Close the the connection to the server."),
        ("Write the text to a file.", "Write the text to to a file."),
        ("The result is a number.", "The result is is a number."),
        ("It is the same as before.", "It is the same as as before."),
        ("Return a list of names.", "Return a list of of names."),
        ("This can be changed later.", "This can can be changed later."),
        ("The path must be absolute.", "The path must must be absolute."),
        ("Check if the file exists.", "Check if if the file exists."),
        ("The values are stored in order.", "The values are stored in in order."),
        ("There is only one instance.", "There there is only one instance."),
        ("Use this for large files.", "Use this for for large files."),
        ("The loop ends when the list is empty.", "The loop ends when when the list is empty."),
        ("A name and a value.", "A name and and a value."),
        ("We went to the market.", "We went to to the market."),
        ("She has not seen it.", "She has has not seen it."),
        ("The window was open.", "The window was was open."),
    ]
]

QUANTITY = [
    *((f"{a} many {b}", f"{a} much {b}") for a, b in [
        ("How", "items are there?"), ("So", "errors were found."), ("Not", "files are this large."),
        ("Too", "arguments were given."),
    ]),
    *((f"{a} much {b}", f"{a} many {b}") for a, b in [
        ("How", "memory is used?"), ("So", "time was lost."), ("Not", "space is left."),
        ("Too", "water was in the glass."),
    ]),
    ("It uses less memory than before.", "It uses fewer memory than before."),
    ("One of the arguments is missing.", "One of the argument is missing."),
    ("Two files were found.", "Two file were found."),
    ("Neither of them is needed.", "Neither of they is needed."),
    ("There is no more data.", "There is none more data."),
    ("At least one value is required.", "At less one value is required."),
    ("The first three rows are shown.", "The three firsts rows are shown."),
    ("None of the keys match.", "No of the keys match."),
]  # fmt: skip

COMPARISON = [
    ("This is faster than a loop.", "This is more fast than a loop."),
    ("The new version is smaller than the old one.", "The new version is small than the old one."),
    ("The value is greater than or equal to zero.", "The value is greater as or equal to zero."),
    ("It is as fast as the other method.", "It is as fast than the other method."),
    ("The largest value is returned.", "The most large value is returned."),
    ("The second list is longer than the first.", "The second list is longer then than first."),
    ("This is the best choice.", "This is the goodest choice."),
    ("The error is worse than before.", "The error is badder than before."),
    ("Use a lower number for better results.", "Use a more low number for better results."),
    ("The most recent file is used.", "The recentest file is used."),
    ("It is more important than speed.", "It is importanter than speed."),
    ("The shortest path is found first.", "The most short path is found first."),
    ("His house is older than mine.", "His house is more old than mine."),
    ("The river is wider here.", "The river is more wide here."),
    ("The result is less accurate.", "The result is lesser accurate."),
    ("This is the same as the default.", "This is the same than the default."),
]

PRONOUN = [
    *((f"{a} {good} {b}", f"{a} {bad} {b}") for a, good, bad, b in [
        ("The class and all of", "its", "it", "methods are public."),
        ("If the files exist,", "they", "them", "are overwritten."),
        ("The user can change", "their", "they", "password here."),
        ("Call the function and store", "its", "it's own", "result."),
        ("The caller is the one", "who", "whom", "asked for it."),
        ("The function", "that", "who", "was called first is printed."),
        ("A list", "whose", "who", "items are numbers."),
        ("The two threads wait for", "each", "every", "other."),
        ("The man", "who", "which", "lives next door is old."),
        ("Give the book to", "him", "he", "tomorrow."),
        ("She cut", "herself", "himself", "while she was cooking."),
        ("We looked at", "them", "they", "for a long time."),
        ("The process ends", "itself", "themselves", "when it is done."),
        ("The modules import", "themselves", "itself", "when they are loaded."),
        ("The place", "where", "which", "the file is stored."),
        ("This is between you and", "me", "I", "only."),
    ]),
]  # fmt: skip

NEGATION = [
    ("It does not return anything.", "It does not return nothing."),
    ("Do not call this method directly.", "Do not to call this method directly."),
    ("There is no default value.", "There is not default value."),
    ("The file could not be opened.", "The file could be not opened."),
    ("No error is raised.", "Not error is raised."),
    ("It is not needed any more.", "It is not needed no more."),
    ("The list cannot be empty.", "The list not can be empty."),
    ("This has never been tested.", "This has been never tested not."),
    ("You don't need to close it.", "You not need to close it."),
    ("If it isn't found, None is returned.", "If it not is found, None is returned."),
    ("He did not come.", "He did not came."),
    ("They do not know the answer.", "They know not do the answer."),
    ("The option has no effect.", "The option has not effect."),
    ("Nothing is written to the disk.", "Nothing is not written to the disk never."),
    ("It should not be used.", "It should be used not."),
    ("The name does not contain spaces.", "The name does not contains spaces."),
]

CONDITIONAL = [
    ("If the key is missing, the default is returned.", "If the key is missing, the default is return."),
    ("If an error occurs, the program stops.", "If an error occurs, the program stopping."),
    ("Unless the flag is set, nothing is printed.", "Unless the flag is set, nothing print."),
    ("When the queue is empty, the worker waits.", "When the queue is empty, the worker waiting."),
    ("If the list is sorted, the search is fast.", "If the list is sorted, the search fast."),
    ("While the lock is held, no one else can write.", "While the lock is held, no one else can writing."),
    ("If it rains, we stay at home.", "If it rains, we staying at home."),
    ("As soon as the data arrive, they are shown.", "As soon as the data arrive, they are show."),
    ("Before the test starts, the cache is cleared.", "Before the test starts, the cache is clear it."),
    ("If both are given, the first one wins.", "If both are given, the first one win."),
    ("Once the file is closed, it cannot be read.", "Once the file is closed, it cannot be reading."),
    ("If no name is given, one is made up.", "If no name is given, one is make up."),
    ("Because the input is large, it is read in parts.", "Because the input is large, is read in parts."),
    ("Although it is slow, it is correct.", "Although it is slow, is correct."),
    ("If the value is not None, it is used.", "If the value is not None, it used is."),
    ("Until the answer comes, the client is blocked.", "Until the answer comes, the client is block."),
]

PHENOMENA: dict[str, Sequence[Pair]] = {
    "agreement": AGREEMENT,
    "distant_agreement": DISTANT_AGREEMENT,
    "determiner_noun": DETERMINER_NOUN,
    "article": ARTICLE,
    "word_order": WORD_ORDER,
    "verb_form": VERB_FORM,
    "preposition": PREPOSITION,
    "docstring_phrase": DOCSTRING_PHRASE,
    "repeated_word": REPEATED_WORD,
    "quantity": QUANTITY,
    "comparison": COMPARISON,
    "pronoun": PRONOUN,
    "negation": NEGATION,
    "conditional": CONDITIONAL,
}


def rows() -> Iterator[dict[str, str]]:
    """The rows of minimal_pairs.jsonl: good, bad, phenomenon."""
    for phenomenon, pairs in PHENOMENA.items():
        for good, bad in pairs:
            yield {"good": good, "bad": bad, "phenomenon": phenomenon}
