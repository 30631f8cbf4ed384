"""A run at a site: does the steps that orders ask for, with the site's own code, data and states."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from protofed import wire
from protofed.api.evaluation import Evaluation
from protofed.api.method import Step
from protofed.api.requests import Fit, Request
from protofed.engine.federation import Federation
from protofed.engine.message import printable, sealed
from protofed.engine.round import MOST_HALVINGS
from protofed.engine.test_sets import APART
from protofed.federation.keyring import Keyring
from protofed.federation.messages import Description, Done, Failed, Limits, Order, Refusal, Work
from protofed.federation.plan import Plan, plan_of
from protofed.federation.refused import Refused
from protofed.federation.site_data import SiteData
from protofed.federation.site_privacy import SitePrivate
from protofed.federation.site_store import StateFiles
from protofed.federation.site_sums import SiteSums
from protofed.federation.steps import UnknownStep, exchange_of, message_like, step_named
from protofed.optim.optimizers import halved
from protofed.runs.runtime_choice import pinned_threads
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.device import moved
from protofed.runtimes.jobs import Answer, Failure, Job, Reason, failure_of, non_finite
from protofed.runtimes.sequential import Sequential
from protofed.transforms.by_class import too_few
from protofed.transforms.chain import UploadPipeline
from protofed.tree import Tree

CLAIMABLE = (
    *(Reason.CLIENT_ERROR, Reason.DIVERGED, Reason.MEMORY_LOST, Reason.REFUSED_BY_SITE),
    *(Reason.BUDGET_SPENT, Reason.UNRELEASED),
)
"""What a site can say of a client that failed. All else is for the server to find out."""


class LimitedRuntime(Sequential):
    """The reference runtime, within a site's limits: a method's own settings may ask for more epochs than the
    experiment's do."""

    def __init__(self, device: str, limits: Limits) -> None:
        super().__init__(device)
        self._limits = limits
        self.end = inf
        """On the monotonic clock: when the site has worked enough for this run."""
        self.refused: Refused | None = None
        """What it refused in the last step, which a method may have gone on without."""

    def answer(self, request: Request[Any]) -> Any:
        if isinstance(request, Fit) and request.epochs > self._limits.epochs:  # guard: site-s-epochs-of-every-fit
            what = f"{request.epochs} epochs, and this site trains at most {self._limits.epochs}"
            self.refused = Refused(Refusal.TOO_MANY_EPOCHS, what)
        if time.monotonic() > self.end:  # guard: site-s-hours
            what = f"this site works at most {self._limits.hours} hours for a run"
            self.refused = Refused(Refusal.TOO_MANY_HOURS, what)
        if self.refused is not None:
            raise self.refused
        return super().answer(request)

    def outcome(self, job: Job) -> Answer | Failure:
        """What came of one job. Raises Refused."""
        self.refused = None
        [(_, outcome)] = self.run([job])
        if self.refused is not None:
            raise self.refused
        return outcome


