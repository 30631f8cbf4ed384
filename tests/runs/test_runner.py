"""Runs that survive: killed, stopped, resumed, and never two in one folder."""

import enum
import json
import math
import os
import signal
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import protofed
from protofed import BadInput, Data, RunFailed, Task, wire
from protofed.engine.training import Training
from protofed.metrics.registry import METRICS
from protofed.nn.networks import Parts
from protofed.runs.config import config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.results import Result, Round, parsed, summed
from protofed.runs.runner import Experiment, execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.saver import Saver
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.sequential import Sequential
from protofed.tasks.minidigits import Minidigits
from protofed.tasks.models import mlp
from run_doubles import parts, small_experiment, small_task

ROUNDS = 8


def outcome(folder: Path) -> tuple[bytes, dict[str, bytes], list[dict[str, object]]]:
    """Everything a run ends with but the time that it took."""
    last = folder / "checkpoint" / f"{ROUNDS:06d}"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    named = json.loads((last / "manifest").read_bytes().splitlines()[0])["memories"]
    shards = {name: (folder / "checkpoint" / "memories" / name).read_bytes() for name in sorted(named)}
    return (last / "server.safetensors").read_bytes(), shards, rounds


def in_child(work: Callable[[], object]) -> int:
    """The process id of a child that does the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return small_experiment("moon", ROUNDS)


@pytest.fixture(scope="module")
def uninterrupted(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("whole")
    execute(experiment, RunFolder(folder))
    return outcome(folder)


def test_a_run_writes_its_folder(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/protofed", "run", "my file.toml"])
    execute(experiment, RunFolder(tmp_path))
    names = {"checkpoint", "config.toml", "done", "environment.json", "lock", "rounds.jsonl", "task.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == ROUNDS
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert environment["command"] == "protofed run 'my file.toml'"  # as a shell would read it again


def test_stopped_after_a_round_and_resumed_it_ends_with_the_same_bytes(
    experiment: Experiment, uninterrupted: tuple[object, ...], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    for stop in (2, 3, 7):
        result = execute(experiment, folder, resume=True, should_stop=lambda stop=stop: folder.rounds_saved >= stop)
        assert len(result.rounds) == stop
        assert not result.is_complete
        assert not folder.is_done
    assert execute(experiment, folder, resume=True).is_complete
    assert outcome(tmp_path) == uninterrupted


def test_a_damaged_newest_checkpoint_costs_one_round_and_no_bit(
    experiment: Experiment, uninterrupted: tuple[object, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 4)
    (tmp_path / "checkpoint" / "000004" / "server.safetensors").write_bytes(b"damaged")
    execute(experiment, folder, resume=True)
    assert "damaged" in caplog.text
    assert outcome(tmp_path) == uninterrupted


def test_a_finished_run_is_loaded_not_repeated(experiment: Experiment, tmp_path: Path) -> None:
    first = execute(experiment, RunFolder(tmp_path))

    class NoTraining(Sequential):
        def run(self, jobs: object) -> object:
            raise AssertionError("a finished run trained again")

        def answer(self, request: object) -> object:
            raise AssertionError("a finished run was evaluated again")

    idle = replace(experiment, federation=replace(experiment.federation, runtime=NoTraining()))
    again = execute(idle, RunFolder(tmp_path), resume=True)
    assert wire.encode(again.server) == wire.encode(first.server)
    assert again.rounds == first.rounds


def test_an_unfinished_run_is_not_overwritten(experiment: Experiment, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 3)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(BadInput, match="holds a run with 3 rounds done: continue it with --resume"):
        execute(experiment, folder)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_in_use_is_refused_and_free_again_when_its_process_dies(
    experiment: Experiment, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    ready, write = os.pipe()

    def hold() -> None:
        with folder.locked():
            os.write(write, b"x")
            signal.pause()

    child = in_child(hold)
    os.read(ready, 1)
    with pytest.raises(BadInput, match=f"in use by another process .pid {child} on "):
        execute(experiment, folder)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert execute(experiment, folder).is_complete


def test_an_output_folder_that_cannot_be_written_is_named(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(
        BadInput, match=f"cannot write to {blocked / 'run'}: Not a directory; choose another folder with --out"
    ):
        execute(experiment, RunFolder(blocked / "run"))

    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(BadInput, match=f"cannot write to {tmp_path / 'run'}: Permission denied"):
        execute(experiment, RunFolder(tmp_path / "run"))


def test_a_full_disk_stops_the_run_and_it_resumes_to_the_same_bytes(
    experiment: Experiment, uninterrupted: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    write = os.write

    def full(handle: int, data: bytes) -> int:
        if folder.rounds_saved >= 3:
            raise OSError(28, "No space left on device")
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(RunFailed, match="No space left on device"):
            execute(experiment, folder)
    execute(experiment, folder, resume=True)
    assert outcome(tmp_path) == uninterrupted


def test_without_a_folder_nothing_is_written(
    experiment: Experiment, uninterrupted: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = execute(experiment)
    assert list(tmp_path.iterdir()) == []
    assert wire.encode(result.server) == uninterrupted[0]


def test_threads_are_pinned_for_the_run_and_given_back() -> None:
    seen: list[int] = []
    experiment = small_experiment("fedavg", 1)
    watched = replace(experiment.federation, on_client=lambda client: None)
    before = torch.get_num_threads()

    class Watch:
        def begin(self, *_: object) -> None:
            seen.append(torch.get_num_threads())

        def client(self, *_: object) -> None: ...

        def round(self, *_: object) -> None: ...

    execute(replace(experiment, federation=watched, threads=before + 1), observer=Watch())
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_evaluation_every_few_rounds_and_always_in_the_last(experiment: Experiment) -> None:
    result = execute(replace(experiment, evaluate_every=3))
    assert [r.round for r in result.rounds if r.is_evaluated] == [3, 6, 8]


OF_READINGS = {
    "public.mean_heads",
    "public.nearest_prototype",
    "public.initial_head",
}  # of methods without a public model
AT_HOME = {"public.local_index", "own_local_index"}  # of tasks without domains
EVERY = {metric.id for metric in METRICS if metric.group != "domain"}
ALL = EVERY - OF_READINGS - AT_HOME


def measured_in(r: Round) -> set[str]:
    return {name for name in EVERY if r.metric(name) is not None}


def test_clients_are_judged_every_few_rounds_and_in_the_last(experiment: Experiment) -> None:
    """FPL has a public model: GM in every round, the other metrics where clients are judged."""
    result = execute(replace(experiment, evaluate_every=2, evaluate_clients_every=3))
    assert [r.round for r in result.rounds if r.is_evaluated] == [2, 3, 4, 6, 8]
    assert [r.round for r in result.rounds if r.clients] == [3, 6, 8]
    for r in result.rounds:
        if r.clients:
            assert r.clients.keys() == {"c0", "c1", "c2"}
            assert measured_in(r) == ALL - {"auc", "new"}
            assert r.personal["owned"] == pytest.approx(sum(own["owned"] for own in r.clients.values()) / 3)
            gm, local = r.public["accuracy"], r.personal["local_index"]
            assert r.summary["harmonic_mean"] == pytest.approx(2 * gm * local / (gm + local))
        elif r.is_evaluated:
            assert not r.personal
            assert measured_in(r) == {name for name in ALL if not name.startswith("personal.")} - {
                "auc",
                "harmonic_mean",
                "new",
            }
    unjudged = execute(experiment)
    assert wire.encode(result.server) == wire.encode(unjudged.server), "judging changed the training"


def test_methods_without_a_public_model_have_no_global_metrics() -> None:
    experiment = replace(small_experiment("local", 1), evaluate_clients_every=1)
    (only,) = execute(experiment).rounds
    of_public = {name for name in ALL if name.startswith("public.")}
    assert ALL - measured_in(only) == {"auc", "new", "harmonic_mean", *of_public}
    assert not measured_in(only) & (OF_READINGS | AT_HOME)


def test_what_clients_see_at_home_by_domain() -> None:
    """Clients c0 and c2 are of the domain low, c1 is of high; in each, accuracy is the mean over its clients."""
    (only,) = execute(small_experiment("local", 1)).rounds
    low, high = only.own_domains["low"]["accuracy"], only.own_domains["high"]["accuracy"]
    assert only.summary["own"] == pytest.approx((2 * low + high) / 3)
    assert "auc" not in only.own_domains["low"], "three classes have no area under the curve"
    (public,) = execute(small_experiment("fedavg", 1)).rounds
    assert public.own_domains == public.domains
    assert summed([public], "last").own_domains == public.own_domains


def two_classes() -> Task:
    task = small_task()
    few = {c: d.rows((d.labels < 2).nonzero().flatten()) for c, d in task.clients.items()}
    tests = {name: d.rows((d.labels < 2).nonzero().flatten()) for name, d in task.tests.items()}

    def two(client: str) -> Parts:
        return {**parts(client), "classifier": nn.Linear(8, 2)}

    return replace(task, clients=few, tests=tests, num_classes=2, model=two, public=None)


def test_two_classes_have_areas_under_the_curve_at_home_and_in_the_metrics() -> None:
    for method in ("local", "fedavg"):
        (only,) = protofed.run(method, two_classes(), rounds=1, epochs=1, batch_size=8).rounds
        areas = [own["auc"] for own in only.own_domains.values()]
        assert only.summary["auc"] == pytest.approx(sum(areas) / 2)
        assert all(0 <= area <= 1 for area in areas)


def test_a_domain_without_clients_is_seen_by_the_public_model() -> None:
    homeless = replace(two_classes(), domain_of={"c1": "high"})
    (only,) = protofed.run("fedavg", homeless, rounds=1, epochs=1, batch_size=8).rounds
    assert only.own_domains["low"] == only.domains["low"]
    assert "auc" in only.own_domains["low"]


def test_a_setup_that_asks_clients_has_a_line_and_what_moved_is_in_every_line(tmp_path: Path) -> None:
    experiment = small_experiment("fedpc", 2)
    result = execute(experiment, RunFolder(tmp_path))
    assert result.is_complete
    assert [r.round for r in result.rounds] == [0, 1, 2]
    setup, first, _ = result.rounds
    assert not setup.is_evaluated
    assert setup.traffic["c0"]["up"] < first.traffic["c0"]["up"]  # prototypes alone, then weights too
    assert parsed((tmp_path / "rounds.jsonl").read_text()) == list(result.rounds)
    assert [r.round for r in execute(small_experiment("fedavg", 1)).rounds] == [1]


def rounds_of(*averages: float | None) -> list[Round]:
    return [
        Round(
            k + 1,
            1,
            {},
            "public model",
            {"a": {"accuracy": v - 0.1}, "b": {"accuracy": v + 0.1}},
            summary={"average": v},
        )
        if v is not None
        else Round(k + 1, 1, {})
        for k, v in enumerate(averages)
    ]


def test_summaries_by_hand() -> None:
    rounds = rounds_of(0.9, None, 0.2, 0.3, 0.4, 0.5, 0.6)
    # the last five evaluated rounds are 0.2, 0.3, 0.4, 0.5 and 0.6
    for summary, a, b, average in (("last_five", 0.3, 0.5, 0.4), ("last", 0.5, 0.7, 0.6), ("best", 0.8, 1.0, 0.9)):
        scores = summed(rounds, summary)
        assert {domain: own["accuracy"] for domain, own in scores.domains.items()} == pytest.approx({"a": a, "b": b})
        assert scores.metrics == pytest.approx({"average": average})
    some = [replace(r, personal={"owned": 0.1 * r.round}) if r.round in (5, 7) else r for r in rounds]
    assert summed(some, "last_five").metrics["personal.owned"] == pytest.approx(0.6)  # of rounds 5 and 7, which have it
    with pytest.raises(BadInput, match="no round was evaluated"):
        summed(rounds_of(None), "last")


@pytest.fixture(scope="module")
def python_result() -> Result:
    return protofed.run(protofed.FPL(temperature=0.1), small_task(), rounds=2, epochs=1, batch_size=8)


def test_the_result_has_rounds_server_and_a_model_for_each_client(python_result: Result) -> None:
    assert [r.round for r in python_result.rounds] == [1, 2]
    assert python_result.server.params.keys() == python_result.model_for("c1").params.keys()
    logits = python_result.model_for("c0").logits(torch.zeros(4, 6))
    assert logits.shape == (4, 3)
    assert python_result.accuracy("last").keys() == {"low", "high"}
    with pytest.raises(BadInput, match="no client 'nobody'; the clients are c0, c1, c2"):
        python_result.model_for("nobody")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fedavgg"}, "method 'fedavgg' is unknown; did you mean 'fedavg'"),
        ({"method": "fedavg", "task": "minidigit"}, "task 'minidigit' is unknown; did you mean 'minidigits'"),
        ({"method": protofed.FPL(temperature=-1.0)}, "FPL.temperature: must be greater than 0, not -1.0"),
        ({"method": protofed.FPL}, "give an instance of a frozen dataclass"),
        ({"method": "fedavg", "optimizer": protofed.Sam(base=protofed.Sgd(lr=-1.0))}, "Sgd.lr: must be greater than 0"),
        ({"method": "fedavg", "rounds": 0}, "Training.rounds: must be greater than or equal to 1, not 0"),
        ({"method": "fedavg", "optimizer": protofed.Sgd(lr=-0.1)}, "Sgd.lr: must be greater than 0, not -0.1"),
    ],
)
def test_bad_arguments_are_refused_before_work_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        protofed.run(**arguments)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Own(protofed.FedAvg):
    """A method of a user's with a setting of any kind, and with something that it makes of it."""

    setting: Any = None
    made: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", repr(self.setting))


