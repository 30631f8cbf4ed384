"""Replays of rounds that no folder holds, and tasks whose clients have tests of their own."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from protofed import Data, Sgd, Task, UploadSettings
from protofed.api.method import Method
from protofed.audit.replay import Replay, Tap
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.nn.networks import Parts

SIZE = 6


def parts(client: str) -> Parts:
    return {"features": nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU()), "classifier": nn.Linear(16, 3)}


def drawn(labels: list[int], seed: int) -> Data:
    draws = torch.Generator().manual_seed(seed)
    directions = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(7))
    y = torch.tensor(labels)
    return Data.of(directions[y] + torch.randn(len(y), SIZE, generator=draws), y)


def task_of(labels: dict[str, list[int]], tests: int = 60) -> Task:
    """Clients with exactly these labels, and tests of their own from the same source."""
    clients = {client: drawn(own, k) for k, (client, own) in enumerate(labels.items())}
    own = {client: drawn([0, 1, 2] * tests, 100 + k) for k, client in enumerate(labels)}
    everyone = {"all": drawn([0, 1, 2] * 50, 99)}
    return Task(clients, everyone, 3, parts, dict.fromkeys(clients, "all"), own, name="drawn")


def replay_of(
    method: Method[Any, Any, Any, Any],
    task: Task,
    rounds: int = 2,
    uploads: UploadSettings = UploadSettings(),  # noqa: B008, immutable
    **training: Any,
) -> Replay:
    """The last of so many rounds, tapped."""
    tap, pipeline = Tap(), uploads.pipeline()
    settings = Training(**{"rounds": rounds, "epochs": 2, "batch_size": 8, "optimizer": Sgd(lr=0.05), **training})
    federation = Federation(method, task, settings, uploads=replace(pipeline, stages=(tap, *pipeline.stages)))
    state = before = federation.start()
    for _ in range(rounds):
        tap.sent[:] = [one for one in tap.sent if not one.is_of_round]
        before, state = state, federation.advance(state)
    return Replay(federation, before, state, list(tap.sent), "exact")
