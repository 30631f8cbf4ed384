"""Local training: every client learns alone from its own data, as the floor that federation must beat.

Sends: nothing. Keeps: its whole model. Server: nothing.

Departures: none.
"""

from dataclasses import dataclass

from protofed.api.contexts import ClientContext, Reply, ServerContext
from protofed.api.requests import Objective
from protofed.api.task import ClientId
from protofed.methods._shared.losses import cross_entropy
from protofed.methods.families import OwnWeights, Summands, SumMethod, Totals
from protofed.tree import Nothing, Params


@dataclass(frozen=True)
class LocalOnly(SumMethod[Nothing, Nothing, OwnWeights, Nothing]):
    tags = ("personal", "heterogeneous")
    private = ("*",)

    def init_server(self, server: ServerContext) -> Nothing:
        return Nothing()

    def message_for(self, state: Nothing, client: ClientId) -> Nothing:
        return Nothing()

    def upload_spec(self, state: Nothing, server: ServerContext) -> Nothing:
        return Nothing()

    def summand(self, upload: Nothing, message: Nothing) -> Summands:
        return {}

    def from_sum(self, state: Nothing, totals: Totals, server: ServerContext) -> Nothing:
        return state

    def init_memory(self, client: ClientContext, message: Nothing) -> OwnWeights:
        return OwnWeights(client.initial_params())

    def local_weights(self, message: Nothing, memory: OwnWeights) -> Params:
        return memory.params

    async def train(self, client: ClientContext, message: Nothing, memory: OwnWeights) -> Reply[Nothing, OwnWeights]:
        params = await client.fit(Objective(cross_entropy), params=memory.params)
        return Reply(Nothing(), OwnWeights(params))
