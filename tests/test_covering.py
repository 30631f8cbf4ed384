"""The selection of combinations that are fast."""

from covering import covering


def test_all_combinations_are_there_and_every_value_is_in_a_fast_one() -> None:
    names, combinations = covering(a=[1, 2, 3], b={"x": 10, "y": 20}).args
    assert names == ("a", "b")
    assert {one.values for one in combinations} == {(a, b) for a in (1, 2, 3) for b in (10, 20)}
    fast = {one.values for one in combinations if not one.marks}
    assert fast == {(1, 10), (2, 20), (3, 10)}
    assert {one.id for one in combinations if one.marks} == {"1-y", "2-x", "3-y"}
