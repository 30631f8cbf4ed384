"""Whole runs over messages: settings, transforms, evaluation, resuming."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from federation.grids import config_of, here, remote, sites_of, states
from protofed.api.method import Method
from protofed.api.task import Task
from protofed.engine.around import Around, At
from protofed.engine.federation import Federation
from protofed.engine.secure_settings import SecureSettings
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.errors import BadInput, RunFailed
from protofed.evaluation.evaluate import evaluate
from protofed.federation.in_process import InProcess
from protofed.federation.messages import Limits
from protofed.federation.runtime import ElsewhereStore
from protofed.federation.server import prepared
from protofed.federation.site import Site
from protofed.federation.site_data import own_part, package_data
from protofed.federation.steps import UnknownStep, step_name, step_named
from protofed.methods import METHODS
from protofed.optim.optimizers import Sgd
from protofed.optim.schedules import CosineRate
from protofed.privacy.settings import PrivacySettings
from protofed.runs.config.config import Config
from protofed.runs.config.sections import EvaluationSettings
from protofed.runs.loading import load
from protofed.runs.results import Result
from protofed.runs.runner import execute
from protofed.runs.runtime_choice import RuntimeSettings
from protofed.runs.store.folder import RunFolder
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Reason
from protofed.tasks.custom.settings import Custom
from protofed.tasks.minidigits import Minidigits, MinidigitsSkewed
from protofed.testing.federations import TASK, after, assert_same, memories
from protofed.transforms.chain import UploadSettings


def both(
    folder: Path, method: Method[Any, Any, Any, Any], rounds: int = 2, **settings: Any
) -> tuple[State, State, Federation, Federation]:
    """The state in one process and that over messages, and their federations."""
    config = config_of(method, **settings)
    pipeline, fine_tune = config.uploads.pipeline(), config.evaluation.fine_tune
    near = Federation(method, TASK, config.training, uploads=pipeline, fine_tune=fine_tune)
    sites = sites_of(folder)
    far = remote(InProcess(sites), config)
    ended = [of.finish(after(rounds, of)) for of in (near, far)]
    assert [f.reason for f in ended[1].failures] == [f.reason for f in ended[0].failures]
    assert_same(ended[1].server, ended[0].server, "the server's state over messages")
    assert_same(states(sites, ended[1], far), memories(ended[0]), "what clients keep")
    assert ended[1].loss == ended[0].loss
    return ended[0], ended[1], near, far


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rare classes are withheld": ("fednh", {"uploads": UploadSettings(min_class_count=2)}),
    "uploads are rounded and clipped": ("fpl", {"uploads": UploadSettings("bfloat16", "median")}),
    "clients keep their statistics": ("fedpc", {"norm_statistics": "local"}),
    "nobody keeps statistics": ("ifca", {"norm_statistics": "dropped"}),
    "clients keep their optimiser": ("fedproto", {"optimizer_state": "kept"}),
    "both are kept": ("fedavg_ft", {"optimizer_state": "kept", "norm_statistics": "local"}),
    "some are slow": ("fedavg", {"slow_share": 0.4, "epochs": 4}),
    "some take part": ("feddyn", {"fraction": 0.6, "over_selection": 1.4, "full_last_round": True}),
    "the rate changes": ("ditto", {"schedule": CosineRate()}),
    "some never train": ("fedbn", {"held_out_clients": 1}),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_means_the_same_over_messages(what: str, tmp_path: Path) -> None:
    name, settings = SETTINGS[what]
    both(tmp_path, METHODS[name](), **settings)


@pytest.mark.parametrize("wrapper", [name for name in METHODS if "wrapper" in METHODS.source(name).tags])
def test_a_wrapper_around_fpl_is_the_same_over_messages(wrapper: str, tmp_path: Path) -> None:
    settings = {"contrast_with": "global", "consistent_with": "global"} if wrapper == "fedsgd" else {}
    both(tmp_path, METHODS[wrapper](base=METHODS["fpl"](**settings)))  # type: ignore[call-arg]


def test_a_client_that_diverges_is_asked_again_at_half_the_rate(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": Sgd(lr=1e20, momentum=0.0, weight_decay=0.0), "max_norm": 1e300}
    config = config_of(METHODS["fedavg"](), fraction=0.2, epochs=1)
    training = replace(config.training, on_divergence="retry_half_lr", **settings)
    config = replace(config, training=training)
    near, far = Federation(config.method, TASK, training), remote(InProcess(sites_of(tmp_path)), config)
    first, second = (of.advance(of.start()) for of in (near, far))
    assert second.repeats == first.repeats == {"cyd": 2}
    assert_same(second.server, first.server, "the server's state after half the rate")


# ---- evaluation


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "ditto", "fedpc"])
def test_models_are_judged_the_same_at_their_sites(name: str, tmp_path: Path) -> None:
    evaluation = EvaluationSettings(fine_tune=1)
    before, after_, near, far = both(tmp_path, METHODS[name](), evaluation=evaluation, held_out_clients=1)
    here, there = (evaluate(of, state) for of, state in ((near, before), (far, after_)))
    assert there.domains == here.domains
    assert there.public == here.public
    assert there.summary == here.summary
    assert there.new.keys() == here.new.keys() != set()


def test_models_are_judged_where_they_are_trained(tmp_path: Path) -> None:
    method = METHODS["fedrep"]()
    near, far = here(method), remote(InProcess(sites_of(tmp_path)), config_of(method))
    first, second = (of.advance(of.start(), evaluates=True) for of in (near, far))
    assert_same(second.evaluations, first.evaluations, "evaluations at sites")
    assert set(second.evaluations) == set(TASK.clients)


@pytest.mark.parametrize("name", ["fpl", "fedproto"])
def test_test_sets_that_only_sites_have_stay_there(name: str, tmp_path: Path) -> None:
    tests = dict(zip(sorted(TASK.clients), TASK.tests.values(), strict=False))
    task = replace(TASK, tests={}, local_tests=tests)
    config = config_of(METHODS[name](), task)
    near, far = Federation(config.method, task, config.training), remote(InProcess(sites_of(tmp_path, task)), config)
    here, there = (evaluate(of, of.advance(of.start())) for of in (near, far))
    assert there == here
    assert set(there.at_home) == {*tests}
    assert not far.task.tests
    assert not any(data.x.any() for data in far.task.local_tests.values())


def test_the_server_cannot_read_what_clients_keep() -> None:
    store = ElsewhereStore()
    with pytest.raises(RunFailed, match="at its site"):
        store.load("ann", Receipt("0" * 64))
    with pytest.raises(RunFailed, match="at its site"):
        store.keep("ann", {})


# ---- runs of a task of the package


TRAINING = Training(rounds=2, epochs=1, fraction=0.25, deadline=60.0, on_divergence="skip")


def digits(method: str, task: Any = Minidigits(), **training: Any) -> Config:  # noqa: B008
    settings = replace(TRAINING, **training)
    return Config(task, METHODS[method](), settings, RuntimeSettings(name="sequential"), EvaluationSettings(clients=2))


def digit_sites(folder: Path, task: Any = Minidigits()) -> dict[str, Site]:  # noqa: B008
    clients = sorted(task.build().clients)
    parts = {"north": clients[:5], "south": clients[5:7], "west": clients[7:]}
    return {name: Site(folder / name, package_data(task, own)) for name, own in parts.items()}


def scores(result: Result) -> list[Any]:
    return [replace(each, seconds={}) for each in result.rounds]


@pytest.mark.parametrize("method", ["fpl", pytest.param("fedrep", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_goes_on_where_it_was_and_has_the_same_scores(method: str, tmp_path: Path) -> None:
    config, rounds = digits(method), []

    class Counts:
        def begin(self, *_: Any) -> None: ...
        def client(self, *_: Any) -> None: ...
        def end(self, *_: Any) -> None: ...
        def round(self, result: Any) -> None:
            rounds.append(result.round)

    folder, link = RunFolder(tmp_path / "run"), InProcess(digit_sites(tmp_path))
    first = execute(prepared(link, config, "r1"), folder, observer=Counts(), should_stop=lambda: bool(rounds))
    assert first.state.round == 1
    again = InProcess(digit_sites(tmp_path))  # all processes have ended, and the disks are left
    far = execute(prepared(again, config, "r1"), folder, resume=True)
    near = execute(config.experiment())
    assert_same(far.server, near.server, "the server's state over messages")
    assert scores(far) == scores(near)
    assert not any(each.failures for each in far.rounds)


def test_a_run_under_another_name_has_none_of_its_states(tmp_path: Path) -> None:
    config, folder = digits("scaffold", fraction=1.0, attempts=1), RunFolder(tmp_path / "run")
    config = replace(config, evaluation=EvaluationSettings(every=2))
    link = InProcess(digit_sites(tmp_path))
    stop: Iterator[bool] = iter([False, True, True])
    execute(prepared(link, config, "r1"), folder, should_stop=lambda: next(stop))
    with pytest.raises(RunFailed, match=Reason.MEMORY_LOST):
        execute(prepared(link, config, "r2"), folder, resume=True)


def test_a_run_is_not_resumed_with_other_clients(tmp_path: Path) -> None:
    folder, sites = RunFolder(tmp_path / "run"), digit_sites(tmp_path)
    stop: Iterator[bool] = iter([False, True, True])
    execute(prepared(InProcess(sites), digits("fedavg"), "r1"), folder, should_stop=lambda: next(stop))
    del sites["west"]
    with pytest.raises(RunFailed, match="belongs to run"):
        execute(prepared(InProcess(sites), digits("fedavg"), "r1"), folder, resume=True)


def test_of_a_run_that_is_loaded_only_the_public_model_is_here(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    execute(prepared(InProcess(digit_sites(tmp_path)), digits("scaffold", rounds=1), "r1"), folder)
    result = load(folder.path)
    assert isinstance(result, Result)
    inputs = torch.zeros(2, 3, 28, 28)
    assert result.module()(inputs).shape == (2, 10)
    client = next(iter(result.state.receipts))
    with pytest.raises(RunFailed, match="stays there"):
        result.module(client)


def test_a_run_may_be_made_longer(tmp_path: Path) -> None:
    folder, link = RunFolder(tmp_path / "run"), InProcess(digit_sites(tmp_path))
    execute(prepared(link, digits("scaffold", rounds=1), "r1"), folder)
    far = execute(prepared(link, digits("scaffold"), "r1"), folder, resume=True, allowed_changes=("training.rounds",))
    near = execute(digits("scaffold").experiment())
    assert_same(far.server, near.server, "the server's state of a run that was made longer")
    assert not far.rounds[-1].failures


def test_the_server_has_no_example_of_a_site(tmp_path: Path) -> None:
    experiment = prepared(InProcess(digit_sites(tmp_path)), digits("fpl"), "r1")
    task, built = experiment.federation.task, Minidigits().build()
    assert {client: len(data) for client, data in task.clients.items()} == {
        client: len(data) for client, data in built.clients.items()
    }
    for client, data in task.clients.items():
        assert len(data.x) == 1, client
        assert not data.x.any()
        assert not data.y.any()
    assert [*task.clients] == [*built.clients], "reports list clients in another order than in one process"
    assert task.domain_of == built.domain_of
    assert task.tests.keys() == built.tests.keys()


def test_a_site_has_no_example_of_another(tmp_path: Path) -> None:
    sites = digit_sites(tmp_path)
    prepared(InProcess(sites), digits("fpl"), "r1")
    built = Minidigits().build()
    for site in sites.values():
        task = site._runs["r1"].federation.task
        for client, data in task.clients.items():
            if client in site.data.clients:
                assert len(data.x) == len(built.clients[client])  # no rows of others in the same tensor
                assert torch.equal(data.x, built.clients[client].inputs(built.clients[client].index))
            else:
                assert len(data.x) == 1
                assert not data.x.any()


def test_public_models_are_judged_at_sites_whose_test_sets_are_drawn(tmp_path: Path) -> None:
    task = MinidigitsSkewed(num_clients=8)
    config = digits("fedavg", task, rounds=1, fraction=0.2)
    far = execute(prepared(InProcess(digit_sites(tmp_path, task)), config, "r1"))
    near = execute(config.experiment())
    assert far.rounds[-1].summary == near.rounds[-1].summary
    assert far.rounds[-1].public == near.rounds[-1].public
    assert far.rounds[-1].personal == near.rounds[-1].personal


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"deadline": 0.0}, "training.deadline"),
        ({"on_divergence": "stop"}, "training.on_divergence"),
    ],
)
def test_settings_that_a_remote_run_cannot_have_are_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=key):
        prepared(InProcess(digit_sites(tmp_path)), digits("fpl", **changes), "r1")


class OfMyOwn:
    """A task of the user's own code that reads files."""

    def build(self) -> Task:
        return TASK

    def stamp(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("task", "key"),
    [
        (OfMyOwn(), r"task\.name"),
        (Custom(path="/data"), r"task\.path"),
        (Custom(model="networks:mine"), r"task\.model"),
    ],
)
def test_own_code_and_own_files_at_the_server_are_refused(task: Any, key: str) -> None:
    with pytest.raises(BadInput, match=key):
        prepared(InProcess({}), replace(digits("fedavg"), task=task), "r1")


