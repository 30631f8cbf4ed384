"""Differential privacy in secure sums: how much noise a sum has, what it costs, and what cannot be."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, sqrt
from typing import TYPE_CHECKING

from protofed.api.method import Method
from protofed.api.task import ClientId
from protofed.engine.around import unwrapped
from protofed.errors import RunFailed
from protofed.methods.families import SumMethod
from protofed.privacy.account import cost, multiplier
from protofed.privacy.fixed_point import FixedPoint, flat
from protofed.privacy.ledger import Entry
from protofed.privacy.shares import NoiseShare
from protofed.privacy.site import threshold

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

SLACK = 1 + 1e-9
"""Of a sum of many costs in floating point."""


def hides_clients(method: Method) -> bool:  # type: ignore[type-arg]
    """Whether what a client adds can be bounded: whether the method says what one adds that has learnt nothing."""
    if not isinstance(method, SumMethod):
        return False
    owners = {name: _owner(method, name) for name in ("unchanged", "summand", "upload_spec")}
    own = owners.pop("unchanged")
    return own is not SumMethod and all(issubclass(own, other) for other in owners.values())


def _owner(method: Method, name: str) -> type:  # type: ignore[type-arg]
    return next(cls for cls in type(method).__mro__ if name in vars(cls))


@dataclass(frozen=True)
class NoisedSums:
    """The noise of the secure sums of a run."""

    federation: "Federation"

    @property
    def whole_client(self) -> bool:
        assert self.federation.private is not None
        return self.federation.private.settings.level == "client"

    @cached_property
    def least(self) -> int:
        """So many clients stay in every sum."""
        assert self.federation.secure is not None
        return threshold(len(self.federation.sampled(0)), self.federation.secure.settings.threshold)

    @property
    def honest(self) -> int:
        assert self.federation.secure is not None
        return self.least - self.federation.secure.settings.colluders

    @cached_property
    def multiplier(self) -> float:
        """m of each sum, so that all sums of the run that a client is in keep to ε and δ."""
        of, private = self.federation, self.federation.private
        assert private is not None
        sums = Counter(client for number in range(of.training.rounds) for client in of.sampled(number))
        return multiplier(private.budget**0.5, max(sums.values()))

    @cached_property
    def share(self) -> NoiseShare:
        assert self.federation.private is not None
        s = self.federation.private.settings
        most = s.clip_client if self.whole_client else s.clip_gradients
        return NoiseShare(most, self.multiplier, self.honest, s.noise, self.whole_client)

    # ---- what a sum costs

    def check_budget(self, clients: Iterable[ClientId]) -> None:
        """Before anybody is asked."""
        private = self.federation.private
        assert private is not None
        for client in clients:
            if private.ledger.spent(client) + cost(self.multiplier) > private.budget * SLACK:  # guard: sums-in-budget
                raise RunFailed(
                    f"BUDGET_SPENT: client {client}: another sum costs {cost(self.multiplier):.4g} of μ², and not so "
                    "much is left; what was saved is intact"
                )

    def charge(self, clients: Iterable[ClientId], round: int, call: int, about: bytes) -> None:
        """Before the sum is known. `about` tells this sum from all others; with noise of the run's seed the same sum
        comes about again, and costs nothing."""
        private = self.federation.private
        assert private is not None
        kind = "a client's change" if self.whole_client else "gradient sums"
        digest, price = hashlib.sha256(about).hexdigest(), cost(self.multiplier)
        name = self.federation.name
        private.ledger.write(  # guard: sums-charged
            Entry(name, round, "round", call, client, kind, 1, price, digest) for client in clients
        )

    # ---- what cannot be

    def refusals(self) -> Iterator[str]:
        of, method = self.federation, unwrapped(self.federation.method)
        name = type(method).__name__
        if self.honest < 1:
            yield (
                f"secure.colluders and secure.threshold: {self.least} clients stay at least, so that none is left "
                "whose noise the server does not know; lower the one or raise the other"
            )
            return
        assert of.secure is not None
        if self.share.kind == "secret" and not of.secure.settings.masks:  # guard: secret-noise-under-masks
            yield (
                'privacy.noise = "secret" and secure.masks = false: the server would see what each client adds with '
                "one share of the noise alone; set secure.masks to true"
            )
        if method.has_more_exchanges:
            yield f"privacy.level and method.name: {name} takes several sums in a round, and one is accounted for"
        elif self.whole_client:
            yield from self._client_level(method)
        elif not method.releases_gradient_sums:
            yield (
                f'privacy.level = "record" and secure.sums: {name} (method.name) adds noise at each client, not in '
                "the sum; take fedsgd, or set secure.sums to false"
            )
        elif isinstance(method, SumMethod) and method.public_weight(2) == 1:
            yield (
                'privacy.level = "record" and training.weighting: a mean over records has another bound at each '
                'client; set it to "examples"'
            )
        most, finest = self.share.most * self.share.multiplier, FixedPoint(len(of.ids)).error * 2
        if log2(most) - 21 < log2(finest):
            yield f"privacy: noise of {most:.2g} is too narrow for the whole numbers of a sum; clip at a larger length"

    def _client_level(self, method: Method) -> Iterator[str]:  # type: ignore[type-arg]
        of, name = self.federation, type(method).__name__
        if not (isinstance(method, SumMethod) and hides_clients(method)):  # guard: client-level-bounded
            yield f'privacy.level = "client" and method.name: what a client of {name} adds has no bound here'
            return
        if method.public_weight(2) != 1:
            yield (
                'privacy.level = "client" and training.weighting: clients that count by their examples say how many '
                'they have; set it to "uniform"'
            )
        private = of.private
        assert private is not None
        message = method.message_for(of.initial_server, of.ids[0])
        like = method.upload_spec(of.initial_server, of.server_context(0, "round"))
        size = len(flat(method.summand(like, message)))
        needed, count = ceil(self.multiplier * sqrt(size)), len(of.sampled(0))
        if needed > count and not private.settings.allow_useless:  # guard: useless-noise-refused
            yield (
                f'privacy.level = "client": {count} clients take part in a round, and with these settings the noise of '
                f"{size} numbers is {needed / count:.3g} times as long as their sum can be; it takes {needed} clients, "
                "fewer rounds, a larger privacy.epsilon or fewer numbers (privacy.allow_useless = true runs it anyway)"
            )
