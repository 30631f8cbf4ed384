"""What a method works with: `ServerContext` at the server, `ClientContext` at a client."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from protofed.api.evaluation import TestSets
from protofed.api.private import Charge, Features, Function, RecordSums, Terms
from protofed.api.requests import Fit, Fitted, Map, Objective, PrivateFit, Request, Total
from protofed.api.task import ClientId, TaskSpec
from protofed.data.batches import Batch, Data
from protofed.data.transforms import Transform
from protofed.nn.networks import Model, Networks
from protofed.optim.gradients import Gradients
from protofed.optim.kept import part_of, with_part
from protofed.optim.optimizers import Optimizer
from protofed.seeds import derive_seed, generator
from protofed.tree import Params, Tree, record, select

Memory = TypeVar("Memory")
Upload = TypeVar("Upload")
T = TypeVar("T")


@record
class Reply(Generic[Upload, Memory]):
    """What a client's step ends with: what is sent, and what stays at the client."""

    upload: Upload
    memory: Memory
    loss: Tensor | None = None  # ()
    """The mean loss of its main training. The engine fills it in; methods leave it alone."""
    spent: Tensor | None = None  # (kinds, 2), releases and their cost
    """What it released under differential privacy. The engine fills it in too."""


@dataclass(frozen=True)
class _Sum:
    """A loss plus a term that reads its own context, the last of the contexts."""

    loss: Callable[..., Tensor]
    term: Callable[..., Tensor]

    def __call__(self, model: Model, batch: Batch, *context: Tree) -> Tensor:
        return self.loss(model, batch, *context[:-1]) + self.term(model, batch, *context[-1])


@dataclass(frozen=True)
class _WithoutTerms:
    """A statistic that reads the method's own contexts, without those of the added loss terms."""

    statistic: Callable[..., Tree]
    num_contexts: int

    def __call__(self, model: Model, batch: Batch, *context: Tree) -> Tree:
        return self.statistic(model, batch, *context[: self.num_contexts])


@dataclass
class Carried:
    """The optimiser's state for all weights of a client that may train: what its main training of a round goes on from,
    and in the end what that training left."""

    state: Tree

    async def through(self, request: Fit) -> Fitted:
        """The answer to the main training, once it has been done."""
        weights, trained = select(request.params, request.networks.trainable), [list(t) for t in request.trained()]
        names = [name for chosen in trained for name in chosen]
        if len(names) != len(set(names)):
            raise ValueError('training.optimizer_state = "kept": two objectives train the same weights in turns')
        states = tuple(part_of(self.state, weights, chosen) for chosen in trained)
        fitted = await replace(request, states=states)
        for chosen, part in zip(trained, fitted.states, strict=True):
            self.state = with_part(self.state, weights, chosen, part)
        return fitted


@dataclass
class MainTraining:
    """What is noted of the main training of a step: the first one with the configured optimiser."""

    is_begun: bool = False
    loss: float | None = None


