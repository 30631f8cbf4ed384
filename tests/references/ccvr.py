"""CCVR around FedAvg in plain torch, after Algorithm 1 of Luo and others, by the features of all clients together.

Eq. (3) and (4) of the paper pool what clients send into just the mean and covariance of all features of a class.
"""

import numpy as np
import torch
import torch.nn.functional as F

from protofed.seeds import derive_seed, generator
from references import fedavg
from references.plain import (
    CLASSES,
    CLIENTS,
    ROUNDS,
    TRAINING,
    State,
    averaged,
    examples,
    features,
    network,
    part,
    server_batches,
    state_of,
)


def rounds(start: State, samples: int, epochs: int, rate: float) -> dict:
    model = averaged(start, fedavg.local)
    sets = [examples(client) for client in CLIENTS]
    z = torch.cat([features(model, x) for x, _ in sets]).double()
    y = torch.cat([labels for _, labels in sets])
    draws = generator(derive_seed(TRAINING.seed, "finish", ROUNDS), "server")
    virtual = []
    for c in range(CLASSES):
        own = z[y == c]
        values, vectors = np.linalg.eigh(np.cov(own.numpy(), rowvar=False, ddof=1))
        root = vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T
        normal = torch.randn(samples, z.shape[1], dtype=torch.float64, generator=draws)
        virtual.append((own.mean(0) + normal @ torch.tensor(root)).float())
    labels = torch.arange(CLASSES).repeat_interleave(samples)
    classifier = network(model)["classifier"]
    optimizer = torch.optim.SGD(classifier.parameters(), lr=rate, momentum=0.9)
    planned = server_batches(torch.cat(virtual), labels, ROUNDS, epochs=epochs, size=64, phase="finish")
    for batch in planned:
        rows = batch.weight > 0
        optimizer.zero_grad()
        F.cross_entropy(classifier(batch.x[rows]), batch.y[rows]).backward()
        optimizer.step()
    retrained = state_of({"classifier": classifier})
    assert not torch.equal(retrained["classifier.weight"], part(model, "classifier")["classifier.weight"])
    return {"server": {"base": {"params": model}, "classifier": retrained}}
