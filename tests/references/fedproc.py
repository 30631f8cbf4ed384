"""FedProc in plain torch, after Eq. (5) to (9) of Mu and others and the authors' code.

α falls from 1 by 1/T a round; a contrast of cosines without temperature; centres by the numbers of examples. Before
there are centres clients learn by cross-entropy. Centres are those that the last epoch saw. `closed` is the schedule of
RethinkFL, with centres that count alike.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from references.plain import CLASSES, CLIENTS, ROUNDS, State, batches, counted, mean, network, state_of, train


def rounds(start: State, closed: bool = False) -> dict:
    centres: dict[int, Tensor] = {}
    behind = torch.zeros(CLASSES)
    for t in range(ROUNDS):
        alpha = 1 - t / (ROUNDS - 1 if closed else ROUNDS)
        trained, sent = {}, []
        for client in CLIENTS:
            seen: list[tuple[Tensor, int]] = []

            def loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
                each = []
                z = model["features"](batch.x)
                scores = model["classifier"](z)
                for k in counted(batch):
                    y = int(batch.y[k])
                    if batch.is_last_epoch:
                        seen.append((z[k].detach(), y))
                    own = F.cross_entropy(scores[k], batch.y[k])
                    if y in centres:
                        cosines = {c: F.cosine_similarity(z[k], centre, dim=0) for c, centre in centres.items()}
                        contrast = -torch.log(torch.exp(cosines[y]) / sum(torch.exp(s) for s in cosines.values()))
                        own = alpha * contrast + (1 - alpha) * own
                    each.append(own)
                return torch.stack(each).mean()

            model = network(start)
            train(model, batches(client, t), loss)
            trained[client] = state_of(model)
            sent.append({c: [z for z, y in seen if y == c] for c in {y for _, y in seen}})
        start = mean(trained)
        for c in range(CLASSES):
            owners = [torch.stack(own[c]) for own in sent if c in own]
            centres[c] = torch.stack([z.mean(0) for z in owners]).mean(0) if closed else torch.cat(owners).mean(0)
            behind[c] = len(owners) if closed else len(torch.cat(owners))
    means = torch.stack([centres[c] for c in range(CLASSES)])
    return {"server": {"params": start, "prototypes": {"mean": means, "count": behind}}}