@dataclass
class SiteRun:
    """What a site needs for the orders of one run."""

    description: Description
    plan: Plan
    federation: Federation
    runtime: LimitedRuntime
    limits: Limits
    sums: SiteSums | None = None
    """The only way in which anything leaves, if that was agreed on."""
    private: SitePrivate | None = None
    """What clients release, if they do so under differential privacy."""

    @classmethod
    def of(
        cls,
        description: Description,
        data: SiteData,
        limits: Limits,
        states: Path,
        device: str,
        keyring: Keyring | None = None,
        private: SitePrivate | None = None,
    ) -> "SiteRun":
        """Raises BadInput if no federation can be made of it."""
        plan, runtime = plan_of(description.config), LimitedRuntime(device, limits)
        terms = None
        if plan.secure.sums and keyring is not None:
            terms = keyring.terms(description.keys, plan.secure.threshold)
        federation = Federation(
            plan.method,
            data.task_among(description.clients),
            plan.training,
            runtime,
            uploads=_uploads(plan, limits),
            secure=(secure := plan.secure.made(terms)),
            private=private,
            fine_tune=plan.evaluation.fine_tune,
            name=description.run,
        )
        runtime.store = StateFiles(states, federation.initial_client_state, runtime.device)
        sums = None if secure is None else SiteSums(federation, secure.terms(federation))
        return cls(description, plan, federation, runtime, limits, sums, private)

    def done(self, order: Order, end: float) -> tuple[list[Done], list[Failed]]:
        """What came of an order. Nobody waits for it any more after `end`, on the monotonic clock."""
        done: list[Done] = []
        failed: list[Failed] = []
        with pinned_threads(1), self.runtime.open(self.federation):
            step, messages = self._step(order), self._messages(order)
            for work in order.works:
                try:
                    if time.monotonic() > end:  # guard: site-stops-at-deadline
                        raise TimeoutError("nobody waits for the answer any longer")
                    found = self._one(self._job(order, step, work, messages[work.message]))
                except Refused as refused:
                    found = Failed(work.client, Reason.REFUSED_BY_SITE, str(refused))
                except Exception as error:  # whatever goes wrong for a client concerns that client only
                    found = _claimed(failure_of(work.client, error))
                (done if isinstance(found, Done) else failed).append(found)  # type: ignore[arg-type]
        return done, failed

    def _messages(self, order: Order) -> Sequence[Tree]:
        """The method's messages, in the structure that its messages always have."""
        numbers = [work.message for work in order.works]
        if sorted({*numbers}) != [*range(len({*numbers}))]:
            raise Refused(Refusal.UNREADABLE, "the order's clients do not name its messages")
        first = {work.message: work.client for work in reversed(order.works)}
        method, server = self.federation.method, self.federation.initial_server
        exchange, name = exchange_of(order.step)
        likes = [message_like(method, name or "train", server, first[number]) for number in sorted(first)]
        if self.sums is not None and exchange:
            likes = [self.sums.message_like(exchange, like) for like in likes]
        try:
            messages = wire.decode(order.messages, likes)
        except wire.WireError as error:
            raise Refused(Refusal.UNREADABLE, printable(str(error))) from error
        if bad := non_finite(messages):  # guard: messages-finite-at-site
            raise Refused(
                Refusal.NOT_FINITE, f"the server's message holds values that are not finite: {printable(bad)}"
            )
        return list(moved(messages, self.runtime.device))

    def _one(self, job: Job) -> Done | Failed:
        outcome = self._outcome(job)
        is_afresh = self._begins_afresh(outcome)
        if is_afresh:
            outcome = self._outcome(replace(job, receipt=None))
        if isinstance(outcome, Answer):
            outcome = outcome if self.sums is None else self.sums.checked(job, outcome)
            upload = self._told(job, outcome.upload)
            sent = sealed(job.ticket, upload, outcome.receipt, outcome.loss, outcome.charges)
            return Done(job.client, sent.data, is_afresh)
        return _claimed(outcome)

    def _outcome(self, job: Job) -> Answer | Failure:
        """What came of a job. Raises Refused."""
        if self.private is None or job.step == self.federation.method.evaluate_own:
            return self.runtime.outcome(job)
        ask = self.private.outcome if self.sums is None else self.private.outcome_of_sum
        return ask(self.federation, job, self.runtime.outcome)

    def _told(self, job: Job, upload: Tree) -> Tree:
        """An evaluation on a client's own examples, without those of classes that this site finds too rare."""
        if not isinstance(upload, Evaluation) or job.tests not in APART or self.limits.class_count <= 1:
            return upload
        context = job.context
        few = too_few(context.data.labels.cpu(), context.num_classes, self.limits.class_count)
        # guard: rare-classes-of-tests-stay
        return replace(upload, confusion=upload.confusion.masked_fill(few[:, None], 0))

    def _begins_afresh(self, outcome: Answer | Failure) -> bool:
        is_lost = isinstance(outcome, Failure) and outcome.reason == Reason.MEMORY_LOST
        return is_lost and self.description.on_memory_lost == "start afresh"

    def _step(self, order: Order) -> Step[Any, Any, Any]:
        try:
            if self.sums is not None:
                return self.sums.step(order)
            if self.private is not None:
                self.private.refuse_step(order)
            return step_named(self.federation.method, order.step)
        except UnknownStep as error:
            raise Refused(Refusal.STEP_NOT_ALLOWED, printable(str(error))) from error

    def _job(self, order: Order, step: Step[Any, Any, Any], work: Work, message: Tree) -> Job:
        federation, ticket = self.federation, order.ticket
        tests = federation.test_sets(work.client, order.tests)
        context = federation.client_context(work.client, ticket.round, ticket.phase, ticket.question, tests)
        if not 0 <= work.halvings <= MOST_HALVINGS:  # guard: rates-are-only-halved
            raise Refused(Refusal.OTHER_SETTINGS, f"the order halves the learning rate {work.halvings} times")
        if work.halvings:
            optimizer = halved(context.optimizer, work.halvings)
            context = replace(context, optimizer=optimizer, halvings=work.halvings)
        ours = (context.epochs, context.batch_size, context.step_seed)
        if ours != (work.epochs, work.batch_size, work.step_seed):  # guard: order-s-settings-are-those-agreed
            raise Refused(
                Refusal.OTHER_SETTINGS, "the order's epochs, batch size or seed are not those that were agreed"
            )
        return Job(
            work.client,
            step,
            context,
            message,
            Receipt(work.receipt) if work.receipt else None,
            federation.method if self.sums is None else self.sums.method,
            order.tests,
            order.evaluates,
            federation.encoded,
            ticket=ticket,
        )


def _uploads(plan: Plan, limits: Limits) -> UploadPipeline:
    """What is done to uploads here. Nothing is said of a class that this site finds too rare."""
    pipeline = plan.uploads.pipeline(is_own_data=plan.is_own_data)
    least = limits.class_count if limits.class_count > 1 else 0
    return replace(pipeline, min_class_count=max(pipeline.min_class_count, least))  # guard: site-s-rare-classes


def _claimed(failure: Failure) -> Failed:
    """A failure as a site can claim it."""
    if failure.reason in CLAIMABLE:
        return Failed(failure.client, failure.reason, printable(failure.detail))
    return Failed(failure.client, Reason.CLIENT_ERROR, printable(f"{failure.reason}: {failure.detail}"))
