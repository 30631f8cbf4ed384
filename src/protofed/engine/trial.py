"""One batch through code of the user's own, before the first round: network, loss, upload and prediction.

What is wrong there would fail at every client in every round. So it is raised once, with the user's own lines.
"""

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import protofed
from protofed.api.method import Method
from protofed.api.task import ClientId
from protofed.engine.around import unwrapped
from protofed.engine.upload_validation import UploadValidator
from protofed.errors import BadInput
from protofed.runtimes.divergence import Diverged
from protofed.runtimes.isolation import let_pass
from protofed.runtimes.jobs import Failure, Job
from protofed.runtimes.sequential import Sequential
from protofed.tasks.models import Network, NetworkOfClient
from protofed.tree import Tree

if TYPE_CHECKING:
    from protofed.engine.federation import Federation

log = logging.getLogger(__name__)

LIBRARIES = (str(Path(str(protofed.__file__)).parent), str(Path(str(torch.__file__)).parent))


def is_own_code(federation: "Federation") -> bool:
    """Whether the method, one that it goes around, or the network is not protofed's."""
    method: Any = unwrapped(federation.method)
    own = False
    while isinstance(method, Method):
        own |= not type(method).__module__.startswith("protofed.")
        method = getattr(method, "base", None)
    match federation.task.model:
        case Network() as network:
            return own or network.build is not None
        case NetworkOfClient(networks):
            return own or any(network.build is not None for network in networks.values())
    return True


def refuse_broken_code(federation: "Federation", state: Tree) -> None:
    """Refuses code that cannot take a step at any client. A step that fails at one client and not at another is left to
    the round, which knows what to do about it; so is one that only fails for few examples."""
    if type(unwrapped(federation.method)).setup is not Method.setup:
        return  # its first step is in the setup
    faults = []
    for client in federation.sampled(0)[:2]:
        fault = _fault(federation, state, client, is_whole=False)
        if fault is None or _fault(federation, state, client, is_whole=True) is None:
            return
        faults.append(fault)
    first = faults[0]
    if all(fault.kind == first.kind for fault in faults):  # guard: broken-code-raised-once
        raise BadInput(first.text) from first.error


@dataclass(frozen=True)
class _Fault:
    """What went wrong, and where."""

    what: str
    error: Exception

    @property
    def kind(self) -> tuple[str, type[Exception]]:
        return self.what, type(self.error)

    @property
    def text(self) -> str:
        frames = traceback.extract_tb(self.error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        lines = "".join(traceback.format_list(own or frames[-1:])).rstrip("\n")
        said = f"{type(self.error).__name__}: {self.error}"
        return f"before the first round, one batch was tried, and {self.what} failed:\n{lines}\n{said}"


class _NotAccepted(ValueError):
    """An upload or a prediction that is not what it must be."""


def _fault(federation: "Federation", state: Tree, client: ClientId, is_whole: bool) -> _Fault | None:
    """What fails when one client takes one step; None if nothing does, or if it is not for the trial to judge."""
    method, context = federation.method, federation.client_context(client, 0)
    if not is_whole:
        context = replace(context, data=context.data.rows(torch.arange(min(context.batch_size, len(context.data)))))
    context = replace(context, epochs=1)
    runtime, found = Sequential(str(federation.runtime.device)), dict[str, Tree]()

    def begin() -> None:
        found["message"] = method.message_for(state, client)
        found["memory"] = method.init_memory(context, found["message"])

    def train() -> None:
        job = Job(client, method.train, context, found["message"], None, method, encode=federation.encoded)
        found["reply"] = runtime.reply(job, found["memory"])

    def upload() -> None:
        like = federation.uploads.spec(method.upload_spec(state, federation.server_context(0, "load")))
        passed = UploadValidator(like, federation.limits).validated(client, found["reply"].upload)
        if isinstance(passed, Failure):
            raise _NotAccepted(f"the upload would be refused, {passed.reason}: {passed.detail}")

    def predict() -> None:
        if not federation.task.tests:
            return  # nobody asks for predictions
        message, memory, data = found["message"], found["memory"], context.data
        x = context.transform.clean(data.inputs(data.index[: context.batch_size]))
        model = federation.networks_of(client).model(method.local_weights(message, memory))
        with torch.no_grad():
            scores = method.predict(model, x, message, memory)
        if scores.shape != (len(x), context.num_classes):
            raise _NotAccepted(
                f"predict gave {tuple(scores.shape)} for {len(x)} examples of {context.num_classes} classes: it must "
                f"give {(len(x), context.num_classes)}"
            )

    steps: Sequence[tuple[str, Callable[[], None]]] = (
        ("what a client begins with (message_for, init_memory)", begin),
        ("a prediction (predict)", predict),
        ("a step of training (train)", train),
        ("the upload (upload_spec)", upload),
    )
    for what, step in steps:
        try:
            step()
        except (Diverged, BadInput) as error:
            log.info("the trial of %s ended early: %s", client, error)
            return None
        except Exception as error:
            let_pass(error)
            return _Fault(what, error)
    return None
