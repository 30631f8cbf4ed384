"""Class sums and gradients in one noised secure sum: what a record changes, what is charged, and what is refused."""

import dataclasses
import tomllib
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from engine.test_noised_sums import GONE, after_one, noised, unmasked
from engine.test_secure import STEPS, Dropping
from methods.conformance import assert_same
from privacy.private_runs import plain_parts
from protofed import METHODS, BadInput, FedAvg, FedNH, FedProc, FedProtoAvg, FedSGD, PrivacySettings, RunFailed
from protofed.api.contexts import ClientContext, Reply
from protofed.api.private import Unreleased
from protofed.api.requests import Objective
from protofed.data.batches import Batch, Data
from protofed.engine.federation import Federation
from protofed.engine.private import release_rounds
from protofed.methods._shared.losses import cross_entropy
from protofed.methods._shared.one_step import SentSums
from protofed.methods.fednh import PROTOTYPES, turned
from protofed.methods.fpl import FPL
from protofed.privacy.account import epsilon_of, mu_of
from protofed.privacy.class_sums import class_queries, means_of
from protofed.privacy.shares import NoiseShare, OwnSums, RecordNoise
from protofed.prototypes.class_means import ClassSums, Prototypes
from protofed.runs.config import config
from protofed.runtimes.sequential import Sequential
from protofed.transforms.by_class import withheld

GLOBAL = {"contrast_with": "global", "consistent_with": "global"}
RECORD = PrivacySettings("record", epsilon=8.0, clip_gradients=0.5, clip_features=2.0)
LOOSE = dataclasses.replace(RECORD, epsilon=1000.0)
BASES: dict[str, Any] = {
    "fpl": FPL(**GLOBAL),
    "fednh": FedNH(),
    "fedproc": FedProc(),
    "fedproto_avg": FedProtoAvg(),
}


def of_base(base: Any = "fpl", privacy: PrivacySettings = RECORD, **settings: Any) -> Federation:
    base = BASES[base] if isinstance(base, str) else base
    defaults = {"weighting": "examples", "secure": unmasked(), "rounds": 2}
    return noised(FedSGD(base=base, server_lr=1.0), privacy=privacy, **{**defaults, **settings})


def after(of: Federation, rounds: int) -> Any:
    state = of.start()
    for _ in range(rounds):
        state = of.advance(state)
        assert not state.failures
    return state


def charged(of: Federation, client: str = "c3") -> list[Any]:
    assert of.private is not None
    return [entry for entry in of.private.ledger.entries if entry.client == client]


# ---- the account


def test_sums_and_counts_are_one_release_of_their_multiplier_by_hand() -> None:
    """d = 64 gives a = 8/9. With m = 3 and R = 4: σ_S = 3 · 4 · √(9/8) = 12.728 and σ_n = 3 · √9 = 9, so that
    (4/12.728)² + (1/9)² = 8/81 + 1/81 = 1/9 = 1/m²."""
    sums, counts = class_queries(3.0, 4.0, 10, 64)
    assert sums.multiplier * sums.most == pytest.approx(12.7279, abs=1e-4)
    assert counts.multiplier * counts.most == pytest.approx(9.0)
    shift = (4 / 12.7279) ** 2 + (1 / 9) ** 2
    assert shift == pytest.approx(1 / 9, rel=1e-5)
    assert (sums.size, counts.size, counts.is_whole) == (640, 10, True)


@pytest.mark.parametrize("base", BASES)
def test_gradients_and_class_sums_of_a_run_spend_what_was_promised_and_no_more(base: str) -> None:
    """T6 in sums. μ² in six rounds with two releases: 0.7/6 of it for gradients each, 0.3/2 for class sums each."""
    of = of_base(base, dataclasses.replace(RECORD, prototype_share=0.3), rounds=6)
    after(of, 6)
    mu = mu_of(8.0, 1e-5)
    for client in of.ids:
        entries = charged(of, client)
        assert [(e.round, e.releases) for e in entries if e.kind == "gradient sums"] == [(r, 1) for r in range(6)]
        assert [(e.round, e.releases) for e in entries if e.kind == "class sums"] == [(1, 1), (3, 1)]
        for entry in entries:
            assert entry.cost == pytest.approx(mu**2 * (0.7 / 6 if entry.kind == "gradient sums" else 0.15))
        assert epsilon_of(sum(e.cost for e in entries) ** 0.5, 1e-5) == pytest.approx(8.0)
        assert sum(e.cost for e in entries) <= mu**2 * (1 + 1e-9)
    with pytest.raises(RunFailed, match="BUDGET_SPENT"):
        of.advance(dataclasses.replace(after(of_base(base, rounds=6), 1), round=1))


