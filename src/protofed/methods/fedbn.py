"""FedBN: FedAvg whose clients keep their layers of normalisation, weights and statistics, to themselves.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Sends: the weights of everything but the layers of normalisation. Keeps: its layers of normalisation. Server: mean.

Departures:
1. Clients count by their numbers of examples, as in all methods here; equally in the paper.
2. All layers of normalisation stay at the client, GroupNorm and LayerNorm too; the paper speaks of BatchNorm.
3. Between rounds a client is tested with the server's weights and its own layers of normalisation. A client that has
   not taken part has those of the common initial weights.
"""

from dataclasses import dataclass

from protofed import tree
from protofed.api.contexts import ClientContext, ServerContext
from protofed.errors import BadInput
from protofed.methods.families import OwnWeights, PartSharing, Weights


@dataclass(frozen=True)
class FedBN(PartSharing):
    tags = ("personal",)

    # Which weights belong to layers of normalisation only the networks know; statistics go by these names in all.
    private = ("*.running_mean", "*.running_var")

    def init_server(self, server: ServerContext) -> Weights:
        kept = server.networks.normalisation
        if not kept:
            raise BadInput(
                "FedBN: the network has no layers of normalisation to keep; without them it is FedAvg, so use that"
            )
        return Weights({name: leaf for name, leaf in server.initial_params().items() if name not in kept})

    def init_memory(self, client: ClientContext, message: Weights) -> OwnWeights:
        return OwnWeights(tree.select(client.initial_params(), client.networks.normalisation))
