"""The clients that a site's key may speak for."""

from pathlib import Path

import pytest

from federation.grids import CLIENTS, sites_of
from protofed.errors import BadInput
from protofed.federation.enrolling import enrolled
from protofed.federation.in_process import InProcess


def test_a_key_speaks_for_the_clients_that_were_enrolled_with_it(tmp_path: Path) -> None:
    link = InProcess(sites_of(tmp_path))
    assert {*enrolled(link, 5.0).site_of} == {client for own in CLIENTS.values() for client in own}
    assert {*enrolled(link, 5.0, {"north": ("ann", "bob", "zoe")}).site_of} == {*enrolled(link, 5.0).site_of}
    with pytest.raises(BadInput, match=r"north.*'bob'") as error:
        enrolled(link, 5.0, {"north": ("ann", "cyd"), "west": ("eve",)})
    assert "south" not in str(error.value)