@pytest.mark.parametrize("name", ["fedproto", "fpl"])
def test_what_a_site_finds_too_rare_is_withheld_by_it(name: str, tmp_path: Path) -> None:
    sites = sites_of(tmp_path, limits=Limits(class_count=2))
    far = remote(InProcess(sites), config_of(METHODS[name]()))
    config = config_of(METHODS[name](), uploads=UploadSettings(min_class_count=2))
    near = Federation(config.method, TASK, config.training, uploads=config.uploads.pipeline())
    there, here = (of.finish(after(2, of)) for of in (far, near))
    assert_same(there.server, here.server, "the server's state without rare classes")
    plain = Federation(config.method, TASK, config.training)
    with pytest.raises(AssertionError):
        assert_same(plain.finish(after(2, plain)).server, here.server, "the server's state with them")


def test_all_such_settings_are_named_at_once(tmp_path: Path) -> None:
    config = digits("fedper", deadline=0.0, on_divergence="stop")
    config = replace(config, evaluation=EvaluationSettings(global_models=True), runtime=RuntimeSettings(threads=2))
    config = replace(config, secure=SecureSettings(sums=True, masks=False), privacy=PrivacySettings("record"))
    with pytest.raises(BadInput) as refused:
        prepared(InProcess({}), config, "r1")
    keys = (
        "training.deadline",
        "training.on_divergence",
        "evaluation.global_models",
        "runtime.threads",
        "secure.masks",
    )
    for key in (*keys, "privacy.noise"):
        assert key in str(refused.value)