@dataclass(frozen=True)
class ClientContext:
    """What a client's step works with: its own data and networks, and the runtime's help."""

    id: ClientId
    round: int
    num_rounds: int
    num_classes: int
    networks: Networks
    data: Data
    """What it trains on."""
    transform: Transform
    optimizer: Optimizer
    epochs: int
    batch_size: int
    seed: int
    """The root of all draws of the run."""
    step_seed: int
    """The root of the draws of this step."""
    public: Data | None = None
    """Examples that everyone may see; their labels are not used."""
    tests: TestSets = field(default_factory=TestSets)
    """What its models are tested on."""
    rate_changes: bool = False
    """Whether the learning rate of `optimizer`, which is that of this round, is another one in other rounds."""
    halvings: int = 0
    """How often its learning rates were halved, since it diverged in this round: that of `optimizer` is halved already,
    a rate that a method sets is for the method to halve."""
    fine_tune: int = 0
    """Epochs in which it fine-tunes the model that it would use, before that is tested."""
    carried: Carried | None = None
    """The optimiser's state that is kept from round to round; None: every training begins afresh."""
    main: MainTraining = field(default_factory=MainTraining)
    privacy: Terms | None = None
    """What its releases look like under differential privacy; None without."""
    charges: list[Charge] = field(default_factory=list)
    """What it has released in this step."""
    sums: RecordSums | None = None
    """What makes the sums over records to which noise comes in a secure sum; None without such noise."""
    terms: tuple[tuple[Callable[..., Tensor], tuple[Tree, ...]], ...] = ()
    _requests: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_examples(self) -> Tensor:
        return torch.tensor(len(self.data))

    @property
    def num_steps(self) -> int:
        """How many steps its training of a round takes."""
        return self.epochs * ceil(len(self.data) / self.batch_size)

    def initial_params(self) -> Params:
        """The weights that every client with these networks starts from."""
        return self.networks.init(derive_seed(self.seed, "weights"))

    @overload
    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        data: Data | None = None,
    ) -> Params: ...

    @overload
    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        data: Data | None = None,
        fold: Callable[..., T],
    ) -> tuple[Params, T]: ...

    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        data: Data | None = None,
        fold: Callable[..., Any] | None = None,
    ) -> Any:
        """The weights after training from `params`; anything not named here is as configured.

        With `fold` it gives `(weights, sums)`: Σ fold(model, batch, *context) over the batches of the last epoch, on
        the model and features that the first objective's loss sees. The sums keep the statistic's dtype.
        """
        if fold is not None and self.terms:
            fold = _WithoutTerms(fold, len(context))
        for term, term_context in self.terms:
            objectives = tuple(replace(o, loss=_Sum(o.loss, term)) for o in objectives)
            context = (*context, term_context)
        request = Fit(
            networks=self.networks,
            params=params,
            context=context,
            data=self.data if data is None else data,
            transform=self.transform,
            objectives=objectives,
            optimizer=(optimizer or self.optimizer).for_round(self.round),
            epochs=self.epochs if epochs is None else epochs,
            batch_size=self.batch_size,
            seed=self._next_seed(),
            rate_changes=self.rate_changes and optimizer is None,
            fold=fold,
        )
        fitted = await (self._main_training(request) if optimizer is None and not self.main.is_begun else request)
        return fitted.params if fold is None else (fitted.params, fitted.folded)

    async def _main_training(self, request: Fit) -> Fitted:
        self.main.is_begun = True
        fitted = await (request if self.carried is None else self.carried.through(request))
        self.main.loss = fitted.loss
        return fitted

    async def gradient_sum(
        self, objective: Objective, params: Params, context: tuple[Tree, ...] = ()
    ) -> tuple[Params, Params]:
        """Σ of the gradients of all examples at `params`, of the weights that may train, and the statistics of
        BatchNorm afterwards. Where records are hidden by noise in the sum over clients, each one's gradient is clipped,
        and the sum is exact, in float64."""
        if self.sums is not None:
            request = PrivateFit(
                networks=self.networks,
                params=params,
                context=context,
                data=self.data,
                transform=self.transform,
                objectives=(objective,),
                optimizer=Gradients(),
                epochs=1,
                batch_size=len(self.data),
                seed=self._next_seed(),
                mechanisms=(self.sums.gradients(params, context),),
                is_sum=True,
            )
            return self.sums.noted((await request).params), {}
        whole = replace(self, batch_size=len(self.data))
        found = await whole.fit(objective, params=params, context=context, epochs=1, optimizer=Gradients())
        gradient = {name: len(self.data) * leaf for name, leaf in select(found, self.networks.trainable).items()}
        return gradient, select(found, list(self.networks.statistics))

    async def class_sums(
        self, params: Params, function: Function | None = None, longest: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Σ of each class's features at `params`, in evaluation mode, (C, D), and how many there are, (C,). `function`
        gives other features, and `longest` is their largest length. Where records are hidden by noise in the sum over
        clients, each one's features are clipped, the sums are exact, in float64, and zero in rounds without a release.
        """
        if self.sums is not None:
            data = self.data if self.sums.releases_class_sums else self.data.rows(torch.arange(1))
            z, y = await self.map(Features(function), params, data=data)
            return self.sums.class_sums(z, y, self.num_classes, longest, params)
        z, y = await self.map(Features(function), params)
        zero = torch.zeros(self.num_classes, z.shape[1], dtype=torch.float64, device=z.device)
        return zero.index_add(0, y, z.double()).float(), torch.bincount(y, minlength=self.num_classes).to(z.dtype)

    async def total(
        self,
        statistic: Callable[..., T],
        params: Params,
        context: tuple[Tree, ...] = (),
        data: Data | None = None,
    ) -> T:
        """Σ statistic(model, batch, *context) over the client's examples."""
        data = self.data if data is None else data
        return await Total(self.networks, params, context, data, self.transform, self._next_seed(), statistic)

    async def map(
        self,
        function: Callable[..., T],
        params: Params,
        context: tuple[Tree, ...] = (),
        data: Data | None = None,
        to_cpu: bool = False,
    ) -> T:
        """function(model, batch, *context) for each of the client's examples, in order."""
        data = self.data if data is None else data
        return await Map(self.networks, params, context, data, self.transform, self._next_seed(), function, to_cpu)

    def _next_seed(self) -> int:
        return derive_seed(self.step_seed, "request", next(self._requests))

    def with_loss_term(self, term: Callable[..., Tensor], *context: Tree) -> "ClientContext":
        """The same, but every fit also descends `term(model, batch, *context)`: how one method wraps another."""
        return replace(self, terms=(*self.terms, (term, context)))


@dataclass(frozen=True)
class ServerContext:
    """What the server's half of a method works with. No client's example can be reached from here."""

    spec: TaskSpec
    networks: Networks
    optimizer: Optimizer
    round: int
    num_rounds: int
    seed: int
    phase_seed: int
    """The root of the server's draws in this setup, round or finish."""
    answer: Callable[[Request[Any]], Any]
    """Does the work that a request names, on data that the server has."""
    rate_share: float = 1.0
    """The learning rate of clients in this round, as a share of that of `optimizer`: what the schedule says."""
    _fits: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_classes(self) -> int:
        return self.spec.num_classes

    @cached_property
    def generator(self) -> torch.Generator:
        """The server's randomness."""
        return generator(self.phase_seed, "server")

    @property
    def feature_dim(self) -> int:
        """D, the size of a feature vector."""
        return self.networks.feature_dim(self.spec.input.blank())

    def initial_params(self) -> Params:
        """The weights that every client with these networks starts from."""
        return self.networks.init(derive_seed(self.seed, "weights"))

    def fit(
        self,
        *objectives: Objective,
        params: Params,
        data: Data,
        context: tuple[Tree, ...] = (),
        epochs: int = 1,
        batch_size: int = 64,
        optimizer: Optimizer | None = None,
    ) -> Params:
        """The weights after training on data that the server has, such as prototypes."""
        request = Fit(
            networks=self.networks,
            params=params,
            context=context,
            data=data,
            transform=Transform(),
            objectives=objectives,
            optimizer=(optimizer or self.optimizer).for_round(self.round),
            epochs=epochs,
            batch_size=batch_size,
            seed=derive_seed(self.phase_seed, "server fit", next(self._fits)),
        )
        fitted: Fitted = self.answer(request)
        return fitted.params
