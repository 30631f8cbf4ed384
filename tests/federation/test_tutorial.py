"""docs/tutorials/federation.md, done as it is written: a server and three people, each with a folder of their own, type
the commands of the page and change the lines that it names. Only the installation is left out."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from federation.machines import Machines, free_port
from protofed import wire
from protofed.engine.federation import Federation
from protofed.federation.site_data import own_part
from protofed.runs.config import config as configuration
from protofed.testing.federations import after

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "federation.md"
ADDRESS = "server.example.org:8000"
"""That of the page."""
STEPS = [
    "1. Install, everywhere",
    "2. Server: make the federation",
    "3. Site A: settings and key",
    "4. Server: let the sites in",
    "5. Site A: check",
    "6. Site A: take part",
    "7. Server: run",
]


def sections() -> dict[str, str]:
    """The text below each heading."""
    pieces = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def commands(section: str) -> list[str]:
    return [line for block in blocks(section, "sh") for line in block.splitlines()]


def for_site(text: str, site: str) -> str:
    """What the page says for site A, as another one reads it."""
    return re.sub(r"\bA\b", site, text)


def edited(path: Path, changes: str) -> None:
    """The file with the lines of a block of the page in the place of those that it has for the same keys."""
    text, section = path.read_text(), ""
    for line in changes.splitlines():
        if line.startswith("["):
            section = line
        elif line:
            key = re.escape(line.partition(" = ")[0])
            inside = rf"(^{re.escape(section)}$(?:\n(?!\[).*)*?\n){key} = .*$"
            text, count = re.subn(inside, lambda found: found[1] + line, text, flags=re.MULTILINE)  # noqa: B023
            assert count == 1, f"{path} has no line for {key} in {section}"
    path.write_text(text)


class People(Machines):
    """Each of them is at a terminal, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.homes = {name: folder / name for name in ("server", "A", "B", "C")}
        for home in self.homes.values():
            home.mkdir(mode=0o700)
        (folder / "bin").mkdir()
        shim = folder / "bin" / "protofed"
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m protofed.cli.start "$@"\n')
        shim.chmod(0o755)

    @property
    def _env(self) -> dict[str, str]:
        own = super()._env
        return {**own, "PATH": f"{self.folder / 'bin'}:{own.get('PATH', '/usr/bin:/bin')}", "COLUMNS": "100"}

    def types(self, who: str, line: str, name: str = "") -> str:
        """The name under which what they typed is running."""
        name = name or f"{who}-{self._starts:02d}"
        line = line.replace(ADDRESS, f"127.0.0.1:{self.port}")
        self._popen(name, ["sh", "-c", f"cd '{self.homes[who]}' && exec {line}"])
        return name

    def does(self, who: str, line: str, code: int = 0) -> str:
        """What is on the screen when it is done."""
        name = self.types(who, line)
        assert self.ended(name) == code, self.everything()
        return self.text(name)


@pytest.fixture
def people(tmp_path: Path) -> Iterator[People]:
    found = People(tmp_path)
    yield found
    found.close()


def test_three_people_do_what_the_page_says(people: People) -> None:
    page = sections()
    assert [heading for heading in page if heading[:1].isdigit()] == STEPS
    server, sites = people.homes["server"], ("A", "B", "C")

    for line in commands(page[STEPS[1]]):
        people.does("server", line)
    for site in sites:
        shutil.move(server / "fed" / "kits" / site, people.homes[site] / site)  # by mail

    clients = settings(people, page[STEPS[2]])
    for site in sites:
        for line in commands(page[STEPS[2]]):
            shown = people.does(site, for_site(line, site))
        assert "Its fingerprint" in shown
        shutil.copy(people.homes[site] / site / f"{site}.pub", server)

    for line in commands(page[STEPS[3]]):
        assert "is enrolled" in people.does("server", line)

    for site in sites:
        (line,) = commands(page[STEPS[4]])
        shown = people.does(site, for_site(line, site), code=2)  # the server does not run yet
        assert [text for text in shown.splitlines() if text.startswith("BAD")] == [
            text for text in shown.splitlines() if "is out of reach" in text
        ]
        people.does(site, for_site(line, site) + " --offline")

    for site in sites:
        (line,) = commands(page[STEPS[5]])
        people.types(site, for_site(line, site), name=f"site-{site}")

    (experiment,) = blocks(page[STEPS[6]], "toml")
    (server / "first.toml").write_text(experiment)
    (line,) = commands(page[STEPS[6]])
    people.types("server", line, name="serve")
    people.wait_for("serve", "all sites take part")
    shown = people.does("server", "protofed federation status fed")
    assert re.search("^A: there since", shown, re.MULTILINE)
    assert re.search(r"results/first: \d+ of 10 rounds done$", shown, re.MULTILINE)
    assert people.ended("serve") == 0, people.everything()
    assert "results/first: done" in people.text("serve")

    for site in sites:
        people.running[f"site-{site}"].terminate()
        assert people.ended(f"site-{site}") == 0
        assert "what the clients remember is kept" in people.text(f"site-{site}")
    assert_as_in_one_process(server, clients)


def settings(people: People, section: str) -> list[str]:
    """Changes the lines of each site.toml that the page names. The clients of all."""
    (changes,) = blocks(section, "toml")
    others = dict(re.findall(r'\b([BC]) takes `"([\w-]+)"`', section))
    assert others.keys() == {"B", "C"}
    (first,) = re.findall(r'clients = \["([\w-]+)"\]', changes)
    for site, client in {"A": first, **others}.items():
        edited(people.homes[site] / site / "site.toml", changes.replace(first, client))
    return [first, *others.values()]


def assert_as_in_one_process(server: Path, clients: list[str]) -> None:
    """The numbers are those of the same run in one process with these three clients, as the page says."""
    config = configuration.load(server / "first.toml")
    near = Federation(config.method, own_part(config.task.build(), clients), config.training)  # type: ignore[union-attr]
    wanted = wire.to_arrays(near.finish(after(config.training.rounds, near)).server)
    last = sorted((server / "results" / "first" / "checkpoint").glob("0*/server.safetensors"))[-1]
    found = wire.decode_arrays(last.read_bytes())
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
