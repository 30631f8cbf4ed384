"""Differential privacy in secure sums: noise, account and refusals, in a federation."""

import dataclasses
import tomllib
from math import sqrt
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from engine.test_secure import STEPS, Dropping
from methods.conformance import assert_same
from privacy.private_runs import plain_parts, task_of
from protofed import METHODS, BadInput, PrivacySettings, RunFailed, SecureSettings, Sgd
from protofed.engine.federation import Federation
from protofed.engine.noised_sums import hides_clients
from protofed.engine.private import Private
from protofed.engine.state import State
from protofed.engine.training import Training
from protofed.privacy.account import epsilon_of
from protofed.privacy.site import Aborted
from protofed.runs.config import config
from protofed.runtimes.sequential import Sequential

CLIENTS = 10
GONE = ("c1", "c4", "c7")
USELESS = PrivacySettings("client", epsilon=8.0, allow_useless=True)


def noised(
    method: Any = "fedavg",
    runtime: Any = None,
    privacy: PrivacySettings = USELESS,
    secure: SecureSettings | None = None,
    clients: int = CLIENTS,
    **training: Any,
) -> Federation:
    defaults = {"rounds": 1, "epochs": 1, "batch_size": 8, "optimizer": Sgd(lr=0.1), "weighting": "uniform"}
    return Federation(
        METHODS[method]() if isinstance(method, str) else method,
        task_of(clients),
        Training(**{**defaults, "quarantine": 0, **training}),
        runtime or Sequential(),
        secure=(secure or SecureSettings(sums=True)).made(),
        private=Private(privacy),
        name="noised",
    )


def unmasked(**settings: Any) -> SecureSettings:
    return SecureSettings(sums=True, masks=False, **settings)


def after_one(of: Federation) -> State:
    return of.advance(of.start())


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("exchange", STEPS)
def test_masked_sums_with_noise_are_those_without_masks_whoever_drops_out(exchange: int, count: int) -> None:
    masked = after_one(noised(runtime=Dropping(GONE[:count], STEPS[exchange])))
    gone = () if exchange > 3 else GONE[:count]
    plain = after_one(noised(runtime=Dropping(gone, "Add"), secure=unmasked()))
    assert_same(masked.server, plain.server, f"the weights with {count} gone in exchange {exchange}")


@pytest.mark.parametrize(("colluders", "honest"), [(0, 7), (4, 3)])
def test_the_mean_change_has_the_noise_that_epsilon_asks_for(colluders: int, honest: int) -> None:
    """At ε = 1 one release has m = 3.73. Seven of ten stay at least; less those that work with the server."""
    strong = dataclasses.replace(USELESS, epsilon=1.0)
    of = noised(privacy=strong, secure=unmasked(colluders=colluders))
    before = of.start()
    after = of.advance(before)
    change = torch.cat([(leaf - before.server.params[n]).flatten() for n, leaf in after.server.params.items()])
    assert of.noised_sums is not None
    m = of.noised_sums.multiplier
    assert m == pytest.approx(3.73, abs=0.01)
    assert of.noised_sums.share.honest == honest
    expected = m * sqrt(CLIENTS / honest) / CLIENTS  # B = 1
    # The clipped changes themselves add at most 1 / √P to the root mean square.
    error = 4 / sqrt(2 * len(change)) * expected + 1 / sqrt(len(change))
    assert change.square().mean().sqrt().item() == pytest.approx(expected, abs=error)


def test_with_little_noise_the_mean_change_is_that_of_clipped_changes() -> None:
    """ε = 1000 in one round, at a length that nothing reaches: but for the noise it is FedAvg."""
    loose = dataclasses.replace(USELESS, epsilon=1000.0, clip_client=4.0)
    of = noised(privacy=loose, secure=unmasked())
    plain = dataclasses.replace(noised(secure=unmasked()), private=None)
    found, expected = after_one(of).server.params, after_one(plain).server.params
    assert of.noised_sums is not None
    spread = 4 * of.noised_sums.multiplier * sqrt(CLIENTS / 7) / CLIENTS
    assert spread < 0.05
    for name, leaf in expected.items():
        assert (found[name] - leaf).abs().max() < 5 * spread, name


def test_a_change_that_is_too_long_is_scaled_down() -> None:
    of = noised(privacy=dataclasses.replace(USELESS, epsilon=1000.0, clip_client=0.05), secure=unmasked())
    before = of.start()
    after = of.advance(before)
    assert of.noised_sums is not None
    change = torch.cat([(leaf - before.server.params[n]).flatten() for n, leaf in after.server.params.items()])
    noise = 0.05 * of.noised_sums.multiplier * sqrt(CLIENTS / 7) / CLIENTS * sqrt(len(change))
    assert change.norm() < 0.05 + 2 * noise


