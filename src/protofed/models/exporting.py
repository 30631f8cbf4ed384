"""Hands a model over: a folder with its weights, graphs for other programs, preprocessing, prototypes and a card."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from protofed.engine.around import unwrapped
from protofed.errors import BadInput, RunFailed
from protofed.methods import METHODS
from protofed.models import formats, graphs
from protofed.models.card import card
from protofed.models.formats import ModelFile, NetworkByName, PrototypeSet, inputs_of, networks_of
from protofed.models.loading import INPUTS, MODEL, PROTOTYPES, WEIGHTS, model_of
from protofed.models.module import Context, TrainedModel
from protofed.runs.config.recording import named_table
from protofed.runs.store import disk, opening
from protofed.runs.store.folder import commit
from protofed.tasks.models import Network, NetworkOfClient
from protofed.version import __version__

if TYPE_CHECKING:
    from protofed.runs.results import Result

log = logging.getLogger(__name__)

GRAPH, ONNX, CARD = "model.pt2", "model.onnx", "model_card.md"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]
    """What is not there, and why."""


def export(
    result: "Result",
    folder: Path | str,
    site: str | None = None,
    *,
    onnx: bool | None = None,
    replace: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Exported:
    """Writes the model of a site, or the one of all sites, into a new folder.

    `onnx`: whether an ONNX file is written; by default if the packages for it are installed. With `replace`, a model
    that is in the folder already goes. The folder is whole or not there.
    """
    folder = Path(folder)
    refuse_existing(folder, replace)
    model, notes = result.module(site), list[str]()
    tell("tracing the graph")
    files = {WEIGHTS: _weights(model), PROTOTYPES: _prototypes(model), INPUTS: inputs_of(result.federation.task).text()}
    files[MODEL] = _facts(result, model, site, files).text()
    files[GRAPH] = graphs.torch_graph(model)
    if onnx or (onnx is None and graphs.has_onnx()):
        tell("writing ONNX and comparing it")
        files[ONNX] = graphs.onnx_graph(model)
    elif onnx is None:
        notes.append(f"no {ONNX}: {graphs.NEEDS_ONNX}")
    notes += _read_back(files, model, result)
    tell("writing the card")
    files[CARD] = card(result, site, tuple(files)).encode()
    _write(folder, files)
    return Exported(folder, tuple(files), tuple(notes))


def refuse_existing(folder: Path, replace: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; name a folder that is not there yet")
    if not folder.exists():
        return
    if not replace:  # guard: export-overwrites-nothing
        raise BadInput(f"{folder} is there already; name another folder, or replace what is in it with --replace")
    others = {path.name for path in folder.iterdir()} - {MODEL, WEIGHTS, PROTOTYPES, INPUTS, GRAPH, ONNX, CARD}
    if others:  # guard: export-replaces-only-models
        raise BadInput(f"{folder} holds more than a model, such as {sorted(others)[0]}; name another folder")


def _weights(model: TrainedModel) -> bytes:
    return save({name: _plain(leaf) for name, leaf in model.state_dict().items()})


def _prototypes(model: TrainedModel) -> bytes:
    tensors: dict[str, Tensor] = {}
    for k, points in enumerate(model.prototypes.values()):
        tensors |= {f"{k}.values": _plain(points.values), f"{k}.label": _plain(points.label.to(torch.int64))}
    return save(tensors)


def _plain(leaf: Tensor) -> Tensor:
    return leaf.detach().cpu().contiguous().clone()


def _facts(result: "Result", model: TrainedModel, site: str | None, files: dict[str, bytes]) -> ModelFile:
    federation = result.federation
    method, task = unwrapped(federation.method), federation.task
    networks = networks_of(task)
    network: NetworkByName | None = None if networks is None else networks[site or federation.ids[0]]
    with torch.no_grad():
        features = model.embed(model.blank()).shape[-1]
    return ModelFile(
        protofed=__version__,
        commit=commit(),
        task=task.name,
        site=site,
        round=result.state.round,
        method={key: value for key, value in named_table(METHODS, method).items() if value is not None},
        network=network,
        classes=task.classes,
        features=features,
        has_records=bool(model.known) or not _predicts_alone(model),
        known=tuple(model.known),
        prototypes=tuple(PrototypeSet(kind=kind, count=len(p.values)) for kind, p in model.prototypes.items()),
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )


@torch.no_grad()
def _predicts_alone(model: TrainedModel) -> bool:
    """Whether the method predicts with nothing but the weights."""
    parts = dict(model.named_children())
    x = graphs.samples(model, 2)
    try:
        alone = model.with_context(parts, Context({}, {}))
        return torch.equal(alone(x), model(x))
    except Exception as error:  # a method of the user's own may do anything with a message
        log.debug("the method needs its records: %s", error)
        return False


@torch.no_grad()
def _read_back(files: dict[str, bytes], model: TrainedModel, result: "Result") -> list[str]:
    """Refuses to hand over a model that would not be read as it is. Notes what reading it needs of the user's own."""
    facts = formats.read(ModelFile, files[MODEL], MODEL)
    if facts.network is None:
        return ["protofed cannot read it back: its network has no name, since it was made in Python; use the graphs"]
    method, build = unwrapped(result.federation.method), _network(result, facts.site).build
    again, x = model_of(files, "the exported model", method, network=build).model, graphs.samples(model, 4)
    if not torch.allclose(again(x), model(x), rtol=1e-5, atol=1e-6):
        raise RunFailed("the exported model does not predict as the run does; nothing was written")
    own = [name for name in (facts.method["name"], facts.network.name) if ":" in str(name)]
    return (
        [f"reading it needs your own code: {' and '.join(map(str, own))}; give its folder with --code"] if own else []
    )


def _network(result: "Result", site: str | None) -> Network:
    model, client = result.federation.task.model, site or result.federation.ids[0]
    found = model.networks[client] if isinstance(model, NetworkOfClient) else model
    assert isinstance(found, Network), "a network that has a name"
    return found


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder = folder.absolute()
    try:
        disk.make(folder.parent)
        with opening.folder(folder.parent) as above:
            try:
                disk.put_folder(above, folder.name, files)
            except OSError:
                disk.remove(above, f".writing-{folder.name}")
                raise
    except OSError as error:
        size = sum(map(len, files.values()))
        raise RunFailed(f"could not write {folder}: {opening.reason(error)} ({size} bytes to write)") from error
