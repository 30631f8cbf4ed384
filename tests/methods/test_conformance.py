"""Every method does what every method must, and the suite that says so can fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.conformance import CHECKS, check_inputs_are_left_alone
from methods.sampling import ALWAYS, SHARE, WHOLE, is_slow
from protofed import tree
from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.method import Method, Uploads
from protofed.methods import METHODS
from protofed.methods.families import OwnWeights, Weights, WeightUpload
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedrep import FedRep
from protofed.nn.networks import without
from protofed.tree import Params, record

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("fpl", {"finch_level": "first"}),
    ("fpl", {"consistency_reduction": "sum"}),
    ("fpl", {"prototype_mode": "recomputed"}),
    ("fpl", {"contrast_with": "global", "consistent_with": "global"}),
    ("fpl_sums", {"num_clusters": 2, "starts": 2, "lloyd_steps": 2}),
    ("fpl", {"contrast": False}),
    ("fpl", {"consistency": False}),
    ("fpl", {"contrast": False, "consistency": False}),
    ("fedproto", {"inference": "nearest_prototype"}),
    ("fedproto", {"prototype_mode": "recomputed"}),
    ("fedproto_avg", {"prototype_mode": "recomputed"}),
    ("moon", {"contrast_weight": 5.0}),
    ("fedpac", {"combination": False}),
    ("fedtgp", {"inference": "classifier"}),
    ("fedplvm", {"most_prototypes": 1, "correction": False}),
    ("fedhkd", {"prediction_distance": "divergence", "feature_distance": "mean_square", "noise": 0.1}),
    ("fedpcl", {"encoder": "frozen", "rivals": "others", "inference": "global"}),
]
"""Settings that take another path through a method than its defaults do."""

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))


def complaint(name: str, check: Callable[[Method], None], **settings: Any) -> str | None:
    """What the check has against the method, or None. The one way in which a method is put to a check."""
    try:
        check((BROKEN.get(name) or METHODS[name])(**settings))
    except AssertionError as error:
        return f"{name} {settings or ''}: {error}"
    return None


@every_check
@pytest.mark.parametrize("name", METHODS)
def test_every_method_conforms(name: str, check: Callable[[Method], None]) -> None:
    assert complaint(name, check) is None


@every_check
@pytest.mark.parametrize(
    ("name", "settings"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value))
)
def test_settings_that_take_another_path_conform(
    name: str, settings: dict[str, Any], check: Callable[[Method], None]
) -> None:
    assert complaint(name, check, **settings) is None


# ---- what is left to `make test-all`


def test_every_check_is_made_of_all_defaults_and_of_one_of_so_many_other_settings_in_a_row() -> None:
    assert test_every_method_conforms.__name__ == WHOLE
    other = FedAvg(weighting="uniform")
    assert other != FedAvg()
    for check in CHECKS:
        assert is_slow(check, [FedAvg()], 0), "the defaults a second time"
        fast = [not is_slow(check, [other], number) for number in range(3 * SHARE)]
        assert all(any(fast[k : k + SHARE]) for k in range(2 * SHARE))
        assert all(fast) == (check in ALWAYS)


# ---- the proof that the suite can fail


@record
class LeakyUpload:
    params: Params
    num_examples: Tensor
    statistics: Tensor


def _statistics(params: Params) -> Tensor:
    """Innocent numbers, with the head among them."""
    norms = torch.stack([leaf.norm() for leaf in params.values()])
    return torch.cat([norms, params["classifier.weight"].flatten(), norms.square()])


@dataclass(frozen=True)
class LeakyFedRep(FedRep):
    """Sends its head, where nobody would look for it, and declares that it does."""

    head_epochs: int = 2  # quick

    def upload_spec(self, server: Weights, central: ServerContext) -> Any:
        return LeakyUpload(server.params, torch.tensor(0), _statistics(central.initial_params()))

    async def train(self, local: ClientContext, message: Weights, memory: OwnWeights) -> Reply[Any, OwnWeights]:
        reply = await super().train(local, message, memory)
        statistics = _statistics(self.local_weights(message, reply.memory))
        return Reply(LeakyUpload(reply.upload.params, reply.upload.num_examples, statistics), reply.memory)


@dataclass(frozen=True)
class UnseededFedAvg(FedAvg):
    """Draws from torch's global generator."""

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: ServerContext) -> Weights:
        mean = super().aggregate(server, uploads, central)
        return tree.map(lambda leaf: leaf + 1e-3 * torch.randn(leaf.shape).abs(), mean)


