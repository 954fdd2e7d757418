"""Services that analyse a text, used by the demos.  Run one with `mdworker text_services:count` in this folder.

A text is one frame; a line that begins with "# " begins a chapter.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator

from zmdp import Services
from zmdp.workers import Request, Worker

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")

count = Worker("text.count")
phrases = Worker("text.phrases")
services = Services()


def chapters(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each chapter's title and words."""
    for chapter in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        title, _, body = chapter.partition("\n")
        yield title, WORD.findall(body.lower())


@count
def count_words(request: Request) -> Iterator[list[bytes]]:
    """Stream `title, number of words` for each chapter as PARTIALs; the FINAL is the total."""
    total = 0
    for title, words in chapters(request[0].decode()):
        total += len(words)
        yield [title.encode(), b"%d" % len(words)]
    return [b"total", b"%d" % total]


@phrases
def longest_phrases(request: Request) -> list[bytes]:
    """Return the pid and the most frequent phrase of each length from 2 to 20 words.  Takes a second or so."""
    words = [word for _, chapter in chapters(request[0].decode()) for word in chapter]
    found = []
    for length in range(2, 21):
        counted = Counter(zip(*(words[at:] for at in range(length)), strict=False))
        phrase, times = counted.most_common(1)[0]
        found.append(f"{times} × {' '.join(phrase)}".encode())
    return [b"%d" % os.getpid(), *found]


@services.service("text.words")
def number_of_words(text: str) -> int:
    """Return the number of words."""
    return len(WORD.findall(text))


def words(request: Request) -> list[bytes]:
    """Return the number of words and the pid.  A plain function, for Spark's executors."""
    return [b"%d" % len(WORD.findall(request[0].decode())), b"%d" % os.getpid()]