SETTINGS = [
    *(1, 0.5, math.inf, "a", True, None, (1, 2), [[0.5], ["b"]]),
    *({"a": 1, "b": {"c": (1, 2)}, "d": None}, {"a b": {"x.y": {"": 1}}, "ü": "\x7f\n"}),
]


def as_toml_has_it(value: Any) -> Any:
    """It has no tuples, and nothing for None."""
    if isinstance(value, dict):
        return {key: as_toml_has_it(own) for key, own in value.items() if own is not None}
    return [as_toml_has_it(own) for own in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_what_can_be_recorded_may_be_a_setting(setting: Any, tmp_path: Path) -> None:
    protofed.run(Own(setting), small_task(), rounds=1, folder=tmp_path)
    recorded = tomllib.loads((tmp_path / "config.toml").read_text())["method"]
    assert "made" not in recorded
    assert recorded.get("setting") == as_toml_has_it(setting)
    assert protofed.run(Own(setting), small_task(), rounds=1, folder=tmp_path, resume=True).rounds


class Number(enum.IntEnum):
    ONE = 1


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
OTHERS = [
    *(Path("a"), len, {"a"}, {1: 2}, (None,), [{"a": 1}], torch.ones(2), Own(), np.float64(0.5), [np.float64(0.5)]),
    *(Number.ONE, math.nan, 2**63, "\ud800", {"\ud800": 1}, ENDLESS),
]


@pytest.mark.parametrize("setting", OTHERS, ids=ascii)
def test_what_cannot_be_recorded_is_refused_by_name(setting: Any) -> None:
    with pytest.raises(
        BadInput, match=r"Own\.setting is .*, which a run cannot record: settings are plain numbers, strings"
    ):
        protofed.run(Own(setting), small_task(), rounds=1)


def test_a_folder_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    task, settings = small_task(), {"rounds": 1, "epochs": 1, "batch_size": 8, "folder": tmp_path, "resume": True}
    first = protofed.run("fedavg", task, **settings)
    assert protofed.run("fedavg", task, **settings).rounds == first.rounds
    changed = replace(task, clients={**task.clients, "c0": task.clients["c0"].rows(torch.arange(5))})
    with pytest.raises(BadInput, match=r"task.fingerprint: .* then, .* now"):
        protofed.run("fedavg", changed, **settings)


class Noisy(nn.Module):
    """Draws in evaluation too, as networks with sampled features do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_networks_that_draw_give_the_same_bits_again() -> None:
    task = small_task()
    noisy = replace(
        task, model=lambda client: {"features": nn.Sequential(nn.Linear(6, 8), Noisy()), "classifier": nn.Linear(8, 3)}
    )
    method = protofed.FPL(prototype_mode="recomputed")
    first, again = (protofed.run(method, noisy, rounds=2, epochs=1, batch_size=8) for _ in range(2))
    assert wire.encode(first.server) == wire.encode(again.server)
    assert [r.domains for r in first.rounds] == [r.domains for r in again.rounds]


def test_a_folder_is_not_resumed_with_another_transform(tmp_path: Path) -> None:
    images = Data.of(torch.rand(6, 1, 4, 4), torch.arange(6) % 3)
    task = Task({"a": images}, {"t": images}, 3, lambda client: mlp(16, 3), transform=protofed.Transform())
    settings = {"rounds": 1, "epochs": 1, "batch_size": 8, "folder": tmp_path, "resume": True}
    protofed.run("fedavg", task, **settings)
    with pytest.raises(BadInput, match=r"task.fingerprint: .* then, .* now"):
        protofed.run("fedavg", replace(task, transform=protofed.Transform(flip=True)), **settings)


def test_resuming_with_other_software_is_said(
    experiment: Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    execute(experiment, folder, should_stop=lambda: folder.rounds_saved >= 2)
    execute(experiment, folder, resume=True, should_stop=lambda: folder.rounds_saved >= 3)
    assert "other software" not in caplog.text
    facts = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps({**facts, "torch": "1.0"}))
    execute(experiment, folder, resume=True)
    assert f"torch 1.0 then, {torch.__version__} now" in caplog.text


def test_weights_that_are_not_numbers_are_noticed_where_they_never_leave_the_client() -> None:
    with pytest.raises(RunFailed, match="round 2: client c0 diverged with LocalOnly: step 1 of 1: the loss was nan"):
        protofed.run("local", small_task(), rounds=3, epochs=1, optimizer=protofed.Sgd(lr=1e30))


def test_predictions_follow_the_methods_own_rule_on_examples_as_stored() -> None:
    task = small_task()
    result = protofed.run(protofed.FedProto(inference="nearest_prototype"), task, rounds=2, epochs=1, batch_size=8)
    x = task.tests["low"].x
    scores = result.predict("c0", x)
    z = result.model_for("c0").features(x)
    nearest = (z[:, None] - result.server.mean).square().mean(-1).argmin(-1)
    assert torch.equal(scores.argmax(-1), nearest)


def test_a_task_without_tests_trains_and_is_not_evaluated() -> None:
    result = protofed.run("fedavg", replace(small_task(), tests={}, domain_of={}), rounds=1, epochs=1, batch_size=8)
    assert [r.is_evaluated for r in result.rounds] == [False]


@dataclass(frozen=True)
class Optional(protofed.FedAvg):
    limit: float | None = None


def test_settings_may_be_left_open_and_whole_numbers_are_numbers() -> None:
    assert protofed.run(Optional(), small_task(), rounds=1, epochs=1, batch_size=8).is_complete
    one, same = (
        config.Config(
            Minidigits(), config.checked(protofed.FedProx(weight)), Training(), RuntimeSettings(), EvaluationSettings()
        ).identity
        for weight in (1, 1.0)
    )
    assert one == same


# ---- saving behind a run


def test_a_state_is_saved_while_the_next_round_runs_and_before_the_next_save() -> None:
    release, order = threading.Event(), list[str]()

    def slow() -> None:
        assert release.wait(10)
        order.append("first")

    with Saver(behind=True) as saver:
        saver.begin(slow)
        assert order == [], "the run does not wait for it"
        release.set()
        saver.begin(lambda: order.append("second"))
        assert order[0] == "first"
    assert order == ["first", "second"]


@pytest.mark.parametrize("behind", [False, True])
def test_a_save_that_fails_is_never_silent(behind: bool) -> None:
    def failing() -> None:
        raise RunFailed("the disk is full")

    with pytest.raises(RunFailed, match="the disk is full"), Saver(behind=behind) as saver:
        saver.begin(failing)


def test_a_failed_save_ends_the_run_at_the_next_one() -> None:
    def failing() -> None:
        raise RunFailed("the disk is full")

    with Saver(behind=True) as saver:
        saver.begin(failing)
        with pytest.raises(RunFailed, match="the disk is full"):
            saver.begin(lambda: None)


def test_the_time_of_a_round_is_told_apart(tmp_path: Path) -> None:
    (first, second) = execute(small_experiment(rounds=2), RunFolder(tmp_path)).rounds
    assert list(first.seconds) == ["train", "aggregate", "evaluate", "checkpoint"]
    assert all(value >= 0 for value in first.seconds.values())
    assert second.seconds["checkpoint"] > 0


def test_a_test_set_may_be_called_like_a_number_of_a_run() -> None:
    experiment = small_experiment("fedavg", 1)
    low, high = experiment.federation.task.tests.values()
    task = replace(experiment.federation.task, tests={"average": low, "down": high}, domain_of={})
    (only,) = execute(replace(experiment, federation=replace(experiment.federation, task=task))).rounds
    accuracies = [scores["accuracy"] for scores in only.domains.values()]
    assert list(only.domains) == ["average", "down"]
    assert only.average == pytest.approx(sum(accuracies) / 2)


def lasting(rounds: int) -> Experiment:
    return replace(small_experiment(rounds=rounds), config=f"[training]\nrounds = {rounds}\n", identity="one")


def test_a_run_that_goes_on_is_not_done_until_it_is(tmp_path: Path) -> None:
    folder, allowed = RunFolder(tmp_path), ["training.rounds"]
    execute(lasting(2), folder)
    assert folder.is_done
    execute(lasting(4), folder, resume=True, allowed_changes=allowed, should_stop=lambda: folder.rounds_saved > 2)
    assert (folder.is_done, folder.rounds_saved) == (False, 3)
    assert execute(lasting(4), folder, resume=True).is_complete
    assert (folder.is_done, folder.rounds_saved) == (True, 4)


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    execute(lasting(3), folder)
    with pytest.raises(BadInput, match=r"has 3 rounds already, more than training\.rounds = 2"):
        execute(lasting(2), folder, resume=True, allowed_changes=["training.rounds"])
    assert folder.is_done
    assert "rounds = 3" in folder.read_config()


def test_names_may_hold_ends_of_lines_of_another_kind() -> None:
    names = ["a\u2028b", "c\x85d", "e\u2029f"]
    lines = "".join(
        f'{{"round": {k}, "participants": 1, "failures": {{"{name}": "x"}}}}\n' for k, name in enumerate(names)
    )
    assert [list(r.failures) for r in parsed(lines)] == [[name] for name in names]
    assert parsed("") == []


def test_the_folder_of_a_run_from_python_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for resume in (False, True):
        result = protofed.run("local", small_task(), rounds=1, folder="here", resume=resume)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert result.model_for(next(iter(small_task().clients)))
