"""Rules that divide rows: nothing twice, nothing lost, the same for the same seed; each rule by numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from math import nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed.errors import BadInput
from protofed.seeds import generator
from protofed.tasks.partition import (
    NOBODY,
    allotted,
    apportioned,
    by_site,
    cut,
    dirichlet,
    exchanged,
    portion,
    proportional,
    shards,
    skewed,
    split,
)

Rule = Callable[[Tensor, int], list[Tensor]]

modest = settings(deadline=None, derandomize=True, max_examples=60)
seeds = st.integers(0, 2**40)
label_lists = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def repeated(*counts: int) -> Tensor:
    """counts[c] rows of class c, class after class."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def mixed(*counts: int) -> Tensor:
    labels = repeated(*counts)
    return labels[torch.randperm(len(labels), generator=generator(5, "mixed"))]


def joined(parts: Iterable[Tensor]) -> list[int]:
    return sorted(row for part in parts for row in part.tolist())


def are_rows(parts: Iterable[Tensor]) -> bool:
    """Whether all are int64 and ascending, and no row is there twice."""
    parts = list(parts)
    return all(p.dtype == torch.int64 and p.tolist() == sorted(p.tolist()) for p in parts) and len(
        set(joined(parts))
    ) == sum(map(len, parts))


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def counts_of(labels: Tensor, rows: Tensor, num_classes: int) -> list[int]:
    return labels[rows].bincount(minlength=num_classes).tolist()


def of_split(labels: Tensor, seed: int) -> list[Tensor]:
    parts = split(labels, 0.2, seed, validation=0.1)
    return [parts.train, parts.validation, parts.test]


def of_proportional(labels: Tensor, seed: int) -> list[Tensor]:
    return list(proportional({"a": labels[::3], "b": labels[1::3], "c": labels[2::3]}, labels, seed).values())


RULES: dict[str, Rule] = {
    "allotted": lambda labels, seed: list(allotted(labels, {"a": 20, "b": 15, "c": 5}, seed).values()),
    "dirichlet": lambda labels, seed: list(dirichlet(labels, 4, 0.5, seed, minimum=3)),
    "shards": lambda labels, seed: list(shards(labels, 4, 3, seed)),
    "split": of_split,
    "proportional": of_proportional,
}
LABELS = mixed(30, 14, 25, 7)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


# What holds for all rules


@every_rule
def test_the_same_seed_gives_the_same_rows_and_another_seed_gives_others(rule: Rule) -> None:
    assert same(rule(LABELS, 3), rule(LABELS, 3))
    assert not same(rule(LABELS, 3), rule(LABELS, 4))


@every_rule
def test_rows_are_ascending_and_nobody_shares_one(rule: Rule) -> None:
    assert all(are_rows(rule(LABELS, seed)) for seed in range(20))


@every_rule
def test_global_generators_and_the_given_labels_are_left_alone(rule: Rule) -> None:
    labels = LABELS.clone()
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    first = rule(labels, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index, union-attr]
    assert torch.equal(labels, LABELS)
    torch.manual_seed(1)
    assert same(rule(labels, 0), first)


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"shards"}))
def test_what_classes_are_called_makes_no_difference(name: str) -> None:
    other = torch.tensor([17, -3, 10**12, 4])[LABELS]
    for seed in range(10):
        assert same(RULES[name](LABELS, seed), RULES[name](other, seed))