def test_an_evaluation_that_no_site_can_do_is_refused(tmp_path: Path) -> None:
    config = replace(digits("fpl"), evaluation=EvaluationSettings(patience=2))
    with pytest.raises(BadInput, match=r"evaluation\.patience"):
        prepared(InProcess(digit_sites(tmp_path)), config, "r1")


# ---- steps by name


def test_every_step_has_a_name_by_which_it_is_found() -> None:
    fedpc = METHODS["fedpc"]()
    around = Around(Around(fedpc))
    wrapper = METHODS["feddecorr"](base=METHODS["fedavg_ft"]())  # type: ignore[call-arg]
    cases: list[tuple[Any, Any, str]] = [
        (fedpc, fedpc.train, "train"),
        (fedpc, fedpc.describe, "describe"),  # type: ignore[attr-defined]
        (around, around.evaluate_own, "evaluate_own"),
        (around, At(around, At(around.base, fedpc.describe)), "base.base.describe"),  # type: ignore[arg-type,attr-defined]
        (wrapper, wrapper.base.fine_tune, "base.fine_tune"),  # type: ignore[attr-defined]
    ]
    for method, step, name in cases:
        assert step_name(method, step) == name
        assert step_named(method, name) == step


@pytest.mark.parametrize(
    "name",
    ["", "__init__", "init_server", "predict", "evaluate", "base", "base.train", "train.train", "x", "é", "_loss"],
)
def test_nothing_but_a_step_has_a_name(name: str) -> None:
    with pytest.raises(UnknownStep):
        step_named(METHODS["fedpc"](), name)


def test_a_step_without_a_name_cannot_be_sent() -> None:
    async def step(client: Any, message: Any, memory: Any) -> Any: ...

    with pytest.raises(UnknownStep):
        step_name(METHODS["fedavg"](), step)


def test_a_part_of_a_task_is_of_clients_that_it_has() -> None:
    with pytest.raises(BadInput, match="no clients zoe"):
        own_part(TASK, ["ann", "zoe"])
