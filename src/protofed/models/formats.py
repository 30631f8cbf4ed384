"""What is written down of a task and of a model, as JSON, and how it is checked when it is read.

A file may have been damaged, or come from somebody else. So every number has a range, unknown keys are refused, and
nothing in a file is imported or run.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from annotated_types import Ge, Gt, Interval, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError, model_validator

from protofed.api.task import InputSpec, Preprocessing, Task
from protofed.datasets.preprocessing import ImageFiles, TableRows
from protofed.datasets.tabular import Encoder
from protofed.datasets.tabular.encoding import Numeric, OneHot
from protofed.datasets.tabular.limits import MAX_CATEGORIES, MAX_COLUMNS
from protofed.errors import BadInput
from protofed.tasks.models import MODELS, Network, NetworkOfClient

MAX_BYTES = 32 * 2**20
"""Of a JSON file."""
MAX_INPUTS = 4 * 2**20
"""Numbers in one input."""

Text = Annotated[str, StringConstraints(max_length=1000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Interval(ge=0, le=2**53)]
Plain = bool | Whole | Number | Text
Kind = Literal["uint8", "float32", "int32", "int64"]
DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}

T = TypeVar("T", bound="Written")


class Written(BaseModel):
    """A table of a JSON file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def text(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n").encode()


def read(cls: type[T], content: bytes, where: str) -> T:
    """The table in a file. Raises BadInput with the first thing that is wrong."""
    try:
        return cls.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadInput(f"{where} is damaged, or of another version: {place or 'it'}: {first['msg']}") from None


# ---- how files become inputs


class Images(Written):
    kind: Literal["images"] = "images"
    pixels: Annotated[int, Interval(ge=1, le=2048)]
    channels: Literal[1, 3]
    bits: Annotated[int, Interval(ge=8, le=16)]


class NumberColumn(Written):
    """`(value - mean) / deviation`, 0 where the value is missing. With `has_indicator` a second number follows: 1 if it
    is missing, else 0."""

    kind: Literal["number"] = "number"
    column: Name
    mean: Number
    deviation: Annotated[Number, Gt(0)]
    has_indicator: bool


class CodeColumn(Written):
    """One number for each category, one for others, one for a missing value: 1 for the value's, 0 for the others."""

    kind: Literal["codes"] = "codes"
    column: Name
    categories: Annotated[tuple[Text, ...], MaxLen(MAX_CATEGORIES)]


class Rows(Written):
    kind: Literal["table"] = "table"
    label: Text
    columns: Annotated[
        tuple[Annotated[NumberColumn | CodeColumn, Field(discriminator="kind")], ...], MinLen(1), MaxLen(MAX_COLUMNS)
    ]
    zero_is_missing: tuple[Name, ...] = ()


class Inputs(Written):
    """How a file becomes what the network reads: it is read, scaled and normalised."""

    format: Literal[1] = 1
    shape: Annotated[tuple[Annotated[int, Ge(1)], ...], MaxLen(8)]
    """Of one input."""
    dtype: Kind
    """Of inputs."""
    stored_dtype: Kind
    """Of examples before they are scaled. Bytes are divided by 255."""
    mean: Annotated[tuple[Number, ...], MaxLen(4096)]
    """Subtracted from each channel after scaling."""
    std: Annotated[tuple[Annotated[Number, Gt(0)], ...], MaxLen(4096)]
    """Each channel is divided by this."""
    files: Annotated[Images | Rows, Field(discriminator="kind")] | None
    """How files are read; null if only tensors can be given."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        size = 1
        for side in self.shape:
            size *= side
        if size > MAX_INPUTS:
            raise ValueError(f"an input of {size} numbers; at most {MAX_INPUTS} are read")
        if len(self.mean) != len(self.std) or (self.mean and len(self.mean) != self.shape[0]):
            raise ValueError("the means and deviations are not those of the channels")
        if isinstance(self.files, Images) and self.shape != (self.files.channels, *[self.files.pixels] * 2):
            raise ValueError(f"images of {self.files.pixels} pixels are not inputs {self.shape}")
        if isinstance(self.files, Rows) and self.shape != (len(encoder_of(self.files).features),):
            raise ValueError(f"rows of {len(encoder_of(self.files).features)} numbers are not inputs {self.shape}")
        return self

    @property
    def spec(self) -> InputSpec:
        return InputSpec(self.shape, DTYPES[self.dtype])


def inputs_of(task: Task) -> Inputs:
    stored = next(iter(task.clients.values())).x.dtype
    return Inputs(
        shape=task.spec.input.shape,
        dtype=_name(task.spec.input.dtype),
        stored_dtype=_name(stored),
        mean=task.transform.mean,
        std=task.transform.std,
        files=files_of(task.preprocessing),
    )


def _name(dtype: torch.dtype) -> Any:
    return next(name for name, one in DTYPES.items() if one is dtype)


def files_of(preprocessing: Preprocessing | None) -> Images | Rows | None:
    match preprocessing:
        case ImageFiles(pixels, channels, bits):
            return Images.model_validate({"pixels": pixels, "channels": channels, "bits": bits})
        case TableRows(encoder, label, zero_is_missing):
            columns = tuple(_column_of(column) for column in encoder.columns)
            return Rows(label=label, columns=columns, zero_is_missing=zero_is_missing)
    return None


def _column_of(column: Numeric | OneHot) -> NumberColumn | CodeColumn:
    if isinstance(column, OneHot):
        return CodeColumn(column=column.column, categories=column.categories)
    return NumberColumn(
        column=column.column, mean=column.mean, deviation=column.deviation, has_indicator=column.has_indicator
    )


def preprocessing_of(files: Images | Rows | None) -> ImageFiles | TableRows | None:
    match files:
        case Images():
            return ImageFiles(files.pixels, files.channels, files.bits)
        case Rows():
            return TableRows(encoder_of(files), files.label, files.zero_is_missing)
    return None


def encoder_of(rows: Rows) -> Encoder:
    return Encoder(
        tuple(
            OneHot(column.column, column.categories)
            if isinstance(column, CodeColumn)
            else Numeric(column.column, column.mean, column.deviation, column.has_indicator)
            for column in rows.columns
        )
    )


# ---- networks


class NetworkByName(Written):
    name: Name
    """One of protofed's, or `module:function`."""
    settings: Annotated[dict[Name, Plain], MaxLen(50)]

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own."""
        return self.name not in MODELS


def networks_of(task: Task) -> dict[str, NetworkByName] | None:
    """The network of each client, by name; None if they have none."""
    match task.model:
        case Network() as one:
            return dict.fromkeys(task.clients, _written(one))
        case NetworkOfClient(networks):
            return {client: _written(networks[client]) for client in task.clients}
    return None


def _written(network: Network) -> NetworkByName:
    return NetworkByName(name=network.name, settings=dict(network.settings))


# ---- the outline of a task


class Client(Written):
    examples: Annotated[int, Interval(ge=1, le=2**40)]
    domain: Text | None
    network: NetworkByName | None
    is_held_out: bool = False
    """Whether it never trained, and is tested as a new client."""


class Outline(Written):
    """What a run writes down of its task, so that it can be loaded where the data are not."""

    format: Literal[1] = 1
    name: Text
    classes: Annotated[tuple[Text, ...], MinLen(1), MaxLen(1_000_000)]
    inputs: Inputs
    public: Annotated[int, Ge(0), Le(2**40)]
    """Public examples, which everyone may see."""
    clients: Annotated[dict[Name, Client], MinLen(1), MaxLen(1_000_000)]
    tests: dict[Text, Whole]
    """Test examples of each domain."""


def outline_of(task: Task) -> Outline:
    networks: Mapping[str, NetworkByName | None] = networks_of(task) or dict.fromkeys(task.clients)
    return Outline(
        name=task.name,
        classes=task.classes,
        inputs=inputs_of(task),
        public=0 if task.public is None else len(task.public),
        clients={
            client: Client(
                examples=len(data),
                domain=task.domain_of.get(client),
                network=networks[client],
                is_held_out=client in task.held_out,
            )
            for client, data in task.clients.items()
        },
        tests={domain: len(data) for domain, data in task.tests.items()},
    )


# ---- a model


class PrototypeSet(Written):
    kind: Name
    """What the prototypes are, such as `global prototypes`."""
    count: Annotated[int, Interval(ge=1, le=10_000_000)]


class ModelFile(Written):
    """What is written down of a model that was handed over."""

    format: Literal[1] = 1
    protofed: Text
    commit: Text
    task: Text
    site: Text | None
    """Whose model it is; null for the one of all sites."""
    round: Whole
    method: dict[Name, JsonValue]
    """Name and settings."""
    network: NetworkByName | None
    """Null if the network has no name: then only Python code that has it can build it."""
    classes: Annotated[tuple[Text, ...], MinLen(1), MaxLen(1_000_000)]
    features: Annotated[int, Interval(ge=1, le=2**24)]
    """Numbers of a feature vector."""
    has_records: bool
    """Whether the method predicts with more than the weights."""
    known: Annotated[tuple[Name, ...], MaxLen(10_000)]
    """What that is: paths in what a client is sent and keeps. The tensors are `known_0` and so on among the weights."""
    prototypes: Annotated[tuple[PrototypeSet, ...], MaxLen(1000)]
    """Sets `0.values` (M, D) and `0.label` (M,) and so on of prototypes.safetensors."""
    files: Annotated[dict[Name, Sha256], MaxLen(10)]
    """SHA-256 of the files that this one belongs to."""