def test_a_release_that_cannot_be_paid_for_is_not_made() -> None:
    """Gradients alone could be paid for twice more; with class sums the round costs too much."""
    of = of_base(rounds=4)
    state = after(of, 2)
    assert of.private is not None
    before = len(of.private.ledger.entries)
    assert of.noised_sums is not None
    gradient, classes = (of.noised_sums.costs(1)[kind] for kind in ("gradient sums", "class sums"))
    of.private.budget = of.private.ledger.spent("c3") + gradient + 0.5 * classes
    with pytest.raises(RunFailed, match="BUDGET_SPENT: client c0"):
        of.advance(dataclasses.replace(state, round=1))
    assert len(of.private.ledger.entries) == before
    of.advance(dataclasses.replace(state, round=0))


# ---- sensitivity


def rows(count: int) -> Data:
    """Records of very different lengths, so that both kinds of clipping are needed."""
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, generator=draws) * torch.logspace(-2, 6, count)[:, None]
    return Data.of(x, torch.randint(0, 3, (count,), generator=draws))


def noise_of(of: Federation, round: int = 1) -> RecordNoise:
    assert of.noised_sums is not None
    found = of.noised_sums.noise_of(round)
    assert isinstance(found, RecordNoise)
    return found


def own_sums(of: Federation, data: Data, message: Any) -> tuple[Tensor, ClassSums]:
    """What one client's sums are before their noise."""
    sums = OwnSums(noise_of(of), message)
    client = dataclasses.replace(of.client_context("c0", 1), data=data, sums=sums)
    memory = of.method.init_memory(client, message)
    upload = Sequential()._drive(of.method.train(client, message, memory)).upload
    return torch.cat([leaf.flatten() for leaf in upload.gradient.values()]), upload.classes


@pytest.mark.parametrize("base", ["fpl", "fednh"])
def test_one_record_moves_the_joint_sum_by_no_more_than_its_noise_is_made_for(base: str) -> None:
    """T1 in sums: in units of the noise of each number, at most √(1/m_g² + 1/m²), and some record does so. A neighbour
    of a client is the same without one of its records."""
    of, count = of_base(base), 120
    data, message = rows(count), of.method.message_for(after(of, 1).server, "c0")
    noise, longest = noise_of(of), of.method.base.longest_feature  # type: ignore[attr-defined]
    gradient, classes = own_sums(of, data, message)
    of_gradient = noise.gradients.query(len(gradient))
    of_sums, of_counts = noise.queries(*classes.total.shape, longest)
    assert of_sums.most == (1.0 if base == "fednh" else 2.0)
    bound = 1 / noise.gradients.multiplier**2 + 1 / noise.class_multiplier**2
    moved = []
    for k in range(count):
        left = data.rows(torch.cat([torch.arange(k), torch.arange(k + 1, count)]))
        other, others = own_sums(of, left, message)
        parts = (
            (gradient - other).norm() / (of_gradient.scale * of_gradient.grid),
            (classes.total - others.total).norm() / (of_sums.scale * of_sums.grid),
            (classes.count - others.count).norm() / (of_counts.scale * of_counts.grid),
        )
        moved.append(sum(float(part) ** 2 for part in parts))
    assert max(moved) <= bound * (1 + 1e-4)
    assert max(moved) > 0.98 * bound


def test_a_joint_release_is_no_more_than_two_of_its_parts() -> None:
    """1/m² of a round with class sums, from what records can move: (C/σ_g)² + (R/σ_S)² + (1/σ_n)²."""
    of = of_base()
    noise = noise_of(of)
    sums, counts = noise.queries(3, 8, None)
    g = noise.gradients
    shift = (0.5 / (g.multiplier * 0.5)) ** 2 + (2.0 / (sums.multiplier * 2.0)) ** 2 + 1 / counts.multiplier**2
    assert of.noised_sums is not None
    assert shift == pytest.approx(sum(of.noised_sums.costs(1).values()))