def test_a_run_spends_what_was_promised_and_then_stops() -> None:
    of = noised(rounds=3, secure=unmasked())
    state = of.start()
    for _ in range(3):
        state = of.advance(state)
    assert of.private is not None
    for client in of.ids:
        costs = [entry.cost for entry in of.private.ledger.entries if entry.client == client]
        assert len(costs) == 3
        assert epsilon_of(sum(costs) ** 0.5, 1e-5) == pytest.approx(8.0)
    with pytest.raises(RunFailed, match="BUDGET_SPENT: client c0:"):
        of.advance(state)


@pytest.mark.parametrize(("noise", "lines"), [("simulated", 1), ("secret", 2)])
def test_a_round_that_is_done_again_pays_again_if_its_noise_is_new(noise: Any, lines: int) -> None:
    of = noised(rounds=2, privacy=dataclasses.replace(USELESS, noise=noise))
    start = of.start()
    first = of.advance(start)
    # A process that was killed has forgotten what it had unmasked.
    again = dataclasses.replace(of, secure=SecureSettings(sums=True).made()).advance(start)
    if noise == "simulated":
        assert_same(again.server, first.server, "the same round")
    else:
        assert not torch.equal(again.server.params["classifier.weight"], first.server.params["classifier.weight"])
    assert of.private is not None
    assert len([e for e in of.private.ledger.entries if e.client == "c0"]) == lines


def test_with_fewer_than_whose_noise_is_enough_there_is_no_sum() -> None:
    """Three of ten never come: of the seven none may be missing, although two thirds of seven would be five."""
    of = noised(runtime=Dropping(GONE, "Advertise"), attempts=1)
    after_one(of)

    class Later(Dropping):
        def run(self, jobs: Any) -> Any:
            jobs = list(jobs)
            if jobs and type(jobs[0].step).__name__ == "AddMasked":
                self.gone, self.kind = ("c2",), "AddMasked"
            yield from super().run(jobs)

    of = noised(runtime=Later(GONE, "Advertise"), attempts=1)
    with pytest.raises(RunFailed, match="6 clients have added something, and the sum needs 7"):
        after_one(of)


def test_sites_demand_enough_noise_themselves(tmp_path: Any) -> None:
    """Of a roster of six, four may stay by the threshold; a site whose noise is made for seven does not begin."""
    from privacy.test_site import DIGEST, OCCASION, server

    of = server(tmp_path, 6)
    adverts = {c: site.advertise(OCCASION, DIGEST) for c, site in of.sites.items()}
    of.adverts = adverts
    strict = dataclasses.replace(of.sites["c00"], least=7)
    with pytest.raises(Aborted, match="it takes 7"):
        strict.share_out(OCCASION, of.roster)
    of = server(tmp_path, 9)
    of.sites = {c: dataclasses.replace(site, least=8) for c, site in of.sites.items()}
    of.mask()
    ids = sorted(of.sites)
    with pytest.raises(Aborted, match="too few"):
        of.sites["c00"].agree(OCCASION, ids[:7], ids[7:])


def test_numbers_of_examples_are_not_in_the_sum() -> None:
    """Clients have 12, 17, … examples, and count alike: what the server reads as their mean is nothing but noise."""
    of = noised(secure=unmasked(), privacy=dataclasses.replace(USELESS, epsilon=1000.0))
    state = of.start()
    seen: list[Any] = []
    method = dataclasses.replace(of.method)
    summed = type(method).from_sum

    class Watching(type(method)):  # type: ignore[misc]
        def from_sum(self, state: Any, totals: Any, server: Any) -> Any:
            seen.append(totals["upload"].total.num_examples)
            return summed(self, state, totals, server)

    of = noised(Watching(), secure=unmasked(), privacy=dataclasses.replace(USELESS, epsilon=1000.0))
    of.advance(state)
    assert abs(float(seen[0])) < 2


def test_how_large_a_number_is_that_does_not_fit_is_not_told() -> None:
    """One weight of c3 is 42 424 242, longer than no clip, and above 2²⁴: its size would be in the failure."""

    class Huge(METHODS["fedavg"]):  # type: ignore[misc]
        async def trained(self, client: Any, message: Any, memory: Any) -> Any:
            params = dict(await super().trained(client, message, memory))
            if client.id == "c3":
                params["classifier.bias"] = params["classifier.bias"].index_fill(0, torch.tensor(0), 42_424_242.0)
            return params

    settings = dataclasses.replace(USELESS, clip_client=1e8, epsilon=1000.0)
    [failure] = after_one(noised(Huge(), secure=unmasked(), privacy=settings)).failures
    assert failure.client == "c3"
    assert "too large" in failure.detail
    assert "e+" not in failure.detail


