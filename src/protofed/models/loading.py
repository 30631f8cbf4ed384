"""Models that were handed over, read back.

A model may come from somebody else: everything is checked before it is used, its tensors are safetensors, and nothing
that it names is imported unless the user gives the folder of the code.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofed import wire
from protofed.api.contexts import ClientContext, ServerContext
from protofed.api.task import Enrolment, TaskSpec
from protofed.api.views import Points
from protofed.data.batches import Data
from protofed.data.transforms import Transform
from protofed.datasets.preprocessing import ImageFiles, TableRows
from protofed.errors import BadInput
from protofed.methods import METHODS
from protofed.models import formats
from protofed.models.formats import DTYPES, Inputs, ModelFile, preprocessing_of
from protofed.models.module import AnyMethod, Context, Records, TrainedModel, hollow
from protofed.models.outline import FindNetwork, network_of
from protofed.nn.networks import Networks, Parts
from protofed.optim.optimizers import Sgd
from protofed.printable import one_line
from protofed.runs.config.messages import listed
from protofed.runs.config.recording import named_table
from protofed.runs.config.schema import Problems
from protofed.runs.config.sections import REGISTRIES, built
from protofed.runs.config.user_classes import Importer, user_classes
from protofed.runs.store import opening

MODEL, INPUTS, WEIGHTS, PROTOTYPES = "model.json", "preprocessing.json", "weights.safetensors", "prototypes.safetensors"
MAX_WEIGHTS = 16 * 2**30
"""Bytes of a file of tensors."""
SOMEONE = "someone"
"""The client for whom the network of a global model is built."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that was handed over. It needs neither the run nor the data that it comes from."""

    facts: ModelFile
    inputs: Inputs
    model: TrainedModel

    @property
    def classes(self) -> tuple[str, ...]:
        return self.facts.classes

    @property
    def preprocessing(self) -> ImageFiles | TableRows | None:
        """How files are read; None if only tensors can be given."""
        return preprocessing_of(self.inputs.files)

    def module(self) -> TrainedModel:
        """The model as a plain `nn.Module`."""
        return self.model

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Scores of the classes (B, C), for examples as they are stored, such as images of bytes."""
        scores: Tensor = self.model(self.model.transform(x))
        return scores

    def __str__(self) -> str:
        whose = "all sites" if self.facts.site is None else one_line(self.facts.site)
        method, classes = self.facts.method.get("name"), ", ".join(map(one_line, self.classes))
        return f"model of {whose}: {method} on {self.facts.task}, round {self.facts.round}; classes {classes}"


def is_model(path: Path) -> bool:
    """Whether a folder holds a model, and not a run."""
    try:
        with opening.folder(path) as own:
            return opening.kind(own, MODEL) is not None
    except OSError:
        return False


def load_model(path: Path, method: AnyMethod | None = None, code: Path | None = None) -> LoadedModel:
    """The model in a folder. `code` is the folder of modules of the user's own that the model names."""
    if not is_model(path):
        raise BadInput(f"{path} is not a model: it has no {MODEL}. `protofed export` writes models")
    limits = {MODEL: formats.MAX_BYTES, INPUTS: formats.MAX_BYTES, WEIGHTS: MAX_WEIGHTS, PROTOTYPES: MAX_WEIGHTS}
    files: dict[str, bytes] = {}
    for name, most in limits.items():
        try:
            files[name] = opening.read(path, name, most=most)
        except OSError as error:
            raise BadInput(f"{path / name} cannot be read: {opening.reason(error)}; export the model again") from error
    return model_of(files, str(path), method, code)


def model_of(
    files: Mapping[str, bytes],
    where: str,
    method: AnyMethod | None = None,
    code: Path | None = None,
    network: Callable[..., Parts] | None = None,
) -> LoadedModel:
    """The model in these files. `network` builds the network, if that is the user's own and at hand."""
    facts = formats.read(ModelFile, files[MODEL], f"{where}/{MODEL}")
    for name in (INPUTS, WEIGHTS, PROTOTYPES):
        if facts.files.get(name) != hashlib.sha256(files[name]).hexdigest():  # guard: model-files-have-checksums
            raise BadInput(f"{where}/{name} is damaged, or of another model: it does not have its checksum")
    inputs = formats.read(Inputs, files[INPUTS], f"{where}/{INPUTS}")
    importer = Importer(code, refusal="") if code else Importer(refusal="give the folder of its module with --code")
    weights = _tensors(files[WEIGHTS], f"{where}/{WEIGHTS}")
    try:
        found = _method(facts, importer, where) if method is None else _same(method, facts, where)
        find = importer.network if network is None else lambda name: network
        model = _built(facts, inputs, found, find, weights, where)
        model.prototypes = _prototypes(facts, _tensors(files[PROTOTYPES], f"{where}/{PROTOTYPES}"), where)
    except BadInput:
        raise
    except Exception as error:  # a file that passes all checks may still ask for a network that cannot be
        raise BadInput(f"{where} cannot be built: {type(error).__name__}: {error}") from error
    return LoadedModel(facts, inputs, model)


def _tensors(data: bytes, where: str) -> dict[str, Tensor]:
    try:
        return wire.decode_arrays(data)
    except wire.WireError as error:
        raise BadInput(f"{where} is damaged: {error}") from error


def _method(facts: ModelFile, importer: Importer, where: str) -> AnyMethod:
    table = {"method": dict(facts.method)}
    classes, _, problems = user_classes(table, importer)
    try:
        if problems:
            raise Problems(problems)
        method: AnyMethod = built(table, "method", REGISTRIES.extended(classes, {}))
    except Problems as error:
        raise BadInput(listed(error.all, {}, lambda key: f"{where}/{MODEL}")) from None
    return method


