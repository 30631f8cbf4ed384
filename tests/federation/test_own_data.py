"""Own files at sites: the agreement before the first round, and runs that are those of one process."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from federation.grids import states
from federation.own_folders import (
    CLIENTS,
    COLUMNS,
    RARE_NUMBER,
    RARE_WORD,
    given_to_sites,
    sites_with,
    write_images,
    write_tables,
)
from protofed.api.task import Task
from protofed.engine.training import Training
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.evaluate import evaluate
from protofed.federation.codec import decoded, encoded
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Enrolment, Limits, Question, Refusal, Shared, Survey
from protofed.federation.own_data import OwnData, Telling
from protofed.federation.own_formats import read_shares, shares_text
from protofed.federation.policy import Identity, Policy, SiteSettings
from protofed.federation.server import prepared
from protofed.federation.site import Site
from protofed.methods import METHODS
from protofed.runs.config.config import Config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.runner import execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store.folder import RunFolder
from protofed.tasks.custom import Custom
from protofed.testing.federations import after, assert_same, memories

MOST = 10**8
TRAINING = Training(rounds=3, epochs=1, batch_size=8, deadline=60.0, on_divergence="skip")


def config_of(task: Custom, method: str = "fedavg", at_server: bool = True, **changes: Any) -> Config:
    """Of an experiment, which has no path at the server."""
    task = replace(task, path="") if at_server else task
    training = replace(TRAINING, **changes)
    return Config(task, METHODS[method](), training, RuntimeSettings(name="sequential"), EvaluationSettings(every=3))


class Tapped(InProcess):
    """Keeps everything that passes."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        super().__init__(sites)
        self.passed: list[bytes] = []

    def send(self, site: str, data: bytes, most_bytes: int) -> str:
        self.passed.append(data)
        return super().send(site, data, most_bytes)

    def receive(self, timeout: float) -> Iterator[tuple[str, bytes]]:
        for site, data in super().receive(timeout):
            self.passed.append(data)
            yield site, data


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Custom:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Custom:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(params=["images", "tables"])
def own(request: pytest.FixtureRequest) -> Custom:
    settings: Custom = request.getfixturevalue(request.param)
    return settings


def assert_as_in_one_process(settings: Custom, method: str, folder: Path, clients: Any = CLIENTS) -> None:
    near = config_of(settings, method, at_server=False).experiment().federation
    sites = sites_with(folder, settings, clients=clients)
    far = prepared(InProcess(sites), config_of(settings, method), "r1").federation
    here, there = (of.finish(after(3, of)) for of in (near, far))
    assert not there.failures
    assert_same(there.server, here.server, "the server's state with own files at sites")
    assert_same(states(sites, there, far), memories(here), "what clients keep")
    assert there.loss == here.loss
    first, second = evaluate(near, here), evaluate(far, there)
    assert second.at_home == {client: first.at_home[client] for client in second.at_home}
    assert second.at_home.keys() == first.at_home.keys()
    assert second.new.keys() == first.new.keys()


@pytest.mark.parametrize("method", ["fedavg", "fpl", "fedbn", "fedproto"])
def test_a_run_with_own_files_at_sites_is_that_of_one_process(own: Custom, method: str, tmp_path: Path) -> None:
    assert_as_in_one_process(own, method, tmp_path)


def test_a_site_that_is_held_out_has_no_say_in_sums(tables: Custom, tmp_path: Path) -> None:
    assert_as_in_one_process(replace(tables, hold_out=["south-2"]), "fedbn", tmp_path)


def examples(task: Task) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for kind in ("clients", "local_tests", "validation"):
        for client, data in getattr(task, kind).items():
            found[f"{kind} {client}"] = data.inputs(data.index), data.labels
    return found


