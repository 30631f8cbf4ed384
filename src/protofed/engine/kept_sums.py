"""Sums over sites that were unmasked, on the server's disk until no state is left that is older. A site helps to unmask
a sum once and never again, so a round that is done again goes on from the sum that there is."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from protofed import wire
from protofed.api.task import ClientId
from protofed.errors import RunFailed
from protofed.privacy.outbox import KEPT_ROUNDS, write_whole
from protofed.privacy.site import Occasion
from protofed.runtimes.client_store import Receipt
from protofed.runtimes.jobs import Failure, Reason

NAME = re.compile(r"(\d{8})-[a-z]+-\d+\.safetensors")


@dataclass(frozen=True)
class KeptSum:
    asked: Sequence[ClientId]
    """Who was asked to add."""
    survivors: Sequence[ClientId]
    """Who has added."""
    receipts: Mapping[ClientId, Receipt]
    """Of what these keep since."""
    failures: Sequence[Failure]
    """Of the others, in the whole phase until then."""
    total: Tensor  # (P,), int64


class KeptSums:
    def __init__(self) -> None:
        self._folder: Path | None = None

    def keep_in(self, folder: Path) -> None:
        self._folder = folder

    def get(self, occasion: Occasion, digest: bytes, asked: Sequence[ClientId]) -> KeptSum | None:
        """The sum over these clients for a message with this digest; None if there is none."""
        path = None if self._folder is None else self._folder / _name(occasion)
        if path is None or not path.exists():
            return None
        try:
            data = path.read_bytes()
            facts = json.loads(wire.header(data)["__metadata__"]["sum"])
            if (facts["run"], facts["digest"], facts["asked"]) != (occasion.run, digest.hex(), [*asked]):
                return None  # guard: kept-sums-are-of-the-same-question
            failures = [Failure(client, Reason(reason), detail) for client, reason, detail in facts["failures"]]
            total = wire.decode_arrays(data)["total"]
            return KeptSum(asked, facts["survivors"], facts["receipts"], failures, total)
        except (OSError, wire.WireError, ValueError, KeyError, TypeError) as error:
            raise RunFailed(f"{path} is damaged ({error}), and sites do not unmask a sum twice") from error

    def put(self, occasion: Occasion, digest: bytes, kept: KeptSum) -> None:
        """Keeps a sum; it is on the disk when this returns."""
        if self._folder is None:
            return
        facts = {
            "run": occasion.run,
            "digest": digest.hex(),
            "asked": [*kept.asked],
            "survivors": [*kept.survivors],
            "receipts": dict(kept.receipts),
            "failures": [[one.client, one.reason, one.detail] for one in kept.failures],
        }
        write_whole(self._folder, _name(occasion), save({"total": kept.total}, metadata={"sum": json.dumps(facts)}))
        for path in self._folder.iterdir():
            match = NAME.fullmatch(path.name)
            if match and int(match[1]) < occasion.round - KEPT_ROUNDS:
                path.unlink(missing_ok=True)


def _name(occasion: Occasion) -> str:
    return f"{occasion.round:08d}-{occasion.phase}-{occasion.number}.safetensors"
