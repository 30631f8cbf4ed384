"""Every method over messages: the server's state and every client's are those of one process, bit for bit."""

from pathlib import Path

from federation.grids import grid, states
from methods.sampling import some_methods
from protofed.methods import METHODS
from protofed.testing.federations import after, assert_same, federation, memories


@some_methods
def test_a_method_over_messages_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    far, sites = grid(tmp_path, method)
    there = far.finish(after(3, far))
    near = federation(method)
    here = near.finish(after(3, near))
    assert not there.failures
    assert_same(there.server, here.server, "the server's state over messages")
    assert_same(states(sites, there, far), memories(here), "what clients keep")