@every_rule
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(9), "torch.float32"),
        (torch.zeros(9, 1, dtype=torch.int64), r"\(9, 1\)"),
        (torch.zeros(0, dtype=torch.int64), "no examples"),
    ],
)
def test_labels_that_are_none_are_refused(rule: Rule, labels: Tensor, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rule(labels, 0)


# FPL's allocation


@pytest.mark.parametrize(
    ("fraction", "count", "expected"),
    [
        (0.01, 60_000, 600),
        (0.01, 7_291, 72),
        (0.01, 73_257, 732),
        (0.2, 899, 179),
        (0.2, 768, 153),
        (0.2, 237, 47),
        (0.2, 127, 25),
        (0.2, 235, 47),
        (1, 7, 7),
    ],
)
def test_a_clients_size_is_the_whole_part_of_the_fraction(fraction: float, count: int, expected: int) -> None:
    assert portion(fraction, count) == expected


@pytest.mark.parametrize(("fraction", "count", "expected"), [(0.29, 100, 29), (0.57, 100, 57), (0.58, 100, 58)])
def test_a_size_is_exact_where_floats_fall_short(fraction: float, count: int, expected: int) -> None:
    assert portion(fraction, count) == expected


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, nan])
def test_a_fraction_outside_zero_to_one_is_refused(fraction: float) -> None:
    with pytest.raises(BadInput, match=f"{fraction} of a domain"):
        portion(fraction, 100)


@st.composite
def allotments(draw: st.DrawFn) -> tuple[Tensor, dict[str, int]]:
    """Labels and sizes by which every client can have every class, often just so."""
    num_classes, num_clients = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(num_classes, num_classes + 8), min_size=num_clients, max_size=num_clients))
    spare = max(sum(sizes) - num_classes * num_clients, 0) + draw(st.integers(0, 3))
    more = draw(st.lists(st.integers(0, num_classes - 1), min_size=spare, max_size=spare))
    labels = draw(st.permutations(list(range(num_classes)) * num_clients + more))
    return torch.tensor(labels), {f"client-{k}": size for k, size in enumerate(sizes)}


@given(allotments(), seeds)
@modest
def test_clients_have_their_sizes_and_every_class_and_share_no_row(
    allotment: tuple[Tensor, dict[str, int]], seed: int
) -> None:
    labels, sizes = allotment
    found = allotted(labels, sizes, seed)
    assert {name: len(rows) for name, rows in found.items()} == sizes
    assert are_rows(found.values())
    assert all(set(labels[rows].tolist()) == set(labels.tolist()) for rows in found.values())
    backwards = allotted(labels, dict(reversed(sizes.items())), seed)
    assert all(torch.equal(found[name], backwards[name]) for name in sizes)


def test_without_the_rule_a_client_may_lack_a_class_and_the_rule_changes_no_more_than_that() -> None:
    labels, sizes = repeated(90, 10), {"a": 12, "b": 12}
    lacking = 0
    for seed in range(30):
        plain, repaired = allotted(labels, sizes, seed, every_class=False), allotted(labels, sizes, seed)
        for name in sizes:
            lacks = 1 not in labels[plain[name]]
            lacking += lacks
            # Ten rows of class 1 are never used up by 24 of 100 in these seeds: one row comes for one that goes.
            assert len(set(plain[name].tolist()) - set(repaired[name].tolist())) == lacks
            assert 1 in labels[repaired[name]]
    assert 0 < lacking < 60


def test_every_row_is_as_likely_as_any_other() -> None:
    given_to_a = torch.zeros(10)
    for seed in range(400):
        given_to_a[allotted(repeated(10), {"a": 3, "b": 4}, seed)["a"]] += 1
    # 120 of 400 each, with a standard deviation of 9.2.
    assert (given_to_a - 120).abs().max() < 40


def outcomes(owner: list[int], classes: list[int], client: int, missing: int) -> set[tuple[int, ...]]:
    """All that an exchange leads to, over many draws."""
    arguments = torch.tensor(owner), torch.tensor(classes), client, missing
    return {tuple(exchanged(*arguments, generator(seed)).tolist()) for seed in range(60)}


def test_a_missing_class_comes_from_unused_rows_first() -> None:
    # Client 0 has rows 0 and 1, both of class 0. Of class 1, client 1 has rows 3 and 4; row 5 is nobody's.
    found = outcomes([0, 0, NOBODY, 1, 1, NOBODY], [0, 0, 0, 1, 1, 1], client=0, missing=1)
    assert found == {(NOBODY, 0, NOBODY, 1, 1, 0), (0, NOBODY, NOBODY, 1, 1, 0)}