def test_the_text_of_an_error_is_not_told() -> None:
    class Broken(METHODS["fedavg"]):  # type: ignore[misc]
        async def train(self, client: Any, message: Any, memory: Any) -> Any:
            if client.id == "c3":
                raise ValueError("the age is 42")
            return await super().train(client, message, memory)

    state = after_one(noised(Broken(), secure=unmasked()))
    [failure] = state.failures
    assert failure.client == "c3"
    assert "42" not in failure.detail
    plain = dataclasses.replace(noised(Broken(), secure=unmasked()), private=None)
    assert "the age is 42" in after_one(plain).failures[0].detail


def test_gradients_of_clients_can_be_hidden_too() -> None:
    """fedsgd at client level: the mean over clients of their clipped mean gradients, and noise."""
    of = noised(METHODS["fedsgd"](server_lr=1.0), secure=unmasked())
    before = of.start()
    after = of.advance(before)
    step = torch.cat([(leaf - after.server.base.params[n]).flatten() for n, leaf in before.server.base.params.items()])
    assert of.noised_sums is not None
    noise = of.noised_sums.multiplier * sqrt(CLIENTS / 7) / CLIENTS * sqrt(len(step))
    assert 0.5 * noise < step.norm() < 1 + 1.5 * noise


# ---- records


RECORD = PrivacySettings("record", epsilon=8.0, clip_gradients=0.5)


def of_records(privacy: PrivacySettings = RECORD, **settings: Any) -> Federation:
    return noised(METHODS["fedsgd"](server_lr=1.0), privacy=privacy, **{"weighting": "examples", **settings})


@pytest.mark.parametrize("exchange", STEPS)
def test_masked_sums_of_gradients_with_noise_are_those_without_masks(exchange: int) -> None:
    masked = after_one(of_records(runtime=Dropping(GONE, STEPS[exchange])))
    plain = after_one(of_records(runtime=Dropping(() if exchange > 3 else GONE, "Add"), secure=unmasked()))
    assert_same(masked.server, plain.server, f"the weights with three gone in exchange {exchange}")


def clipped_by_hand(of: Federation, params: Any, limit: float) -> torch.Tensor:
    """Σ over all records of their gradients, each at most so long, one after another by plain torch."""
    total = torch.zeros(sum(leaf.numel() for leaf in params.values()))
    parts = plain_parts()
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    for name, parameter in named.items():
        parameter.data.copy_(params[name])
    for data in of.task.clients.values():
        for x, y in zip(data.x, data.labels, strict=True):
            loss = torch.nn.functional.cross_entropy(parts["classifier"](parts["features"](x[None])), y[None])
            grads = torch.autograd.grad(loss, [named[name] for name in params])
            own = torch.cat([g.flatten() for g in grads])
            total += own * min(1.0, limit / own.norm().item())
    return total


def test_the_step_is_along_the_sum_of_clipped_gradients_of_records() -> None:
    """ε = 1000: the noise of one round is 0.5 · m = 0.013 in each number of a sum of 390 records."""
    of = of_records(dataclasses.replace(RECORD, epsilon=1000.0), secure=unmasked())
    before = of.start()
    after = of.advance(before)
    count = sum(len(data) for data in of.task.clients.values())
    step = (
        torch.cat([(leaf - after.server.base.params[n]).flatten() for n, leaf in before.server.base.params.items()])
        * count
    )
    expected = clipped_by_hand(of, before.server.base.params, 0.5)
    assert of.noised_sums is not None
    spread = 0.5 * of.noised_sums.multiplier * sqrt(CLIENTS / 7)
    assert spread < 0.03 * expected.norm()
    assert (step - expected).abs().max() < 5 * spread
    assert (step - clipped_by_hand(of, before.server.base.params, 1e9)).norm() > 20 * spread, "nothing was clipped"


def test_the_noise_of_records_is_that_of_the_sum_and_not_of_each_client() -> None:
    of = of_records(dataclasses.replace(RECORD, epsilon=0.1), secure=unmasked())
    before = of.start()
    after = of.advance(before)
    count = sum(len(data) for data in of.task.clients.values())
    step = (
        torch.cat([(leaf - after.server.base.params[n]).flatten() for n, leaf in before.server.base.params.items()])
        * count
    )
    assert of.noised_sums is not None
    noise = step - clipped_by_hand(of, before.server.base.params, 0.5)
    expected = 0.5 * of.noised_sums.multiplier * sqrt(CLIENTS / 7)
    assert noise.square().mean().sqrt().item() == pytest.approx(expected, rel=4 / sqrt(2 * len(noise)))


