"""Secure sums at a site: which of their exchanges an order can ask for, and that nothing goes out beside them."""

from dataclasses import dataclass, replace
from typing import Any

from protofed.api.method import Step
from protofed.engine.federation import Federation
from protofed.engine.secure import Told, adds_of
from protofed.federation.messages import Order, Refusal
from protofed.federation.refused import Refused
from protofed.federation.steps import AnyMethod, UnknownStep, exchange_of, step_named, summand_named
from protofed.privacy import exchanges
from protofed.privacy.exchanges import AddMasked, Advertise, Agree, ShareOut, Terms, Unmask
from protofed.privacy.site import Occasion
from protofed.runtimes.jobs import Answer, Job
from protofed.tree import Tree, leaves

PHASES = ("setup", "round", "evaluate", "finish")


@dataclass(frozen=True)
class SiteSums:
    """The secure sums of a run in which a site takes part."""

    federation: Federation
    terms: Terms

    @property
    def method(self) -> AnyMethod:
        """As clients are given it."""
        return Told(self.federation.method)

    def step(self, order: Order) -> Step[Any, Any, Any]:
        """The step that an order asks for, of this site's own code. Raises UnknownStep and Refused."""
        ticket, (exchange, name) = order.ticket, exchange_of(order.step)
        if order.evaluates:  # guard: nothing-judged-beside-sums
            raise Refused(Refusal.SUMS_ONLY, "the order asks how each client's model does, beside a secure sum")
        if not exchange:
            return step_named(self.federation.method, name)
        if ticket.phase not in PHASES:
            raise Refused(Refusal.STEP_NOT_ALLOWED, "the order is of no phase of a run")
        occasion = Occasion(ticket.run, ticket.phase, ticket.round, ticket.question)
        if exchange == AddMasked.exchange:
            return self._added(occasion, name)
        found: dict[str, Step[Any, Any, Any]] = {
            Advertise.exchange: Advertise(self.terms, occasion),
            ShareOut.exchange: ShareOut(self.terms, occasion),
            Agree.exchange: Agree(self.terms, occasion),
            Unmask.exchange: Unmask(self.terms, occasion),
        }
        if exchange not in found or name:
            raise UnknownStep("a secure sum has no such exchange")
        return found[exchange]

    def _added(self, occasion: Occasion, name: str) -> AddMasked:
        is_first = (occasion.phase, occasion.number) == ("round", 1)
        if (name == "train") != is_first:  # guard: trained-once-a-round
            raise Refused(
                Refusal.STEP_NOT_ALLOWED, "the first sum of a round is that of the training, and no other sum is"
            )
        if self.federation.private is not None and not is_first:  # guard: one-noised-sum-at-sites
            raise Refused(Refusal.STEP_NOT_ALLOWED, "a private run has one sum in each round, that of the training")
        step, summand = step_named(self.federation.method, name), summand_named(self.federation.method, name)
        return AddMasked(adds_of(self.federation, step, summand, occasion.round), self.terms, occasion)

    @staticmethod
    def message_like(exchange: str, base: Tree) -> Tree:
        """A message with the structure of those of an exchange; `base` is one of the method's."""
        return exchanges.message_like(exchange, base)

    def checked(self, job: Job, answer: Answer) -> Answer:
        """What a step sends, if it may. Raises Refused."""
        is_exchange = bool(getattr(job.step, "exchange", ""))
        is_judged = job.step == self.federation.method.evaluate_own
        if leaves(answer.upload) and not is_exchange and not is_judged:  # guard: site-s-nothing-but-sums
            raise Refused(Refusal.SUMS_ONLY, "the order asks for an upload, and this site gives sums alone")
        return replace(answer, loss=None)  # guard: no-loss-beside-sums