def _same(method: AnyMethod, facts: ModelFile, where: str) -> AnyMethod:
    given = {key: value for key, value in named_table(METHODS, method).items() if value is not None}
    if given != facts.method:
        raise BadInput(f"{where} was made with another method: {facts.method}, not {given}")
    return method


def _built(
    facts: ModelFile,
    inputs: Inputs,
    method: AnyMethod,
    find: FindNetwork,
    weights: Mapping[str, Tensor],
    where: str,
) -> TrainedModel:
    if facts.network is None:
        raise BadInput(
            f"{where} has a network without a name, which was made in Python: build the module there and load "
            f"{WEIGHTS} into it, or use the exported graph"
        )
    network = network_of(facts.network, find)
    _refuse_size(network, weights, where)
    client = facts.site or SOMEONE
    spec = TaskSpec(
        name=facts.task,
        num_classes=len(facts.classes),
        input=inputs.spec,
        transform=Transform(inputs.mean, inputs.std),
        model=network,
        clients={client: Enrolment(1)},
    )
    networks = Networks(partial(method.networks, spec, client))
    known = {path: _taken(weights, f"known_{k}", where) for k, path in enumerate(facts.known)}
    params = {name: leaf for name, leaf in weights.items() if not name.startswith("known_")}
    records = _records(method, spec, networks, client, facts) if facts.has_records else {}
    parts = _checked_parts(networks, params, where)
    model = TrainedModel(
        method,
        parts,
        Context(records, known),
        classes=facts.classes,
        input=inputs.spec,
        transform=spec.transform,
    )
    with torch.no_grad():
        for name, leaf in model.state_dict(keep_vars=True).items():  # BatchNorm's own loading wants its counter
            leaf.copy_(weights[name])
    _refuse_other_outputs(model, facts, where)
    return model


def _refuse_size(network: Any, weights: Mapping[str, Tensor], where: str) -> None:
    """Refuses a network that is larger than its weights, before memory is taken for it."""
    with torch.device("meta"):
        parts: Parts = network()
    needed = sum(leaf.numel() for module in parts.values() for leaf in module.parameters())
    have = sum(leaf.numel() for leaf in weights.values())
    if needed > 2 * have + 2**20:  # guard: network-not-larger-than-weights
        raise BadInput(f"{where}: its network has {needed} weights, and {WEIGHTS} has {have}")


def _checked_parts(networks: Networks, params: Mapping[str, Tensor], where: str) -> Parts:
    """Fresh modules of the parts that the weights are of."""
    names = {name.partition(".")[0] for name in params}
    unknown = sorted(names - {*networks.parts})
    if unknown:
        raise BadInput(f"{where}: the network has no part {one_line(unknown[0])!r}; its parts are {networks.parts}")
    parts = networks.modules_at(networks.init(0), names)
    expected = {f"{part}.{n}": leaf for part, module in parts.items() for n, leaf in module.state_dict().items()}
    for name in sorted({*expected} | {*params}):
        then, now = params.get(name), expected.get(name)
        if then is None or now is None or then.shape != now.shape or then.dtype != now.dtype:
            said = "missing" if then is None else f"{tuple(then.shape)} of {then.dtype}"
            raise BadInput(f"{where}/{WEIGHTS}: {one_line(name)} is {said}, which the network has not")
    return parts


def _refuse_other_outputs(model: TrainedModel, facts: ModelFile, where: str) -> None:
    with torch.no_grad():
        scores, features = model(model.blank()), model.embed(model.blank())
    if scores.shape != (1, len(facts.classes)) or features.shape != (1, facts.features):
        raise BadInput(
            f"{where}: scores {tuple(scores.shape)} and features {tuple(features.shape)} are not the model's"
        )


def _records(method: AnyMethod, spec: TaskSpec, networks: Networks, client: str, facts: ModelFile) -> Records:
    """The structure of what the method predicts with. Values come from the file."""
    server = ServerContext(spec, networks, Sgd(), 0, 1, 0, 0, _refused)
    state = method.init_server(server)
    if facts.site is None:
        public = method.public(state)
        return {} if public is None else hollow({"message": public[1]})
    message = method.message_for(state, client)
    blank = torch.zeros((1, *spec.input.shape), dtype=spec.input.dtype)
    data = Data.of(blank, torch.zeros(1, dtype=torch.int64))
    context = ClientContext(client, 0, 1, spec.num_classes, networks, data, spec.transform, Sgd(), 1, 1, 0, 0)
    return hollow({"message": message, "memory": method.init_memory(context, message)})


def _refused(request: Any) -> Any:
    raise BadInput(f"a model that is only loaded asks for {type(request).__name__}")


def _taken(weights: Mapping[str, Tensor], name: str, where: str) -> Tensor:
    if name not in weights:
        raise BadInput(f"{where}: {one_line(name)} is missing")
    return weights[name]


def _prototypes(facts: ModelFile, tensors: Mapping[str, Tensor], where: str) -> dict[str, Points]:
    found = {}
    for k, one in enumerate(facts.prototypes):
        values, label = _taken(tensors, f"{k}.values", where), _taken(tensors, f"{k}.label", where)
        is_good = values.shape == (one.count, facts.features) and label.shape == (one.count,)
        is_good &= values.dtype == torch.float32 and label.dtype == torch.int64 and bool(values.isfinite().all())
        if not is_good or label.min() < 0 or label.max() >= len(facts.classes):
            raise BadInput(f"{where}/{PROTOTYPES}: {one_line(one.kind)} are not prototypes of the classes")
        found[one.kind] = Points(values, label)
    return found


__all__ = ["DTYPES", "LoadedModel", "is_model", "load_model", "model_of"]