def test_a_missing_class_that_is_used_up_comes_from_a_client_with_two_who_gets_a_row_for_it() -> None:
    # Of class 1, client 1 has rows 2 and 3, and client 2 has row 4 alone. Row 5 is of a class that nobody asks for.
    found = outcomes([0, 0, 1, 1, 2, NOBODY], [0, 0, 1, 1, 1, 0], client=0, missing=1)
    assert found == {
        (1, 0, 0, 1, 2, NOBODY),
        (1, 0, 1, 0, 2, NOBODY),
        (0, 1, 0, 1, 2, NOBODY),
        (0, 1, 1, 0, 2, NOBODY),
    }


def test_a_client_gives_up_no_class_of_which_it_has_one() -> None:
    # Client 0 has one row of class 0 and two of class 1.
    found = outcomes([0, 0, 0, NOBODY], [0, 1, 1, 2], client=0, missing=2)
    assert found == {(0, NOBODY, 0, 0), (0, 0, NOBODY, 0)}


@pytest.mark.parametrize(
    ("counts", "sizes", "message"),
    [
        ((5, 5), {"a": 7, "b": 6}, "13 examples of 10: 3 are missing"),
        ((5, 5), {"a": 2, "b": 1}, "'b' cannot have all 2 classes with 1 examples"),
        ((7, 2), {"a": 2, "b": 2, "c": 2}, "class 1 has 2 examples, but 3 clients"),
        ((5, 5), {"a": 2, "b": 0}, "'b': 0"),
        ((5, 5), {}, "at least one client"),
    ],
)
def test_an_allotment_that_cannot_be_is_refused_with_the_reason(
    counts: tuple[int, ...], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        allotted(repeated(*counts), sizes, 0)


def test_few_rows_and_few_of_a_class_are_no_fault_where_classes_are_not_asked_for() -> None:
    found = allotted(repeated(7, 2), {"a": 1, "b": 4, "c": 4}, 0, every_class=False)
    assert joined(found.values()) == list(range(9))


def test_the_row_of_a_missing_class_is_drawn() -> None:
    labels, taken = repeated(30, 10), set()
    for seed in range(60):
        if 1 not in labels[allotted(labels, {"a": 5}, seed, every_class=False)["a"]]:
            taken.update(row for row in allotted(labels, {"a": 5}, seed)["a"].tolist() if row >= 30)
    assert len(taken) > 3


# Dirichlet label skew


@pytest.mark.parametrize(
    ("count", "proportions", "expected"),
    [
        (10, [0.25, 0.5, 0.25], [2, 5, 3]),  # cut at 2.5 and 7.5, rounded down
        (10, [0.0, 1.0, 0.0], [0, 10, 0]),
        (3, [0.5, 0.25, 0.25], [1, 1, 1]),  # cut at 1.5 and 2.25
        (7, [1.0], [7]),
        (100, [0.5, 0.4999999], [50, 50]),  # the last has the rest
    ],
)
def test_a_class_is_cut_at_the_cumulative_proportions(
    count: int, proportions: list[float], expected: list[int]
) -> None:
    assert cut(count, np.array(proportions)).tolist() == expected


@given(st.integers(1, 1000), st.lists(st.floats(0.001, 1), min_size=1, max_size=30))
@modest
def test_a_cut_gives_every_row_once(count: int, weights: list[float]) -> None:
    sizes = cut(count, np.array(weights) / sum(weights))
    assert sizes.sum() == count
    assert sizes.min() >= 0


def test_a_client_with_its_even_share_gets_nothing_of_later_classes() -> None:
    drawn = {0: [0.7, 0.2, 0.1], 1: [0.5, 0.5]}
    asked = []

    def proportions(label: int, num: int) -> np.ndarray:
        asked.append(num)
        return np.array(drawn[label])

    # 12 rows for 3 clients: 4 each. Class 0 is cut at 4.2 and 5.4: 4, 1, 1 rows, and client 0 is full.
    assert skewed([6, 6], 3, proportions).tolist() == [[4, 0], [1, 3], [1, 3]]
    assert asked == [3, 2]


def test_a_client_with_less_than_its_even_share_still_takes_part() -> None:
    # 13 rows for 3 clients: 4 are less than 13/3, 5 are not.
    table = skewed([6, 1, 6], 3, lambda label, num: np.array([[0.7, 0.2, 0.1], [1, 0, 0], [0.5, 0.5]][label]))
    assert table.tolist() == [[4, 1, 0], [1, 0, 3], [1, 0, 3]]


@given(st.lists(st.integers(12, 60), min_size=2, max_size=5), st.integers(1, 4), st.sampled_from([0.5, 2.0]), seeds)
@modest
def test_a_skewed_division_is_complete_and_keeps_to_its_minima(
    counts: list[int], num_clients: int, concentration: float, seed: int
) -> None:
    labels = mixed(*counts)
    parts = dirichlet(labels, num_clients, concentration, seed, minimum=4)
    assert len(parts) == num_clients
    assert are_rows(parts)
    assert joined(parts) == list(range(len(labels)))
    assert min(map(len, parts)) >= 4
    assert min(len(set(labels[part].tolist())) for part in parts) >= 2


def test_draws_are_repeated_until_all_clients_have_the_minimum() -> None:
    for seed in range(10):
        parts = dirichlet(repeated(50, 50), 4, 0.5, seed, minimum=15, minimum_classes=1)
        assert min(map(len, parts)) >= 15


@pytest.mark.parametrize(("num_clients", "concentration"), [(100, 0.3), (100, 1.0), (10, 0.5), (10, 0.1)])
def test_the_papers_divisions_of_cifar10_are_found(num_clients: int, concentration: float) -> None:
    labels = torch.arange(50_000) % 10
    parts = dirichlet(labels, num_clients, concentration, 0)
    assert joined(parts) == list(range(50_000))
    assert min(map(len, parts)) >= 10
    assert min(len(labels[part].unique()) for part in parts) >= 2


def first_shares(concentration: float, num: int) -> np.ndarray:
    """What each of four clients gets of the class that is divided first, for many seeds, as shares."""
    found = [dirichlet(repeated(200, 200), 4, concentration, s, minimum=0, minimum_classes=0) for s in range(num)]
    return np.array([[(part < 200).sum().item() / 200 for part in parts] for parts in found])


def test_with_a_high_concentration_all_clients_have_equal_shares() -> None:
    shares = first_shares(1e6, 20)
    assert np.abs(shares - 0.25).max() < 0.012  # to two rows, since cuts are rounded down


def test_shares_have_the_mean_and_the_variance_of_the_dirichlet_law() -> None:
    # Dir(1, 1, 1, 1): mean 1/4, variance (1/4)(3/4) / (4 + 1) = 0.0375. 400 draws: the mean's error is about 0.01.
    shares = first_shares(1.0, 400)
    assert np.abs(shares.mean(0) - 0.25).max() < 0.03
    assert np.abs(shares.var(0) - 0.0375).max() < 0.012


def mean_entropy(concentration: float) -> float:
    """Of clients' label distributions, over seeds; log 10 if nothing is skewed."""
    labels = repeated(*[100] * 10)
    parts = [p for seed in range(5) for p in dirichlet(labels, 5, concentration, seed, minimum=1, minimum_classes=1)]
    shares = np.array([counts_of(labels, p, 10) for p in parts]) / np.array([[len(p)] for p in parts])
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(1).mean())


