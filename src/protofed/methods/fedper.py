"""FedPer: clients share the body of the network, keep their own head, and train both together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, arXiv:1912.00818, 2019.

Sends: the weights of everything but the classifier. Keeps: its classifier. Server: mean weighted by the number of
examples.

Departures:
1. The personalisation layers are the classifier, which is one layer in most networks; the paper also keeps more.
2. Between rounds a client is tested with the server's body and its own head; some code tests the body that it trained.
3. A client that first takes part late starts from the common initial head; the paper has all clients take part.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protofed.api.contexts import ServerContext
from protofed.api.evaluation import Reading
from protofed.api.task import ClientId
from protofed.methods._shared.global_models import with_heads
from protofed.methods._shared.models import CLASSIFIER
from protofed.methods.families import OwnWeights, PartSharing, Weights


@dataclass(frozen=True)
class FedPer(PartSharing):
    tags = ("personal",)
    private = CLASSIFIER

    def global_models(
        self, state: Weights, memories: Mapping[ClientId, OwnWeights], server: ServerContext
    ) -> dict[str, Reading]:
        return with_heads(state.params, memories, server)
