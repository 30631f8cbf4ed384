"""Methods that can be learnt by one step of a server along the gradient over all records: what FedSGD goes around."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from protofed.api.contexts import ServerContext
from protofed.api.method import Method
from protofed.api.private import Function
from protofed.api.requests import Objective
from protofed.api.roles import Count, PerClass
from protofed.methods.families import PrototypeSharing, WeightsAndPrototypes
from protofed.prototypes.class_means import ClassSums
from protofed.tree import Nothing, Params, Tree, record

Targets = TypeVar("Targets")


@record
class SentSums(ClassSums):
    """Class sums as a client sends them."""

    total: Annotated[Tensor, PerClass()]  # (C, D), zero where the class is absent
    count: Annotated[Tensor, Count()]  # (C,)


class OneStep(ABC):
    """Of a method: what a record adds to a round's sums, and what the server makes of them."""

    longest_feature: ClassVar[float | None] = None
    """How long the features are of which there are class sums; None if they may be of any length."""

    @property
    def class_features(self) -> Function | None:
        """The features (B, D) of which there are class sums, if the method releases any; None for the network's."""
        return None

    def not_in_sums(self) -> str:
        """What these settings ask for that sums over records do not have; empty if nothing."""
        return ""

    @abstractmethod
    def record_loss(self, message: Any, round: int, num_rounds: int) -> tuple[Objective, tuple[Tree, ...]]:
        """What a client that was sent this descends, and the context of its loss, which holds nothing but what was
        sent."""

    def sums_spec(self, state: Any, server: ServerContext) -> SentSums | Nothing:
        """Class sums of the shape that a client's have, if the method releases any."""
        return Nothing()

    @abstractmethod
    def after_step(self, state: Any, params: Params, sums: ClassSums | None) -> Any:
        """What the server knows once it has stepped to these weights, and has class sums over all records, if the
        method releases any; a class whose count is 0 was not released."""


class PrototypesOneStep(PrototypeSharing[Targets], OneStep):
    """Of a method that learns against what the server makes of class prototypes."""

    def record_loss(
        self, message: WeightsAndPrototypes[Targets], round: int, num_rounds: int
    ) -> tuple[Objective, tuple[Tree, ...]]:
        return Objective(self.loss), (message.prototypes,)

    def sums_spec(self, state: WeightsAndPrototypes[Targets], server: ServerContext) -> SentSums:
        return SentSums(torch.zeros(server.num_classes, server.feature_dim), torch.zeros(server.num_classes))

    def after_step(
        self, state: WeightsAndPrototypes[Targets], params: Params, sums: ClassSums | None
    ) -> WeightsAndPrototypes[Targets]:
        assert sums is not None
        return replace(state, params=params, prototypes=self.combine(sums, state.prototypes))


def why_not_one_step(method: Method[Any, Any, Any, Any]) -> str:
    """Why one step on all records is not this method's; empty if it is. What it says of itself counts if it is not of a
    class whose training the method replaces."""
    if not isinstance(method, OneStep):
        return "trains in more than one step"
    names = ("record_loss", "train", "trained")
    own, *trained = [next((c for c in type(method).__mro__ if name in vars(c)), object) for name in names]
    if not all(issubclass(own, other) for other in trained):  # guard: one-step-not-inherited-past-training
        return "replaces the training of what it is made from"
    return method.not_in_sums()
