"""What a result shows of itself, observers, and runs that go on."""

from pathlib import Path

import numpy as np
import pytest
import torch

import protofed
from models.handing import run_of, vectors
from protofed import BadInput, Callback, FedAvg, LocalOnly, Result, RunFailed, TensorBoard, tree
from protofed.engine.federation import Federation
from protofed.runs.observers import Lenient, LoggingSettings, Progress, scalars
from protofed.runs.results import Round


def short(method: object, rounds: int = 2, **settings: object) -> Result:
    return protofed.run(method, vectors(), rounds=rounds, epochs=1, batch_size=8, runtime="sequential", **settings)  # type: ignore


@pytest.fixture(scope="module")
def result() -> Result:
    return short(FedAvg(), 3)


def test_it_prints_as_a_summary(result: Result) -> None:
    accuracy = result.accuracy("last")
    text = str(result)
    assert text == repr(result) == result.summary()
    assert text.splitlines()[0] == "FedAvg on custom: 3 of 3 rounds, 3 clients"
    assert f"  low  {100 * accuracy['low']:.1f} %" in text.splitlines()
    own = str(short(LocalOnly()))
    assert "own models" in own
    assert "  c1  " in own, "the sites come first where each has its model"


def test_confusion_counts_what_was_judged(result: Result) -> None:
    accuracy = result.accuracy("last")
    confusion = result.confusion()
    assert confusion.shape == (3, 3)
    assert confusion.sum() == 60
    assert confusion.trace() / 60 == pytest.approx((accuracy["low"] + accuracy["high"]) / 2)
    assert result.confusion("c1").trace() / 30 == pytest.approx(accuracy["high"]), "c1 is of the domain high"


def test_curves_are_a_table_of_rounds(result: Result) -> None:
    curves = result.curves()
    assert [*curves.index] == [1, 2, 3]
    assert curves["accuracy of low"][3] == result.accuracy("last")["low"]
    assert curves["loss"].notna().all()
    axes = result.plot()
    assert [line.get_label() for line in axes.get_lines()] == ["low", "high"]
    with pytest.raises(BadInput, match="no metric 'luck'"):
        result.plot("luck")


def test_embeddings_are_the_features_of_the_model(result: Result) -> None:
    data = vectors().tests["low"]
    found = result.embeddings("c1", data)
    with torch.no_grad():
        assert torch.allclose(found, result.model_for("c1").features(data.x), atol=1e-6)
    assert torch.equal(result.embeddings(None, data.x[:4]), found[:4])


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("method", [FedAvg(), LocalOnly()], ids=["fedavg", "local"])
def test_a_run_that_goes_on_is_the_longer_run(method: object, in_folder: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run" if in_folder else None
    more = protofed.continue_from(short(method, 1, folder=folder), rounds=2)
    whole = short(method, 3)
    assert [r.round for r in more.rounds] == [1, 2, 3]
    assert all(map(torch.equal, tree.leaves(more.state.server), tree.leaves(whole.state.server)))
    x = vectors().tests["low"].x
    assert torch.equal(more.predict("c1", x), whole.predict("c1", x))


def test_a_loaded_run_goes_on_elsewhere_and_stays_as_it_was(tmp_path: Path) -> None:
    short(LocalOnly(), 2, folder=tmp_path / "run", keep=(1,))
    early = protofed.load(tmp_path / "run", 1, task=vectors())
    assert isinstance(early, Result)
    with pytest.raises(BadInput, match="give another folder"):
        protofed.continue_from(early, 1)
    more = protofed.continue_from(early, 2, folder=tmp_path / "other")
    assert more.state.round == 3
    again = protofed.load(tmp_path / "other", task=vectors())
    x = vectors().tests["low"].x
    assert torch.equal(again.predict("c1", x), short(LocalOnly(), 3).predict("c1", x))  # type: ignore
    assert protofed.load(tmp_path / "run", task=vectors()).state.round == 2  # type: ignore


# ---- observers


class Told(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, federation: Federation, done: int) -> None:
        self.heard.append(f"begin {done}")

    def client(self, client: str) -> None:
        self.heard.append(client)

    def round(self, result: Round) -> None:
        self.heard.append(f"round {result.round}")

    def end(self, result: Result | None) -> None:
        self.heard.append("end" if result else "failed")


def test_observers_are_told_how_a_run_goes() -> None:
    told, other = Told(), Told()
    short(FedAvg(), 1, observer=[told, other])
    assert told.heard == ["begin 0", "c0", "c1", "c2", "round 1", "end"] == other.heard


def test_an_observer_that_fails_ends_the_run_and_the_others_hear_of_it() -> None:
    class Failing(Told):
        def round(self, result: Round) -> None:
            raise RuntimeError("mine")

    told = Told()
    with pytest.raises(RuntimeError, match="mine"):
        short(FedAvg(), 1, observer=[told, Failing()])
    assert told.heard[-1] == "failed"


def test_a_log_that_is_lost_is_named_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Away(Callback):
        asked = 0

        def round(self, result: Round) -> None:
            self.asked += 1
            raise ConnectionError("the server is away")

    away = Away()
    assert short(FedAvg(), 3, observer=Lenient(away)).is_complete
    assert away.asked == 1
    assert caplog.text.count("the server is away") == 1


def test_progress_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    short(FedAvg(), 2, progress=True)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    last = text.rstrip("\n").split("\r")[-1]
    assert last.startswith("round 2/2  accuracy ")
    short(FedAvg(), 1)
    assert not capsys.readouterr().out, "nobody watches a file"


def test_tensorboard_has_the_numbers_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = short(FedAvg(), 2, folder=tmp_path / "run", logging=LoggingSettings(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    found = [(one.step, one.value) for one in events.Scalars("domains/low/accuracy")]
    assert found == [(r.round, pytest.approx(r.domains["low"]["accuracy"], abs=1e-6)) for r in result.rounds]
    with pytest.raises(BadInput, match="go into the run's folder"):
        short(FedAvg(), 1, logging=LoggingSettings(tensorboard=True))
    assert isinstance(TensorBoard(tmp_path), Callback)


def test_logging_changes_no_number_and_not_the_hash() -> None:
    from protofed.runs.config.config import parse

    table = {"task": {"name": "minidigits"}, "method": {"name": "fedavg"}}
    plain, logged = parse(table, "a test"), parse({**table, "logging": {"tensorboard": True}}, "a test")
    assert plain.identity == logged.identity
    assert logged.logging.tensorboard


def test_scalars_are_numbers_by_name(result: Result) -> None:
    numbers = scalars(result.rounds[-1])
    assert numbers["average"] == result.rounds[-1].average
    assert all(isinstance(value, float) for value in numbers.values())
    assert isinstance(Progress(), Callback)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"mlflow is not installed: pip install 'protofed\[mlflow\]'"):
        short(FedAvg(), 1, logging=LoggingSettings(mlflow="http://127.0.0.1:9"))


def test_public_models_of_methods_that_have_none() -> None:
    with pytest.raises(BadInput, match="Name a site"):
        run_of("fedproto").confusion()
    assert np.asarray(run_of("fedproto").confusion("c0")).sum() == 30
    assert RunFailed
