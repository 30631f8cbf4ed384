"""A class of few examples never leaves its client, and a class of few clients is told to nobody."""

import random
from typing import Any

import pytest
import torch

import protofed
from doubles import CLASSES, Watching, bits, tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.methods import METHODS
from protofed.methods.families import PrototypeUpload
from protofed.prototypes.class_means import Prototypes, class_sums, ownership
from protofed.prototypes.gaussians import class_gaussians
from protofed.runs.config.config import parse
from protofed.runtimes.workers import Workers
from protofed.tasks.custom import Custom
from protofed.transforms.by_class import class_rows, too_few, withheld
from protofed.transforms.chain import UploadSettings
from protofed.transforms.stage import Exchange, MinimumOwners
from protofed.tree import named_leaves

TRAINING = Training(rounds=2, epochs=1, batch_size=4)
SENDING = [
    "ccvr",
    "feddistill",
    "fedgh",
    "fedhkd",
    "fedmlp",
    "fednh",
    "fedpac",
    "fedpc",
    "fedpc_sums",
    "fedpcl",
    "fedplvm",
    "fedproc",
    "fedproto",
    "fedproto_avg",
    "fedseproto",
    "fedtgp",
    "fpl",
    "fpl_sums",
    "mp_fedcl",
    "pfedcspc",
]
"""The methods that send something of each class."""


def rows_of(upload: Any, num_classes: int, dropped: list[int]) -> float:
    """The sum of all that an upload says of these classes, found by names alone."""
    found = 0.0
    for path, leaf in named_leaves(upload).items():
        if path.rpartition("/")[2] in ("mean", "count", "covariance"):
            found += leaf.reshape(num_classes, -1)[dropped].abs().sum().item()
    return found


def test_a_class_of_fewer_examples_than_the_minimum_is_zero_in_all_that_is_sent() -> None:
    """T17: Over 100 drawn divisions of examples, with class means, Gaussians, and several rows for each class."""
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    seen = 0
    for _ in range(100):
        sizes = [draw.choice((0, 1, 3, 4, 5, 6, 20)) for _ in range(CLASSES)]
        y = torch.tensor([c for c, size in enumerate(sizes) for _ in range(size)] or [0])
        sizes = y.bincount(minlength=CLASSES).tolist()
        z = torch.randn(len(y), 3, generator=generator) + 5
        means = class_sums(z, y, torch.ones(len(y)), CLASSES).prototypes()
        several = Prototypes(means.mean.repeat_interleave(4, 0), means.count.repeat_interleave(4))
        rare = [c for c, size in enumerate(sizes) if size < 5]
        for upload in (means, ownership(means), class_gaussians(z, y, CLASSES), {"base": {"prototypes": several}}):
            sent = UploadSettings(min_class_count=5).pipeline().encoded(upload, y, CLASSES)
            assert rows_of(sent, CLASSES, rare) == 0
            common = [c for c in range(CLASSES) if c not in rare]
            assert rows_of(sent, CLASSES, common) == rows_of(upload, CLASSES, common)
            seen += rows_of(upload, CLASSES, rare) > 0
    assert seen > 300


@pytest.mark.parametrize("name", SENDING)
def test_no_method_sends_anything_of_a_rare_class(name: str) -> None:
    """In setup, rounds and finish, on a tap behind the client; the control is the run without a minimum."""
    told: dict[int, float] = {}
    for minimum in (0, 2):
        sums: list[float] = []

        def tap(client: str, message: Any, upload: Any, minimum: int = 2, sums: list[float] = sums) -> None:
            sizes = tiny().clients[client].labels.bincount(minlength=CLASSES)
            rare = (sizes < minimum).nonzero().flatten().tolist()
            sums.append(rows_of(upload, CLASSES, rare))

        uploads = UploadSettings(min_class_count=minimum).pipeline()
        of = Federation(METHODS[name](), tiny(), TRAINING, Watching(tap), uploads=uploads)
        state = of.finish(of.advance(of.start()))
        assert not state.failures
        told[minimum] = sum(sums)
    assert told[0] > 0
    assert told[2] == 0


def test_all_methods_that_send_something_of_classes_are_listed() -> None:
    found = []
    for name, cls in METHODS.items():
        of = Federation(cls(), tiny(), TRAINING)
        like = of.method.upload_spec(of.initial_server, of.server_context(0, "load"))
        found += [name] if class_rows(like) else []
    assert sorted([*found, "ccvr"]) == sorted(SENDING)  # CCVR sends it after the last round


