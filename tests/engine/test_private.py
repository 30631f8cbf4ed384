"""Runs under differential privacy: what they cost, what is written down, and what is refused."""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import protofed
from faults.kills import fingerprint, folder_in_memory, run_killed_after
from privacy.private_runs import private, task_of
from protofed import BadInput, PrivacySettings, RunFailed, Sam, SecureSettings, Sgd
from protofed.api.method import Uploads
from protofed.cli.app import app
from protofed.engine.federation import Federation
from protofed.engine.private import Private, release_rounds
from protofed.methods.fedavg import FedAvg
from protofed.privacy.account import epsilon_of, mu_of
from protofed.privacy.ledger import Entry
from protofed.reports.page.facts import facts
from protofed.runs.config import config as configuration
from protofed.runs.listing import listing
from protofed.runs.results import Result
from protofed.runs.runner import Experiment, execute
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.jobs import Answer, Failure, Reason
from protofed.runtimes.sequential import Sequential
from protofed.transforms.chain import UploadSettings
from protofed.tree import named_leaves

SECRET = PrivacySettings("record", epsilon=50.0, noise="secret")


def ended(of: Federation) -> Any:
    state = of.start()
    for _ in range(of.training.rounds):
        state = of.advance(state)
    return of.finish(state)


def spent(of: Federation, client: str = "c0") -> list[Entry]:
    assert of.private is not None
    return [entry for entry in of.private.ledger.entries if entry.client == client]


# ---- the account


@pytest.mark.parametrize(("optimizer", "calls"), [(Sgd(lr=0.1), 1), (Sam(Sgd(lr=0.1)), 2)])
def test_a_run_spends_what_was_promised_and_no_more(optimizer: Any, calls: int) -> None:
    """T6."""
    of = private(optimizer=optimizer, privacy=PrivacySettings("record", epsilon=8.0, delta=1e-6))
    ended(of)
    for client in of.ids:
        entries = spent(of, client)
        assert [entry.releases for entry in entries] == [2 * calls] * 3
        assert epsilon_of(sum(entry.cost for entry in entries) ** 0.5, 1e-6) == pytest.approx(8.0)
    assert of.private is not None
    assert epsilon_of(of.private.most_spent**0.5, 1e-6) == pytest.approx(8.0)


def test_a_step_that_also_judges_its_model_is_charged() -> None:
    of = private(rounds=1)
    of.advance(of.start(), evaluates=True)
    assert len(spent(of)) == 1


def test_prototypes_have_their_share() -> None:
    of = private("fpl", rounds=5, privacy=PrivacySettings("record", epsilon=8.0, releases=2, prototype_share=0.3))
    ended(of)
    by_kind = {kind: [e for e in spent(of) if e.kind == kind] for kind in ("gradients", "class sums")}
    mu = mu_of(8.0, 1e-5)
    assert [entry.round for entry in by_kind["class sums"]] == [1, 3]
    assert sum(entry.cost for entry in by_kind["class sums"]) == pytest.approx(0.3 * mu**2)
    assert sum(entry.cost for entry in by_kind["gradients"]) == pytest.approx(0.7 * mu**2)


def test_the_noise_is_that_of_the_client_that_takes_part_most_often() -> None:
    of = private(rounds=6, fraction=0.4, task=task_of(5))
    ended(of)
    rounds = [of.sampled(number) for number in range(6)]
    most = max(sum(client in ids for ids in rounds) for client in of.ids)
    assert most < 6
    assert of.terms is not None
    assert 2 * most / of.terms.gradient_multiplier**2 == pytest.approx(mu_of(50.0, 1e-5) ** 2)
    assert max(sum(e.releases for e in spent(of, client)) for client in of.ids) == 2 * most


@pytest.mark.parametrize(("k", "rounds", "expected"), [(2, 8, (1, 4)), (1, 8, (1,)), (9, 4, (1, 2, 3)), (2, 1, ())])
def test_class_sums_are_released_in_rounds_that_are_evenly_spread(
    k: int, rounds: int, expected: tuple[int, ...]
) -> None:
    assert release_rounds(k, rounds) == expected


