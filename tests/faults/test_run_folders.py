"""Run folders that somebody has changed: links and pipes in them, damage, checkpoints from a copy, and folders that go
while a run works in them (S11, R5, R13, R14)."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import FrameType
from typing import Any

import pytest
from safetensors.torch import load

from cli.test_cli import protofed
from faults.kills import fingerprint
from faults.shim import Shim, fails
from protofed import wire
from protofed.errors import BadInput, RunFailed
from protofed.reports.figures import save_figure
from protofed.runs.config.config import Config, parse
from protofed.runs.results import Round, parsed
from protofed.runs.run_process import folder_of
from protofed.runs.runner import Experiment, Silent, execute
from protofed.runs.store import checkpoint, client_state, disk, folder, lock, opening
from protofed.runs.store.folder import RunFolder
from protofed.runs.sweep import sweep
from run_doubles import small_experiment

ROUNDS, SAVED = 5, 3


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Two of three clients take part in a round, so that older files hold some of the memories."""
    whole = replace(small_experiment("moon", ROUNDS), config="[task]\nname = 'small'\n")
    training = replace(whole.federation.training, fraction=0.5)
    return replace(whole, federation=replace(whole.federation, training=training))


@pytest.fixture(scope="module")
def expected(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run ends with that nobody touched."""
    path = tmp_path_factory.mktemp("whole")
    execute(experiment, RunFolder(path))
    return fingerprint(path, experiment)


@pytest.fixture(scope="module")
def stopped(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "run"
    run = RunFolder(path)
    execute(experiment, run, should_stop=lambda: run.rounds_saved >= SAVED)
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    """A run that was stopped after three of five rounds."""
    copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """Whoever opens a pipe that nobody writes to waits for ever."""

    def too_late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, 120)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# ---- S11: links, pipes and names


INNER = [
    *("config.toml", "environment.json", "rounds.jsonl", "lock", "done", "config-until-3.toml", "checkpoint"),
    *(".writing-config.toml", ".writing-rounds.jsonl", ".writing-done", ".writing-environment.json"),
]
IN_CHECKPOINTS = [
    *("memories", "000002", "000003", "000099", "damaged-000001", ".writing-x", ".writing-000004", ".removing-000001"),
    *("000003/manifest", "000003/server.safetensors", "000003/rounds.jsonl", "memories/000003.safetensors"),
    *("memories/x", "memories/000004.safetensors", "memories/.writing-000004.safetensors"),
]
NAMES = [*INNER, *(f"checkpoint/{name}" for name in IN_CHECKPOINTS)]


def link_to_what_it_was(path: Path, outside: Path) -> None:
    """To a good copy elsewhere, or to a file of somebody's if there is nothing yet."""
    if path.exists():
        shutil.move(path, outside / "moved")
    path.symlink_to(outside / "moved" if (outside / "moved").exists() else outside / "file")


def link_to_a_folder(path: Path, outside: Path) -> None:
    gone(path)
    path.symlink_to(outside / "folder")


def link_to_nothing(path: Path, outside: Path) -> None:
    gone(path)
    path.symlink_to(outside / "not-there")


def pipe(path: Path, outside: Path) -> None:
    gone(path)
    os.mkfifo(path)


def other_name_of_a_file(path: Path, outside: Path) -> None:
    gone(path)
    path.hardlink_to(outside / "file")


def gone(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


TRAPS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a good copy": link_to_what_it_was,
    "a link to a folder": link_to_a_folder,
    "a link to nothing": link_to_nothing,
    "a pipe": pipe,
    "another name of a file": other_name_of_a_file,
}


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What is not the run's."""
    path = tmp_path / "outside"
    (path / "folder").mkdir(parents=True)
    for name in ("file", "folder/one", "folder/manifest", "folder/000004.safetensors"):
        (path / name).write_text("somebody's")
    return path


def resuming_error(experiment: Experiment, folder: Path) -> str:
    """What is said when a run is resumed; nothing if it comes to its end."""
    try:
        execute(experiment, RunFolder(folder), resume=True)
    except (BadInput, RunFailed) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_outside_a_run_folder_is_written_or_removed_whatever_lies_in_it(
    trap: str, run: Path, outside: Path, experiment: Experiment, expected: str, tmp_path: Path
) -> None:
    """S11. Everything that has a name in a run's folder, in turn: resuming and showing go well or end in an error with
    a name, and do not wait."""
    good = 0
    for number, name in enumerate(NAMES):
        place, around = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "outside"
        copytree(run, place)
        copytree(outside, around)
        TRAPS[trap](place / name, around)
        before = contents(around)
        if place.joinpath("config.toml").is_file():
            with contextlib.suppress(SystemExit):
                assert "Traceback" not in protofed("show", place).stderr, name
        error = resuming_error(experiment, place)
        if error:
            assert str(place) in error, name
        else:
            assert fingerprint(place, experiment) == expected, name
            good += 1
        assert contents(around) == before, f"{name}: something outside was touched"
    print(f"{trap}: {len(NAMES)} names, {good} runs went on")
    assert good >= 5, "nearly everything is refused"


def test_a_link_in_the_place_of_a_file_is_named(run: Path, outside: Path, experiment: Experiment) -> None:
    """S11. In every place from which a run reads."""
    for name, where in {
        "config.toml": "config.toml cannot be read: it is a link",
        "environment.json": "environment.json cannot be read: it is a link",
        "lock": "cannot write to .*: it is a link",
        "checkpoint": "checkpoint cannot be read: it is a link",
    }.items():
        shutil.move(run / name, outside / name)
        (run / name).symlink_to(outside / name)
        with pytest.raises((BadInput, RunFailed), match=where):
            execute(experiment, RunFolder(run), resume=True)
        (run / name).unlink()
        shutil.move(outside / name, run / name)


def test_a_link_to_a_good_checkpoint_elsewhere_is_not_a_checkpoint(
    run: Path, outside: Path, experiment: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("000003", "000003/server.safetensors", "000003/manifest", "memories/000003.safetensors"):
        path = run / "checkpoint" / name
        shutil.move(path, outside / "moved")
        path.symlink_to(outside / "moved")
        loaded = checkpoint.load(run / "checkpoint", experiment.federation, experiment.identity)
        assert loaded is not None
        assert loaded.state.round == 2, name
        assert "000003 is damaged" in caplog.text, name
        assert "it is a link" in caplog.text, name
        caplog.clear()
        path.unlink()
        shutil.move(outside / "moved", path)


def test_the_folder_itself_may_be_a_link(run: Path, tmp_path: Path, experiment: Experiment, expected: str) -> None:
    """Its path is the user's word."""
    (tmp_path / "link").symlink_to(run)
    execute(experiment, RunFolder(tmp_path / "link"), resume=True)
    assert fingerprint(run, experiment) == expected


def test_a_new_file_is_never_what_a_link_leads_to(outside: Path) -> None:
    (outside / "link").symlink_to(outside / "file")
    with opening.folder(outside) as own, pytest.raises(FileExistsError):
        disk.write(own, "link", b"ours")
    assert (outside / "file").read_text() == "somebody's"


@pytest.mark.parametrize("name", ["..", ".", "", "../outside/file", "/etc/hostname", "a/b", "a\0b"])
def test_a_name_is_one_in_the_folder(name: str, outside: Path) -> None:
    with pytest.raises(OSError, match="is not the name of a file in a run's folder"):
        opening.read(outside / "folder", name)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full", "/proc/self/fd"])
def test_what_is_not_a_file_is_not_read(name: str) -> None:
    path = Path(name)
    with pytest.raises(OSError, match=r"not a file|Is a directory|is a link"):
        opening.read(path.parent, path.name, most=10)


def test_a_small_file_that_is_large_is_not_read(run: Path) -> None:
    for name, read in {"config.toml": RunFolder.read_config, "environment.json": RunFolder.read_environment}.items():
        with (run / name).open("ab") as file:
            file.truncate(10**8)  # takes no room on the disk
        with pytest.raises(BadInput, match=rf"{name} cannot be read: it is larger than 1000000 bytes"):
            read(RunFolder(run))


def test_a_lock_that_is_also_somebodys_file_is_refused(run: Path, outside: Path, experiment: Experiment) -> None:
    (run / "lock").unlink()
    (run / "lock").hardlink_to(outside / "file")
    with pytest.raises(BadInput, match="lock is also a file elsewhere"):
        execute(experiment, RunFolder(run), resume=True)
    assert (outside / "file").read_text() == "somebody's"


def test_what_a_lock_says_of_its_holder_is_printable(run: Path, experiment: Experiment) -> None:
    (run / "lock").write_bytes(b"\x1b[2Jon elsewhere since ever")
    with pytest.raises(BadInput, match=r"\?\[2Jon elsewhere since ever"):
        execute(experiment, RunFolder(run), resume=True)


def with_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what a manifest says, with the checksum that it must have then."""
    facts = json.loads((path / "manifest").read_bytes().splitlines()[0])
    changed = change(facts)
    line = changed if isinstance(changed, bytes) else json.dumps(facts if changed is None else changed).encode()
    (path / "manifest").write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def renamed(table: dict[str, Any], old: str, new: str) -> None:
    table[new] = table.pop(old)


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file outside": (lambda m: m["files"].update({"../../../x": "0" * 64}), "names the files"),
    "no files": (lambda m: m["files"].clear(), "names the files"),
    "a memory outside": (lambda m: renamed(m["memories"], "000003.safetensors", "../../x"), "as memories"),
    "a memory by another name": (lambda m: renamed(m["memories"], "000003.safetensors", "x"), "as memories"),
    "no list of clients": (lambda m: m["memories"]["000003.safetensors"].update(clients=3), "what is in memories/"),
    "a client that is not there": (lambda m: m["memories"]["000003.safetensors"]["clients"].append("c9"), "c9|clients"),
    "memories that are text": (lambda m: m.update(memories="x"), "no table of memories"),
    "no strikes": (lambda m: m.update(strikes=[1]), "no table of strikes"),
    "a round that is text": (lambda m: m.update(round="3"), "does not say its round"),
    "no run": (lambda m: m.pop("run") and None, "does not say its run"),
    "a list": (lambda m: [m], "does not say its format"),
    "no JSON": (lambda m: b"{", "manifest: "),
    "deep nesting": (lambda m: b"[" * 100_000, "manifest: "),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_was_made_to_deceive_is_damage(
    case: str, run: Path, outside: Path, experiment: Experiment, caplog: pytest.LogCaptureFixture
) -> None:
    """S11. Its checksum is right."""
    change, why = MANIFESTS[case]
    with_manifest(run / "checkpoint" / "000003", change)
    before = contents(outside)
    loaded = checkpoint.load(run / "checkpoint", experiment.federation, experiment.identity)
    assert loaded is not None
    assert loaded.state.round == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "000003 is damaged" in said
    assert any(word in said for word in why.split("|")), said
    assert contents(outside) == before


def test_a_picture_of_a_report_takes_the_place_of_a_link(outside: Path, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    (tmp_path / "picture.png").symlink_to(outside / "file")
    save_figure(Figure(figsize=(1, 1)), tmp_path / "picture.png")
    assert (outside / "file").read_text() == "somebody's"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "picture.png").is_symlink()


# ---- R5: which checkpoints count


def damaged_later_ones(run: Path) -> None:
    """Two checkpoints with higher numbers that are not whole, and whose memories are."""
    for number in (8, 9):
        path = run / "checkpoint" / f"{number:06d}"
        copytree(run / "checkpoint" / "000003", path)
        with_manifest(path, lambda m, number=number: m.update(round=number))  # type: ignore[misc]
        (path / "server.safetensors").write_bytes(b"damaged")


def test_checkpoints_that_are_not_whole_never_cost_those_that_are(
    run: Path, experiment: Experiment, expected: str
) -> None:
    """R5. The newest two are damaged, and older ones were put back from a copy: the run goes on from these, and each of
    its states is there when it is stopped again."""
    damaged_later_ones(run)
    folder = RunFolder(run)
    for rounds in (4, 5):
        saved = Stop(rounds)
        execute(experiment, folder, resume=True, observer=saved, should_stop=saved.is_reached)
        there = {path.name for path in folder.checkpoints.glob("00*")}
        assert there == {f"{rounds - 1:06d}", f"{rounds:06d}"}
    assert fingerprint(run, experiment) == expected
    for number in (8, 9):
        assert (run / "checkpoint" / f"damaged-00000{number}" / "server.safetensors").read_bytes() == b"damaged"


class Stop(Silent):
    def __init__(self, rounds: int) -> None:
        self.rounds, self.done = rounds, 0

    def round(self, result: Round) -> None:
        self.done = result.round

    def is_reached(self) -> bool:
        return self.done >= self.rounds


def test_a_save_that_fails_removes_no_good_checkpoint_for_a_damaged_one(
    run: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5, R4. It fails before it could set anything aside."""
    damaged_later_ones(run)
    names = {*os.listdir(run / "checkpoint" / "memories")}
    (run / "checkpoint" / "000003" / "manifest").write_bytes(b"damaged")  # nobody can say any more what it needs
    loaded = checkpoint.load(run / "checkpoint", experiment.federation, experiment.identity)
    assert loaded is not None
    assert loaded.state.round == 2
    later = checkpoint.Checkpoint(experiment.federation.advance(loaded.state), loaded.rounds)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", Shim(fails(1, errno.ENOSPC)))
        with pytest.raises(RunFailed, match="000002, is intact"):
            checkpoint.save(run / "checkpoint", later, experiment.federation, experiment.identity)
    assert (run / "checkpoint" / "000002").is_dir()
    assert (run / "checkpoint" / "000003").is_dir()
    assert {*os.listdir(run / "checkpoint" / "memories")} == names


def test_a_damaged_checkpoint_that_is_set_aside_keeps_its_memories_and_takes_no_others_name(
    run: Path, experiment: Experiment, expected: str
) -> None:
    """R5. It is whole again as soon as its file is put back."""
    server = run / "checkpoint" / "000003" / "server.safetensors"
    good = server.read_bytes()
    (run / "checkpoint" / "damaged-000003").mkdir()
    server.write_bytes(b"damaged")
    execute(experiment, RunFolder(run), resume=True)
    assert fingerprint(run, experiment) == expected
    aside = run / "checkpoint" / "damaged-000003-2"
    assert (aside / "server.safetensors").read_bytes() == b"damaged"
    (aside / "server.safetensors").write_bytes(good)
    aside.rename(run / "checkpoint" / "000003")
    assert checkpoint.verify.is_whole(run / "checkpoint", "000003")


def test_a_save_reads_nothing_that_it_has_written_or_read_before(
    run: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole is known: a run that goes on hashes no file of an earlier round again."""
    read: list[str] = []
    real = hashlib.file_digest

    def watched(file: Any, kind: Any) -> Any:
        read.append(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        return real(file, kind)

    monkeypatch.setattr("protofed.runs.store.verify.hashlib.file_digest", watched)
    execute(experiment, RunFolder(run), resume=True)
    assert len(read) == len(set(read)), "a file was read twice"
    assert all("/000002/" in one or "/000003/" in one or "/memories/" in one for one in read)
    assert not any(f"memories/00000{number}" in one for one in read for number in (4, 5))


# ---- R13: memories


def test_a_file_of_memories_is_one_of_safetensors_and_each_clients_part_too(run: Path, experiment: Experiment) -> None:
    for path in (run / "checkpoint" / "memories").iterdir():
        arrays = load(path.read_bytes())
        assert arrays
        for name, data in arrays.items():
            assert wire.decode(bytes(data.tolist()), experiment.federation.initial_client_state(name.removesuffix("/")))


def flipped(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class After(Silent):
    """Does something once, after so many rounds."""

    def __init__(self, rounds: int, act: Callable[[], object]) -> None:
        self.rounds, self.act = rounds, act

    def round(self, result: Round) -> None:
        if result.round == self.rounds:
            self.act()


def test_memories_that_change_while_a_run_goes_on_are_never_used(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13. With nothing at hand, every state is read from its file."""
    monkeypatch.setattr(client_state, "HELD_BYTES", 0)
    monkeypatch.setattr(
        "protofed.runs.store.verify.refuse_changed", lambda folder, shards: None
    )  # the saves' own check
    memories = tmp_path / "checkpoint" / "memories"
    act = After(2, lambda: [flipped(path) for path in memories.iterdir()])
    with pytest.raises(
        RunFailed, match=r"memories/00000\d.safetensors no longer holds what client c\d keeps"
    ) as caught:
        execute(experiment, RunFolder(tmp_path), observer=act)
    assert "put it back from a copy" in str(caught.value)


@pytest.mark.parametrize("damage", [flipped, Path.unlink], ids=["flipped", "removed"])
def test_a_run_whose_memories_change_stops_at_its_next_save_and_goes_on_when_they_are_back(
    damage: Callable[[Path], None], tmp_path: Path, experiment: Experiment, expected: str
) -> None:
    """R13. Otherwise it would save states that no resume can use."""
    memories, copy = tmp_path / "run" / "checkpoint" / "memories", tmp_path / "copy"

    def act() -> None:
        copytree(memories, copy)
        for path in memories.iterdir():
            damage(path)

    with pytest.raises(RunFailed, match=r"(was changed or removed while the run went on|no longer)") as caught:
        execute(experiment, RunFolder(tmp_path / "run"), observer=After(3, act))
    assert "put it back from a copy" in str(caught.value)
    shutil.rmtree(memories)
    copytree(copy, memories)
    execute(experiment, RunFolder(tmp_path / "run"), resume=True)
    assert fingerprint(tmp_path / "run", experiment) == expected


def test_every_flipped_bit_of_a_clients_part_is_found_when_it_is_read(
    run: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13. And a bit elsewhere in the file costs nobody else anything."""
    monkeypatch.setattr(client_state, "HELD_BYTES", 0)
    loaded = checkpoint.load(run / "checkpoint", experiment.federation, experiment.identity)
    assert loaded is not None
    store = experiment.federation.runtime.store
    client, receipt = next(iter(loaded.state.receipts.items()))
    shard = client_state._SHARDS[receipt]
    part = shard.parts[client]
    path = run / "checkpoint" / "memories" / shard.name
    good = path.read_bytes()
    for at in range(part.begin, part.begin + part.size):
        flipped(path, at)
        with pytest.raises(RunFailed, match=f"no longer holds what client {client} keeps"):
            store.load(client, receipt)
        path.write_bytes(good)
    store.load(client, receipt)


# ---- R14: damage to the other files, and folders that go


@pytest.fixture(scope="module")
def digits() -> Config:
    facts = {"training": {"rounds": 1, "epochs": 1}, "task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    return parse(facts, "a test")


@pytest.fixture(scope="module")
def other_digits(digits: Config) -> Config:
    return replace(digits, training=replace(digits.training, seed=1))


@pytest.fixture(scope="module")
def finished(digits: Config, other_digits: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of two runs that have ended."""
    out = tmp_path_factory.mktemp("out")
    for config in (digits, other_digits):
        execute(config.experiment(), folder_of(config, out))
    return out


def cut(data: bytes) -> bytes:
    """In the middle; of TOML, behind a sign of equality, since half of it may be valid."""
    middle = len(data) // 2
    return data[: max(middle, data.find(b"=", middle) + 1)]


def other_number(data: bytes) -> bytes:
    return data.replace(b'"accuracy": 0.', b'"accuracy": 1.', 1)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "cut near its end": lambda data: data[:-3],
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"not what it was\n",
    "another kind": lambda data: b"[1]",
    "deep": lambda data: b"[" * 100_000,
}
FILES = ("config.toml", "environment.json", "rounds.jsonl")


def assert_named(done: "subprocess.CompletedProcess[str]", name: str, what: str) -> None:
    assert done.returncode == 2, what
    assert "Traceback" not in done.stderr, what
    said = " ".join(done.stderr.split())
    assert name in said, what
    assert any(word in said for word in ("is damaged", "cannot be read")), what
    assert any(word in said for word in ("put it back", "written again")), what


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_finished_run_is_named_and_it_is_said_what_to_do(
    name: str, finished: Path, digits: Config, tmp_path: Path
) -> None:
    """R14, by show and by run."""
    source = folder_of(digits, finished).path
    (tmp_path / "first.toml").write_text((source / "config.toml").read_text())
    cases = {**DAMAGES, **({"another number": other_number} if name == "rounds.jsonl" else {})}
    for damage, change in cases.items():
        place = tmp_path / "out" / digits.identity
        copytree(source, place)
        before = (place / name).read_bytes()
        (place / name).write_bytes(change(before))
        if damage == "another kind" and name == "config.toml":
            pass  # a table of that name: an empty section is no damage that anyone can see
        else:
            assert_named(protofed("show", place), name, f"show, {damage}")
            if (damage, name) != ("empty", "config.toml"):
                done = protofed("run", tmp_path / "first.toml", "--out", tmp_path / "out")
                assert_named(done, name, f"run, {damage}")
        shutil.rmtree(place)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_run_that_is_resumed_is_named_or_made_good(
    name: str, run: Path, experiment: Experiment, expected: str, tmp_path: Path
) -> None:
    """R14. The lines of rounds.jsonl are in the checkpoint too."""
    for damage, change in DAMAGES.items():
        place = tmp_path / damage
        copytree(run, place)
        (place / name).write_bytes(change((place / name).read_bytes()))
        if name == "rounds.jsonl":
            execute(experiment, RunFolder(place), resume=True)
            assert fingerprint(place, experiment) == expected, damage
        else:
            with pytest.raises(BadInput) as caught:
                execute(experiment, RunFolder(place), resume=True)
            assert str(place) in str(caught.value), damage


def test_rounds_that_no_checkpoint_holds_and_nobody_can_read_are_never_begun_afresh(
    run: Path, experiment: Experiment
) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "rounds.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(BadInput, match=r"rounds\.jsonl cannot be read"):
        execute(experiment, RunFolder(run), resume=True)


LINES: dict[str, str] = {
    "no JSON": '{"round": 1',
    "a list": "[1]",
    "a number missing": '{"round": 1}',
    "a round that is text": '{"round": "x", "participants": 1, "failures": {}}',
    "an unknown key": '{"round": 1, "participants": 1, "failures": {}, "more": 1}',
    "scores that are text": '{"round": 1, "participants": 1, "failures": {}, "domains": {"a": {"accuracy": "x"}}}',
    "no accuracy": '{"round": 1, "participants": 1, "failures": {}, "domains": {"a": {}}, "own_domains": {"a": {}}}',
    "no average": '{"round": 1, "participants": 1, "failures": {}, "domains": {"a": {"accuracy": 1.0}}, '
    '"own_domains": {"a": {"accuracy": 1.0}}}',
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_is_no_round_is_named(case: str) -> None:
    good = Round(1, 1, {}).line()
    with pytest.raises(BadInput, match=r"here is damaged: line 2 is no round"):
        parsed(good + LINES[case] + "\n", "here")


@pytest.mark.parametrize(("name", "is_done"), [*((name, True) for name in (*FILES, "checkpoint")), (FILES[0], False)])
def test_one_bad_folder_is_one_failed_run_of_a_comparison(
    name: str, is_done: bool, finished: Path, digits: Config, other_digits: Config, tmp_path: Path
) -> None:
    """R14. Finished, and unfinished, which is resumed in a process of its own."""
    copytree(finished, tmp_path / "out")
    place = folder_of(digits, tmp_path / "out").path
    if not is_done:
        (place / "done").unlink()
    if name == "checkpoint":
        shutil.move(place / "checkpoint", tmp_path / "elsewhere")
        (place / "checkpoint").symlink_to(tmp_path / "elsewhere")
    else:
        (place / name).write_bytes(bytes(range(256)))
    bad, good = sweep([digits, other_digits], tmp_path / "out", workers=1)
    assert not bad.is_done
    assert name in (bad.failure or "")
    assert good.is_done, good.failure
    assert good.failure is None


@pytest.mark.parametrize("when", [2, ROUNDS], ids=["between rounds", "after the last save"])
@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_goes_while_a_run_works_in_it_fails_the_run(
    how: str, when: int, tmp_path: Path, experiment: Experiment
) -> None:
    """R14. It would save on into a folder without configuration, and call that done."""
    place = tmp_path / "run"

    def act() -> None:
        shutil.move(place, tmp_path / "moved")
        if how == "removed":
            shutil.rmtree(tmp_path / "moved")
        elif how == "replaced":
            copytree(tmp_path / "moved", place)

    with pytest.raises(RunFailed, match=r"run was removed, moved or replaced while the run worked in it"):
        execute(experiment, RunFolder(place), observer=After(when, act))
    assert not (place / "done").exists()
    assert how == "replaced" or not place.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_named(
    number: int, tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14."""

    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BadInput, match=r"run (is on a file system without locks|cannot be locked) .*--out or --folder"):
        execute(experiment, RunFolder(tmp_path / "run"))
    assert lock.LOCK in os.listdir(tmp_path / "run")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("show",), ("show", "--json")], ids=" ".join)
def test_a_table_that_cannot_be_printed_is_said_without_a_traceback(
    words: tuple[str, ...], finished: Path, digits: Config
) -> None:
    """R14. On a full disk, and when the reader has gone."""
    command = [sys.executable, "-m", "protofed.cli.app", *words, str(folder_of(digits, finished).path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with FULL.open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: could not print: No space left on device")
    assert "Traceback" not in done.stderr
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writing)
    assert done.returncode == 3
    assert done.stderr == ""


def test_git_runs_no_program_that_a_repository_names(tmp_path: Path) -> None:
    """S11. The commit is asked for wherever protofed lies, also in somebody's checkout."""
    canary, script = tmp_path / "canary", tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {canary}\n")
    script.chmod(0o755)
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*words: str) -> None:
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=repository, env=environment, check=True, capture_output=True)

    git("init")
    (repository / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    git("config", "core.fsmonitor", str(script))
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    shutil.copy(script, hooks / "post-index-change")
    git("status")
    assert canary.exists(), "the canary does not sing"
    canary.unlink()
    os.utime(repository / "file", (1, 1))
    assert folder._git(repository, "ls-files", "--error-unmatch", "file") == "file"
    described = folder._git(repository, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    assert len(described) == 12
    assert not canary.exists()


@pytest.mark.parametrize("name", ["privacy", "sums"])
def test_what_a_run_keeps_beside_its_checkpoints_is_in_its_folder(name: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert getattr(run, name) == run.path / name
    (run.path / name).symlink_to(tmp_path)
    with pytest.raises(BadInput, match="none is followed"):
        getattr(run, name)