# ---- what the sum is, and its noise


@pytest.mark.parametrize("exchange", STEPS)
@pytest.mark.parametrize("base", ["fpl", "fednh"])
def test_masked_sums_of_both_kinds_are_those_without_masks(base: str, exchange: int) -> None:
    from protofed import SecureSettings

    masked = of_base(base, secure=SecureSettings(sums=True), runtime=Dropping(GONE, STEPS[exchange]))
    plain = of_base(base, runtime=Dropping(GONE if exchange <= 3 else (), "Add"))
    ends = [of.advance(of.advance(of.start())) for of in (masked, plain)]
    assert_same(ends[0].server, ends[1].server, f"{base} with three gone in exchange {exchange}")


@pytest.mark.parametrize("base", ["fedproc", "fedproto_avg"])
def test_other_methods_of_prototypes_come_with_it(base: str) -> None:
    from protofed import SecureSettings

    masked, plain = (after(of_base(base, secure=s), 2) for s in (SecureSettings(sums=True), unmasked()))
    assert_same(masked.server, plain.server, base)
    assert plain.server.base.prototypes.count.any()


def pooled_by_hand(of: Federation, params: Any, longest: float, unit: bool) -> tuple[Tensor, Tensor]:
    """Σ of the clipped features of each class over all clients, one record after another by plain torch."""
    parts = plain_parts()
    parts["features"].load_state_dict(
        {n.removeprefix("features."): p for n, p in params.items() if n.startswith("features.")}
    )
    total, count = torch.zeros(3, 8), torch.zeros(3)
    for data in of.task.clients.values():
        for x, y in zip(data.x, data.labels, strict=True):
            z = parts["features"].eval()(x[None])[0].detach()
            z = z / z.norm() if unit else z
            total[y] += z * min(1.0, longest / z.norm().item())
            count[y] += 1
    return total, count


def test_prototypes_are_the_clipped_class_means_over_all_records() -> None:
    """ε = 1000: the noise of a mean of about 130 records is far below its length."""
    of = of_base("fpl", LOOSE)
    state = after(of, 1)
    made: Prototypes = of.advance(state).server.base.prototypes.consistent
    total, count = pooled_by_hand(of, state.server.base.params, 2.0, unit=False)
    noise = noise_of(of)
    sums, _ = noise.queries(3, 8, None)
    spread = sums.multiplier * 2.0 * sqrt(10 / 7) / count
    expected = total / count[:, None]
    assert (spread < 0.05 * expected.norm(dim=1)).all()
    assert ((made.mean - expected).abs() < 5 * spread[:, None] + 1e-4).all()
    of_all = pooled_by_hand(of, state.server.base.params, 1e9, unit=False)[0] / count[:, None]
    assert ((made.mean - of_all).norm(dim=1) > 5 * spread).any(), "nothing was clipped"


def test_fednh_s_prototypes_are_turned_to_the_directions_of_all_records() -> None:
    of = of_base("fednh", LOOSE)
    state = after(of, 1)
    before, found = state.server.base.params, of.advance(state).server.base.params[PROTOTYPES]
    total, count = pooled_by_hand(of, before, 1.0, unit=True)
    expected = turned(before[PROTOTYPES], Prototypes(total / count[:, None], count), 0.9)
    assert (F.cosine_similarity(found, expected) > 0.999).all()
    assert (F.cosine_similarity(found, before[PROTOTYPES]) < 0.9999).any(), "nothing was turned"


def fpl_gradient_by_hand(of: Federation, state: Any, limit: float) -> Tensor:
    """Σ over all records of the gradients of FPL's loss against the server's prototypes, each at most so long."""
    base, targets = of.method.base, state.server.base.prototypes  # type: ignore[attr-defined]
    params = {n: p.clone().requires_grad_() for n, p in state.server.base.params.items()}
    model = of.networks_of("c0").model(params, training=True)
    total = torch.zeros(sum(p.numel() for p in params.values()))
    for data in of.task.clients.values():
        for x, y in zip(data.x, data.labels, strict=True):
            one = Batch(x[None], y[None], torch.ones(1), torch.zeros(1), torch.tensor(True), torch.tensor(0))
            grads = torch.autograd.grad(base.loss(model, one, targets), [*params.values()])
            own = torch.cat([g.flatten() for g in grads])
            total += own * min(1.0, limit / own.norm().item())
    return total