def test_a_lower_concentration_is_a_stronger_skew() -> None:
    strong, middle, weak = map(mean_entropy, (0.1, 1.0, 10.0))
    assert strong + 0.3 < middle < weak - 0.1
    assert weak < np.log(10)


def test_rows_of_a_class_are_drawn_at_random() -> None:
    first = dirichlet(repeated(50, 50), 2, 1e6, 0)[0]
    assert first.tolist() != [*range(25), *range(50, 75)]
    assert counts_of(repeated(50, 50), first, 2) in ([24, 24], [24, 25], [25, 24], [25, 25])


def test_a_wish_that_no_draw_meets_is_refused_with_what_to_change() -> None:
    with pytest.raises(BadInput, match=r"1000 draws from Dir\(0.001\).*raise the concentration"):
        dirichlet(repeated(20, 20), 2, 0.001, 0)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"num_clients": 5}, "40 examples of 2 classes cannot give each of 5 clients 10 examples"),
        ({"num_clients": 2, "minimum_classes": 3}, "3 classes"),
        ({"num_clients": 21, "minimum": 1}, "cannot give each of 21 clients"),
        ({"num_clients": 0}, "at least 1"),
        ({"num_clients": 2, "concentration": 0.0}, "concentration is 0.0"),
        ({"num_clients": 2, "concentration": float("inf")}, "concentration is inf"),
        ({"num_clients": 2, "concentration": nan}, "concentration is nan"),
    ],
)
def test_a_skewed_division_that_cannot_be_is_refused_at_once(wish: Mapping[str, float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        dirichlet(repeated(20, 20), **{"concentration": 1.0, "seed": 0, **wish})  # type: ignore[arg-type]


# Shards


def test_shards_are_cut_from_sorted_rows_the_last_ones_longer_and_dealt_in_every_way() -> None:
    # By label: 1, 3, 6 | 2, 5 | 0, 4. Seven rows in three shards: 2, 2 and 3.
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0])
    pieces = [(1, 3), (2, 6), (0, 4, 5)]
    found = {tuple(tuple(part.tolist()) for part in shards(labels, 3, 1, seed)) for seed in range(60)}
    assert found == set(permutations(pieces))


