"""Membership inference: does what a client sent tell who it was trained on?

Three attacks, each on one kind of upload. An attacker who scores an example higher takes it rather for a member.

    loss        minus the loss under the weights that were sent (Yeom et al., CSF 2018)
    loss drop   how much lower the loss is than under the weights that the client had received
    tracing     ⟨z − r_c, p_c − r_c⟩: z the example's features, p_c the prototype of its class, and r_c the mean of that
                class over examples that the attacker has (Dwork et al., Robust Traceability, FOCS 2015), in units of
                the deviation that it has over these
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed import tree
from protofed.api.requests import Map
from protofed.api.roles import Prototype, Weights, counted_by, roles
from protofed.api.task import ClientId
from protofed.audit.examples import Examples, examples_of
from protofed.audit.replay import Replay, Sent
from protofed.audit.statistics import Pair, Share, found_at, over_clients, pooled, pooled_auc
from protofed.data.batches import Batch, Data
from protofed.metrics.bootstrap import Interval
from protofed.nn.networks import Model, Networks
from protofed.tree import Params, Tree

RATES = (0.01, 0.05)
"""Of false alarms, at which the share of members that are found is reported."""
UNIT = 1e-3
"""Prototypes whose lengths differ from 1 by less are directions."""


@dataclass(frozen=True)
class Attack:
    """How well one attack did on one kind of upload, over all clients."""

    kind: str
    pairs: Mapping[ClientId, Pair]
    """The scores of each client's members and others."""
    is_same_source: bool
    needs: str = ""
    """What the attacker must have beside the upload."""

    @property
    def auc(self) -> float:
        return pooled_auc([*self.pairs.values()])

    @property
    def interval(self) -> Interval | None:
        return over_clients(pooled_auc, [*self.pairs.values()])

    @property
    def found(self) -> dict[float, Share | None]:
        members, others = pooled([*self.pairs.values()])
        return {rate: found_at(members, others, rate) for rate in RATES}

    @property
    def of_clients(self) -> dict[ClientId, float]:
        return {client: pooled_auc([pair]) for client, pair in self.pairs.items()}


def attacks(replay: Replay, seed: int = 0) -> tuple[list[Attack], list[str]]:
    """All attacks that the uploads of the round allow, and why others are not possible."""
    task, notes = replay.federation.task, dict[str, None]()
    pairs: dict[tuple[str, str], dict[ClientId, Pair]] = {}
    sources = []
    for call in replay.uploads.values():
        for client, sent in call.items():
            examples = examples_of(task, client, seed)
            if examples is None:
                notes[f"client {client}: there are no examples of its classes that it has not trained on"] = None
                continue
            sources.append(examples.is_same_source)
            with replay.federation.runtime.open(replay.federation):
                for kind, needs, score in scores_of(replay, sent, examples, notes):
                    pair = (score(examples.members), score(examples.others))
                    kept = tuple(one[np.isfinite(one)] for one in pair)
                    if all(map(len, kept)):
                        pairs.setdefault((kind, needs), {})[client] = (kept[0], kept[1])
    if sources and not pairs and not notes:
        notes["clients send neither weights nor prototypes but, for instance, gradients: no attack reads them"] = None
    found = [Attack(kind, own, all(sources), needs) for (kind, needs), own in pairs.items()]
    return found, list(notes)


Score = Callable[[Data], np.ndarray]


def scores_of(
    replay: Replay, sent: Sent, examples: Examples, notes: dict[str, None]
) -> Sequence[tuple[str, str, Score]]:
    """The attacks that one upload allows: name, what else they need, and the score of examples."""
    return [*_of_weights(replay, sent, examples, notes), *_of_prototypes(replay, sent, examples, notes)]


def sent_models(upload: Tree, networks: Networks) -> list[tuple[str, Params]]:
    """The sets of weights in an upload that are those of a network, or some of them, by the path before the names."""
    found: dict[str, Params] = {}
    for path, role in roles(upload).items():
        where, _, name = path.rpartition("/")
        leaf = tree.named_leaves(upload)[path]
        if isinstance(role, Weights) and networks.shapes.get(name) == leaf.shape:
            found.setdefault(where, {})[name] = leaf
    return [*found.items()]


def are_enough(networks: Networks, params: Params, use: Callable[[Params], object]) -> bool:
    """Whether these weights are all that something needs. If some are missing, it is tried."""
    if params.keys() == networks.shapes.keys():
        return True
    try:
        use(params)
    except KeyError:  # the name of a weight that stays at the client
        return False
    return True


def _of_weights(replay: Replay, sent: Sent, examples: Examples, notes: dict[str, None]) -> list[tuple[str, str, Score]]:
    if not any(isinstance(role, Weights) for role in roles(sent.upload).values()):
        return []
    networks, one = replay.federation.networks_of(sent.client), examples.population.rows(torch.tensor([0]))
    loss = partial(_loss, replay, sent, networks)
    models = [
        (where, params)
        for where, params in sent_models(sent.upload, networks)
        if are_enough(networks, params, lambda params: loss(params, one))
    ]
    if not models:
        notes["weights: what is sent of them is not enough to compute the loss of a client's model"] = None
        return []
    found: list[tuple[str, str, Score]] = []
    received = tree.named_leaves(sent.message)
    for where, params in models:
        name = "weights" if len(models) == 1 else where
        start = {key: received[f"{where}/{key}"] for key in params if f"{where}/{key}" in received}
        found.append((f"{name}: loss", "", partial(_lower, loss, params)))
        if start.keys() == params.keys() and all(start[key].shape == params[key].shape for key in params):
            found.append((f"{name}: loss drop", "", partial(_dropped, loss, start, params)))
    return found


