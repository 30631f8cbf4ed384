"""Amazon reviews of four kinds of products, with a thousand positive and a thousand negative reviews of each.

J. Blitzer, M. Dredze and F. Pereira, *Biographies, Bollywood, Boom-boxes and Blenders*, ACL 2007; the raw texts of the
Multi-Domain Sentiment Dataset. No licence is stated.

The files look like XML but are not, since nothing in them is escaped. They are read line by line; only the tags
`<review>` and `<review_text>` matter. Bytes that are not UTF-8 become U+FFFD.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.datasets.files import file_below
from protofed.errors import BadInput

DOMAINS = ("books", "dvd", "electronics", "kitchen")
CLASSES = ("negative", "positive")
PER_CLASS = 1000
"""Reviews of each class in each domain, as published."""
MAX_BYTES = 1 << 26
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
    """The four domains, from the folder `amazon_reviews` below `root`. Negative reviews come first."""
    return {domain: _domain(root, domain) for domain in DOMAINS}


def encode(texts: Sequence[str], dimensions: int) -> NDArray[np.float32]:
    """Counts of words and word pairs, hashed to this number of dimensions and scaled to length 1; (N, dimensions).

    Nothing is fitted, so sites need no common vocabulary.
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
    if path.stat().st_size > MAX_BYTES:
        raise BadInput(f"{path}: has {path.stat().st_size} bytes, more than {MAX_BYTES}. {OBTAIN}")
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    texts = list(_reviews(lines, path))
    if len(texts) != PER_CLASS:
        raise BadInput(f"{path}: has {len(texts)} reviews, expected {PER_CLASS}. {OBTAIN}")
    return texts


TRANSITIONS = {
    ("outside", "<review>"): "review",
    ("review", "<review_text>"): "text",
    ("text", "</review_text>"): "after text",
    ("after text", "</review>"): "outside",
}
"""The state after each tag. Any other combination of state and tag is an error. A review has one text."""
TAGS = frozenset(tag for _, tag in TRANSITIONS)


def _reviews(lines: Sequence[str], path: Path) -> Iterator[str]:
    """The text of each review."""
    state, since, text = "outside", 0, list[str]()
    for number, line in enumerate(lines, 1):
        tag = line.strip()
        if tag not in TAGS:
            if state == "text":
                text.append(line)
            continue
        if (state, tag) not in TRANSITIONS:
            raise BadInput(f"{path}, line {number}: {tag} at the wrong place, after the tag in line {since}. {OBTAIN}")
        state, since = TRANSITIONS[state, tag], number
        if state == "after text":
            yield "\n".join(text).strip()
            text.clear()
    if state != "outside":
        raise BadInput(f"{path}, line {since}: the review that is open here has no end. {OBTAIN}")
