"""The engine: setup, rounds, finish; who takes part, and what counts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from protofed.api.contexts import ClientContext, ServerContext
from protofed.api.evaluation import Evaluation, TestSets, evaluation_spec
from protofed.api.method import Method, UsedModel, with_weighting
from protofed.api.private import Terms
from protofed.api.requests import Request
from protofed.api.task import ClientId, Task, TaskSpec
from protofed.data.batches import Data
from protofed.engine.around import unwrapped
from protofed.engine.conflicts import problems_of
from protofed.engine.noised_sums import NoisedSums
from protofed.engine.private import Private
from protofed.engine.round import RoundClients
from protofed.engine.sampling import round_half_up, shuffled
from protofed.engine.state import State
from protofed.engine.test_sets import APART, client_tests, is_testable, pooled_tests
from protofed.engine.training import Training
from protofed.engine.upload_validation import Limits
from protofed.engine.wrapping import wrapped
from protofed.errors import BadInput, RoundAbandoned, RunFailed
from protofed.nn.networks import Networks
from protofed.one_run import only_run
from protofed.optim.schedules import ConstantRate, scheduled
from protofed.runtimes.device import unplaced
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.jobs import Runtime, TestKind
from protofed.runtimes.sequential import Sequential
from protofed.seeds import derive_seed
from protofed.transforms.by_class import too_few
from protofed.transforms.chain import UploadPipeline
from protofed.tree import Tree

if TYPE_CHECKING:
    from protofed.engine.secure import SecureSums

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Federation:
    method: Method[Any, Any, Any, Any]
    task: Task
    training: Training
    runtime: Runtime = field(default_factory=Sequential)
    on_client: Callable[[ClientId], None] = lambda client: None
    """Told of every client whose step ended."""
    uploads: UploadPipeline = field(default_factory=UploadPipeline)
    """What happens to uploads between a client's step and the method."""
    secure: "SecureSums | None" = None
    """Whether clients give sums alone, and how."""
    private: Private | None = None
    """What clients release under differential privacy, if they do."""
    fine_tune: int = 0
    """Epochs in which a client fine-tunes the model that it would use, on its own data, before it is tested."""
    name: str = "unnamed"
    """Of the run: messages that answer another one are refused."""
    _networks: dict[ClientId, Networks] = field(default_factory=dict)
    _tests: dict[ClientId, TestSets] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", self.runtime.placed(self.task))
        object.__setattr__(self, "method", with_weighting(self.method, self.training.weighting))
        t = self.training
        if t.held_out_clients >= (count := len(self.task.clients) - len(self.task.held_out)):
            what = f"training.held_out_clients is {t.held_out_clients}, but the task has {count} clients"
            raise BadInput(f"{what}: one must be left to train")
        problems = problems_of(self)
        if problems:
            raise BadInput("\n".join(problems))
        object.__setattr__(self, "method", wrapped(self))

    def start(self) -> State:
        if self.uploads.stages or self.uploads.reach.updates:
            like = self.method.upload_spec(self.initial_server, self.server_context(0, "load"))
            message = self.method.message_for(self.initial_server, self.ids[0])
            if refusals := self.uploads.refusals(like, message, self.task.num_classes):
                raise BadInput("\n".join(refusals))
        return self._attempted(self._setup, State(0, None, {}))

    def advance(self, state: State, evaluates: bool = False) -> State:
        """The state after one more round. With `evaluates`, clients judge the models that they train."""
        return self._attempted(partial(self._round, evaluates=evaluates), state)

    def finish(self, state: State) -> State:
        """The state after what the method does at the end."""
        finished = self._attempted(self._end, state)
        return finished.following(state)

    def _asked(self, state: State, ids: tuple[ClientId, ...], phase: str, evaluates: bool = False) -> RoundClients:
        kind = RoundClients if self.secure is None else self.secure.clients
        return kind(self, state, ids, phase, evaluates)

    def _setup(self, state: State, attempt: int) -> State:
        clients = self._asked(state, self.trusted(state), "setup")
        return clients.after(self.method.setup(self.method.init_server(clients.server), clients))

    def _round(self, state: State, attempt: int, evaluates: bool) -> State:
        ids = self.sampled(state.round, attempt, state.strikes)
        clients = self._asked(state, ids, "round", evaluates and self.task.has_tests)
        return replace(clients.after(self.method.round(state.server, clients)), round=state.round + 1)

    def _end(self, state: State, attempt: int) -> State:
        clients = self._asked(state, self.trusted(state), "finish")
        return clients.after(self.method.finish(state.server, clients))

    def _tested(self, state: State, attempt: int) -> State:
        clients = self._asked(state, self.trusted(state), "evaluate")
        return clients.after(self.method.judged(state.server, clients))

    def _attempted(self, phase: Callable[[State, int], State], state: State) -> State:
        """The state after a phase, which is begun again, from the same state, if it was abandoned."""
        self.task.refuse_without_data()
        abandoned: list[str] = []
        for attempt in range(self.training.attempts):  # guard: round-tried-again
            try:
                with only_run(), self.runtime.open(self):
                    return replace(phase(state, attempt), abandoned=tuple(abandoned))
            except RoundAbandoned as error:
                abandoned.append(str(error))
                # guard: abandoned-round-logged
                log.warning("ROUND_ABANDONED: %s (attempt %d of %d)", error, attempt + 1, self.training.attempts)
            except Diverged as error:
                raise RunFailed(f"the server's own training diverged: {error}") from error
        raise RunFailed(f"{abandoned[-1]} Given up after {len(abandoned)} attempts; what was saved is intact.")

    @cached_property
    def ids(self) -> tuple[ClientId, ...]:
        """All clients that may take part, in canonical order."""
        return tuple(client for client in sorted(self.task.clients) if client not in self.new_ids)

    @cached_property
    def new_ids(self) -> tuple[ClientId, ...]:
        """Clients that are held out of the training, in canonical order."""
        named = self.task.held_out
        drawn = shuffled(sorted({*self.task.clients} - {*named}), self.training.seed, "held out")
        return tuple(sorted((*named, *drawn[: self.training.held_out_clients])))

    @cached_property
    def spec(self) -> TaskSpec:
        """What the server knows of the task: nothing of clients that are held out."""
        spec = self.task.spec
        return replace(spec, clients={client: spec.clients[client] for client in spec.clients if client in self.ids})

    def sampled(
        self, round: int, attempt: int = 0, strikes: Mapping[ClientId, int] = MappingProxyType({})
    ) -> tuple[ClientId, ...]:
        """Who takes part, in canonical order, drawn from the run's seed, the round and the attempt; clients in
        quarantine do not."""
        target = max(1, round_half_up(self.training.fraction * len(self.ids)))
        # guard: more-asked-than-needed, over-selection-rounded-up-but-not-noise
        count = min(len(self.ids), ceil(target * self.training.over_selection - 1e-9))
        is_full = self.training.full_last_round and round == self.training.rounds - 1
        if is_full or count == len(self.ids):
            return self._out_of_quarantine(self.ids, strikes)
        path = (round, attempt) if attempt else (round,)  # guard: another-attempt-draws-anew
        drawn = self._out_of_quarantine(shuffled(self.ids, self.training.seed, "sample", *path), strikes)
        return tuple(sorted(drawn[:count]))

    @cached_property
    def slow(self) -> frozenset[ClientId]:
        """The clients that are slow, in all rounds the same."""
        count = round_half_up(self.training.slow_share * len(self.ids))
        return frozenset(shuffled(self.ids, self.training.seed, "slow")[:count])

    def epochs_of(self, client: ClientId, round: int) -> int:
        """A client's passes over its data in a round, drawn from the run's seed, the client and the round."""
        epochs, seed = self.training.epochs, self.training.seed
        return 1 + derive_seed(seed, "slow", client, round) % epochs if client in self.slow else epochs

    def trusted(self, state: State) -> tuple[ClientId, ...]:
        """The clients that are not in quarantine."""
        return self._out_of_quarantine(self.ids, state.strikes)

    def _out_of_quarantine(self, ids: Sequence[ClientId], strikes: Mapping[ClientId, int]) -> tuple[ClientId, ...]:
        limit = self.training.quarantine or inf
        left = tuple(client for client in ids if strikes.get(client, 0) < limit)  # guard: quarantine
        if not left:  # guard: all-quarantine-ends-run
            raise RunFailed(
                f"all {len(ids)} clients are in quarantine: {limit} uploads of each were refused in a row; "
                "rounds.jsonl says why (training.quarantine = 0 asks them all the same)"
            )
        return left

    @cached_property
    def _server_answer(self) -> Callable[[Request[Any]], Any]:
        return self.runtime.for_server()

    @cached_property
    def limits(self) -> Limits:
        """What no good upload exceeds."""
        enrolled = {client: enrolment.num_examples for client, enrolment in self.task.spec.clients.items()}
        return Limits(self.task.num_classes, self.training.max_norm, enrolled, self.withheld)

    def withheld(self, client: ClientId) -> Tensor | None:
        """The classes of which a client has too few examples to say anything, (C,); None if it may tell of all."""
        minimum, task = self.uploads.min_class_count, self.task
        return too_few(task.site(client).train.labels, task.num_classes, minimum) if minimum else None

    def networks_of(self, client: ClientId) -> Networks:
        """A client's networks; clients with equal ones share them."""
        if client not in self._networks:
            build = partial(self.method.networks, self.spec, client)
            self._networks[client] = Networks.one_of(self._networks.values(), build)
        return self._networks[client]

    def client_context(
        self, client: ClientId, round: int, phase: str = "round", run: int = 1, tests: TestSets | None = None
    ) -> ClientContext:
        """What a client's step works with; its place in the run of the federation decides its draws."""
        t, in_round = self.training, phase == "round"
        return ClientContext(
            id=client,
            round=round,
            num_rounds=t.rounds,
            num_classes=self.task.num_classes,
            networks=self.networks_of(client),
            data=self.task.site(client).train,
            transform=self.task.transform,
            optimizer=scheduled(t.optimizer, t.schedule.share(round, t.rounds)) if in_round else t.optimizer,
            rate_changes=t.schedule != ConstantRate(),
            epochs=self.epochs_of(client, round) if in_round else t.epochs,
            batch_size=t.batch_size,
            seed=t.seed,
            step_seed=derive_seed(t.seed, "step", client, round, phase, run),
            public=self.task.public,
            tests=tests or TestSets(),
            fine_tune=self.fine_tune,
            privacy=self.terms if in_round else None,
        )

    @cached_property
    def terms(self) -> Terms | None:
        return None if self.private is None or self.secure is not None else self.private.terms(self)

    @cached_property
    def noised_sums(self) -> NoisedSums | None:
        """The noise of secure sums, if differential privacy is in them."""
        return NoisedSums(self) if self.private is not None and self.secure is not None else None

    def client_state(self, state: State, client: ClientId, message: Tree) -> Tree:
        """What a client of a simulation keeps now; made afresh for one that has never taken part."""
        if client in state.receipts:
            return self.runtime.store.load(client, state.receipts[client])
        return self.method.init_memory(self.client_context(client, state.round), message)

    @cached_property
    def initial_server(self) -> Tree:
        """What the server knows before anything: it has the structure that the server's state always has."""
        return self.method.init_server(self.server_context(0, "load"))

    def initial_client_state(self, client: ClientId) -> Tree:
        """What a client keeps before it takes part: it has the structure that its state always has."""
        message = self.method.message_for(self.initial_server, client)
        return self.method.init_memory(self.client_context(client, 0), message)

    def encoded(self, upload: Tree, data: Data) -> Tree:
        """An upload as it is sent by a client that has these examples."""
        return self.uploads.encoded(upload, data.labels, self.task.num_classes)

    @cached_property
    def pooled_tests(self) -> Data | None:
        with unplaced():
            return pooled_tests(self.task.tests)

    @cached_property
    def _domain_tests(self) -> TestSets:
        return TestSets(self.pooled_tests, {name: len(data) for name, data in self.task.tests.items()})

    def test_sets(self, client: ClientId, kind: TestKind = "all") -> TestSets:
        """What a client's models are tested on."""
        if kind in APART:
            return APART[kind](self.task, client)
        if kind == "none" or not self.task.has_tests:
            return TestSets()
        if kind == "domains":
            return self._domain_tests
        if kind == "own":
            tests = self.test_sets(client)
            drawn = None if tests.pooled is None or tests.own_rows is None else tests.pooled.rows(tests.own_rows)
            return TestSets(own=drawn if tests.own is None else tests.own, train_counts=tests.train_counts)
        if client not in self._tests:
            with unplaced():
                self._tests[client] = client_tests(self.task, client, self.training.seed, self.pooled_tests)
        return self._tests[client]

    @cached_property
    def testable(self) -> tuple[ClientId, ...]:
        """The clients that have, or can be drawn, a test set of their own."""
        return tuple(client for client in (*self.ids, *self.new_ids) if is_testable(self.task, client))

    @property
    def clients_use(self) -> UsedModel:
        """The model by which the method is judged."""
        return "own models" if self.fine_tune else self.method.clients_use

    def evaluated(
        self, state: State, ids: Sequence[ClientId] | None = None, tests: TestKind = "domains"
    ) -> dict[ClientId, Evaluation]:
        """How the model does that each client would use now; of all clients that are not in quarantine, unless some are
        named. A client whose evaluation fails is left out, with a warning; one whose process was killed is asked again:
        nothing else would name it, and its state has not changed."""
        self.task.refuse_without_data()
        order = wanted = self.trusted(state) if ids is None else tuple(ids)
        like = evaluation_spec(self.test_sets(order[0], tests), self.task.num_classes)
        message_for = partial(self.method.message_for, state.server)
        found: dict[ClientId, Evaluation] = {}
        for attempt in range(self.training.attempts):
            clients = RoundClients(self, state, wanted, "evaluate")
            with only_run(), self.runtime.open(self):
                try:
                    found |= clients.run(self.method.evaluate_own, message_for, like, tests=tests)
                except RoundAbandoned:
                    if attempt + 1 == self.training.attempts or not any(f.is_killed for f in clients.failures):
                        raise
            wanted = tuple(f.client for f in clients.failures if f.is_killed)  # guard: evaluations-repeated
            if not wanted:
                break
        return {client: found[client] for client in order if client in found}

    def judged(self, state: State) -> State:
        """The state that is tested if this round is not the last; nothing of it counts in the run."""
        if type(unwrapped(self.method)).judged is Method.judged:
            return state
        return replace(state, server=self._attempted(self._tested, state).server)

    def server_context(self, round: int, phase: str) -> ServerContext:
        t = self.training
        return ServerContext(
            spec=self.spec,
            networks=self.networks_of(self.ids[0]),
            optimizer=t.optimizer,
            round=round,
            num_rounds=t.rounds,
            seed=t.seed,
            phase_seed=derive_seed(t.seed, phase, round),
            answer=self._server_answer,
            rate_share=t.schedule.share(round, t.rounds) if phase == "round" else 1.0,
        )
