"""Record-level differential privacy of a run: what clients release, and that nothing else leaves."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protofed import wire
from protofed.api.contexts import ClientContext, Reply
from protofed.api.method import Method, Step
from protofed.api.private import BudgetSpent, NotPrivate, Terms, Unreleased
from protofed.api.task import ClientId
from protofed.engine.around import Around
from protofed.errors import RunFailed
from protofed.privacy.account import mu_of, multiplier
from protofed.privacy.client import RecordLevel, gradient_calls
from protofed.privacy.ledger import LEDGER, Entry, Ledger, most_spent, read
from protofed.privacy.outbox import Outbox
from protofed.privacy.settings import PrivacySettings
from protofed.runtimes.device import moved
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.jobs import Answer, Failure, Job, Outcome, Reason, charged, spent_by
from protofed.tree import Tree, record

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)

Run = Callable[[Iterable[Job]], Iterator[Outcome]]


OF_TRAINING = (
    ("on_divergence", ("stop", "skip"), "a client that repeats a round at half its rate pays for it twice"),
    ("optimizer_state", ("fresh",), "a private step begins with a fresh optimiser"),
    ("norm_statistics", ("averaged",), "networks may have no running statistics"),
)
"""Settings of the training, the values that go with privacy, and why others do not."""


class StepFailed(RuntimeError):
    """A private step failed. What is said of it tells nothing of examples."""


class _Hidden:
    """Stands where examples are."""

    def __getattr__(self, name: str) -> Any:
        raise NotPrivate("what a client keeps first is made of its examples, which privacy.level does not cover")

    def __len__(self) -> int:
        raise NotPrivate("what a client keeps first is made of its examples, which privacy.level does not cover")


@dataclass(frozen=True)
class Privately(Around):
    """The method at clients whose steps are private: one that trains is given no examples, and no other is taken."""

    def init_memory(self, client: ClientContext, message: Tree) -> Tree:
        hidden: Any = _Hidden()
        return self.base.init_memory(replace(client, data=hidden), message)  # guard: first-memory-without-examples

    async def stepped(
        self, step: Step[Any, Any, Any], client: ClientContext, message: Tree, memory: Any
    ) -> Reply[Any, Any]:
        if step == self.base.evaluate_own:
            return await step(client, message, memory)
        name = type(self.base).__name__
        if step != self.base.train or client.privacy is None:  # guard: no-step-but-training
            raise NotPrivate(f"{name} asks clients for more than training, which privacy.level does not cover")
        private = RecordLevel(client, client.privacy, client.step_seed, message, memory)
        try:
            reply = await self.base.train_privately(private, message, memory)
        except (BudgetSpent, Diverged, NotPrivate, Unreleased):
            raise
        except Exception as error:  # its text may hold values of examples
            log.debug("the private step of client %s failed", client.id, exc_info=error)
            raise StepFailed(f"a private step of {name} failed; the log at level DEBUG says why") from None
        private.check("the upload", reply.upload)
        private.check("the memory", reply.memory)
        return reply


@record
class Sent:
    """What the outbox keeps of a step."""

    upload: Tree
    memory: Tree
    spent: torch.Tensor


class Private:
    """What a run's clients release under record-level differential privacy."""

    def __init__(self, settings: PrivacySettings) -> None:
        self.settings = settings
        self.budget = mu_of(settings.epsilon, settings.delta) ** 2
        """μ² of every client."""
        self.ledger = Ledger()
        self._outbox: Outbox | None = None

    def keep_in(self, folder: Path) -> None:
        """From now on what is released is written down here. What is there already counts."""
        self.ledger = Ledger(folder / LEDGER, self.ledger.entries)
        if self.settings.noise == "secret":
            self._outbox = Outbox(folder / "outbox")

    def go_on_from(self, earlier: "Private") -> None:
        """What clients released in an earlier run of the same data counts in this one."""
        self.ledger.write(earlier.ledger.entries)

    def terms(self, federation: "Federation") -> Terms:
        """How much noise each release has, so that all releases of the whole run keep to ε and δ."""
        t, s = federation.training, self.settings
        passes = Counter[str]()
        for number in range(t.rounds):
            for client in federation.sampled(number):
                passes[client] += federation.epochs_of(client, number)
        gradients = max(passes.values()) * gradient_calls(t.optimizer)
        rounds = release_rounds(s.releases, t.rounds) if federation.method.releases_class_sums else ()
        share = s.prototype_share if rounds else 0.0
        mu = self.budget**0.5
        return Terms(
            s.clip_features,
            s.clip_gradients,
            multiplier(mu * (1 - share) ** 0.5, gradients),
            multiplier(mu * share**0.5, len(rounds)) if rounds else 0.0,
            rounds,
            s.noise,
            self.budget,
        )

    def show(self, folder: Path) -> None:
        """Knows what was released in a run that is over, or that another process works on."""
        self.ledger = Ledger(entries=read(folder / LEDGER))

    @property
    def most_spent(self) -> float:
        """Σ 1/m² of the client that has released most."""
        return most_spent(self.ledger.entries)

    def left(self, client: ClientId) -> float:
        """What a client may still spend of μ²."""
        return self.budget - self.ledger.spent(client)

    # ---- clients' steps

    def sent(self, federation: "Federation", run: Run, jobs: Iterable[Job], like: Tree) -> Iterator[Outcome]:
        """What came of training steps. What they release is written down before anybody is given it; what was sent
        before is sent again."""
        new: dict[str, Job] = {}
        again: list[Outcome] = []

        def asked() -> Iterator[Job]:
            for job in jobs:
                answer = self._again(federation, job, like)
                if answer is not None:
                    again.append((job.client, answer))
                    continue
                terms = job.context.privacy
                assert terms is not None
                left = replace(terms, left=self.left(job.client))
                new[job.client] = replace(job, context=replace(job.context, privacy=left))
                yield new[job.client]

        for client, outcome in run(asked()):
            yield client, self._written(federation, new[client], outcome)
        yield from again

    def _written(self, federation: "Federation", job: Job, outcome: Answer | Failure) -> Answer | Failure:
        if isinstance(outcome, Failure):
            return self._failed(job, outcome)
        if self._outbox is not None:  # guard: sent-again-with-the-same-noise
            memory = federation.runtime.store.load(job.client, outcome.receipt) if outcome.receipt else ()
            spent = spent_by(outcome.charges)
            assert spent is not None
            self._outbox.put(
                job.client, job.ticket.round, self._about(federation, job), Sent(outcome.upload, memory, spent)
            )
            self._outbox.forget(job.ticket.round)
        self._charge(job, outcome)
        return outcome

    def _failed(self, job: Job, failure: Failure) -> Failure:
        if failure.reason == Reason.BUDGET_SPENT:
            raise RunFailed(f"BUDGET_SPENT: client {job.client}: {failure.detail}; what was saved is intact")
        return failure

    def _charge(self, job: Job, answer: Answer) -> None:
        """Before the upload leaves."""
        t, digest = job.ticket, hashlib.sha256(wire.encode(answer.upload)).hexdigest()
        self.ledger.write(  # guard: charged-before-sent
            Entry(t.run, t.round, t.phase, t.call, job.client, charge.kind, charge.releases, charge.cost, digest)
            for charge in answer.charges
        )

    def _again(self, federation: "Federation", job: Job, like: Tree) -> Answer | None:
        """What the client sent when it was asked the same before."""
        if self._outbox is None:
            return None
        before, none = job.memory(federation.runtime.store), torch.zeros(())
        kept = self._outbox.get(job.client, job.ticket.round, self._about(federation, job), Sent(like, before, none))
        if kept is None:
            return None
        kept = moved(kept, federation.runtime.device)
        receipt = federation.runtime.store.keep(job.client, kept.memory)
        answer = Answer(kept.upload, receipt, None, charged(kept.spent))
        self._charge(job, answer)  # a process may have been killed before it could
        return answer

    def _about(self, federation: "Federation", job: Job) -> str:
        """What the client is asked for: the same words mean that the same is to be sent."""
        known = job.message, job.memory(federation.runtime.store)
        digest = hashlib.sha256(wire.encode(known)).hexdigest() if wire.to_arrays(known) else ""
        return f"{job.ticket.run}\0{job.ticket.phase}\0{job.ticket.call}\0{digest}"


