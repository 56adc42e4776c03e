"""Sentences of a document by punctuation, without models or downloads."""

from __future__ import annotations

import re

_PARAGRAPH = re.compile(r"\n[ \t\r]*\n")
# A full stop, closing quotes or brackets, white space, then what may open a sentence; ideographic stops need no space.
_BOUNDARY = re.compile(
    r"(?<=[.!?\u2026])(?P<close>[\"'\u201d\u2019\u00bb)\]]*)\s+(?=[\"'\u201c\u2018\u00ab(\[]*[^\W_a-z])"
    r"|(?<=[\u3002\uff01\uff1f])"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'\u201c\u2018])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|Rev|Hon|Gen|Col|Capt|Lt|Sgt|Sen|Rep|Gov|Messrs|St|Mt|Jr|Sr|"
    r"Nos?|Art|Sec|Vol|Fig|Co|Inc|vs|cf|e\.g|i\.e|(?:[A-Z]\.)+[A-Z])\.$"
)


def split_sentences(text: str) -> list[str]:
    """Sentences in order, none empty; a blank line always ends one, a lone line break never does.

    A stop after an initial or a common abbreviation (``Mr.``, ``U.S.``) or before a lower-case letter ends nothing.
    """
    return [sentence for paragraph in _PARAGRAPH.split(text) for sentence in _split_paragraph(paragraph)]


def _split_paragraph(paragraph: str) -> list[str]:
    sentences, start = [], 0
    for match in _BOUNDARY.finditer(paragraph):
        end = match.end("close") if match.group("close") is not None else match.end()
        # looking back a few words is enough to see an abbreviation, and keeps long paragraphs linear
        if match.group("close") == "" and _ABBREVIATION.search(paragraph[max(start, end - 16) : end]):
            continue
        sentences.append(paragraph[start:end].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]
