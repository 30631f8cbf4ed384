"""The folders of a federation: what goes to whom, and whose keys are let in."""

import stat
from pathlib import Path

import pytest

from protofed.errors import BadInput

pytest.importorskip("cryptography", reason="kits need cryptography, which the extra flower brings")

from protofed.federation import certificates, kits, policy
from protofed.federation.keys import fingerprint, new_private_key, public_text, read_private_key, read_public_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kits.init(tmp_path / "fed", ["A", "B", "C"], "server.example.org:8000")
    return tmp_path / "fed"


def public(tmp_path: Path, name: str) -> str:
    return public_text(new_private_key(tmp_path / f"{name}.key").public_key())


def test_a_kit_holds_no_secret_and_all_that_a_site_needs(folder: Path) -> None:
    for site in "ABC":
        kit = folder / "kits" / site
        assert {p.name for p in kit.iterdir()} == {"README.md", "site.toml", "ca.crt", "server.pub"}
        assert not any(b"PRIVATE" in p.read_bytes() for p in kit.iterdir())
        settings = policy.read(kit)
        assert (settings.site.name, settings.site.server) == (site, "server.example.org:8000")
        mark = fingerprint(read_public_key(kit / "server.pub"))
        assert mark in (kit / "README.md").read_text()
        assert mark == fingerprint(read_private_key(folder / "server" / "signing.key").public_key())


def test_secrets_of_the_server_are_for_its_user_alone(folder: Path) -> None:
    assert stat.S_IMODE((folder / "server").stat().st_mode) == 0o700
    for name in ("ca.key", "server.key", "signing.key", "control.token"):
        assert stat.S_IMODE((folder / "server" / name).stat().st_mode) == 0o600


def test_the_server_is_certified_for_its_address_and_itself(folder: Path) -> None:
    names = certificates.hosts((folder / "server" / "server.crt").read_bytes())
    assert names == ["server.example.org", "localhost", "127.0.0.1"]


@pytest.mark.parametrize(
    ("address", "listen"), [("server.example.org:8000", "0.0.0.0:8000"), ("127.0.0.1:8000", "127.0.0.1:8000")]
)
def test_a_server_that_only_this_machine_reaches_listens_to_no_other(tmp_path: Path, address: str, listen: str) -> None:
    assert kits.init(tmp_path / "fed", ["A"], address).settings.listen == listen


def test_federations_differ(tmp_path: Path) -> None:
    one, other = (kits.init(tmp_path / name, ["A"], "localhost:8000") for name in ("one", "other"))
    assert one.settings.federation != other.settings.federation
    assert one.token != other.token
    assert one.authority != other.authority


def test_a_federation_is_not_made_over_another(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(BadInput, match="already"):
        kits.init(folder, ["A"], "localhost:8000")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("sites", [[], ["../A"], ["A/B"], [""], ["A", "a"], ["A", "A"], ["-A"], ["A\n"], ["A" * 41]])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, sites: list[str]) -> None:
    with pytest.raises(BadInput):
        kits.init(tmp_path / "fed", sites, "localhost:8000")
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize(
    "address", ["server", "server:", ":8000", "server:0", "server:70000", "a b:1", "::1:80", "x/y:1"]
)
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(BadInput):
        kits.init(tmp_path / "fed", ["A"], address)
    assert not (tmp_path / "fed").exists()


def test_a_site_is_let_in_by_its_key_for_its_clients(folder: Path, tmp_path: Path) -> None:
    text = public(tmp_path, "A")
    kits.enrol(folder, "A", text, ["ward-1", "ward-2"])
    server = kits.read_server(folder)
    assert [*server.keys] == ["A"]
    assert public_text(server.keys["A"]) == text
    assert server.sites["A"].clients == ("ward-1", "ward-2")
    assert server.sites["B"].public_key == ""


def test_a_new_key_takes_the_place_of_a_lost_one(folder: Path, tmp_path: Path) -> None:
    kits.enrol(folder, "A", public(tmp_path, "old"), ["ward-1"])
    new = public(tmp_path, "new")
    kits.enrol(folder, "A", new, ["ward-1"])
    assert public_text(kits.read_server(folder).keys["A"]) == new


def test_who_may_not_be_enrolled(folder: Path, tmp_path: Path) -> None:
    text = public(tmp_path, "A")
    kits.enrol(folder, "A", text, ["ward-1"])
    with pytest.raises(BadInput, match="none of the sites"):
        kits.enrol(folder, "D", public(tmp_path, "D"))
    with pytest.raises(BadInput, match="the key of A"):
        kits.enrol(folder, "B", text)
    with pytest.raises(BadInput, match="ward-1: already"):
        kits.enrol(folder, "B", public(tmp_path, "B"), ["ward-2", "ward-1"])
    with pytest.raises(BadInput, match="not a public key"):
        kits.enrol(folder, "B", "no key")
    assert [*kits.read_server(folder).keys] == ["A"]


def test_a_server_s_folder_that_others_can_open_is_refused(folder: Path) -> None:
    (folder / "server").chmod(0o755)
    with pytest.raises(BadInput, match="chmod 700"):
        kits.read_server(folder)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("listen", "listens", "did you mean 'listen'"),
        ("[sites.A]", "[site.A]", "site"),
        ("[sites.A]\npublic_key", "[sites.A]\npublic_keys", "did you mean 'public_key'"),
        ("[sites.A]", "[sites.'../A']", "cannot name a site"),
    ],
)
def test_what_is_wrong_with_the_server_s_file_is_said(folder: Path, old: str, new: str, told: str) -> None:
    path = folder / "server" / "server.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BadInput) as error:
        kits.read_server(folder)
    assert told in str(error.value)


def test_a_renewed_certificate_has_the_same_authority(folder: Path, tmp_path: Path) -> None:
    kits.enrol(folder, "A", public(tmp_path, "A"))
    old = (folder / "server" / "server.crt").read_bytes()
    authority = (folder / "server" / "ca.crt").read_bytes()
    server = kits.renew(folder, "new.example.org:9000")
    assert (folder / "server" / "server.crt").read_bytes() != old
    assert server.authority == authority
    assert certificates.hosts((folder / "server" / "server.crt").read_bytes())[0] == "new.example.org"
    assert kits.read_server(folder).settings.address == "new.example.org:9000"
    assert [*kits.read_server(folder).keys] == ["A"]
