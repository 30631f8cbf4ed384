"""A model for everyone, made of models that share a body and have heads of their own: for evaluation only, since no
server has the heads."""

from collections.abc import Mapping

from protofed.api.contexts import ServerContext
from protofed.api.evaluation import Outcomes, Reading, outcomes_of
from protofed.api.task import ClientId
from protofed.data.batches import Batch
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights
from protofed.nn.networks import Model, matching
from protofed.prototypes import contrast
from protofed.prototypes.class_means import Prototypes
from protofed.tree import Mean, Params


def with_heads(body: Params, memories: Mapping[ClientId, OwnWeights], server: ServerContext) -> dict[str, Reading]:
    """The body under the mean of the clients' heads, and under the head that all clients began with, as in FedNH's
    code, whose server has no other."""
    found = {"initial_head": Reading({**body, **initial_head(server)}, by_classifier)}
    if not memories:
        return found
    mean = Mean()
    for _, memory in sorted(memories.items()):
        mean.add(matching(memory.params, CLASSIFIER))
    return {"mean_heads": Reading({**body, **mean.value()}, by_classifier), **found}


def initial_head(server: ServerContext) -> Params:
    return matching(server.initial_params(), CLASSIFIER)


def by_classifier(model: Model, batch: Batch) -> Outcomes:
    return outcomes_of(model.logits(batch.x))


def by_nearest(model: Model, batch: Batch, prototypes: Prototypes) -> Outcomes:
    return outcomes_of(contrast.nearest(model.features(batch.x), prototypes.mean, prototypes.is_known))
