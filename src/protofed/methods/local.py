"""Local training: every client learns alone from its own data, as the floor that federation must beat.

Sends: nothing. Keeps: its whole model. Server: nothing.

Departures: none.
"""

from dataclasses import dataclass

from torch import Tensor

from protofed.data import Batch
from protofed.method import Central, ClientId, Local, Method, Objective, Reply, Uploads
from protofed.methods.families import OwnWeights
from protofed.networks import Model
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class LocalOnly(Method[Nothing, Nothing, OwnWeights, Nothing]):
    tags = ("personal", "heterogeneous")
    private = ("*",)

    def init_server(self, central: Central) -> Nothing:
        return Nothing()

    def message_for(self, server: Nothing, client: ClientId) -> Nothing:
        return Nothing()

    def upload_like(self, server: Nothing, central: Central) -> Nothing:
        return Nothing()

    def aggregate(self, server: Nothing, uploads: Uploads[Nothing], central: Central) -> Nothing:
        for _ in uploads:
            pass
        return server

    def init_memory(self, local: Local, message: Nothing) -> OwnWeights:
        return OwnWeights(local.initial_params())

    def local_weights(self, message: Nothing, memory: OwnWeights) -> Params:
        return memory.params

    async def train(self, local: Local, message: Nothing, memory: OwnWeights) -> Reply[Nothing, OwnWeights]:
        params = await local.fit(Objective(self.loss), params=memory.params)
        return Reply(Nothing(), OwnWeights(params))

    def loss(self, model: Model, batch: Batch) -> Tensor:
        return batch.cross_entropy(model.logits(batch.x))
