"""IFCA in plain torch, after Algorithm 1 of Ghosh and others, with model averaging."""

import torch
import torch.nn.functional as F

from references.plain import CLIENTS, ROUNDS, SIZE, State, batches, examples, judged, mean, network, state_of, train


def rounds(starts: list[State], weights: dict[str, float] = SIZE) -> dict:
    models, chosen = list(starts), {}
    for t in range(ROUNDS):
        trained: list[dict[str, State]] = [{} for _ in models]
        for client in CLIENTS:
            x, y = examples(client)
            losses = [F.cross_entropy(judged(model, x), y).item() for model in models]
            chosen[client] = losses.index(min(losses))
            model = network(models[chosen[client]])
            train(model, batches(client, t, fit=len(models)))
            trained[chosen[client]][client] = state_of(model)
        models = [mean(own, weights) if own else model for own, model in zip(trained, models, strict=True)]
    assert len(set(chosen.values())) > 1, "clients choose different models"
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    kept = {client: {"cluster": torch.tensor(k)} for client, k in chosen.items()}
    return {"server": {"params": stacked}, "memories": kept}
