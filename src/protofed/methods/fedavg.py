"""FedAvg: clients train the global model, the server averages what they made of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.

Sends: weights. Keeps: nothing. Server: mean weighted by the number of examples.

Departures: none.
"""

from dataclasses import dataclass

from protofed.methods.families import GlobalModel
from protofed.tree import Nothing


@dataclass(frozen=True)
class FedAvg(GlobalModel[Nothing]):
    tags = ("global",)