def test_every_site_prepares_the_tensors_of_one_process(own: Custom, tmp_path: Path) -> None:
    whole = examples(own.build())
    sites = sites_with(tmp_path, own)
    prepared(InProcess(sites), config_of(own), "r1")
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for site in sites.values():
        assert isinstance(site.data, OwnData)
        data = site.data.prepared(site._runs["r1"].description.preparation)
        assert not data.task.tests
        found |= examples(data.task)
    assert_same(dict(sorted(found.items())), dict(sorted(whole.items())), "examples of all sites")


def test_the_server_has_classes_inputs_and_sizes_and_no_example(own: Custom, tmp_path: Path) -> None:
    task, whole = prepared(InProcess(sites_with(tmp_path, own)), config_of(own), "r1").federation.task, own.build()
    assert (task.class_names, task.preprocessing) == (whole.class_names, whole.preprocessing)
    assert {c: len(data) for c, data in task.clients.items()} == {c: len(data) for c, data in whole.clients.items()}
    assert (task.spec.input, task.transform, task.model) == (whole.spec.input, whole.transform, whole.model)
    assert (task.local_tests.keys(), task.validation.keys()) == (whole.local_tests.keys(), whole.validation.keys())
    assert not any(data.x.any() for data in task.clients.values())
    assert not task.tests


# ---- what passes