def test_every_round_of_gradient_sums_is_one_release() -> None:
    of = of_records(rounds=4, secure=unmasked())
    state = of.start()
    for _ in range(4):
        state = of.advance(state)
    assert of.private is not None
    entries = [entry for entry in of.private.ledger.entries if entry.client == "c3"]
    assert [(e.kind, e.releases) for e in entries] == [("gradient sums", 1)] * 4
    assert epsilon_of(sum(e.cost for e in entries) ** 0.5, 1e-5) == pytest.approx(8.0)


# ---- what is refused


def test_useless_noise_is_refused_with_the_number_of_clients_that_it_takes() -> None:
    """ε = 1 in one round has m = 3.73; P is the number of weights, and two more."""
    with pytest.raises(BadInput, match=r"privacy\.level = \"client\": 10 clients") as caught:
        noised(privacy=PrivacySettings("client", epsilon=1.0))
    of = noised(privacy=dataclasses.replace(USELESS, epsilon=1.0))
    size = sum(leaf.numel() for leaf in of.start().server.params.values()) + 2
    assert of.noised_sums is not None
    needed = of.noised_sums.multiplier * sqrt(size)
    assert int(str(caught.value).split("it takes ")[1].split()[0]) == pytest.approx(needed, abs=1)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"secure": SecureSettings()}, ('privacy.level = "client"', "secure.sums")),
        ({"weighting": "examples"}, ('privacy.level = "client"', "training.weighting")),
        ({"method": "fedproto"}, ('privacy.level = "client"', "method.name")),
        ({"method": "scaffold"}, ('privacy.level = "client"', "method.name")),
        ({"method": "fedpc_sums"}, ('privacy.level = "client"', "method.name")),
        ({"method": "fpl_sums"}, ("privacy.level", "method.name")),
        ({"secure": SecureSettings(sums=True, colluders=7)}, ("secure.colluders", "secure.threshold")),
        ({"privacy": PrivacySettings("record", epsilon=8.0)}, ('privacy.level = "record"', "secure.sums")),
        (
            {"privacy": dataclasses.replace(USELESS, noise="secret"), "secure": unmasked()},
            ("privacy.noise", "secure.masks"),
        ),
        ({"method": "fedsgd", "privacy": RECORD}, ('privacy.level = "record"', "training.weighting")),
        ({"privacy": dataclasses.replace(USELESS, clip_client=1e-6)}, ("privacy", "narrow")),
    ],
)
def test_what_does_not_go_together_names_both_keys(changes: dict[str, Any], keys: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        noised(**changes)
    assert all(key in str(caught.value) for key in keys), str(caught.value)


def test_these_methods_bound_what_a_client_adds() -> None:
    """Those that send nothing but weights, and do nothing else with them in what they add."""
    found = {name for name in METHODS if hides_clients(METHODS[name]())}
    assert {"fedavg", "fedprox", "fedopt", "moon"} <= found
    assert not {"scaffold", "fednova", "fpl", "ifca", "fedproto", "averaging"} & found


def test_a_second_sum_in_a_round_is_not_made() -> None:
    class Twice(METHODS["fedavg"]):  # type: ignore[misc]
        def round(self, state: Any, clients: Any) -> Any:
            return super().round(super().round(state, clients), clients)

    with pytest.raises(RunFailed, match="a sum beside"):
        after_one(noised(Twice(), attempts=1))


def test_the_sections_of_a_file() -> None:
    text = """
    [task]
    name = "minidigits"
    [method]
    name = "fedavg"
    [training]
    weighting = "uniform"
    [privacy]
    level = "client"
    """
    with pytest.raises(BadInput, match=r"secure\.sums"):
        config.parse(tomllib.loads(text), "a test")
    found = config.parse(tomllib.loads(f"{text}\n[secure]\nsums = true\ncolluders = 2"), "a test")
    assert found.privacy.level == "client"
    assert found.secure.colluders == 2
    fewer = config.parse(tomllib.loads(f"{text}\n[secure]\nsums = true\ncolluders = 1"), "a test")
    assert fewer.identity != found.identity, "shares of noise are others"


def test_a_network_with_batch_norm_is_refused() -> None:
    from methods.conformance import TASK

    assert "features" in plain_parts()
    with pytest.raises(BadInput, match="BatchNorm"):
        Federation(
            METHODS["fedavg"](),
            TASK,
            Training(rounds=1, weighting="uniform"),
            secure=SecureSettings(sums=True).made(),
            private=Private(USELESS),
        )
