"""A process that is killed while it judges a client's model changes no score."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from doubles import tiny
from protofed.engine.federation import Federation
from protofed.engine.training import Training
from protofed.errors import RunFailed
from protofed.evaluation.evaluate import evaluate
from protofed.methods.fedrep import FedRep
from protofed.runtimes.sequential import Sequential
from protofed.runtimes.workers import Workers


@dataclass(frozen=True)
class Dying(FedRep):
    """The processes of these clients are killed, so many times each."""

    folder: str = ""
    clients: tuple[str, ...] = ("c01",)
    times: int = 1

    async def evaluate_own(self, client: Any, message: Any, memory: Any) -> Any:
        if self.folder and client.id in self.clients:
            for number in range(self.times):
                try:
                    os.close(os.open(Path(self.folder) / f"{client.id}-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return await super().evaluate_own(client, message, memory)


def judged(runtime: Any, **dying: Any) -> Any:
    federation = Federation(Dying(**dying), tiny(), Training(rounds=2, epochs=1, batch_size=8), runtime)
    try:
        return evaluate(federation, federation.advance(federation.start()))
    finally:
        runtime.close()


@pytest.mark.parametrize("clients", [("c01",), ("c00", "c01", "c02", "c03")])
@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_while_it_judges_changes_no_score(
    clients: tuple[str, ...], times: int, tmp_path: Path
) -> None:
    """R8. Such a client would be missing from the scores, and nothing in rounds.jsonl would say so."""
    found = judged(Workers(2), folder=str(tmp_path), clients=clients, times=times)
    assert found == judged(Sequential())
    assert len(list(tmp_path.iterdir())) == len(clients) * times


def test_processes_that_are_killed_again_and_again_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"0 of 4 clients replied well.*signal 9"):
        judged(Workers(2), folder=str(tmp_path), clients=("c00", "c01", "c02", "c03"), times=3)
