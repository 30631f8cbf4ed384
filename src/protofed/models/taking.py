"""The model of a client, or the public one, out of a federation."""

from typing import TYPE_CHECKING

import torch

from protofed.api.task import ClientId
from protofed.api.views import Points
from protofed.engine.around import Around, unwrapped
from protofed.engine.federation import Federation
from protofed.engine.state import State
from protofed.errors import BadInput
from protofed.models.module import Records, TrainedModel, needed
from protofed.nn.networks import Networks
from protofed.tree import Params, Tree

if TYPE_CHECKING:
    from protofed.models.module import AnyMethod


def client_model(federation: Federation, state: State, client: ClientId) -> TrainedModel:
    """The model that this client would use now."""
    _refuse_unknown(federation, client)
    if client not in state.receipts and not _is_public(federation):
        raise BadInput(f"{client} has not taken part in a round yet, so it has no model of its own")
    message = federation.method.message_for(state.server, client)
    memory = federation.client_state(state, client, message)
    params = federation.method.local_weights(message, memory)
    return _model(federation, state, federation.networks_of(client), params, message, memory)


def public_model(federation: Federation, state: State) -> TrainedModel:
    """The model that anyone may use."""
    public = federation.method.public(state.server)
    if public is None:
        method = type(unwrapped(federation.method)).__name__
        sites = ", ".join(federation.ids)
        raise BadInput(f"{method} has no global model here: every site has its own. Name a site, one of: {sites}")
    params, message = public
    return _model(federation, state, federation.networks_of(federation.ids[0]), params, message, None)


def _is_public(federation: Federation) -> bool:
    """Whether all clients use one model."""
    return federation.method.clients_use == "public model"


def _refuse_unknown(federation: Federation, client: ClientId) -> None:
    if client not in federation.ids:
        raise BadInput(f"no client {client!r}; the clients are {', '.join(federation.ids)}")


def _model(
    federation: Federation, state: State, networks: Networks, params: Params, message: Tree, memory: Tree
) -> TrainedModel:
    method, records = _as_the_method_sees(federation.method, message, memory)
    spec = federation.spec
    with torch.device("cpu"):
        blank = spec.input.blank(2)
        parts, context = needed(method, networks, params, records, blank)
        modules = networks.modules_at(params, parts)
    model = TrainedModel(
        method, modules, context, classes=federation.task.classes, input=spec.input, transform=spec.transform
    )
    with torch.no_grad():
        width = model.embed(model.blank()).shape[-1]
    model.prototypes = {kind: p for kind, p in _prototypes(federation, state).items() if p.values.shape[-1] == width}
    return model


def _prototypes(federation: Federation, state: State) -> dict[str, Points]:
    """The prototypes that the server has, on the CPU."""
    sets = federation.method.prototype_sets(state.server)
    found = {kind: Points(p.values.detach().float().cpu(), p.label.cpu()) for kind, p in sets.items()}
    return {kind: points for kind, points in found.items() if len(points.values)}


def _as_the_method_sees(method: "AnyMethod", message: Tree, memory: Tree) -> "tuple[AnyMethod, Records]":
    """The configured method, and the records without what settings of the training have put around them."""
    while isinstance(method, Around):
        message, memory, method = method.seen(message, memory), method.kept_by_base(memory), method.base
    return method, {name: one for name, one in (("message", message), ("memory", memory)) if one is not None}
