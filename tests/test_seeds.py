"""Seeds are the same on every machine and unrelated between places."""

import pytest
import torch

from protofed.seeds import derive_seed, generator


@pytest.mark.parametrize(
    ("path", "seed"),
    [((0,), 3696793467068528757), ((1, "fit", "client", 3, 0), 3416000433226221231)],
)
def test_seeds_never_change(path: tuple[int, ...], seed: int) -> None:
    """A change here would silently change every published result."""
    assert derive_seed(*path) == seed


def test_every_element_of_the_path_matters() -> None:
    paths = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a"), (0, 1, "a"), (0, "a1"), (0, "a", "1")]
    assert len({derive_seed(*path) for path in paths}) == len(paths)


def test_words_are_not_run_together() -> None:
    assert derive_seed(0, "ab", "c") != derive_seed(0, "a", "bc")


def test_seeds_fit_a_signed_word_and_use_all_of_it() -> None:
    seeds = [derive_seed(root) for root in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert len(set(seeds)) == 200


def test_generators_of_one_place_draw_the_same() -> None:
    assert torch.equal(torch.rand(5, generator=generator(3, "x")), torch.rand(5, generator=generator(3, "x")))
    assert not torch.equal(torch.rand(5, generator=generator(3, "x")), torch.rand(5, generator=generator(4, "x")))
