"""A client under record-level differential privacy: it knows which tensors are released, and pays for new ones."""

from collections.abc import Callable
from dataclasses import replace
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext
from protofed.api.private import (
    BudgetSpent,
    Charge,
    ChargeKind,
    Features,
    Function,
    NoisySums,
    PrivateClient,
    Terms,
    Unreleased,
)
from protofed.api.requests import Objective, PrivateFit
from protofed.data.batches import Batch
from protofed.optim.optimizers import Optimizer
from protofed.privacy.account import cost
from protofed.privacy.class_sums import class_queries, ends_in_relu, means_of, whole_sums
from protofed.privacy.noise import Noise, Query, Release, noise_of
from protofed.prototypes.class_means import Prototypes, no_prototypes
from protofed.seeds import derive_seed
from protofed.tree import Params, Tree

T = TypeVar("T")

SLACK = 1 + 1e-9
"""Of a sum of many costs in floating point."""


def gradient_calls(optimizer: Optimizer) -> int:
    """How many gradients an optimiser takes in one step."""
    calls, weights = [], {"weight": torch.ones(1, device="cpu")}

    def gradient(at: Params) -> Params:
        calls.append(1)
        return {name: torch.ones_like(leaf) for name, leaf in at.items()}

    optimizer.step(gradient, weights, optimizer.init(weights))
    return len(calls)


class RecordLevel(PrivateClient):
    """The client of a step, whose examples only noise leaves."""

    def __init__(self, client: ClientContext, terms: Terms, seed: int, *known: Tree) -> None:
        """`known` are the message and the memory; `seed` is of the client, the round and the call."""
        self._client = client
        self._terms = terms
        self._noise: Noise = noise_of(terms.noise, seed)
        self._released: dict[int, Tensor] = {}
        self.id, self.round = client.id, client.round
        self.num_rounds, self.num_classes = client.num_rounds, client.num_classes
        self.num_steps, self.optimizer, self.networks = client.num_steps, client.optimizer, client.networks
        self._know(*known)

    # ---- what is known

    def _know(self, *trees: Tree) -> None:
        """Notes that everything in these trees is released. It is kept alive: a new tensor may reuse its id()."""
        self._released |= {id(leaf): leaf for one in trees for leaf in tree.leaves(one)}

    def check(self, what: str, *trees: Tree) -> None:
        """Refuses trees with a tensor that is not released."""
        for one in trees:
            for path, leaf in tree.named_leaves(one).items():
                if id(leaf) not in self._released:  # guard: unreleased-refused
                    raise Unreleased(f"{what} holds {path or 'a tensor'}, which is not made of released ones alone")

    def post(self, function: Callable[..., T], *trees: Tree) -> T:
        self.check("what post is given", *trees)
        made = function(*trees)
        self._know(made)
        return made

    def initial_params(self) -> Params:
        params = self._client.initial_params()
        self._know(params)
        return params

    @property
    def num_examples(self) -> Tensor:
        count = self._client.num_examples
        self._know(count)
        return count

    # ---- what costs

    def _charge(self, kind: ChargeKind, releases: int, multiplier: float) -> None:
        """Before anything is drawn: what cannot be paid for does not come about."""
        new, before = releases * cost(multiplier), fsum(charge.cost for charge in self._client.charges)
        if before + new > self._terms.left * SLACK:  # guard: budget-kept
            raise BudgetSpent(
                f"{releases} releases of {kind} cost {new:.4g} of μ², and {self._terms.left - before:.4g} is left"
            )
        self._client.charges.append(Charge(kind, releases, new))

    async def fit(
        self,
        *objectives: Objective,
        params: Params,
        context: tuple[Tree, ...] = (),
        epochs: int | None = None,
        penalty: Callable[..., Tensor] | None = None,
    ) -> Params:
        self.check("what fit is given", params, context)
        client, terms = self._client, self._terms
        epochs = client.epochs if epochs is None else epochs
        calls = gradient_calls(client.optimizer)
        self._charge("gradients", epochs * calls * len(objectives), terms.gradient_multiplier)
        request = PrivateFit(
            networks=client.networks,
            params=params,
            context=context,
            data=client.data,
            transform=client.transform,
            objectives=objectives,
            optimizer=client.optimizer.for_round(client.round),
            epochs=epochs,
            batch_size=client.batch_size,
            seed=derive_seed(client.step_seed, "private fit", len(client.charges)),
            penalty=penalty,
        )
        sizes = [sum(leaf.numel() for leaf in weights.values()) for weights in request.trained()]
        queries = [Query(size, terms.clip_gradients, terms.gradient_multiplier) for size in sizes]
        fitted = await replace(request, mechanisms=tuple(Release(query, self._noise) for query in queries))
        self._know(fitted.params)
        return fitted.params

    @property
    def releases_class_sums(self) -> bool:
        return self._client.round in self._terms.release_rounds

    async def class_sums(
        self, params: Params, function: Function | None = None, longest: float | None = None
    ) -> NoisySums:
        self.check("what class_sums is given", params)
        z, y = await self._client.map(Features(function), params)
        self._charge("class sums", 1, self._terms.class_sum_multiplier)
        sums, counts = self._queries(z.shape[1], longest)
        total, mass = whole_sums(z, y, sums, counts)
        noisy = NoisySums(sums.released(total, self._noise).float(), counts.released(mass, self._noise).float())
        self._know(noisy)
        return noisy

    def _queries(self, dim: int, longest: float | None) -> tuple[Query, Query]:
        m = self._terms.class_sum_multiplier
        return class_queries(m, self._longest(longest), self.num_classes, dim)

    def _longest(self, longest: float | None) -> float:
        return min(self._terms.clip_features, longest or self._terms.clip_features)

    async def prototypes(
        self, params: Params, function: Function | None = None, longest: float | None = None
    ) -> Prototypes:
        """Counts are whole, and at most the client's number of examples, as those of an ordinary upload."""
        if not self.releases_class_sums:
            return self.post(lambda: no_prototypes(self.num_classes, self._dim(params, function)))
        noisy = await self.class_sums(params, function, longest)
        query, _ = self._queries(noisy.total.shape[1], longest)
        is_positive = function is None and ends_in_relu(self._client.networks)
        enrolled = len(self._client.data)

        def made(noisy: NoisySums) -> Prototypes:
            means, is_known = means_of(noisy.total, noisy.mass, query, is_positive)
            count = noisy.mass.round().clamp(min=1, max=enrolled)
            return Prototypes(means, torch.where(is_known, count, 0.0))

        return self.post(made, noisy)

    @torch.no_grad()
    def _dim(self, params: Params, function: Function | None) -> int:
        """The size of a feature vector, found with an example of zeros."""
        client = self._client
        index = client.data.index[:1]
        x = torch.zeros_like(client.transform.clean(client.data.inputs(index)))
        batch = Batch(x, torch.zeros_like(index), torch.ones(1), index, torch.tensor(True), torch.tensor(0))
        return Features(function)(client.networks.model(params), batch)[0].shape[1]
