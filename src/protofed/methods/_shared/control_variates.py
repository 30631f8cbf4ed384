"""Estimates of gradients and of drift from the weights that a client received and those that it trained."""

import torch
from torch import Tensor

from protofed import tree
from protofed.api.contexts import ClientContext
from protofed.api.method import SettingErrors
from protofed.api.private import PrivateClient
from protofed.errors import BadInput
from protofed.nn.networks import Model
from protofed.optim.optimizers import Optimizer, Sgd
from protofed.tree import Params

OWN_GRADIENTS = (
    "the method takes an update for a sum of the gradients of its round, and a kept momentum holds those of earlier "
    "rounds too"
)


Trainer = ClientContext | PrivateClient
"""What says how a client trains."""


def needs_sgd(method: str, optimizer: Optimizer) -> SettingErrors:
    """The error for any other optimiser: only with SGD is an update a sum of gradients in known proportions."""
    if not isinstance(optimizer, Sgd):
        kind = type(optimizer).__name__.lower()
        yield "training.optimizer.name", f"{method} is defined for clients that train with sgd, not {kind}: take sgd"


def effective_steps(client: Trainer, method: str, proximal_weight: float = 0.0) -> float:
    """‖a‖₁, the effective number of local steps: how often gradients are added up in a client's update.

    With momentum ρ a gradient that is followed by k − 1 others is added 1 + ρ + … + ρᵏ⁻¹ times. A proximal term takes
    back a part of it, the learning rate times μ, in every later step.
    """
    sgd, steps = _sgd(client.optimizer, method), num_steps(client)
    if proximal_weight:
        pull = proximal_weight * rate_in_round(client.optimizer, client.round, method)
        return sum(abs(left) for left in _left_of_a_gradient(sgd, pull, steps))
    return sum((1 - sgd.momentum ** (k + sgd.nesterov)) / (1 - sgd.momentum) for k in range(1, steps + 1))


def _left_of_a_gradient(sgd: Sgd, pull: float, steps: int) -> list[float]:
    """How much of one gradient is in the update after each of so many steps, of which the first took it."""
    velocity, moved, found = 0.0, 0.0, list[float]()
    for k in range(steps):
        gradient = (k == 0) - pull * moved
        velocity = sgd.momentum * velocity + gradient
        moved += gradient + sgd.momentum * velocity if sgd.nesterov else velocity
        found.append(moved)
    return found


def num_steps(client: Trainer) -> int:
    """τ, how many steps a client takes in a round."""
    return client.num_steps


def rate_in_round(optimizer: Optimizer, round: int, method: str) -> float:
    """η, the learning rate of the clients in a round."""
    return _sgd(optimizer, method).for_round(round).lr


def mean_gradient(client: Trainer, start: Params, end: Params, method: str) -> Params:
    """The mean of the gradients that led a client from `start` to `end`."""
    scale = rate_in_round(client.optimizer, client.round, method) * effective_steps(client, method)
    return {name: (start[name] - end[name]) / scale for name in client.networks.trainable}


def _sgd(optimizer: Optimizer, method: str) -> Sgd:
    if not isinstance(optimizer, Sgd):
        raise BadInput(f"{method} is defined for clients that train with sgd: configure it, not {optimizer}")
    return optimizer


def inner_product(a: Params, b: Params) -> Tensor:
    """Σ ⟨a_i, b_i⟩ over the entries of `a`."""
    return torch.stack([(leaf * b[name]).sum() for name, leaf in a.items()]).sum()


def zeros(params: Params, names: tuple[str, ...]) -> Params:
    return {name: params[name].new_zeros(params[name].shape) for name in names}


def added(params: Params, change: Params, share: float = 1.0) -> Params:
    """The params, each moved by `share` of its change."""
    return {name: leaf + share * change[name] for name, leaf in params.items()}


def drift_penalty(model: Model, received: Params, drift: Params) -> Tensor:
    """½ ‖w + drift − received‖² over the parameters."""
    anchor = {name: received[name] - leaf for name, leaf in drift.items()}
    return tree.squared_distance(model.trainable, anchor) / 2


def updated_drift(drift: Params, end: Params, start: Params, share: float = 1.0) -> Params:
    """The drift after a further update from `start` to `end`, of which `share` counts."""
    return {name: leaf + share * (end[name] - start[name]) for name, leaf in drift.items()}


def corrected(mean: Params, drift: Params) -> Params:
    """The mean of the clients' weights, moved on by their mean drift."""
    return {**mean, **{name: mean[name] + leaf for name, leaf in drift.items()}}
