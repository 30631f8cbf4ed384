"""Amazon reviews of four kinds of goods, a thousand that praise and a thousand that do not of each.

J. Blitzer, M. Dredze and F. Pereira, *Biographies, Bollywood, Boom-boxes and Blenders*, ACL 2007; the raw texts of the
Multi-Domain Sentiment Dataset. No licence is stated.

The files look like XML and are not: nothing in them is escaped. They are read line by line, and only `<review>` and
`<review_text>` are looked at. Bytes that are not UTF-8 become U+FFFD.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.tabular import file_below
from protofed.errors import BadInput

DOMAINS = ("books", "dvd", "electronics", "kitchen")
CLASSES = ("negative", "positive")
PER_CLASS = 1000
"""Reviews of each class in each domain, as published."""
MOST_BYTES = 1 << 26
OBTAIN = (
    "Get unprocessed.tar.gz from https://www.cs.jhu.edu/~mdredze/datasets/sentiment/ and put positive.review and "
    "negative.review of each domain into the folders amazon_reviews/books, dvd, electronics and kitchen (called "
    "kitchen_&_housewares there)."
)


@dataclass(frozen=True)
class Reviews:
    texts: tuple[str, ...]
    y: NDArray[np.int64]  # (N,), 1 for positive

    def __len__(self) -> int:
        return len(self.texts)


def read(root: Path) -> Mapping[str, Reviews]:
    """The four domains, from the folder `amazon_reviews` below `root`; negative reviews first."""
    return {domain: _domain(root, domain) for domain in DOMAINS}


def encode(texts: Sequence[str], dimensions: int) -> NDArray[np.float32]:
    """Counts of words and of pairs of neighbouring words, hashed to so many numbers, at length 1; (N, dimensions).

    Nothing is fitted, so that sites need no common vocabulary.
    """
    from sklearn.feature_extraction.text import HashingVectorizer  # a slow import that few runs need

    hashing = HashingVectorizer(n_features=dimensions, ngram_range=(1, 2), norm="l2", dtype=np.float32)
    x: NDArray[np.float32] = hashing.transform(texts).toarray()
    return x


def _domain(root: Path, domain: str) -> Reviews:
    paths = [file_below(root, f"amazon_reviews/{domain}/{name}.review", OBTAIN) for name in CLASSES]
    texts = [text for path in paths for text in _texts(path)]
    return Reviews(tuple(texts), np.repeat(np.arange(len(CLASSES)), PER_CLASS).astype(np.int64))


def _texts(path: Path) -> list[str]:
    if path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{path}: has {path.stat().st_size} bytes, the most is {MOST_BYTES}. {OBTAIN}")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    texts = list(_reviews(lines, path))
    if len(texts) != PER_CLASS:
        raise BadInput(f"{path}: has {len(texts)} reviews, expected {PER_CLASS}. {OBTAIN}")
    return texts


AFTER = {
    ("outside", "<review>"): "review",
    ("review", "<review_text>"): "text",
    ("text", "</review_text>"): "told",
    ("told", "</review>"): "outside",
}
"""Where each tag leads from each place; any other step is an error. A review has one text."""
TAGS = frozenset(tag for _, tag in AFTER)


def _reviews(lines: Sequence[str], path: Path) -> Iterator[str]:
    """The text of each review."""
    place, entered, text = "outside", 0, list[str]()
    for number, line in enumerate(lines, 1):
        tag = line.strip()
        if tag not in TAGS:
            if place == "text":
                text.append(line)
            continue
        if (place, tag) not in AFTER:
            raise BadInput(f"{path}, line {number}: {tag} where it cannot be, after line {entered}. {OBTAIN}")
        place, entered = AFTER[place, tag], number
        if place == "told":
            yield "\n".join(text).strip()
            text.clear()
    if place != "outside":
        raise BadInput(f"{path}, line {entered}: the review that is open here has no end. {OBTAIN}")
