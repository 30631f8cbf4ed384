"""The four domains of reviews: what counts as a review, hashing, and damaged files."""

import os
from pathlib import Path

import numpy as np
import pytest

from protofed.datasets import amazon_reviews
from protofed.datasets.amazon_reviews import DOMAINS, encode
from protofed.errors import BadInput

needs_files = pytest.mark.skipif("PROTOFED_DATA" not in os.environ, reason="needs the published files: PROTOFED_DATA")


def review(text: str) -> str:
    return f"<review>\n<rating>\n5.0\n</rating>\n<review_text>\n{text}\n</review_text>\n</review>"


def written(root: Path, reviews: dict[int, str] | None = None, count: int = 1000) -> Path:
    """Files of the published layout; some reviews of positive books replaced, and so many of them."""
    for domain in DOMAINS:
        folder = root / "amazon_reviews" / domain
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("positive", "negative"):
            is_odd = (domain, name) == ("books", "positive")
            own = reviews if is_odd and reviews else {}
            blocks = [own.get(k, review(f"{domain} {name} {k}")) for k in range(count if is_odd else 1000)]
            (folder / f"{name}.review").write_bytes("\n".join(["<reviews>", *blocks, "</reviews>"]).encode("latin-1"))
    return root


def test_texts_are_read_as_they_are_negative_ones_first(tmp_path: Path) -> None:
    odd = "<b>5 < 6 & so on</b>\n\nna\xefve\x85 page\x0c<review>\n"
    found = amazon_reviews.read(written(tmp_path, {1: review(odd)}))
    assert list(found) == list(DOMAINS)
    books = found["books"]
    assert books.y.tolist() == [0] * 1000 + [1] * 1000
    assert books.texts[0] == "books negative 0"
    assert books.texts[1001:1003] == ("<b>5 < 6 & so on</b>\n\nna\ufffdve\ufffd page\x0c<review>", "books positive 2")


# The review with index 1 starts on line 10, its text on line 14.
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (review("x").replace("</review_text>\n", ""), "line 16: </review> at the wrong place, .* line 14"),
        (review("x").replace("\n</review_text>\n</review>", ""), "line 16: <review> at the wrong place, .* line 14"),
        (review("x").replace("<review_text>\n", ""), "line 15: </review_text> at the wrong place, .* line 10"),
        (review("x").replace("<review>\n", ""), "line 13: <review_text> at the wrong place, .* line 9"),
        (review("</review_text>\n<review_text>"), "line 16: <review_text> at the wrong place, .* line 15"),
    ],
)
def test_a_review_of_another_form_is_refused_with_file_and_line(tmp_path: Path, block: str, message: str) -> None:
    with pytest.raises(BadInput, match=rf"books/positive\.review, {message}"):
        amazon_reviews.read(written(tmp_path, {1: block}))


# 999 reviews of 8 lines follow the first line: the last one's text is opened on line 1 + 7992 + 5 and closed on 8000.
@pytest.mark.parametrize(("tags", "line"), [("</review_text>\n</review>", 7998), ("</review>", 8000)])
def test_an_unterminated_review_is_refused_where_it_was_left_open(tmp_path: Path, tags: str, line: int) -> None:
    with pytest.raises(BadInput, match=rf"positive\.review, line {line}: the review that is open here has no end"):
        amazon_reviews.read(written(tmp_path, {999: review("x").replace(f"\n{tags}", "")}))


@pytest.mark.parametrize("count", [999, 1001])
def test_another_number_of_reviews_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(BadInput, match=rf"positive\.review: has {count} reviews, expected 1000\. Get unprocessed"):
        amazon_reviews.read(written(tmp_path, count=count))


def test_a_missing_or_too_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"negative\.review: there is no such file\. Get unprocessed"):
        amazon_reviews.read(tmp_path)
    monkeypatch.setattr(amazon_reviews, "MAX_BYTES", 1000)
    with pytest.raises(BadInput, match="89910 bytes"):
        amazon_reviews.read(written(tmp_path))


def test_words_and_pairs_are_hashed_to_vectors_of_length_one() -> None:
    x = encode(["good book", "book good", "good book good book", "good"], 4096)
    assert x.shape == (4, 4096)
    assert x.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-6)
    # `good`, `book` and the pair: three numbers. Order changes the pair alone: two of three are shared.
    assert (x != 0).sum(1).tolist() == [3, 3, 4, 1]
    assert x[0] @ x[1] == pytest.approx(2 / 3, abs=1e-6)
    assert np.array_equal(encode(["good book"], 4096), x[:1])


@needs_files
def test_the_published_files_have_the_published_counts() -> None:
    found = amazon_reviews.read(Path(os.environ["PROTOFED_DATA"]))
    assert {name: np.bincount(r.y).tolist() for name, r in found.items()} == {name: [1000, 1000] for name in DOMAINS}
    assert {name: len(set(r.texts)) for name, r in found.items()} == {
        "books": 1956,
        "dvd": 1954,
        "electronics": 1966,
        "kitchen": 1977,
    }
    assert all(text for reviews in found.values() for text in reviews.texts)