def test_the_step_is_along_clipped_gradients_of_the_loss_with_prototypes() -> None:
    of = of_base("fpl", LOOSE, rounds=3)
    state = after(of, 2)
    assert state.server.base.prototypes.consistent.is_known.all()
    ends = of.advance(state)
    moved = [(state.server.base.params[n] - leaf).flatten() for n, leaf in ends.server.base.params.items()]
    step = torch.cat(moved) * sum(len(data) for data in of.task.clients.values())
    expected = fpl_gradient_by_hand(of, state, 0.5)
    spread = 0.5 * noise_of(of, 2).gradients.multiplier * sqrt(10 / 7)
    assert (step - expected).abs().max() < 5.5 * spread
    plain = fpl_gradient_by_hand(of_base(FedAvgLike(), LOOSE), state, 0.5)
    assert (step - plain).norm() > 2 * (step - expected).norm(), "prototypes say nothing in this test"


class FedAvgLike(FPL):
    """FPL without what prototypes add."""

    def __init__(self) -> None:
        super().__init__(**GLOBAL)  # type: ignore[arg-type]

    def prototype_loss(self, z: Tensor, batch: Batch, targets: Any) -> Tensor:
        return torch.zeros_like(batch.weight)


def test_each_kind_has_noise_of_its_own_and_of_its_own_size() -> None:
    """Of nothing but noise: a round of ten clients, seven of whom are enough."""
    share = NoiseShare(2.0, 1.5, 7, "simulated", False)
    noise = RecordNoise(share, 3.0, 4.0)
    sums, counts = noise.queries(300, 9, None)
    added: list[Tensor] = []
    for seed in range(10):
        own = OwnSums(noise)
        gradient = own.noted({"w": torch.zeros(2700, dtype=torch.float64)})
        nothing = torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64)
        total, count = own.class_sums(*nothing, 300, None)
        added.append(own.with_noise({"a": (ClassSums(total, count), 1.0), "b": (gradient, 1.0)}, seed))
    whole = torch.stack(added).sum(0)
    # by name: the weight 1, counts, sums, the weight 1, gradients
    parts = {"counts": whole[1:301], "sums": whole[301:3001], "gradients": whole[3002:]}
    assert whole[0] == whole[3001] == 10
    widths = {"counts": counts, "sums": sums, "gradients": share.query(2700)}
    for name, query in widths.items():
        expected = query.scale * query.grid * sqrt(10 / 7)
        size = len(parts[name])
        assert parts[name].std().item() == pytest.approx(expected, rel=5 / sqrt(2 * size)), name
    same = torch.corrcoef(torch.stack([parts["sums"], parts["gradients"]]))[0, 1]
    assert abs(same) < 5 / sqrt(2700)
    assert abs(torch.corrcoef(torch.stack([parts["counts"], parts["gradients"][:300]]))[0, 1]) < 5 / sqrt(300)


def test_in_rounds_without_a_release_nothing_is_said_of_classes() -> None:
    of = of_base(rounds=5, privacy=dataclasses.replace(RECORD, releases=1))
    state = after(of, 2)
    later = of.advance(state)
    assert [e.round for e in charged(of) if e.kind == "class sums"] == [1]
    assert_same(later.server.base.prototypes, state.server.base.prototypes, "prototypes")
    sums = OwnSums(noise_of(of, 2))
    assert not sums.releases_class_sums
    total, count = sums.class_sums(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64), 3, None)
    assert not total.any()
    assert not count.any()
    assert sums.with_noise({"a": (ClassSums(total, count), 1.0)}, 0).tolist() == [1.0] + [0.0] * 27


def test_classes_of_mostly_noise_are_left_out_by_hand() -> None:
    """d = 4, R = 2, σ_S = 3 · 2 · √(3/2) = 7.348: the noise of a row is 14.697 long, so that 0.25 · 2 · n must be that:
    29.39 records. In a sum with 16 shares of which 9 were enough, noise is 4/3 as wide: 39.19 records."""
    query, _ = class_queries(3.0, 2.0, 3, 4)
    total = torch.tensor([[40.0, 0.0, 0.0, -40.0], [90.0, 0.0, 0.0, 0.0], [10.0, 0.0, 0.0, 0.0]])
    mass = torch.tensor([29.5, 39.5, 29.3])
    means, is_known = means_of(total, mass, query, is_positive=True)
    assert is_known.tolist() == [True, True, False]
    assert means.tolist() == [[pytest.approx(40 / 29.5), 0, 0, 0], [pytest.approx(2.0), 0, 0, 0], [0, 0, 0, 0]]
    assert means_of(total, mass, query, False, times=4 / 3)[1].tolist() == [False, True, False]


