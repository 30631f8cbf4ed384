"""LG-Fed: clients keep the features of the network and share the classifier, which speaks to all of them.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning with
Local and Global Representations, NeurIPS 2019 Workshop on Federated Learning.

Sends: the weights of the classifier. Keeps: all other weights, so that networks may differ below the classifier.
Server: mean of the classifiers.

Departures:
1. The classifier is what is shared; the authors' code shares the two top layers on CIFAR. The projection of a network
   that has one stays at the client.
2. Training starts from common initial weights; the authors' code starts from a model that FedAvg has trained.
3. Clients count by their numbers of examples, as in all methods here; equally in the authors' code.
4. A client is tested with its own features and the server's classifier; the authors' code takes for each client the
   model that was best on its test set. The personal metrics, as of every method, are of the weights just trained.
"""

from dataclasses import dataclass

from protofed.methods.families import PartSharing
from protofed.nn.networks import Patterns

BODY: Patterns = ("features.*", "projection.*")


@dataclass(frozen=True)
class LGFed(PartSharing):
    tags = ("personal", "heterogeneous")

    private = BODY