def test_two_shards_make_two_classes_at_most() -> None:
    labels = torch.arange(60_000) % 10
    parts = shards(labels, 100, 2, 0)
    assert {len(part) for part in parts} == {600}
    assert {len(labels[part].unique()) for part in parts} == {1, 2}


@given(label_lists, st.integers(1, 6), st.integers(1, 4), seeds)
@modest
def test_shards_are_complete_and_as_equal_as_can_be(labels: list[int], clients: int, each: int, seed: int) -> None:
    if clients * each > len(labels):
        with pytest.raises(BadInput, match=f"{len(labels)} examples cannot be dealt"):
            shards(torch.tensor(labels), clients, each, seed)
        return
    parts = shards(torch.tensor(labels), clients, each, seed)
    assert are_rows(parts)
    assert joined(parts) == list(range(len(labels)))
    assert max(map(len, parts)) - min(map(len, parts)) <= each


@pytest.mark.parametrize(("clients", "each"), [(0, 1), (1, 0), (-1, -1)])
def test_no_clients_or_no_shards_are_refused(clients: int, each: int) -> None:
    with pytest.raises(BadInput, match="at least one shard"):
        shards(repeated(5), clients, each, 0)


# Natural sites


def test_a_site_has_the_rows_that_name_it() -> None:
    found = by_site(["va", "basel", "va", "basel", "basel"])
    assert {site: rows.tolist() for site, rows in found.items()} == {"basel": [1, 3, 4], "va": [0, 2]}
    assert list(found) == ["basel", "va"]
    assert are_rows(found.values())


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_row_without_a_site_is_named(blank: str) -> None:
    with pytest.raises(BadInput, match="row 1 has no site"):
        by_site(["va", blank])


# A client's own parts


