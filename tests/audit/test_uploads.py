"""What audits find in uploads, where it is known what is in them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from audit.replays import drawn, replay_of, task_of
from methods.sampling import some_methods
from protofed import METHODS, UploadSettings
from protofed.api.roles import Prototype, roles
from protofed.audit import labels, membership, prototypes
from protofed.audit.examples import examples_of
from protofed.audit.replay import Replay, Sent, difference
from protofed.audit.statistics import over_clients, pooled_auc
from protofed.testing.federations import TASK

EVERYTHING = {f"c{k}": [0, 1, 2] * 20 for k in range(4)}


@some_methods
def test_the_tapped_uploads_add_up_to_the_state_after_the_round(name: str) -> None:
    """And every audit can read them, whatever the method sends."""
    replay = replay_of(METHODS[name](), TASK)
    assert difference(replay.server_after(), replay.after.server) == 0
    found, notes = membership.attacks(replay)
    sends_weights_or_prototypes = any(roles(one.upload) for one in replay.sent if one.is_of_round)
    assert found or notes or not sends_weights_or_prototypes
    assert all(np.isfinite(scores).all() for one in found for pair in one.pairs.values() for scores in pair)
    sent = [p for one in replay.sent for p, role in roles(one.upload).items() if isinstance(role, Prototype)]
    assert bool(prototypes.records(replay).behind) == bool(sent)
    labels.labels(replay)
    prototypes.broadcast(replay, 2)


# ---- membership


def test_a_prototype_of_one_example_gives_its_owner_away() -> None:
    """The control that must be high: what is sent is the example's own feature."""
    method = METHODS["fedproto"](prototype_mode="recomputed")  # type: ignore[call-arg]
    replay = replay_of(method, task_of({f"c{k}": [0, 1, 2] for k in range(20)}), rounds=1)
    ((attack,), _) = membership.attacks(replay)
    assert attack.kind == "prototypes: tracing"
    assert attack.auc > 0.95
    assert attack.needs, "FedProto's clients send no encoder"


def unchanged(replay: Replay) -> Replay:
    """The same, as if clients had sent back what they received."""

    def sent(one: Sent) -> Sent:
        return replace(one, upload=replace(one.upload, params=one.message.params))

    return replace(replay, sent=[sent(one) for one in replay.sent])


def test_weights_that_saw_no_example_tell_nothing() -> None:
    """The control that must be chance."""
    replay = unchanged(replay_of(METHODS["fedavg"](), task_of(EVERYTHING), rounds=1))
    found, _ = membership.attacks(replay)
    loss, drop = found
    assert loss.interval is not None
    assert loss.interval.low <= 0.5 <= loss.interval.high
    assert drop.auc == 0.5, "nothing has dropped"


def test_weights_that_know_their_examples_by_heart_tell_them() -> None:
    task = task_of({f"c{k}": [0, 1, 2] * 4 for k in range(6)})
    plain = replay_of(METHODS["fedavg"](), task, rounds=1, epochs=150)
    for attack in membership.attacks(plain)[0]:
        assert attack.auc > 0.6
        assert attack.is_same_source


def test_members_and_others_are_equally_many_of_each_class() -> None:
    """A client of one class would else be known by its labels."""
    task = task_of({"a": [0] * 9 + [1], "b": [2] * 5})
    examples = examples_of(task, "a")
    assert examples is not None
    for own in (examples.members, examples.others):
        assert torch.bincount(own.labels, minlength=3).tolist() == [9, 1, 0]
    assert not {*map(tuple, examples.members.inputs(examples.members.index).tolist())} & {
        *map(tuple, examples.others.inputs(examples.others.index).tolist())
    }


def test_without_tests_of_its_own_a_client_is_judged_by_half_of_its_domain_s() -> None:
    task = replace(task_of(EVERYTHING), local_tests={})
    examples = examples_of(task, "c0")
    assert examples is not None
    assert not examples.is_same_source
    known = {*examples.population.index.tolist()}
    assert len(known) == 75
    assert not known & {*examples.others.index.tolist()}, "the attacker does not know the others"


# ---- labels


