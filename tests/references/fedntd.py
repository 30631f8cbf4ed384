"""FedNTD in plain torch, after the authors' code: the true class is cut out of both models' scores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import CLASSES, State, averaged, batches, counted, judged, network, scores, state_of, train


def rounds(start: State, beta: float, tau: float) -> dict:
    def local(client: str, t: int, received: State) -> State:
        def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
            rows = counted(batch)
            own, theirs, y = scores(model, batch.x)[rows], judged(received, batch.x)[rows], batch.y[rows]
            others = torch.tensor([[c for c in range(CLASSES) if c != label] for label in y.tolist()])
            student = F.log_softmax(own.gather(1, others) / tau, 1)
            teacher = F.softmax(theirs.gather(1, others) / tau, 1)
            return F.cross_entropy(own, y) + beta * tau**2 * F.kl_div(student, teacher, reduction="batchmean")

        model = network(received)
        train(model, batches(client, t), loss)
        return state_of(model)

    return {"server": {"params": averaged(start, local)}}