@pytest.mark.parametrize("name", SENDING)
def test_a_method_goes_on_if_nobody_may_tell_of_any_class(name: str) -> None:
    of = Federation(METHODS[name](), tiny(), TRAINING, uploads=UploadSettings(min_class_count=1000).pipeline())
    if name == "pfedcspc":
        with pytest.raises(protofed.RunFailed, match="no client sent a prototype"):
            of.advance(of.start())
        return
    state = of.finish(of.advance(of.advance(of.start())))
    assert not state.failures


def test_workers_withhold_too() -> None:
    servers = []
    for runtime in (None, Workers(2)):
        more = {} if runtime is None else {"runtime": runtime}
        of = Federation(
            METHODS["fpl"](), tiny(), TRAINING, uploads=UploadSettings(min_class_count=2).pipeline(), **more
        )
        state = of.advance(of.start())
        assert not state.failures
        servers.append(state.server)
        of.runtime.close()
    assert bits(servers[0]) == bits(servers[1])


def test_what_is_not_of_classes_stays() -> None:
    upload = PrototypeUpload({"w": torch.ones(2)}, Prototypes(torch.ones(2, 3), torch.ones(2)), torch.tensor(7))
    sent = withheld(upload, torch.tensor([True, True]))
    assert sent.params["w"].tolist() == [1, 1]
    assert sent.num_examples == 7
    assert not sent.prototypes.mean.any()


def test_rows_that_cannot_be_of_classes_are_named() -> None:
    odd = Prototypes(torch.ones(5, 3), torch.ones(5))
    with pytest.raises(ValueError, match="numbers of 2 classes cannot have the shape"):
        withheld(odd, torch.tensor([True, False]))


def test_too_few_are_fewer_than_the_minimum() -> None:
    assert too_few(torch.tensor([0, 0, 2, 2, 2]), 4, 3).tolist() == [True, True, False, True]


def test_the_minimum_is_five_for_own_data_and_none_for_the_tasks_of_protofed() -> None:
    """And what is set is taken, whatever the data are."""
    table = {"task": {"name": "minidigits"}, "method": {"name": "fpl"}}
    own = {"name": "custom", "path": "somewhere"}
    assert parse(table, "t").pipeline.min_class_count == 0
    assert parse({**table, "task": own}, "t").pipeline.min_class_count == 5
    for task in ({"name": "minidigits"}, own):
        for minimum in (0, 7):
            given = {**table, "task": task, "uploads": {"min_class_count": minimum}}
            assert parse(given, "t").pipeline.min_class_count == minimum
    assert isinstance(parse({**table, "task": own}, "t").task, Custom)


# ---- owners


def owned_by(*rows: list[float]) -> Prototypes:
    mean = torch.tensor(rows)
    return Prototypes(mean, mean.any(-1).float())


def cleaned(sent: dict[str, Any], minimum: int, **more: Any) -> dict[str, list[float]]:
    exchange = Exchange(lambda client: {}, num_classes=2, **more)
    passed = MinimumOwners(minimum).cleaned(iter(sent.items()), exchange)
    return {client: upload.count.tolist() for client, upload in passed}


def test_a_class_of_fewer_clients_than_the_minimum_reaches_no_method() -> None:
    sent = {"a": owned_by([1, 1], [2, 2]), "b": owned_by([3, 3], [0, 0]), "c": owned_by([4, 4], [0, 0])}
    assert cleaned(sent, 2) == {"a": [1, 0], "b": [1, 0], "c": [1, 0]}
    assert cleaned(sent, 3) == {"a": [1, 0], "b": [1, 0], "c": [1, 0]}
    assert cleaned(sent, 4) == {"a": [0, 0], "b": [0, 0], "c": [0, 0]}


def test_owners_are_counted_in_each_cluster_of_clients() -> None:
    sent = {name: owned_by([1, 1], [2, 2]) for name in "abc"}
    assert cleaned(sent, 2, group=lambda client, upload: client == "c") == {"a": [1, 1], "b": [1, 1], "c": [0, 0]}


def test_a_class_of_one_client_is_broadcast_only_without_a_minimum() -> None:
    """Only c00 has class 4."""
    task = tiny()
    clients = {
        c: data if c == "c00" else data.rows((data.labels != 4).nonzero().flatten()) for c, data in task.clients.items()
    }
    for minimum, is_told in ((1, True), (2, False)):
        of = Federation(
            METHODS["fedproto"](),
            protofed.Task(clients, task.tests, CLASSES, task.model),
            TRAINING,
            uploads=UploadSettings(min_owners=minimum).pipeline(),
        )
        state = of.advance(of.start())
        assert bool(state.server.mean[4].any()) == is_told
        assert state.server.mean[1].any()
