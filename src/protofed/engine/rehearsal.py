"""What is tried before the first round: whether clients' networks fit together and, with code of the user's own,
whether it works at all and whether the device has a deterministic form of what it does. Of protofed's own methods and
networks tests on a GPU have shown that."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from protofed import tree
from protofed.api.task import ClientId
from protofed.engine.around import unwrapped
from protofed.engine.trial import is_own_code, refuse_broken_code
from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.runtimes.determinism import advice, is_not_deterministic
from protofed.runtimes.jobs import Job
from protofed.runtimes.sequential import Sequential
from protofed.tree import Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)


def rehearse(federation: "Federation") -> None:
    """Refuses a run of which the first round would show that no round can be. Looked at are one client with each kind
    of networks, of those that take part in the first round."""
    with federation.runtime.open(federation):
        first = {id(federation.networks_of(client)): client for client in reversed(federation.sampled(0))}
        clients, is_strict = sorted(first.values()), torch.are_deterministic_algorithms_enabled()
        is_own = is_own_code(federation)
        if len(clients) == 1 and not is_own:
            return
        state = federation.method.init_server(federation.server_context(0, "load"))
        _refuse_different_networks(federation, state, clients)  # guard: different-networks-refused
        if is_own and is_strict:
            _refuse_nondeterminism(federation, state, clients)
        if is_own:
            refuse_broken_code(federation, state)


def _refuse_different_networks(federation: "Federation", state: Tree, clients: Sequence[ClientId]) -> None:
    """Refuses clients whose weights cannot be averaged."""
    sent = tree.named_leaves(federation.method.upload_spec(state, federation.server_context(0, "load")))
    names = dict.fromkeys(name for path in sent if "." in (name := path.rpartition("/")[2]))
    shapes = {client: federation.networks_of(client).shapes for client in clients}
    for name in names:
        sizes = {client: tuple(own[name]) if name in own else None for client, own in shapes.items()}
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{size or 'absent'} at {client}" for client, size in sizes.items())
            method = type(unwrapped(federation.method)).__name__
            raise BadInput(
                f"{method} averages weights, but clients have different networks: {name} is {said}. "
                "Give all the same network, or take a method that shares no weights, such as fedproto"
            )


def _refuse_nondeterminism(federation: "Federation", state: Tree, clients: Sequence[ClientId]) -> None:
    """Refuses what the device has no deterministic form of. A client takes its step with one batch; what comes of it is
    thrown away. Other errors are left to the round, which knows what to do about them."""
    for client in clients:
        step = partial(_take_step, federation, state, client)
        try:
            step()
        except Exception as error:
            if not is_not_deterministic(error):
                log.info("the rehearsal of %s ended early: %s: %s", client, type(error).__name__, error)
                continue
            where = _culprit(federation.networks_of(client), step) or "the loss of the method"
            raise BadInput(f"{where}: {advice(error)}") from None


def _take_step(federation: "Federation", state: Tree, client: ClientId) -> None:
    method, context = federation.method, federation.client_context(client, 0)
    few = context.data.rows(torch.arange(min(context.batch_size, len(context.data))))
    context = replace(context, data=few, epochs=1)
    message = method.message_for(state, client)
    job = Job(client, method.train, context, message, None, method)
    Sequential(str(federation.runtime.device)).reply(job, method.init_memory(context, message))


def _culprit(networks: Networks, step: Callable[[], None]) -> str:
    """The innermost layer that has no deterministic form by itself; empty if it is none of them. The step is taken once
    more to learn what each layer is given."""
    calls: dict[nn.Module, tuple[Any, ...]] = {}
    names = networks.layer_names()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda layer, inputs: calls.update({layer: inputs}))
    try:
        step()
    except RuntimeError as error:
        log.debug("again: %s", error)
    finally:
        handle.remove()
    for layer in sorted(names.keys() & calls.keys(), key=lambda layer: -names[layer].count(".")):
        if _is_refused(layer, calls[layer]):
            return f"the layer {names[layer]} ({type(layer).__name__})"
    return ""


def _is_refused(layer: nn.Module, inputs: tuple[Any, ...]) -> bool:
    try:
        with torch.enable_grad():
            outputs = pytree.tree_leaves(layer(*pytree.tree_map(_traced, inputs)))
            torch.autograd.backward([leaf.sum() for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad])
    except RuntimeError as error:
        return is_not_deterministic(error)
    return False


def _traced(value: Any) -> Any:
    """A copy with a gradient. A layer may change it in place, since it is not a leaf."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point()).clone()
