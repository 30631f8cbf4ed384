"""Differential privacy in secure sums: how much noise a sum has, what it costs, and what cannot be."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, fsum, log2, sqrt
from typing import TYPE_CHECKING

from protofed.api.method import Method
from protofed.api.sums import Totals
from protofed.api.task import ClientId
from protofed.engine.around import unwrapped
from protofed.engine.private import release_rounds
from protofed.errors import RunFailed
from protofed.methods._shared.one_step import OneStep
from protofed.methods.families import SumMethod
from protofed.privacy.account import cost, multiplier
from protofed.privacy.class_sums import ends_in_relu, means_of
from protofed.privacy.fixed_point import FixedPoint, flat
from protofed.privacy.ledger import Entry
from protofed.privacy.shares import NoiseShare, RecordNoise
from protofed.prototypes.class_means import ClassSums
from protofed.tree import Mean, named_leaves

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
        from protofed.privacy.site import threshold  # here: it needs `cryptography`, an extra

        assert self.federation.secure is not None
        return threshold(len(self.federation.sampled(0)), self.federation.secure.settings.threshold)

    @property
    def honest(self) -> int:
        assert self.federation.secure is not None
        return self.least - self.federation.secure.settings.colluders

    @cached_property
    def release_rounds(self) -> tuple[int, ...]:
        """The rounds whose sums have class sums too."""
        private, method = self.federation.private, self.federation.method
        assert private is not None
        if self.whole_client or not method.releases_class_sums:
            return ()
        return release_rounds(private.settings.releases, self.federation.training.rounds)

    @cached_property
    def multiplier(self) -> float:
        """m of each sum, class sums aside, so that all sums of the run that a client is in keep to ε and δ."""
        of, private = self.federation, self.federation.private
        assert private is not None
        sums = Counter(client for number in range(of.training.rounds) for client in of.sampled(number))
        part = 1 - private.settings.prototype_share if self.release_rounds else 1.0
        return multiplier((private.budget * part) ** 0.5, max(sums.values()))

    @cached_property
    def class_multiplier(self) -> float:
        """m of each release of class sums; 0 if there are none."""
        private, count = self.federation.private, len(self.release_rounds)
        assert private is not None
        return multiplier((private.budget * private.settings.prototype_share) ** 0.5, count) if count else 0.0

    @cached_property
    def share(self) -> NoiseShare:
        """Of the changes of clients, or of gradients."""
        assert self.federation.private is not None
        s = self.federation.private.settings
        most = s.clip_client if self.whole_client else s.clip_gradients
        return NoiseShare(most, self.multiplier, self.honest, s.noise, self.whole_client)

    def noise_of(self, round: int) -> NoiseShare | RecordNoise:
        """What each client does to what it adds in a round."""
        private = self.federation.private
        assert private is not None
        if self.whole_client:
            return self.share
        m = self.class_multiplier if round in self.release_rounds else 0.0
        return RecordNoise(self.share, m, private.settings.clip_features)

    def cleaned(self, totals: Totals, round: int, count: int) -> Totals:
        """Sums over so many clients, where class sums are those of means that are no longer than features can be, and
        of no class whose mean is mostly noise. This looks at nothing but what is released."""
        if round not in self.release_rounds:
            return totals  # class sums are all zero
        return {name: self._cleaned(mean, round, count) for name, mean in totals.items()}

    def _cleaned(self, mean: Mean, round: int, count: int) -> Mean:
        sums, noise = mean.total, self.noise_of(round)
        if not (isinstance(sums, ClassSums) and isinstance(noise, RecordNoise)):
            return mean
        base = getattr(unwrapped(self.federation.method), "base", None)
        longest, own = (base.longest_feature, base.class_features) if isinstance(base, OneStep) else (None, None)
        classes, dim = sums.total.shape
        query, _ = noise.queries(classes, dim, longest)
        is_positive = own is None and ends_in_relu(self.federation.networks_of(self.federation.ids[0]))
        # More than the least that stay have added noise.
        means, is_known = means_of(sums.total, sums.count, query, is_positive, sqrt(count / self.honest))
        known = sums.count * is_known
        return Mean.of_sums(sums, named_leaves(ClassSums(means * known[:, None], known)), mean.weight)

    # ---- what a sum costs

    def costs(self, round: int) -> dict[str, float]:
        """What the sum of a round costs, by kind: 1/m² each, of one joint release."""
        kinds = {"a client's change" if self.whole_client else "gradient sums": cost(self.multiplier)}
        return {**kinds, "class sums": cost(self.class_multiplier)} if round in self.release_rounds else kinds

    def check_budget(self, clients: Iterable[ClientId], round: int) -> None:
        """Before anybody is asked."""
        private, price = self.federation.private, fsum(self.costs(round).values())
        assert private is not None
        for client in clients:
            if private.ledger.spent(client) + price > private.budget * SLACK:  # guard: sums-in-budget
                raise RunFailed(
                    f"BUDGET_SPENT: client {client}: another sum costs {price:.4g} of μ², and not so "
                    "much is left; what was saved is intact"
                )

    def charge(self, clients: Iterable[ClientId], round: int, call: int, about: bytes) -> None:
        """Before the sum is known. `about` tells this sum from all others; with noise of the run's seed the same sum
        comes about again, and costs nothing."""
        private = self.federation.private
        assert private is not None
        digest, name = hashlib.sha256(about).hexdigest(), self.federation.name
        private.ledger.write(  # guard: sums-charged
            Entry(name, round, "round", call, client, kind, 1, price, digest)
            for client in clients
            for kind, price in self.costs(round).items()
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
        elif method.not_by_record:  # guard: sums-of-single-records
            yield f'privacy.level = "record" and method.name: {name}: {method.not_by_record}'
        assert of.private is not None
        widths, finest = [self.share.most * self.share.multiplier], FixedPoint(len(of.ids)).error * 2
        if self.release_rounds:
            widths += [self.class_multiplier, self.class_multiplier * of.private.settings.clip_features]
        if log2(min(widths)) - 21 < log2(finest):  # guard: noise-on-the-grid-of-sums
            what = f"noise of {min(widths):.2g} is too narrow for the whole numbers of a sum"
            yield f"privacy.clip_client, clip_gradients and clip_features: {what}; clip at a larger length"

    def _client_level(self, method: Method) -> Iterator[str]:  # type: ignore[type-arg]
        of, name = self.federation, type(method).__name__
        if not (isinstance(method, SumMethod) and hides_clients(method)):  # guard: client-level-bounded
            yield f'privacy.level = "client" and method.name: what a client of {name} adds has no bound here'
            return
        if method.releases_class_sums:  # guard: class-sums-of-records-only
            yield f'privacy.level = "client" and method.name: class sums of {name} have no bound for a client here'
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