def release_rounds(releases: int, rounds: int) -> tuple[int, ...]:
    """The rounds in which class sums are released, evenly spread. Not the first: its weights are those of nobody."""
    count = min(releases, rounds - 1)
    return tuple(1 + i * (rounds - 1) // count for i in range(count))


def why_not_private(method: Method[Any, Any, Any, Any]) -> str:
    """Why a method cannot be run privately; empty if it can. A private step counts if it is not of a class whose
    training the method replaces."""
    pairs = (("train", "train_privately"), ("trained", "trained_privately"))
    owners = [(_owner(method, plain), _owner(method, private)) for plain, private in pairs]
    is_own = all(issubclass(private, plain) for plain, private in owners if plain and private)
    if owners[0][1] is Method or not is_own:  # guard: private-step-not-inherited-past-training
        return "has no private step"
    return f"has no private step: {method.not_by_record}" if method.not_by_record else ""


def _owner(method: Method[Any, Any, Any, Any], name: str) -> type | None:
    """The class that a method's function comes from."""
    return next((cls for cls in type(method).__mro__ if name in vars(cls)), None)


def refusals(federation: "Federation") -> Iterator[str]:
    """What of the task and its networks cannot be private. Settings are checked where they are read."""
    private = federation.private
    assert private is not None
    for name, allowed, why in OF_TRAINING:
        if getattr(federation.training, name) not in allowed:  # guard: training-that-goes-with-privacy
            yield f"training.{name} and privacy.level: {why}; use {allowed[0]!r}"
    networks = federation.networks_of(federation.ids[0])
    layers = {name: layer for layer, name in networks.layer_names().items()}
    norms = [name for name, layer in layers.items() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if norms or networks.statistics:  # guard: batch-norm-refused-under-privacy
        name = norms[0] if norms else min(networks.statistics)
        yield (
            f"privacy.level and the network: {name} is a BatchNorm, which mixes the records of a batch, so that none "
            'can be clipped alone; take a network with GroupNorm (task.norm = "group" for minidigits) or with no such '
            'layer (task.model = "mlp" for own tables)'
        )
    largest = max(enrolment.num_examples for enrolment in federation.spec.clients.values())
    if private.settings.delta * largest > 1:
        yield (
            f"privacy.delta is {private.settings.delta:g}, and a client has {largest} records: a δ above one in this "
            f"number would allow to publish a record; set it far below {1 / largest:.1g}"
        )
    count = federation.uploads.min_class_count
    if count and federation.method.releases_class_sums:
        yield (
            f"privacy.level and uploads.min_class_count = {count}: it goes by true counts; set it to 0, and at a site "
            "min_class_count = 1 in the policy of its site.toml"
        )
