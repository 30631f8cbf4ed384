"""A site's own file."""

from pathlib import Path

import pytest

from protofed.errors import BadInput
from protofed.federation import keys
from protofed.federation.keyring import Keyring
from protofed.federation.messages import Limits
from protofed.federation.own_data import Telling
from protofed.federation.policy import Policy, read
from protofed.federation.site_check import check
from protofed.federation.site_data import SiteData
from protofed.federation.site_privacy import Spent
from protofed.privacy.account import mu_of
from protofed.privacy.ledger import Entry, Ledger

GOOD = """
[site]
name = "A"
federation = "00000000000000000000000000000000"
server = "server.example.org:8000"

[data]
clients = ["pen-0", "pen-1"]

[data.task]
name = "minidigits"

[policy]
methods = ["fedavg", "fpl"]
networks = ["small_cnn"]
steps = ["train"]
most_epochs = 3
most_rounds = 40
most_bytes = 5000000
most_hours = 1.5
order_minutes = 2.0
min_class_count = 6
min_rows = 7
columns = ["age"]
tell_classes = false
require_secure_sums = true
believed_keys = ["12345 abcde"]
require_privacy = true
max_epsilon = 3.5
max_epsilon_delta = 1e-6
dry_run = true
"""


def settings(folder: Path, text: str = GOOD) -> Path:
    (folder / "site.toml").write_text(text)
    return folder


def test_all_that_a_site_limits_reaches_the_site(tmp_path: Path) -> None:
    found = read(settings(tmp_path))
    limits = Limits(("fedavg", "fpl"), ("small_cnn",), ("train",), 3, 40, 5_000_000, 1.5, 6, True, True, 3.5, 1e-6)
    assert found.policy.limits() == limits
    assert found.policy.believed_keys == ["12345 abcde"]
    assert found.policy.telling() == Telling(False, 6, ("age",), 7)
    assert (found.policy.order_minutes, found.policy.dry_run) == (2.0, True)
    assert (found.site.name, found.site.server, found.clients) == ("A", "server.example.org:8000", ("pen-0", "pen-1"))


def test_a_site_has_its_own_clients_examples_alone(tmp_path: Path) -> None:
    data = read(settings(tmp_path)).data()
    assert isinstance(data, SiteData)
    assert data.clients == ("pen-0", "pen-1")
    assert data.settings["name"] == "minidigits"


def test_a_site_that_says_nothing_is_careful() -> None:
    assert Policy().limits().class_count == 5
    assert Policy().telling() == Telling(True, 5, (), 5)
    assert Policy().most_hours == 24.0
    limits = Policy().limits()
    assert (limits.secure_sums, limits.privacy, limits.epsilon) == (False, False, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("most_epochs = 3", "most_epoch = 3", "did you mean 'most_epochs'"),
        ("[policy]", "[polcy]", "polcy"),
        ("[policy]", "[policy]\nclients = []", "it is a key of [data]"),
        ("most_epochs = 3", "most_epochs = 0", "most_epochs"),
        ("most_epochs = 3", "most_epochs = true", "most_epochs"),
        ("most_epochs = 3", 'most_epochs = "3"', "most_epochs"),
        ("most_hours = 1.5", "most_hours = inf", "most_hours"),
        ("most_hours = 1.5", "most_hours = -1.0", "most_hours"),
        ("dry_run = true", "dry_run = 1", "dry_run"),
        ('methods = ["fedavg", "fpl"]', 'methods = ["fedavgg"]', "did you mean 'fedavg'"),
        ('methods = ["fedavg", "fpl"]', 'methods = "fedavg"', "methods"),
        ('name = "A"', 'name = "../A"', "site.name"),
        ('name = "A"', 'name = "A\\n"', "site.name"),
        ('federation = "0', 'federation = "x', "site.federation"),
        (":8000", "", "HOST:PORT"),
        ('name = "minidigits"', 'name = "minidigit"', "did you mean 'minidigits'"),
        ('name = "minidigits"', 'name = "os:path"', "data.task.name"),
        ('name = "minidigits"', 'name = "custom"\npath = "scans"', "data.task.path: must be the full path"),
        ('name = "minidigits"', 'name = "custom"', "data.task.path: must be the full path"),
        ('[data.task]\nname = "minidigits"', "", "data.task"),
        ('[site]\nname = "A"', "[site]", "site.name"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(BadInput) as error:
        read(settings(tmp_path, GOOD.replace(old, new, 1)))
    assert told in str(error.value)


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("most_epochs = 3", "most_epoch = 3").replace(":8000", "").replace("dry_run = true", "dry = 1")
    with pytest.raises(BadInput) as error:
        read(settings(tmp_path, text))
    assert all(word in str(error.value) for word in ("most_epoch", "HOST:PORT", "policy.dry"))


def test_a_folder_without_the_file_is_no_site(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read(tmp_path)


def test_a_check_says_whose_keys_are_believed_and_what_was_released(tmp_path: Path) -> None:
    folder = tmp_path / "A"
    folder.mkdir()
    found = read(settings(folder))
    key = keys.new_private_key(found.key)
    keys.write_public(found.server_key, keys.public_text(key.public_key()))
    found.state.mkdir(mode=0o700)
    other = Keyring(found.site.federation, "B", keys.new_private_key(tmp_path / "b"), tmp_path / "state")
    found.keyring(key).keep([other.own(["pen-2"])])
    entry = Entry("run", 0, "round", 1, "pen-0", "gradients", 1, mu_of(2.0, 1e-6) ** 2, "d")
    Ledger(Spent(found.state).path, [entry])
    texts = [finding.text for finding in check(found, reach=False) if finding.is_good]
    mark = keys.fingerprint(other.private.public_key())
    assert f"the key of B, by the server: {mark} (is that what B says on the telephone?)" in texts
    assert "pen-0 has released ε = 2 of 3.5 in all runs, at δ = 1e-06" in texts