Loss = Callable[[Params, Data], np.ndarray]


def _lower(loss: Loss, params: Params, data: Data) -> np.ndarray:
    return -loss(params, data)


def _dropped(loss: Loss, before: Params, after: Params, data: Data) -> np.ndarray:
    return loss(before, data) - loss(after, data)


def _loss(replay: Replay, sent: Sent, networks: Networks, params: Params, data: Data) -> np.ndarray:
    method = replay.federation.method
    has_public = method.public(replay.before.server) is not None

    def each(model: Model, batch: Batch) -> Tensor:
        scores = method.predict(model, batch.x, sent.message, None) if has_public else model.logits(batch.x)
        return F.cross_entropy(scores, batch.y, reduction="none")

    return mapped(replay, networks, params, each, data).double().numpy()


def mapped(
    replay: Replay, networks: Networks, params: Params, function: Callable[[Model, Batch], Tensor], data: Data
) -> Tensor:
    """function(model, batch) for each example, in evaluation mode and unvaried."""
    federation = replay.federation
    request = Map(networks, params, (), data, federation.task.transform, 0, function, to_cpu=True)
    (found,) = federation.runtime.answers([request])
    answer: Tensor = found
    return answer


# ---- prototypes


def _of_prototypes(
    replay: Replay, sent: Sent, examples: Examples, notes: dict[str, None]
) -> list[tuple[str, str, Score]]:
    leaves, role_of = tree.named_leaves(sent.upload), roles(sent.upload)
    paths = [path for path, role in role_of.items() if isinstance(role, Prototype)]
    of_training = replay.federation.method.message_for(replay.before.server, sent.client)
    if not paths or not isinstance(sent.message, type(of_training)):  # an exchange beside the training tells no weights
        return []
    networks = replay.federation.networks_of(sent.client)
    features = partial(_features, replay, sent, networks, _trained(replay, sent))
    one = examples.population.rows(torch.tensor([0]))
    is_sent = any(
        are_enough(networks, params, lambda params: _features(replay, sent, networks, params, one))
        for _, params in sent_models(sent.upload, networks)
    )
    needs = "" if is_sent else "the client's encoder, which is not sent"
    population = features(examples.population)
    found: list[tuple[str, str, Score]] = []
    for path in paths:
        role, num_classes = role_of[path], replay.federation.task.num_classes
        assert isinstance(role, Prototype)
        sets = leaves[path].reshape(num_classes, -1, leaves[path].shape[-1]).double()  # (C, S, D)
        counts = leaves.get(counted_by(path, role))
        known = sets.abs().sum(-1) > 0 if counts is None else counts.reshape(num_classes, -1) > 0
        name = "prototypes" if len(paths) == 1 else path
        if sets.shape[-1] != population.shape[-1]:
            notes[f"{path}: is not of the size of the features, so it is no mean of them"] = None
            continue
        found.append((f"{name}: tracing", needs, partial(_traced, features, population, examples, sets, known)))
    return found


def _traced(
    features: Callable[[Data], Tensor], population: Tensor, examples: Examples, sets: Tensor, known: Tensor, data: Data
) -> np.ndarray:
    """⟨z − r_c, p_c − r_c⟩ in units of its deviation over the population, the largest over the prototypes of the class;
    not a number where there is none, or where the population has fewer than two examples of the class."""
    z, y = features(data), data.labels.cpu()
    if bool((sets[known].norm(dim=-1) - 1).abs().max() < UNIT) if known.any() else False:
        z, population = (F.normalize(one, dim=-1) for one in (z, population))  # prototypes are directions
    labels = examples.population.labels.cpu()
    score = torch.full((len(z),), torch.nan, dtype=torch.float64)
    for c in range(len(sets)):
        drawn = population[labels == c]
        if not (y == c).any() or not known[c].any() or len(drawn) < 2:
            continue
        r = drawn.mean(0)
        away = (sets[c][known[c]] - r).T  # (D, S)
        scale = ((drawn - r) @ away).std(0).clamp(min=1e-12)
        score[y == c] = ((z[y == c] - r) @ away / scale).max(-1).values
    return score.numpy()


def _trained(replay: Replay, sent: Sent) -> Params:
    """The weights that the client had trained, by which it made its prototypes."""
    memory = replay.federation.client_state(replay.after, sent.client, sent.message)
    return replay.federation.method.trained_weights(sent.upload, memory)


def _features(replay: Replay, sent: Sent, networks: Networks, params: Params, data: Data) -> Tensor:
    """What prototypes are means of, (n, D)."""
    method = replay.federation.method

    def shown(model: Model, batch: Batch) -> Tensor:
        return method.shown_features(model, batch.x).flatten(1)

    return mapped(replay, networks, params, shown, data).double()