def test_no_row_passes_before_the_first_round(tables: Custom, tmp_path: Path) -> None:
    link = Tapped(sites_with(tmp_path, tables))
    prepared(link, config_of(tables), "r1")
    text = b"\n".join(link.passed).decode(errors="replace")
    rows = [line.split(",") for path in Path(tables.path).glob("*.csv") for line in path.read_text().splitlines()[1:]]
    values = {cell for row in rows for cell in row if len(cell) > 3}
    told = {"calm", "restless", "well", "dead"}
    assert {RARE_WORD, RARE_NUMBER} < values
    assert told < values
    assert RARE_WORD not in text
    words = {*re.findall(r"[\w.-]+", text)}
    assert values & words == told
    numbers = {float(cell) for row in rows for cell in row if re.fullmatch(r"\d+\.\d+", cell)}
    settings = {*re.findall(r"[\w.-]+", config_of(tables).toml())}  # which pass, and some have a value of a row
    passed = {float(word) for word in words - settings if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", word)}
    assert len(passed) > 10
    assert not numbers & passed


def test_of_images_classes_counts_and_bits_pass(images: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, images)
    link = Tapped(sites)
    prepared(link, config_of(images), "r1")
    answers = [decoded(data, MOST) for data in link.passed]
    (first, *_) = [json.loads(answer.shares) for answer in answers if isinstance(answer, Shared)]
    assert first == {
        "north": {"classes": ["benign", "malignant", "unclear"], "tests": 6, "files": 30, "damaged": 0, "bits": 12}
    }
    text = b"\n".join(link.passed)
    for path in Path(images.path).rglob("*.png"):
        assert path.name.encode() not in text
        assert hashlib.sha256(path.read_bytes()).hexdigest().encode() not in text


def test_all_that_is_told_is_in_the_log(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables)
    link = Tapped(sites)
    prepared(link, config_of(tables), "r1")
    told = [answer.shares for answer in (decoded(data, MOST) for data in link.passed) if isinstance(answer, Shared)]
    for site, text in zip(sites.values(), told, strict=True):
        lines = [json.loads(line) for line in (site.folder / "log.jsonl").read_text().splitlines()]
        assert [line["event"] for line in lines][:3] == ["survey", "sent", "asked"]
        assert lines[0]["told"] == text


def test_a_fault_of_files_stays_at_the_site(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables)
    path = tmp_path / "C/data/west.csv"
    path.write_text(path.read_text().replace("west-3,", "west-3,Miss Havisham "))
    link = Tapped(sites)
    with pytest.raises(BadInput, match=r"C: FILES_NOT_USABLE: .*its log says why"):
        prepared(link, config_of(tables), "r1")
    assert b"Havisham" not in b"".join(link.passed)
    log = (tmp_path / "C/state/log.jsonl").read_text()
    assert "Havisham" in log
    assert "west.csv, line" in log


@pytest.mark.parametrize("message", ["survey", "question"])
def test_an_error_that_nobody_foresaw_ends_no_site_and_stays_there(
    message: str, tables: Custom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = one_site(tmp_path, tables, Telling())

    def fails(own: OwnData) -> None:
        raise ValueError("could not convert 'Miss Havisham'")

    monkeypatch.setattr(OwnData, "_read", fails)
    answer = asked(site, survey_of(tables) if message == "survey" else Question("a" * 32, "{}"))
    assert [name for name, _ in answer.refusals] == [Refusal.FILES_NOT_USABLE]
    assert b"Havisham" not in encoded(answer)
    assert "ValueError: could not convert 'Miss Havisham'" in (site.folder / "log.jsonl").read_text()


def test_what_is_told_is_bounded(tables: Custom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = one_site(tmp_path, tables, Telling())
    monkeypatch.setattr("protofed.federation.own_data.MOST_TOLD", 1000)
    answer = asked(site, survey_of(tables))
    assert (answer.shares, [name for name, _ in answer.refusals]) == ("", [Refusal.TOO_MANY_BYTES])


# ---- the policy


def one_site(folder: Path, settings: Custom, telling: Telling, dry_run: bool = False) -> Site:
    sites = sites_with(folder, settings, telling)
    sites["B"].dry_run = dry_run
    return sites["B"]


def asked(site: Site, message: Any) -> Any:
    answer = site.handle(encoded(message))
    assert answer is not None
    return decoded(answer, MOST)


def survey_of(settings: Custom) -> Survey:
    from protofed.runs.config.recording import task_table
    from protofed.runs.config.toml import section_text

    return Survey("a" * 32, section_text("task", task_table(replace(settings, path=""))))


REFUSED: list[tuple[Refusal, Telling, Callable[[Custom], Custom]]] = [
    (Refusal.FEW_ROWS, Telling(rows=4), lambda task: task),
    (Refusal.COLUMN_NOT_ALLOWED, Telling(columns=("age", "sex")), lambda task: task),
    (Refusal.OTHER_TASK, Telling(), lambda task: replace(task, label="sex")),
    (Refusal.OTHER_TASK, Telling(), lambda task: replace(task, path="/data")),
    (Refusal.OTHER_TASK, Telling(), lambda task: replace(task, min_rows=1)),
]


@pytest.mark.parametrize(("name", "telling", "change"), REFUSED)
def test_a_site_tells_nothing_against_its_policy(
    name: Refusal, telling: Telling, change: Callable[[Custom], Custom], tables: Custom, tmp_path: Path
) -> None:
    site = one_site(tmp_path, tables, telling)
    survey = survey_of(tables)
    changed = change(tables)
    if changed is not tables:
        survey = replace(
            survey_of(changed), task=survey_of(changed).task.replace('path = ""', f'path = "{changed.path}"')
        )
    answer = asked(site, survey)
    assert (answer.shares, [reason for reason, _ in answer.refusals]) == ("", [name])


def test_columns_that_may_be_told_are_enough(tables: Custom, tmp_path: Path) -> None:
    telling = Telling(columns=COLUMNS[1:6], rows=3)
    assert asked(one_site(tmp_path, tables, telling), survey_of(tables)).refusals == ()


def test_a_network_of_own_code_is_refused_by_a_site(tables: Custom, tmp_path: Path) -> None:
    own = replace(tables, model="my:network")
    answer = asked(one_site(tmp_path, own, Telling()), survey_of(own))
    assert [name for name, _ in answer.refusals] == [Refusal.NETWORK_NOT_ALLOWED]


def test_a_dry_run_tells_nothing_and_says_what_it_would_tell(tables: Custom, tmp_path: Path) -> None:
    site = one_site(tmp_path, tables, Telling(), dry_run=True)
    answer = asked(site, survey_of(tables))
    assert (answer.shares, [name for name, _ in answer.refusals]) == ("", [Refusal.DRY_RUN])
    assert "restless" in (site.folder / "log.jsonl").read_text()


@pytest.mark.parametrize("telling", [Telling(classes=False), Telling(class_count=11)])
def test_a_class_that_is_not_told_counts_if_another_site_tells_it(
    telling: Telling, images: Custom, tmp_path: Path
) -> None:
    sites = sites_with(tmp_path, images)
    assert isinstance(sites["B"].data, OwnData)
    sites["B"].data._telling = telling
    link = Tapped(sites)
    task = prepared(link, config_of(images), "r1").federation.task
    assert task.class_names == ("benign", "malignant", "unclear")
    shares = [json.loads(m.shares) for m in (decoded(d, MOST) for d in link.passed) if isinstance(m, Shared)]
    assert shares[1]["east"]["classes"] == (["unclear"] if telling.classes else [])


def test_of_rare_classes_no_test_example_is_told(images: Custom, tmp_path: Path) -> None:
    """Each client has 4 training examples that are benign, and 6 that are malignant; 2 of each are for testing."""
    found = {}
    for least in (1, 5):
        sites = sites_with(tmp_path / str(least), images)
        for site in sites.values():
            site.limits = Limits(class_count=least)
        of = prepared(InProcess(sites), config_of(images, "fedbn"), "r1").federation
        found[least] = evaluate(of, of.finish(after(3, of))).confusion
    everything, told = ({client: torch.tensor(m) for client, m in found[least].items()} for least in (1, 5))
    assert everything.keys() == told.keys()
    for client, counts in everything.items():
        assert counts.sum(1).tolist() == ([2, 2, 2] if client != "west" else [2, 2, 0])
        assert told[client][0].tolist() == [0, 0, 0]
        assert told[client][1:].equal(counts[1:])


def test_a_class_that_nobody_tells_is_refused_without_its_name(images: Custom, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(images.path, folder)
    shutil.copytree(folder / "west/benign", folder / "west/hapax")
    sites = sites_with(tmp_path, replace(images, path=str(folder)), Telling(class_count=5))
    for path in (tmp_path / "C/data/west/hapax").iterdir():
        (path.unlink if "_7" not in path.name else path.exists)()
    link = Tapped(sites)
    with pytest.raises(BadInput, match="C: CLASS_NOT_TOLD"):
        prepared(link, config_of(images), "r1")
    assert b"hapax" not in b"".join(link.passed)


def findings(folder: Path, settings: Custom, policy: Policy) -> dict[str, bool]:
    """What `protofed site check` says of the data of site C."""
    pytest.importorskip("cryptography", reason="a check looks at keys, for which the extra flower brings cryptography")
    from protofed.federation.site_check import check

    path = given_to_sites(folder, settings)["C"]
    site = Identity("C", "0" * 32, "localhost:8000")
    found = check(SiteSettings(folder, site, replace(settings, path=str(path)), ("west",), policy), reach=False)
    return {finding.text: finding.is_good for finding in found}


def test_a_check_says_what_is_there_and_tries_a_step(tables: Custom, tmp_path: Path) -> None:
    found = findings(tmp_path, tables, Policy(min_rows=3, min_class_count=1))
    assert found["own files of west: classes dead, ill, well"]
    assert any(text.startswith("one step on one batch") and good for text, good in found.items())


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (Policy(min_rows=4), "set min_rows = 4 in its section"),
        (Policy(min_rows=1, columns=["age", "sex", "ward"]), "does not allow the columns marker, note"),
    ],
)
def test_a_check_says_what_the_policy_forbids(policy: Policy, told: str, tables: Custom, tmp_path: Path) -> None:
    assert any(told in text and not good for text, good in findings(tmp_path, tables, policy).items())


def test_a_check_of_a_single_class_tries_no_step_and_is_good(images: Custom, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    shutil.copytree(Path(images.path) / "west/benign", folder / "west/benign")
    found = findings(tmp_path, replace(images, path=str(folder)), Policy())
    assert any("a single class" in text and good for text, good in found.items())


# ---- what does not fit together


def edited(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


MISMATCHES: dict[str, tuple[Callable[[str], str], str]] = {
    "another column": (
        lambda text: text.replace("marker", "markers", 1),
        r"column 'marker' is at east, north, south-2, but not at west.*\n.*column 'markers' is at west",
    ),
    "words for numbers": (
        lambda text: "\n".join(
            line if k == 0 else ",".join([(row := line.split(","))[0], "young", *row[2:]])
            for k, line in enumerate(text.splitlines())
        ),
        r"column 'age' has words at west, but only numbers at east, north, south-2",
    ),
    "other classes": (
        lambda text: text.replace("well", "healthy").replace("ill", "sick").replace("dead", "sick"),
        r"C: OTHER_TASK: its classes \(healthy, sick\) are none of another site \(dead, ill, well\)",
    ),
    "numbers for words": (
        lambda text: text.replace("well", "0").replace("ill", "1").replace("dead", "1"),
        r"C: OTHER_TASK: its classes \(0, 1\) are none of another site",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_what_does_not_fit_together_is_refused_by_name(what: str, tables: Custom, tmp_path: Path) -> None:
    change, told = MISMATCHES[what]
    sites = sites_with(tmp_path, tables)
    edited(tmp_path / "C/data/west.csv", change)
    with pytest.raises(BadInput, match=f"(?s){told}"):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_where_clients_are_is_said_where_columns_do_not_fit(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables)
    edited(tmp_path / "C/data/west.csv", lambda text: text.replace("marker", "markers", 1))
    with pytest.raises(BadInput, match="west is at site C"):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_labels_of_numbers_and_words_are_refused(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, replace(tables, label="ward", categorical=()))
    edited(tmp_path / "C/data/west.csv", lambda text: text.replace(",1,", ",one,"))
    with pytest.raises(BadInput, match="the label 'ward' has words at west, but only numbers at east, north, south-2"):
        prepared(InProcess(sites), config_of(replace(tables, label="ward", categorical=())), "r1")


def test_sites_with_other_kinds_of_files_are_refused(tables: Custom, images: Custom, tmp_path: Path) -> None:
    sites = {**sites_with(tmp_path, tables), "A": sites_with(tmp_path / "images", images)["A"]}
    with pytest.raises(BadInput, match=r"A: OTHER_TASK: settings of the task differ from this site's: .*kind"):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_a_client_at_two_sites_is_refused(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables, clients={**CLIENTS, "C": ("west", "north")})
    with pytest.raises(BadInput, match="C: OTHER_CLIENTS: 'north' is a client of A too"):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_a_site_of_another_task_and_one_with_own_files_do_not_mix(tables: Custom, tmp_path: Path) -> None:
    from federation.grids import sites_of

    with pytest.raises(BadInput, match=r"north: OTHER_TASK: .*without own files"):
        prepared(InProcess(sites_of(tmp_path)), config_of(tables), "r1")


class Liar:
    """A site whose answers to a survey or a question are changed."""

    def __init__(self, site: Site, change: Callable[[Any], Any]) -> None:
        self.site, self.change = site, change

    def handle(self, data: bytes) -> bytes | None:
        answer = self.site.handle(data)
        return None if answer is None else encoded(self.change(decoded(answer, MOST)))


def with_shares(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def changed(message: Any) -> Any:
        if isinstance(message, Shared):
            told = json.loads(message.shares)
            change(told)
            return replace(message, shares=json.dumps(told))
        return message

    return changed


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no number": (lambda told: told["west"].update(tests="7"), "west.tests"),
    "another key": (lambda told: told["west"].update(rows_too=[1]), "west.rows_too"),
    "no count": (lambda told: told["west"]["label"].update(numbers=10**6), "impossible counts"),
    "no sums": (lambda told: told["west"]["columns"]["age"]["sums"].update(total=1e300), "'age' has impossible sums"),
    "negative": (lambda told: told["west"]["columns"]["age"]["sums"].update(squares=-1.0), "'age' has impossible sums"),
    "a column twice": (lambda told: told["west"]["names"].append("age"), "a column twice"),
    "words twice": (lambda told: told["west"]["columns"]["sex"].update(words=["m", "m"]), "'sex' has words"),
    "too many words": (
        lambda told: told["west"]["columns"]["sex"].update(words=[f"{k:04}" for k in range(201)]),
        "columns.sex.words",
    ),
    "sums and words": (lambda told: told["west"]["columns"]["age"].update(words=[]), "'age' has sums and words"),
    "nobody": (lambda told: told.clear(), "is no share"),
    "a name that is none": (lambda told: told.update({"we\u202est": told.pop("west")}), "cannot name a client"),
    "sums that are missing": (lambda told: told["west"]["columns"]["age"].update(sums=None), "column 'age'"),
}


@pytest.mark.parametrize("what", LIES)
def test_shares_that_cannot_be_are_refused(what: str, tables: Custom, tmp_path: Path) -> None:
    change, told = LIES[what]
    sites: dict[str, Any] = dict(sites_with(tmp_path, tables))
    sites["C"] = Liar(sites["C"], with_shares(change))
    with pytest.raises(BadInput, match=told):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_a_site_that_enrols_another_preparation_is_refused(tables: Custom, tmp_path: Path) -> None:
    def other(message: Any) -> Any:
        if isinstance(message, Enrolment):
            return replace(
                message, outline=message.outline.replace('"classes": [\n    "dead"', '"classes": [\n    "late"')
            )
        return message

    sites = {name: Liar(site, other) for name, site in sites_with(tmp_path, tables).items()}
    with pytest.raises(BadInput, match="A: OTHER_TASK: classes, columns or network are not those that were agreed"):
        prepared(InProcess(sites), config_of(tables), "r1")


def test_own_files_without_an_agreement_are_refused(tables: Custom, tmp_path: Path) -> None:
    answer = asked(one_site(tmp_path, tables, Telling()), Question("a" * 32))
    assert (answer.outline, [name for name, _ in answer.refusals]) == ("", [Refusal.NOT_AGREED])


def test_shares_are_read_as_they_were_written(own: Custom) -> None:
    shares = own.read().shares
    assert read_shares(shares_text(shares), own.kind, "here") == dict(sorted(shares.items()))


# ---- data that change


def begun(folder: Path, settings: Custom) -> tuple[dict[str, Site], RunFolder]:
    """A run that was stopped after its first round."""
    sites, run = sites_with(folder, settings), RunFolder(folder / "run")
    stop: Iterator[bool] = iter([False, True, True])
    execute(prepared(InProcess(sites), config_of(settings), "r1"), run, should_stop=lambda: next(stop))
    return sites, run


def restarted(sites: Mapping[str, Site]) -> dict[str, Site]:
    """The same sites in new processes: what they had in memory is gone."""
    found = {}
    for name, site in sites.items():
        assert isinstance(site.data, OwnData)
        data = OwnData(site.data._settings, (), site.data._telling)
        found[name] = Site(site.folder, data, site.limits)
    return found


def test_a_run_with_own_files_is_resumed(own: Custom, tmp_path: Path) -> None:
    sites, run = begun(tmp_path, own)
    far = execute(prepared(InProcess(restarted(sites)), config_of(own), "r1"), run, resume=True)
    near = execute(config_of(own, at_server=False).experiment())
    assert far.is_complete
    assert_same(far.server, near.server, "the server's state of a run that was resumed")


@pytest.mark.parametrize("changes", [{"well": "ill"}, {"calm": "calms"}])
def test_a_run_is_not_resumed_with_other_files(changes: dict[str, str], tables: Custom, tmp_path: Path) -> None:
    sites, run = begun(tmp_path, tables)
    for old, new in changes.items():
        edited(tmp_path / "C/data/west.csv", lambda text, old=old, new=new: text.replace(old, new, 5))  # type: ignore[misc]
    with pytest.raises(BadInput, match="C: OTHER_DATA"):
        execute(prepared(InProcess(restarted(sites)), config_of(tables), "r1"), run, resume=True)


def test_the_identity_of_a_run_covers_what_was_agreed(tables: Custom, tmp_path: Path) -> None:
    """Without the sites' own memory of the run, the server's checkpoint refuses."""
    sites, run = begun(tmp_path, tables)
    for site in sites.values():
        shutil.rmtree(site.folder)
    edited(tmp_path / "C/data/west.csv", lambda text: re.sub(r",\d\d\.", ",77.", text, count=9))
    with pytest.raises(RunFailed, match="belongs to run"):
        execute(prepared(InProcess(restarted(sites)), config_of(tables), "r1"), run, resume=True)


def test_a_site_that_comes_back_with_other_files_does_no_order(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables)
    link = InProcess(sites)
    federation = prepared(link, config_of(tables), "r1").federation
    state = federation.advance(federation.start())
    edited(tmp_path / "C/data/west.csv", lambda text: text.replace("ill", "well", 3))
    link._sites["C"] = restarted(sites)["C"]
    state = federation.advance(state)
    assert [(failure.client, failure.detail.partition(":")[0]) for failure in state.failures] == [
        ("west", "OTHER_DATA")
    ]


def test_a_site_that_comes_back_with_the_same_files_goes_on(tables: Custom, tmp_path: Path) -> None:
    sites = sites_with(tmp_path, tables)
    link = InProcess(sites)
    federation = prepared(link, config_of(tables), "r1").federation
    state = federation.advance(federation.start())
    link._sites["C"] = restarted(sites)["C"]
    assert not federation.advance(state).failures


# ---- data of patients


METHODS_HERE = ["fedavg", "fpl", "fedbn", "fedproto"]


def public_data(name: str) -> Path:
    folder = Path(os.environ.get("PROTOFED_DATA", "nowhere")) / name
    if not folder.is_dir():
        pytest.skip(f"PROTOFED_DATA has no {name}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_HERE)
def test_heart_disease_at_four_hospitals_is_as_in_one_process(method: str, tmp_path: Path) -> None:
    source = public_data("heart_disease")
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
    folder = tmp_path / "heart"
    folder.mkdir()
    for path in source.glob("processed.*.data"):
        (folder / f"{path.suffixes[0][1:] or path.stem}.csv").write_text(f"{names}\n{path.read_text()}")
    settings = Custom(str(folder), "tables", label="num", categorical=["cp", "thal"], model="mlp_norm")
    clients = {site: (site,) for site in sorted(path.stem for path in folder.iterdir())}
    assert len(clients) == 4
    assert_as_in_one_process(settings, method, tmp_path, clients)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_HERE)
def test_moles_of_four_collections_are_as_in_one_process(method: str, tmp_path: Path) -> None:
    source, folder = public_data("ham10000"), tmp_path / "moles"
    clients = {site.name: (site.name,) for site in sorted(source.iterdir()) if site.is_dir()}
    assert len(clients) == 4
    for site in clients:
        for name in ("bkl", "mel", "nv"):
            (folder / site / name).mkdir(parents=True)
            for path in sorted((source / site / name).glob("*.jpg"))[:30]:
                shutil.copy(path, folder / site / name / path.name)
    assert_as_in_one_process(Custom(str(folder), pixels=28, model="small_cnn"), method, tmp_path, clients)