def test_largest_remainders_are_rounded_up() -> None:
    shares = [Fraction(3, 2), Fraction(3, 4), Fraction(7, 4)]
    # 1 + 0 + 1 with two to add, to the remainders of 3/4.
    assert apportioned(4, shares, [9, 9, 9], generator(0)) == [1, 1, 2]


def test_none_is_rounded_up_above_its_most_and_whole_shares_stay() -> None:
    shares = [Fraction(3, 4), Fraction(1, 2), Fraction(2)]
    assert apportioned(4, shares, [0, 9, 9], generator(0)) == [0, 1, 2]
    assert apportioned(3, shares, [9, 9, 1], generator(0)) == [1, 1, 1]


def test_equal_remainders_are_drawn() -> None:
    found = {tuple(apportioned(1, [Fraction(1, 2)] * 2, [1, 1], generator(seed))) for seed in range(20)}
    assert found == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("counts", "validation", "test", "expected"),
    [
        # 13 rows: 3.25, so 3. Shares 2, 1 and 0.25.
        ((8, 4, 1), 0.0, 0.25, ([6, 3, 1], [0, 0, 0], [2, 1, 0])),
        # 9 rows: 2.25, so 2. Shares 1.5 and 0.75: one each, and the second row goes to the larger remainder.
        ((6, 3), 0.0, 0.25, ([5, 2], [0, 0], [1, 1])),
        # 0.1 × 20 = 2 and 0.2 × 20 = 4, halved.
        ((10, 10), 0.1, 0.2, ([7, 7], [1, 1], [2, 2])),
        # One row of each class is for training, whatever else is asked.
        ((1, 1, 1), 0.4, 0.5, ([1, 1, 1], [0, 0, 0], [0, 0, 0])),
        ((2,), 0.0, 0.9, ([1], [0], [1])),
        # 100 × 0.29 is 29, where floats say 28.999…: halves and wholes are counted on the decimals.
        ((100,), 0.29, 0.0, ([71], [29], [0])),
        # 2 × 0.25 is one half, which goes up.
        ((2,), 0.0, 0.25, ([1], [0], [1])),
    ],
)
def test_parts_have_the_rows_of_each_class_that_a_hand_counts(
    counts: tuple[int, ...], validation: float, test: float, expected: tuple[list[int], ...]
) -> None:
    labels = mixed(*counts)
    for seed in range(5):
        parts = split(labels, test, seed, validation)
        found = (parts.train, parts.validation, parts.test)
        assert tuple(counts_of(labels, rows, len(counts)) for rows in found) == expected


def test_two_classes_of_two_rows_are_tested_on_one_and_validated_on_the_other() -> None:
    # A quarter of four rows is one for each part. The class that gives its second row for testing has no third.
    for seed in range(10):
        parts = split(repeated(2, 2), 0.25, seed, validation=0.25)
        assert sorted(repeated(2, 2)[torch.cat([parts.test, parts.validation])].tolist()) == [0, 1]
        assert counts_of(repeated(2, 2), parts.train, 2) == [1, 1]


def test_many_small_classes_do_not_add_up_to_a_wrong_total() -> None:
    # A quarter of 3 is 0.75. If every class rounded by itself, 100 rows of 300 would be tested on.
    assert len(split(repeated(*[3] * 100), 0.25, 0).test) == 75


def test_the_rows_of_a_part_are_drawn_at_random() -> None:
    tested = {row for seed in range(40) for row in split(repeated(6, 6), 0.25, seed).test.tolist()}
    assert tested == set(range(12))