def planted(read: list[float], true: list[int]) -> labels.Labels:
    """What is read of a classifier that moved as planted."""
    replay = replay_of(METHODS["fedavg"](), task_of({"a": [c for c in range(3) for _ in range(true[c])]}), rounds=1)
    (one,) = replay.sent
    params = dict(one.upload.params)
    params["classifier.bias"] = one.message.params["classifier.bias"] + torch.tensor(read)
    return labels.labels(replace(replay, sent=[replace(one, upload=replace(one.upload, params=params))]))


def test_the_correlation_of_a_planted_update() -> None:
    assert planted([0.2, 0.4, 0.6], [2, 4, 6]).correlation == pytest.approx(1, abs=1e-6)
    assert planted([0.6, 0.4, 0.2], [2, 4, 6]).correlation == pytest.approx(-1, abs=1e-6)
    assert planted([0.1, 0.3, 0.2], [1, 2, 3]).correlation == pytest.approx(0.5, abs=1e-6)
    assert planted([0.1, 0.3, 0.2], [2, 2, 2]).correlation is None


def test_the_presence_of_classes_in_a_planted_update() -> None:
    # Classes 0 and 1 are there, 2 is not: it scores between them. One pair of two is right.
    found = planted([0.3, 0.1, 0.2], [4, 4, 0])
    assert found.presence == pytest.approx(0.5)
    assert planted([0.3, 0.2, 0.1], [4, 4, 0]).presence == 1
    assert planted([0.3, 0.2, 0.1], [4, 4, 4]).presence is None


def test_a_real_update_tells_the_classes_of_its_client() -> None:
    skewed = {f"c{k}": [k % 3] * 30 + [(k + 1) % 3] * 6 for k in range(6)}
    found = labels.labels(replay_of(METHODS["fedavg"](), task_of(skewed)))
    assert found.correlation is not None
    assert found.correlation > 0.8
    assert not found.counts_are_sent


def test_counts_that_are_sent_are_named() -> None:
    assert labels.labels(replay_of(METHODS["fednh"](), task_of({"a": [0, 0, 1], "b": [2, 2, 1]}))).counts_are_sent
    assert not labels.labels(replay_of(METHODS["fpl"](), task_of({"a": [0, 0, 1], "b": [2, 2, 1]}))).counts_are_sent


# ---- prototypes

FEW = {"a": [0] * 1 + [1] * 4 + [2] * 5, "b": [0] * 7 + [1] * 2, "c": [0] * 9}


def test_prototypes_are_counted_by_what_is_behind_them() -> None:
    found = prototypes.records(replay_of(METHODS["fpl"](), task_of(FEW)))
    assert sorted(found.behind) == [1, 2, 4, 5, 7, 9]
    assert (found.of_one, found.of_few, found.are_bounds) == (1, 3, False)


def test_prototypes_that_are_kept_back_are_not_counted() -> None:
    found = prototypes.records(replay_of(METHODS["fpl"](), task_of(FEW), uploads=UploadSettings(min_class_count=5)))
    assert sorted(found.behind) == [5, 7, 9]


def test_those_before_the_first_round_count_too() -> None:
    fedpc = prototypes.records(replay_of(METHODS["fedpc"](), task_of(FEW)))
    assert sorted(fedpc.behind) == sorted([1, 2, 4, 5, 7, 9] * 2)


def test_a_class_of_one_owner_is_told_to_all_others() -> None:
    (told,) = prototypes.broadcast(replay_of(METHODS["fpl"](), task_of(FEW)), 2)
    assert (told.label, told.owners, told.others) == (2, ("a",), 2)
    first, second = prototypes.broadcast(replay_of(METHODS["fpl"](), task_of(FEW)), 3)
    assert (first.label, first.owners, first.others) == (1, ("a", "b"), 1)
    assert second.label == 2


def test_minimum_owners_tell_nobody() -> None:
    """The round is added up as the server did, with what stands between."""
    replay = replay_of(METHODS["fpl"](), task_of(FEW), uploads=UploadSettings(min_owners=2))
    (told,) = prototypes.broadcast(replay, 2)
    assert (told.owners, told.others) == (("a",), 0)
    assert difference(replay.server_after(), replay.after.server) == 0


def test_the_interval_is_over_clients() -> None:
    replay = replay_of(METHODS["fedavg"](), task_of(EVERYTHING))
    (loss, _), _ = membership.attacks(replay)
    assert loss.interval == over_clients(pooled_auc, [*loss.pairs.values()])
    assert len(loss.of_clients) == 4
    assert drawn([0], 1).x.shape == (1, 6)