@dataclass(frozen=True)
class OrderedFedAvg(FedAvg):
    """Takes the mean of the mean so far and the next upload, so that the last counts half."""

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: ServerContext) -> Weights:
        mean: Params | None = None
        for _, upload in uploads:
            own = upload.params
            mean = own if mean is None else tree.map(lambda a, b: (a + b) / 2, mean, own)
        return Weights(mean)


@dataclass(frozen=True)
class TellingFedAvg(FedAvg):
    """Sends one of its examples as if it were a weight."""

    def upload_spec(self, server: Weights, central: ServerContext) -> WeightUpload:
        return WeightUpload({**server.params, "centre": central.spec.input.blank()}, torch.tensor(0))

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: ServerContext) -> Weights:
        return Weights(without(super().aggregate(server, uploads, central).params, ("centre",)))

    async def train(self, local: ClientContext, message: Weights, memory: Any) -> Reply[WeightUpload, Any]:
        reply = await super().train(local, message, memory)
        example = local.transform.clean(local.data.x[local.data.index[:1]])
        return Reply(WeightUpload({**reply.upload.params, "centre": example}, reply.upload.num_examples), memory)


@dataclass(frozen=True)
class OverwritingFedAvg(FedAvg):
    """Writes the mean into the tensors of the server that it was given."""

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: ServerContext) -> Weights:
        mean = super().aggregate(server, uploads, central)
        for name, leaf in server.params.items():
            leaf.copy_(mean.params[name])
        return server


@dataclass(frozen=True)
class CountingFedAvg(FedAvg):
    """Keeps a count of rounds on itself."""

    def aggregate(self, server: Weights, uploads: Uploads[WeightUpload], central: ServerContext) -> Weights:
        object.__setattr__(self, "rounds", getattr(self, "rounds", 0) + 1)
        return super().aggregate(server, uploads, central)


BROKEN: dict[str, type[Method]] = {
    "leaky": LeakyFedRep,
    "unseeded": UnseededFedAvg,
    "ordered": OrderedFedAvg,
    "telling": TellingFedAvg,
    "overwriting": OverwritingFedAvg,
    "counting": CountingFedAvg,
}


@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        ("leaky", {"check_nothing_private_is_uploaded"}),
        (
            "unseeded",
            {
                "check_same_seed_same_result",
                "check_runtimes_agree",
                "check_order_of_the_task",
                "check_order_of_uploads",
                "check_records_survive_the_wire",
                "check_resuming_changes_nothing",
                "check_a_client_may_fail",
                "check_clients_elsewhere_give_the_same_numbers",
            },
        ),
        ("ordered", {"check_order_of_uploads"}),
        ("telling", {"check_nothing_private_is_uploaded"}),
        ("counting", {"check_no_hidden_state"}),
        ("fedrep", set()),
        ("fedavg", set()),
    ],
)
def test_the_checks_catch_what_is_broken_and_nothing_else(name: str, caught_by: set[str]) -> None:
    complaints = {check.__name__: complaint(name, check) for check in CHECKS}
    assert {check for check, found in complaints.items() if found} == caught_by, complaints


def test_a_method_that_writes_into_what_it_was_given_is_caught() -> None:
    """It may trip other checks too, which compare states that it has overwritten."""
    assert "changed what it was given" in (complaint("overwriting", check_inputs_are_left_alone) or "")
