"""What each site gets: numbers by hand from confusion counts, and what is said of training that went wrong."""

import numpy as np
import pytest

from protofed.reports.advice import remarks, together
from protofed.reports.sites import class_table, reported_round, site_results
from protofed.runs.results import Round, best_by_validation, is_stalled, summed


def judged(number: int, confusion: dict[str, list[list[int]]], new: tuple[str, ...] = (), **more: object) -> Round:
    """A round in which models gave these confusions."""
    accuracy = {s: {"accuracy": float(np.trace(c) / np.sum(c)), "auc": 0.5} for s, c in confusion.items()}
    home = {site: scores for site, scores in accuracy.items() if site not in new}
    own = float(np.mean([scores["accuracy"] for scores in home.values()]))
    return Round(
        number,
        len(home),
        {},
        judged="own models",
        domains=accuracy,
        own_domains=accuracy,
        at_home=home,
        new={site: accuracy[site] for site in new},
        summary={"own": own, "average": 0.1},
        confusion=confusion,
        **more,  # type: ignore[arg-type]
    )


def validated(number: int, score: float, test: float = 0.5) -> Round:
    one = judged(number, {"a": [[round(100 * test), 100 - round(100 * test)], [0, 0]]})
    return Round(**{**vars(one), "validation": {"a": {"balanced_accuracy": score}}})


def test_the_numbers_of_a_site_by_hand() -> None:
    (result,) = site_results(judged(1, {"leeds": [[6, 2], [1, 3]]}))
    values = {name: value for name, (value, _) in result.measures.items()}
    # 9 of 12; (6/8 + 3/4) / 2; F1 of the classes 2·6/(8 + 7) and 2·3/(4 + 5).
    assert values == pytest.approx({"accuracy": 0.75, "balanced": 0.75, "macro-F1": (12 / 15 + 6 / 9) / 2})
    assert (result.num_tested, result.majority) == (12, 8 / 12)
    sensitivity, interval = result.sensitivity(1)
    assert sensitivity == 0.75
    assert interval is not None
    assert (interval.low, interval.high) == (0.25, 1.0)  # 0 of 4 has a chance of 0.4 %, at most 1 of 4 one of 5.1 %
    facts = result.facts(["benign", "malignant"])
    assert facts["sensitivity"] == {"benign": 0.75, "malignant": 0.75}
    assert facts["confusion"] == [[6, 2], [1, 3]]


def test_sites_that_were_held_out_come_last_and_many_classes_have_no_table() -> None:
    results = site_results(judged(1, {"a": [[1, 0], [0, 1]], "b": [[1, 0], [0, 1]]}, new=("a",)))
    assert [(result.site, result.is_held_out) for result in results] == [("b", False), ("a", True)]
    assert class_table(results, ()) is not None
    assert class_table(site_results(judged(1, {"a": np.eye(13, dtype=int).tolist()})), ()) is None


def test_the_round_is_chosen_by_validation_never_by_the_test_set() -> None:
    rounds = [validated(1, 0.5, test=0.9), validated(2, 0.8, test=0.2), validated(3, 0.8, test=1.0)]
    best = best_by_validation(rounds)
    assert best is not None
    assert best.round == 2  # the first of equals, although its test accuracy is the lowest
    assert reported_round(rounds) is best
    assert summed(rounds, "validation").metrics["own"] == 0.2
    assert reported_round([judged(1, {"a": [[1]]}), judged(2, {"a": [[1]]})]).round == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scores", "patience", "stalls"),
    [
        ([0.5, 0.6, 0.6, 0.6], 2, True),  # two rounds after the best one, none of them better
        ([0.5, 0.6, 0.6], 2, False),
        ([0.5, 0.6, 0.6, 0.7], 2, False),
        ([0.9, 0.1, 0.1, 0.1], 0, False),
        ([], 1, False),
    ],
)
def test_patience_counts_rounds_since_the_best(scores: list[float], patience: int, stalls: bool) -> None:
    assert is_stalled([validated(k, score) for k, score in enumerate(scores)], patience) is stalls


GOOD = [[48, 2], [3, 47]]


@pytest.mark.parametrize(
    ("confusion", "words"),
    [
        ([[90, 0], [10, 0]], "one class is predicted for every test example"),
        ([[30, 20], [28, 22]], "the balanced accuracy may be chance"),
        (GOOD, ""),
        ([[50, 0], [0, 0]], ""),  # one class is all that the site has
    ],
)
def test_sites_where_nothing_was_learnt_are_named(confusion: list[list[int]], words: str) -> None:
    found = remarks([judged(k, {"leeds": confusion, "oslo": GOOD}) for k in range(3)], ["benign", "malignant"])
    assert [remark.what for remark in found] == ([words] if words else [])
    if words:
        assert found[0].places[0].startswith("leeds (")
        assert "oslo" not in found[0].text
        assert "training.optimizer.lr" in found[0].advice


def test_a_swinging_accuracy_is_said_and_one_fall_is_not() -> None:
    low = [[30, 20], [10, 40]]

    def course(pattern: str) -> list[str]:
        rounds = [judged(k, {"leeds": GOOD if letter == "h" else low}) for k, letter in enumerate(pattern)]
        return [remark.what for remark in remarks(rounds, ()) if "swings" in remark.what]

    assert course("hlhlhh")
    assert not course("hhlhhh")
    assert not course("hlhl" + "h" * 12)  # long ago


def test_remarks_on_many_runs_are_given_once_with_all_methods() -> None:
    stuck = remarks([judged(1, {"leeds": [[90, 0], [10, 0]]})], ["benign", "malignant"])
    (text,) = together({"fedavg": [stuck, []], "fpl": [stuck, stuck], "local": [[], []]})
    assert "fedavg at leeds (1 of 2 seeds); fpl at leeds (2 of 2 seeds)." in text
    assert "local" not in text