def test_a_run_takes_the_noise_of_all_that_stayed_into_account() -> None:
    """Ten clients stay of whom seven are enough: noise is √(10/7) as wide."""
    of = of_base()
    assert of.noised_sums is not None
    query, _ = noise_of(of).queries(3, 8, None)
    least = query.multiplier * query.most * sqrt(8) / (0.25 * 2.0) * sqrt(10 / 7)
    from protofed.tree import Mean

    sums = Mean()
    sums.add(ClassSums(torch.full((3, 8), 100.0), torch.tensor([least * 1.001, least * 0.999, 0.0])))
    cleaned = of.noised_sums.cleaned({"classes": sums}, 1, 10)["classes"].total
    assert (cleaned.count > 0).tolist() == [True, False, False]
    assert cleaned.total[0].norm() == pytest.approx(2.0 * least * 1.001, rel=1e-6), "no longer than R"
    assert not cleaned.total[1:].any()
    assert of.noised_sums.cleaned({"classes": sums}, 0, 10)["classes"] is sums


# ---- without privacy


def test_without_privacy_prototypes_are_the_class_means_over_all_examples() -> None:
    of = dataclasses.replace(of_base("fpl"), private=None, secure=None)
    state = after(of, 1)
    made = of.advance(state).server.base.prototypes.consistent
    total, count = pooled_by_hand(of, state.server.base.params, 1e9, unit=False)
    assert made.count.tolist() == count.tolist()
    torch.testing.assert_close(made.mean, total / count[:, None], atol=1e-5, rtol=1e-5)


def test_nothing_of_a_rare_class_is_in_class_sums() -> None:
    """By their roles, as everywhere."""
    upload = SentSums(torch.ones(3, 8), torch.tensor([4.0, 5.0, 6.0]))
    sent = withheld(upload, torch.tensor([True, False, False]))
    assert sent.count.tolist() == [0, 5, 6]
    assert sent.total.sum(1).tolist() == [0, 8, 8]


# ---- what is refused


class Adding(FedSGD):
    """Adds something else than its sums."""

    def changed(self, upload: Any, client: ClientContext) -> Any:
        raise NotImplementedError

    async def train(self, client: ClientContext, message: Any, memory: Any) -> Reply[Any, Any]:
        reply = await super().train(client, message, memory)
        return Reply(self.changed(reply.upload, client), reply.memory)


def with_gradient(upload: Any, change: Any) -> Any:
    return dataclasses.replace(upload, gradient={n: change(leaf) for n, leaf in upload.gradient.items()})


