"""What tests of methods share: the small federation and the checks of `protofed.testing`, and slow references."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from protofed.data.batches import Batch, batch_at, training_plan
from protofed.nn.networks import Model, Networks, Parts
from protofed.optim.optimizers import Sgd
from protofed.seeds import derive_seed
from protofed.testing.checks import (
    CHECKS,
    check_a_client_may_fail,
    check_clients_elsewhere_give_the_same_numbers,
    check_few_clients_at_a_time,
    check_inputs_are_left_alone,
    check_models_predict,
    check_no_hidden_state,
    check_nothing_private_is_uploaded,
    check_odd_clients_are_fine,
    check_order_of_the_task,
    check_order_of_uploads,
    check_records_survive_the_wire,
    check_resuming_changes_nothing,
    check_runtimes_agree,
    check_same_seed_same_result,
    check_the_server_reaches_no_example,
)
from protofed.testing.federations import (
    CLASSES,
    FEATURES,
    ODD_TASK,
    SIZES,
    TASK,
    TRAINING,
    Faulty,
    ReversedClients,
    ShuffledArrival,
    after,
    assert_close,
    assert_finite,
    assert_same,
    assert_tensors_only,
    examples,
    federation,
    fingerprint,
    holds,
    labels_of,
    memories,
    reply_of,
    scripted,
    small_network,
    small_task,
    usual,
    usual_reply,
    whole,
)
from protofed.tree import Params

__all__ = [
    "CHECKS",
    "CLASSES",
    "FEATURES",
    "ODD_TASK",
    "SIZES",
    "TASK",
    "TRAINING",
    "Faulty",
    "ReversedClients",
    "ShuffledArrival",
    "after",
    "assert_close",
    "assert_finite",
    "assert_same",
    "assert_tensors_only",
    "batch_of",
    "check_a_client_may_fail",
    "check_clients_elsewhere_give_the_same_numbers",
    "check_few_clients_at_a_time",
    "check_inputs_are_left_alone",
    "check_models_predict",
    "check_no_hidden_state",
    "check_nothing_private_is_uploaded",
    "check_odd_clients_are_fine",
    "check_order_of_the_task",
    "check_order_of_uploads",
    "check_records_survive_the_wire",
    "check_resuming_changes_nothing",
    "check_runtimes_agree",
    "check_same_seed_same_result",
    "check_the_server_reaches_no_example",
    "examples",
    "federation",
    "fingerprint",
    "holds",
    "identity_model",
    "labels_of",
    "loaded",
    "mean_cross_entropy",
    "memories",
    "reply_of",
    "scripted",
    "small_network",
    "small_task",
    "trained_by_hand",
    "usual",
    "usual_reply",
    "whole",
]

torch.set_num_threads(1)

# ---- slow references


def identity_model(weight: list[list[float]] | Tensor) -> Model:
    """A model whose features are its inputs and whose classifier is this matrix."""
    matrix = torch.as_tensor(weight, dtype=torch.float32)
    networks = Networks(lambda: {"features": nn.Identity(), "classifier": nn.Linear(*matrix.T.shape, bias=False)})
    return networks.model({"classifier.weight": matrix}, training=True)


def batch_of(x: Any, y: Any, weight: Any = None) -> Batch:
    x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
    weight = torch.ones(len(y)) if weight is None else torch.as_tensor(weight, dtype=torch.float32)
    return Batch(x, y, weight, torch.arange(len(y)), torch.tensor(True), torch.tensor(0))


def loaded(params: Params, client: str = "", *, training: bool) -> Parts:
    """Plain torch modules with these weights."""
    parts = small_network(client)
    for part, module in parts.items():
        own = {name.removeprefix(f"{part}."): leaf.clone() for name, leaf in params.items() if name.startswith(part)}
        missing = module.load_state_dict(own, strict=False)
        assert not missing.unexpected_keys
        module.train(training)
    return parts


def trained_by_hand(
    params: Params,
    client: str,
    loss: Callable[[Parts, Tensor, Batch], Tensor],
    *,
    round: int = 0,
    fit: int = 0,
    epochs: int = TRAINING.epochs,
    trains: str = "*",
    sgd: Sgd = TRAINING.optimizer,
) -> tuple[Params, list[tuple[Batch, Tensor]]]:
    """The plain torch loop that a fit must equal: the weights that it ends with, and each batch with its features."""
    parts = loaded(params, client, training=True)
    named = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(
        [p for name, p in named.items() if fnmatchcase(name, trains)],
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )
    step = derive_seed(TRAINING.seed, "step", client, round, "round", 1)
    draws = torch.Generator().manual_seed(derive_seed(step, "request", fit))
    plan = training_plan(TASK.clients[client], TRAINING.batch_size, epochs, TASK.transform, draws)
    seen = []
    for step in range(len(plan.index)):
        batch = batch_at(TASK.clients[client], plan, step, TASK.transform)
        optimizer.zero_grad()
        z = parts["features"](batch.x)
        loss(parts, z, batch).backward()
        optimizer.step()
        seen.append((batch, z.detach()))
    state = {f"{part}.{name}": leaf for part, module in parts.items() for name, leaf in module.state_dict().items()}
    return {name: state[name] for name in params}, seen


def mean_cross_entropy(parts: Parts, z: Tensor, batch: Batch) -> Tensor:
    """Of the rows that count, by plain torch."""
    rows = batch.weight > 0
    return nn.functional.cross_entropy(parts["classifier"](z)[rows], batch.y[rows])