@given(label_lists, st.integers(0, 60), st.integers(0, 39), seeds)
@modest
def test_parts_are_disjoint_complete_and_right_to_a_row(
    labels: list[int], test_percent: int, validation_percent: int, seed: int
) -> None:
    y, test, validation = torch.tensor(labels), test_percent / 100, validation_percent / 100
    parts = split(y, test, seed, validation)
    found = [parts.train, parts.validation, parts.test]
    assert are_rows(found)
    assert joined(found) == list(range(len(labels)))
    assert set(y[parts.train].tolist()) == set(labels)
    counts = y.bincount(minlength=6).tolist()
    for rows, percent in ((parts.test, test_percent), (parts.validation, validation_percent)):
        assert 100 * len(rows) - percent * len(labels) < 100
        for n, own in zip(counts, counts_of(y, rows, 6), strict=True):
            assert 100 * own - percent * n < 100
            if n * (100 - test_percent - validation_percent) >= 200:  # it has rows to spare
                assert percent * n - 100 * own < 100
    if min(n * (100 - test_percent - validation_percent) for n in counts if n) >= 300:
        for rows, percent in ((parts.test, test_percent), (parts.validation, validation_percent)):
            assert abs(100 * len(rows) - percent * len(labels)) <= 50


@pytest.mark.parametrize(("test", "validation"), [(-0.1, 0.0), (0.2, -0.1), (0.6, 0.4), (1.0, 0.0), (nan, 0.0)])
def test_fractions_that_leave_nothing_for_training_are_refused(test: float, validation: float) -> None:
    with pytest.raises(BadInput, match=f"test {test} and validation {validation}"):
        split(repeated(5, 5), test, 0, validation)


# Test sets like the training rows


def test_a_test_set_is_divided_class_by_class_as_the_training_rows_are() -> None:
    train = {"b": repeated(1, 2), "a": repeated(3)}
    test = mixed(7, 5, 4)
    for seed in range(5):
        found = proportional(train, test, seed)
        # Class 0: 7 rows at 3 to 1 are 5.25 and 1.75. Class 1 is b's alone. Nobody has class 2.
        assert {name: counts_of(test, rows, 3) for name, rows in found.items()} == {"a": [5, 0, 0], "b": [2, 5, 0]}


def test_odd_rows_do_not_all_go_to_one_client() -> None:
    labels = torch.arange(40)
    found = proportional({"a": labels, "b": labels}, labels, 0)
    assert joined(found.values()) == list(range(40))
    assert 8 < len(found["a"]) < 32  # 20 is the mean, 3.2 the standard deviation


@given(st.lists(label_lists, min_size=1, max_size=5), label_lists, seeds)
@modest
def test_test_sets_are_disjoint_complete_and_in_proportion(held: list[list[int]], tested: list[int], seed: int) -> None:
    train = {f"client-{k}": torch.tensor(labels) for k, labels in enumerate(held)}
    test = torch.tensor(tested)
    found = proportional(train, test, seed)
    assert are_rows(found.values())
    together = torch.cat(list(train.values()))
    assert joined(found.values()) == [row for row, label in enumerate(tested) if label in together]
    counts, totals = test.bincount(minlength=6), together.bincount(minlength=6)
    for name, rows in found.items():
        share = counts * train[name].bincount(minlength=6) / totals.clamp(min=1)
        assert (test[rows].bincount(minlength=6) - share).abs().max() < 1
    backwards = proportional(dict(reversed(train.items())), test, seed)
    assert all(torch.equal(found[name], backwards[name]) for name in train)


def test_a_skewed_division_carries_over_to_the_test_set() -> None:
    train, test = torch.arange(2000) % 10, torch.arange(1000) % 10
    parts = dirichlet(train, 5, 0.5, 0)
    found = proportional({str(k): train[rows] for k, rows in enumerate(parts)}, test, 0)
    for k, rows in enumerate(parts):
        # 200 training and 100 test rows of each class.
        halves = torch.tensor(counts_of(train, rows, 10)) / 2
        assert (torch.tensor(counts_of(test, found[str(k)], 10)) - halves).abs().max() < 1


def test_a_test_set_for_nobody_is_refused() -> None:
    with pytest.raises(BadInput, match="no clients"):
        proportional({}, repeated(3), 0)
