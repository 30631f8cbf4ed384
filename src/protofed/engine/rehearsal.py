"""A rehearsal before the first round: whether the device has a deterministic form of all that clients do."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from protofed.errors import BadInput
from protofed.nn.networks import Networks
from protofed.runtimes.base import Job
from protofed.runtimes.determinism import advice, is_not_deterministic
from protofed.runtimes.sequential import Sequential

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)


def rehearse(federation: "Federation") -> None:
    """Refuses a run whose clients would need what the device has no deterministic form of. One client with each kind of
    networks takes its step with one batch; what comes of it is thrown away. Other errors are left to the round, which
    knows what to do about them."""
    with federation.runtime.open(federation):
        if not torch.are_deterministic_algorithms_enabled():
            return
        alike = {id(federation.networks_of(client)): client for client in reversed(federation.sampled(0))}
        for client in reversed(alike.values()):
            try:
                _take_step(federation, client)
            except Exception as error:
                if not is_not_deterministic(error):
                    log.info("the rehearsal of %s ended early: %s: %s", client, type(error).__name__, error)
                    continue
                where = _culprit(federation.networks_of(client), partial(_take_step, federation, client))
                raise BadInput(f"{where or 'the loss of the method'}: {advice(error)}") from None


def _take_step(federation: "Federation", client: str) -> None:
    method, context = federation.method, federation.client_context(client, 0)
    few = context.data.rows(torch.arange(min(context.batch_size, len(context.data))))
    context = replace(context, data=few, epochs=1)
    message = method.message_for(federation.initial_server, client)
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