class FailingOnce(Sequential):
    """All clients but one fail the first time that they are asked in round 1; the round is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.fails = True

    def run(self, jobs: Any) -> Iterator[Any]:
        for job in jobs:
            [(client, outcome)] = super().run([job])
            if isinstance(outcome, Answer):
                self.seen.append((client, job.context.round, named_leaves(outcome.upload)))
            if self.fails and job.context.round == 1 and client != "c0":
                self.fails = client != "c2"
                yield client, Failure(client, Reason.CLIENT_ERROR, "told to")
            else:
                yield client, outcome


def test_a_round_that_is_tried_again_pays_again_unless_the_same_bytes_are_sent(tmp_path: Path) -> None:
    of = private(FedAvg(), FailingOnce(), privacy=PrivacySettings("record", epsilon=50.0), minimum_replies=2)
    ended(of)  # simulated noise is the same again
    assert len(spent(of)) == 3
    of = private(FedAvg(), FailingOnce(), privacy=SECRET, minimum_replies=2)
    with pytest.raises(RunFailed, match="BUDGET_SPENT: client c0"):
        ended(of)  # nothing says what was sent
    runtime = FailingOnce()
    of = private(FedAvg(), runtime, privacy=SECRET, minimum_replies=2)
    assert of.private is not None
    of.private.keep_in(tmp_path)
    ended(of)
    assert len(spent(of)) == 3
    assert [one[:2] for one in runtime.seen].count(("c0", 1)) == 1, "it was not even asked again"


def test_a_longer_run_of_the_same_data_has_no_budget_left(tmp_path: Path) -> None:
    settings = {"rounds": 2, "epochs": 1, "privacy": PrivacySettings("record", epsilon=50.0), "progress": False}
    result = protofed.run("fedavg", task_of(), folder=tmp_path / "a", **settings)
    with pytest.raises(RunFailed, match="BUDGET_SPENT: client c0: 1 releases of gradients"):
        protofed.continue_from(result, 1)
    with pytest.raises(RunFailed, match="BUDGET_SPENT"):
        protofed.continue_from(result, 1, folder=tmp_path / "b")


# ---- noise


def test_simulated_noise_is_the_same_again_and_secret_noise_is_not() -> None:
    """T8."""
    settings = PrivacySettings("record", epsilon=50.0)
    first, again, secret, other = (private(privacy=one) for one in (settings, settings, SECRET, SECRET))
    ends = []
    for of in (first, again, secret, other):
        torch.manual_seed(0)
        ends.append(ended(of).server.params)
    assert all(torch.equal(leaf, ends[1][name]) for name, leaf in ends[0].items())
    for a, b in ((0, 2), (2, 3)):
        assert not any(torch.equal(leaf, ends[b][name]) for name, leaf in ends[a].items() if leaf.numel() > 3)
    costs = [[replace(e, digest="") for e in spent(of)] for of in (first, again, secret, other)]
    assert costs[0] == costs[1] == costs[2] == costs[3]
    assert spent(first) == spent(again) != spent(secret)


def test_noise_is_as_large_as_the_account_says() -> None:
    """The upload of a client that learns nothing, since all its gradients are clipped to next to nothing."""
    of = private(rounds=1, epochs=1, optimizer=Sgd(lr=1.0), privacy=PrivacySettings("record", clip_gradients=1e-3))
    state = of.start()
    before, after = state.server.params, of.advance(state).server.params
    moved = torch.cat([(after[name] - leaf).flatten() for name, leaf in before.items()])
    assert of.terms is not None
    sizes, weights = torch.tensor([12.0, 17.0, 22.0]), torch.tensor([12.0, 17.0, 22.0]) / 51
    steps = (sizes / 8).ceil()
    expected = 1e-3 * of.terms.gradient_multiplier / 8 * (weights.square() * steps).sum().sqrt()
    assert moved.std() == pytest.approx(expected.item(), rel=0.2)


# ---- what is written down


def run_in(folder: Path, method: Any = "fedavg", **changes: Any) -> Result:
    settings = {"rounds": 3, "epochs": 1, "batch_size": 8, "privacy": SECRET, "progress": False, **changes}
    return protofed.run(method, task_of(), folder=folder, **settings)


def test_what_was_released_is_in_the_runs_folder(tmp_path: Path) -> None:
    result = run_in(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "privacy" / "ledger.jsonl").read_text().splitlines()]
    assert [(line["round"], line["client"]) for line in lines] == [(r, f"c{k}") for r in range(3) for k in range(3)]
    assert {line["run"] for line in lines} == {result.federation.name}
    assert sum(line["cost"] for line in lines if line["client"] == "c1") == pytest.approx(mu_of(50.0, 1e-5) ** 2)


def test_the_outbox_keeps_the_last_rounds_only(tmp_path: Path) -> None:
    run_in(tmp_path, rounds=7)
    rounds = {int(path.name[:8]) for path in (tmp_path / "privacy" / "outbox").iterdir()}
    assert rounds == {3, 4, 5, 6}
    assert not run_in(tmp_path / "b", privacy=PrivacySettings("record")).folder.joinpath("privacy", "outbox").exists()


def to_a_file(privacy: Path, outside: Path) -> None:
    privacy.joinpath("ledger.jsonl").unlink()
    privacy.joinpath("ledger.jsonl").symlink_to(outside)


def to_a_folder(privacy: Path, outside: Path) -> None:
    privacy.rename(outside.parent / "moved")
    privacy.symlink_to(outside.parent / "moved")


def in_the_outbox(privacy: Path, outside: Path) -> None:
    one = next(privacy.joinpath("outbox").iterdir())
    one.unlink()
    one.symlink_to(outside)


def to_a_pipe(privacy: Path, outside: Path) -> None:
    privacy.joinpath("ledger.jsonl").unlink()
    os.mkfifo(privacy / "ledger.jsonl")


@pytest.mark.parametrize("trap", [to_a_file, to_a_folder, in_the_outbox, to_a_pipe])
def test_no_link_in_the_privacy_folder_is_followed(tmp_path: Path, trap: Any) -> None:
    """A folder from somebody else: the ledger leads to a file of the user's, which has no end of a line."""
    run_in(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("all of it")
    trap(tmp_path / "run" / "privacy", victim)
    before = {path: path.read_bytes() for path in tmp_path.joinpath("moved").glob("*") if path.is_file()}
    with pytest.raises(BadInput, match=r"none is followed|not a file"):
        run_in(tmp_path / "run", rounds=4, resume=True, allowed_changes=("training.rounds",))
    with pytest.raises(BadInput, match=r"none is followed|not a file"):
        protofed.load(tmp_path / "run", task=task_of())
    assert victim.read_text() == "all of it"
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_whose_ledger_is_gone_does_not_go_on(tmp_path: Path) -> None:
    """What it released would be forgotten, and all of ε be there once more."""
    run_in(tmp_path)
    (tmp_path / "privacy" / "ledger.jsonl").unlink()
    with pytest.raises(RunFailed, match="the ledger is gone"):
        run_in(tmp_path, rounds=4, resume=True, allowed_changes=("training.rounds",))


@pytest.mark.parametrize(
    ("before", "key"), [(PrivacySettings(), "privacy.level"), (PrivacySettings("record", 50.0), "privacy.noise")]
)
def test_a_run_cannot_become_private_on_its_way(tmp_path: Path, before: PrivacySettings, key: str) -> None:
    """Rounds without noise, or with simulated noise, would count as if they had secret noise."""
    run_in(tmp_path, rounds=1, privacy=before)
    with pytest.raises(BadInput, match=key):
        run_in(tmp_path, rounds=2, resume=True, allowed_changes=("training.rounds", "privacy"))


class Tapped(FedAvg):
    """Writes down what the server is given."""

    tap = Path()

    def aggregate(self, state: Any, uploads: Uploads[Any], server: Any) -> Any:
        def read() -> Iterator[Any]:
            for client, upload in uploads:
                with open(self.tap, "a") as file:
                    file.write(f"{server.round} {client} {upload.params['classifier.bias'].tolist()}\n")
                yield client, upload

        return super().aggregate(state, read(), server)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


def tapped_experiment(rounds: int) -> Experiment:
    return Experiment(private(Tapped(), privacy=SECRET, rounds=rounds, epochs=1), identity="tapped")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_make_no_second_version_of_anything_and_leave_nothing_unpaid(
    in_memory: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T7. A run with secret noise is killed again and again; then it is run once more from what clients have sent."""
    monkeypatch.setattr(Tapped, "tap", in_memory / "timing")
    for name in ("first", "timed"):  # the first one also imports what vmap needs
        begin = time.process_time()
        execute(tapped_experiment(3), RunFolder(in_memory / name))
    whole, draw, done = time.process_time() - begin, random.Random(1), 0
    for number in range(kills):
        if done >= kills:
            break
        folder, tap = RunFolder(in_memory / f"run{number}"), in_memory / f"tap{number}"
        monkeypatch.setattr(Tapped, "tap", tap)
        while run_killed_after(tapped_experiment(3), folder, draw.uniform(0, 0.6 * whole)):
            done += 1
        experiment = tapped_experiment(3)
        versions: dict[Any, set[str]] = defaultdict(set)
        for line in tap.read_text().splitlines():
            versions[tuple(line.split()[:2])].add(line)
        assert len(versions) == 9
        assert all(len(own) == 1 for own in versions.values()), "a second version was sent"
        assert experiment.federation.private is not None
        experiment.federation.private.keep_in(folder.path / "privacy")
        entries = experiment.federation.private.ledger.entries
        assert {(str(e.round), e.client) for e in entries} == {*versions}
        assert len(entries) == 9, "what was never sent costs nothing"
        again = RunFolder(in_memory / f"again{number}")
        copytree(folder.path / "privacy", again.path / "privacy")
        execute(tapped_experiment(3), again)
        assert fingerprint(again.path, tapped_experiment(3)) == fingerprint(folder.path, tapped_experiment(3))
    assert done >= kills


def test_a_damaged_outbox_ends_the_run(tmp_path: Path) -> None:
    run_in(tmp_path)
    for path in (tmp_path / "privacy" / "outbox").iterdir():
        path.write_bytes(path.read_bytes()[:-4])
    for name in ("checkpoint", "rounds.jsonl", "done"):
        os.rename(tmp_path / name, tmp_path / f"not-{name}")
    with pytest.raises(RunFailed, match="cannot be sent again"):
        run_in(tmp_path)


# ---- what is refused


def refused(match: str, method: Any = "fedavg", task: Any = None, **changes: Any) -> None:
    settings = {"rounds": 2, "privacy": PrivacySettings("record"), "progress": False, **changes}
    with pytest.raises(BadInput, match=match):
        protofed.run(method, task or task_of(), **settings)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"secure": SecureSettings(sums=True)}, ("privacy.level", "secure.sums")),
        ({"on_divergence": "retry_half_lr"}, ("training.on_divergence", "privacy.level")),
        ({"optimizer_state": "kept"}, ("training.optimizer_state", "privacy.level")),
        ({"norm_statistics": "local"}, ("training.norm_statistics", "privacy.level")),
        ({"evaluate_clients_every": 1}, ("evaluation.clients", "privacy.level")),
        ({"fine_tune": 1}, ("evaluation.fine_tune", "privacy.level")),
        ({"method": "grace"}, ("privacy.level", "GRACE", "method.name", "half of a batch")),
        ({"method": "fedpc"}, ("privacy.level", "FedPC", "method.name", "no private step")),
        ({"method": "fpl", "uploads": UploadSettings(min_class_count=3)}, ("privacy.level", "uploads.min_class_count")),
        ({"privacy": PrivacySettings("record", delta=0.01), "task": "many"}, ("privacy.delta", "records")),
        ({"privacy": PrivacySettings("client")}, ("privacy.level",)),
        ({"privacy": PrivacySettings(epsilon=1.0)}, ("privacy.epsilon", "privacy.level")),
        ({"privacy": PrivacySettings(noise="secret")}, ("privacy.noise", "privacy.level")),
        (
            {"privacy": PrivacySettings("client"), "secure": SecureSettings(sums=True), "optimizer_state": "kept"},
            ("training.optimizer_state", "privacy.level = .client"),
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_both_keys(changes: dict[str, Any], keys: tuple[str, ...]) -> None:
    if changes.get("task") == "many":
        task = task_of()
        clients = {name: data.rows(torch.arange(12).repeat(10)) for name, data in task.clients.items()}
        changes = {**changes, "task": replace(task, clients=clients)}
    refused("(?s)" + ".*".join(f"(?=.*{key})" for key in keys), **changes)


def test_a_federation_refuses_training_settings_that_the_wrapping_would_leave_out() -> None:
    """A federation that is built without a configuration too."""
    with pytest.raises(BadInput, match=r"training\.optimizer_state and privacy\.level"):
        private(rounds=1, optimizer_state="kept")


def test_batch_norm_is_refused_and_the_way_out_named() -> None:
    refused("features.1 is a BatchNorm.*GroupNorm", task="minidigits", rounds=1)


def test_a_class_that_replaces_the_training_does_not_inherit_the_private_step() -> None:
    class Other(FedAvg):
        async def train(self, client: Any, message: Any, memory: Any) -> Any:
            return await super().train(client, message, memory)

    refused("no private step", method=Other())


def test_without_the_section_nothing_is_different() -> None:
    table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    plain = configuration.parse(table, "a test")
    assert plain.experiment().federation.private is None
    explicit = configuration.parse({**table, "privacy": {"level": "none"}}, "a test")
    assert explicit.identity == plain.identity
    on = [configuration.parse({**table, "privacy": {"level": "record", "epsilon": e}}, "a test") for e in (1.0, 2.0)]
    assert len({plain.identity, *(one.identity for one in on)}) == 3


def test_a_private_step_that_fails_says_nothing_of_examples() -> None:
    class Telling(FedAvg):
        def loss(self, model: Any, batch: Any, message: Any, memory: Any) -> Any:
            raise ValueError("the secret is 42")

    of = private(Telling(), attempts=1)
    with pytest.raises(RunFailed) as error:
        of.advance(of.start())
    assert "42" not in str(error.value)
    assert "a private step of Telling failed" in str(error.value)


def test_losses_are_not_told() -> None:
    of = private()
    assert of.advance(of.start()).loss is None
    assert isinstance(of.private, Private)


# ---- what people are told


def test_a_result_says_what_is_promised_spent_and_not_covered(tmp_path: Path) -> None:
    result = run_in(tmp_path, privacy=PrivacySettings("record", epsilon=8.0))
    for one in (result, protofed.load(tmp_path, task=task_of())):
        assert one.privacy["released"] == pytest.approx(8.0)
        assert one.privacy["noise"] == "SIMULATED"
        assert "ε = 8 of 8 at δ = 1e-05 (SIMULATED)" in one.summary()
    assert result.privacy["unit"] == "record"
    assert "SIMULATED" not in run_in(tmp_path / "b").summary()


def test_commands_and_the_page_say_it_too(tmp_path: Path) -> None:
    run_in(tmp_path / "run", privacy=PrivacySettings("record", epsilon=8.0))
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert shown.output.count("SIMULATED") == 2
    assert "Not covered: metrics" in shown.output
    told = json.loads(CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--json"]).output)
    assert told["privacy"]["released"] == pytest.approx(8.0)
    text = json.dumps(facts(listing([tmp_path / "run"]), "", ""), ensure_ascii=False)
    assert "SIMULATED noise" in text
