"""The table of what is sent, for methods of which it is known."""

import pytest

import sent_docs

KNOWN = {
    "fedavg": ("all", "nothing", "no", "in all", "no", "sums"),
    "scaffold": ("all", "nothing", "no", "in all", "`change`", "sums"),
    "fedper": ("a part", "`classifier`", "no", "in all", "no", "sums"),
    "fedbn": ("a part", "some of `features`", "no", "in all", "no", "sums"),
    "local": ("no", "`classifier`, `features`", "no", "no", "no", "nothing"),
    "fedproto": ("no", "`classifier`, `features`", "one for each class, of features", "which classes", "no", "sums"),
    "fednh": ("all", "nothing", "one for each class, of features", "in all; of each class", "no", "sums"),
    "ccvr": (
        *("all", "nothing"),
        "one for each class, of features (once, at the end); covariances (once, at the end)",
        *("in all; of each class (once, at the end)", "no", "sums"),
    ),
    "ga": ("all", "nothing", "no", "in all", "`loss`", "each upload"),
    "feddistill": (
        *("no", "`classifier`, `features`", "one for each class, of scores", "which classes", "no", "each upload"),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_says_what_is_known_of_a_method(name: str) -> None:
    assert tuple(sent_docs.row(name)[1:]) == KNOWN[name]


def test_a_method_that_tells_before_the_first_round_is_seen_to() -> None:
    assert "(once, at first)" in sent_docs.row("fedpc")[3]
