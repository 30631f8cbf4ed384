"""FedMD in plain torch, after Algorithm 1 of Li and Wang and the authors' code: digest by absolute errors, and revisit.

Which public examples a round is about is drawn, and given here: `wanted[t]` for what clients score in round t. A
consensus is digested at the start of the next round.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.data.batches import Batch
from protofed.data.transforms import Transform
from references.plain import CLASSES, CLIENTS, ROUNDS, TASK, State, batches, counted, judged, network, scores, state_of
from references.plain import train as descend


def rounds(start: State, wanted: list[Tensor], first_epochs: int, digest_epochs: int) -> dict:
    own, consensus = dict.fromkeys(CLIENTS, start), torch.zeros(len(wanted[0]), CLASSES)
    for t in range(ROUNDS):
        said = {}
        for client in CLIENTS:
            model = network(own[client])
            if t == 0:
                descend(model, batches(client, t, 0, first_epochs))
            else:
                about = wanted[t - 1].tolist()

                def digest(model: nn.ModuleDict, batch: Batch) -> Tensor:
                    rows = counted(batch)
                    aims = torch.stack([consensus[about.index(int(batch.index[k]))] for k in rows])
                    return F.l1_loss(scores(model, batch.x)[rows], aims)

                public = TASK.public.rows(wanted[t - 1])
                descend(model, batches(client, t, 0, digest_epochs, public, Transform()), digest)
            descend(model, batches(client, t, 1))
            own[client] = state_of(model)
            said[client] = judged(own[client], TASK.transform.clean(TASK.public.x[wanted[t]]))
        consensus = torch.stack(list(said.values())).mean(0)
    kept = {client: {"params": own[client], "has_trained": torch.tensor(1.0)} for client in CLIENTS}
    server = {"index": wanted[ROUNDS - 1], "scores": consensus, "exists": torch.tensor(1.0), "wanted": wanted[ROUNDS]}
    return {"server": server, "memories": kept}
