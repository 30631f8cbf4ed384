"""Two models in one set of weights, for clients that train both at once: the network's own entries are one, those of
the part `twin` the other."""

import copy

from torch import nn

from protofed.nn.networks import Parts
from protofed.tree import Params

TWIN = "twin."


def with_twin(parts: Parts) -> Parts:
    """The parts, and a copy of all of them as one more. The copy only holds weights: it is never called."""
    return {**parts, "twin": nn.ModuleDict(copy.deepcopy(parts))}


def twin_of(params: Params) -> Params:
    """The other model, by the names of the first."""
    return {name.removeprefix(TWIN): leaf for name, leaf in params.items() if name.startswith(TWIN)}


def as_twin(params: Params) -> Params:
    """A model as the other one."""
    return {TWIN + name: leaf for name, leaf in params.items()}


def without_twin(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if not name.startswith(TWIN)}