CHANGES = {
    "a gradient that is longer": lambda u, c: with_gradient(u, lambda leaf: 2 * leaf),
    "raw class sums": lambda u, c: dataclasses.replace(
        u, classes=SentSums(u.classes.total + c.data.x.sum(), u.classes.count)
    ),
    "true counts": lambda u, c: dataclasses.replace(u, classes=SentSums(u.classes.total, u.classes.count.clone())),
    "one tensor for two": lambda u, c: with_gradient(u, lambda leaf: next(iter(u.gradient.values()))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_no_sum_over_clipped_records_is_not_added(what: str) -> None:
    """T9 in sums."""

    class Leaky(Adding):
        def changed(self, upload: Any, client: ClientContext) -> Any:
            return CHANGES[what](upload, client)

    of = noised(
        Leaky(base=FPL(**GLOBAL)), privacy=RECORD, weighting="examples", rounds=2, attempts=1, secure=unmasked()
    )  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="UNRELEASED: what a client adds holds"):
        of.advance(of.start())


def step_of(of: Federation, act: Any) -> Any:
    """What a client's step may do with its sums."""
    message = of.method.message_for(of.start().server, "c0")
    client = dataclasses.replace(of.client_context("c0", 1), sums=OwnSums(noise_of(of), message))
    return Sequential()._drive(act(client, message.params))


def test_sums_are_taken_at_what_was_sent() -> None:
    """At weights that a client has trained, other records would change the gradient of each."""

    async def at_others(client: ClientContext, params: Any) -> Any:
        return await client.gradient_sum(Objective(cross_entropy), {n: p.clone() for n, p in params.items()})

    async def against_own(client: ClientContext, params: Any) -> Any:
        return await client.gradient_sum(Objective(cross_entropy), params, ({"x": client.data.x},))

    async def features_of_others(client: ClientContext, params: Any) -> Any:
        return await client.class_sums({n: p.clone() for n, p in params.items()})

    for act in (at_others, against_own, features_of_others):
        with pytest.raises(Unreleased, match="which the client was not sent"):
            step_of(of_base(), act)


def test_a_step_makes_each_sum_once() -> None:
    async def gradients(client: ClientContext, params: Any) -> Any:
        await client.gradient_sum(Objective(cross_entropy), params)
        return await client.gradient_sum(Objective(cross_entropy), params)

    async def classes(client: ClientContext, params: Any) -> Any:
        await client.class_sums(params)
        return await client.class_sums(params)

    for act in (gradients, classes):
        with pytest.raises(TypeError, match="once"):
            step_of(of_base(), act)


class Trained(FPL):
    async def train(self, client: Any, message: Any, memory: Any) -> Any:
        return await super().train(client, message, memory)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (FPL(), "clusters prototypes"),
        (FPL(contrast_with="global"), "clusters prototypes"),
        (FedProc(prototype_weighting="uniform"), "prototype_weighting"),
        (METHODS["fedmlp"](), "more than one step"),
        (METHODS["moon"](), "more than one step"),
        (Trained(**GLOBAL), "replaces the training"),  # type: ignore[arg-type]
        (METHODS["fpl_sums"](), "asks again"),
    ],
)
def test_bases_whose_round_is_not_one_step_are_refused(base: Any, why: str) -> None:
    with pytest.raises(BadInput, match=rf"(?s)method\.base.*{why}"):
        of_base(base)


def test_a_loss_that_is_not_of_single_records_is_refused() -> None:
    class Coupled(FedAvg):
        not_by_record = "each half of a batch is compared with the other"

    with pytest.raises(BadInput, match=r"privacy\.level = \"record\" and method\.name.*half of a batch"):
        of_base(Coupled())


def test_noise_below_the_grid_of_the_sum_is_refused() -> None:
    of_base("fpl", dataclasses.replace(RECORD, clip_features=1e-2))
    with pytest.raises(BadInput, match=r"privacy.*clip_features.*too narrow"):
        of_base("fpl", dataclasses.replace(RECORD, clip_features=1e-6))


def test_class_sums_are_for_records() -> None:
    with pytest.raises(BadInput, match=r"privacy\.level = \"client\" and method\.name: class sums"):
        of_base("fpl", PrivacySettings("client", allow_useless=True), weighting="uniform")


def test_a_base_without_prototypes_is_as_before() -> None:
    of = noised(FedSGD(server_lr=1.0), privacy=RECORD, weighting="examples", secure=unmasked())
    after_one(of)
    assert [(e.kind, e.releases) for e in charged(of)] == [("gradient sums", 1)]
    assert charged(of)[0].cost == pytest.approx(mu_of(8.0, 1e-5) ** 2)


def test_the_sections_of_a_file() -> None:
    """As docs/privacy.md has them."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    [text] = [part for part in page.split("```") if part.startswith("toml") and "[method.base]" in part]
    given = '[task]\nname = "minidigits"\nnorm = "group"\n' + text.removeprefix("toml")
    found = config.parse(tomllib.loads(given), "a test")
    assert found.method == FedSGD(base=FPL(**GLOBAL), momentum=0.9)  # type: ignore[arg-type]
    assert (found.privacy.level, found.secure.sums) == ("record", True)
    of = found.experiment().federation
    assert of.noised_sums is not None
    assert of.noised_sums.release_rounds == release_rounds(2, found.training.rounds)
    clusters = given.replace('consistent_with = "global"\n', "")
    with pytest.raises(BadInput, match=r"method\.base.*clusters prototypes"):
        config.parse(tomllib.loads(clusters), "a test")
