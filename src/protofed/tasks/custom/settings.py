"""Settings of the task `custom`."""

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, Lt

from protofed.api.task import Task
from protofed.datasets import sites
from protofed.datasets.preprocessing import ImageFiles
from protofed.datasets.sites import SiteKind
from protofed.errors import BadInput
from protofed.nn.networks import Parts
from protofed.tasks import models
from protofed.tasks.custom.image_task import OwnImages
from protofed.tasks.custom.shares import Agreed, agreed
from protofed.tasks.custom.split import untested_classes
from protofed.tasks.custom.table_task import OwnTables
from protofed.tasks.models import Network, network

log = logging.getLogger(__name__)

IMAGE_NETWORKS: dict[str, Callable[[int, int], Parts]] = {
    "small_cnn": models.small_cnn,
    "cnn_norm": models.cnn_norm,
    "cnn2": models.cnn2,
    "cnn3": models.cnn3,
    "resnet10": models.resnet10,
}
TABLE_NETWORKS: dict[str, Callable[[int, int], Parts]] = {"mlp": models.mlp, "mlp_norm": models.mlp_norm}
ONLY_SIDE = {"small_cnn": 28}
"""Networks that accept images of one size only, and that size."""


@dataclass(frozen=True)
class Custom:
    """Your own images or tables: a folder with a subfolder or a table for each site. `protofed data inspect` writes the
    settings."""

    path: str = ""
    """The folder that contains the sites. A relative path starts at the folder in which the run is started."""
    kind: SiteKind = "images"
    """Images in folder/site/class/, or tables folder/site.csv or folder/site.parquet."""
    label: str | None = None
    """For tables: the column to be predicted. Rows without a label are left out."""
    leave_out: Sequence[str] = ()
    """For tables: columns that are not used, such as identifiers."""
    categorical: Sequence[str] = ()
    """For tables: columns whose numbers are codes, not amounts."""
    pixels: Annotated[int, Interval(ge=8, le=512)] = 32
    """For images: the side to which they are resized."""
    channels: Literal[1, 3] = 3
    """For images: 3 for colour, 1 for grey."""
    bits: Annotated[int, Interval(ge=8, le=16)] | None = None
    """For images of 16-bit grey: how many bits their values use, such as 12. 0 to 2^bits - 1 become 0 to 255 in every
    image. Larger values are refused. By default the most that any of the files uses."""
    skip_damaged: bool = False
    """For images: whether files that cannot be decoded are left out. Otherwise they end the run."""
    max_damaged: Annotated[float, Interval(ge=0, lt=1)] = 0.01
    """For images: the largest share of files that `skip_damaged` may leave out. If more are damaged, the run ends."""
    model: str | None = None
    """The network: small_cnn, which needs images of 28 pixels, cnn_norm, cnn2, cnn3 or resnet10 for images, mlp or
    mlp_norm for tables; or `module:function` for one of your own. small_cnn, cnn_norm, resnet10 and mlp_norm have
    layers of normalisation. By default cnn3 for images and mlp for tables."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.25
    """The share of each class at each site that is used for testing."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the split into training, validation and test sets. It is not the run's seed."""
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    """The share of each class at each site that is neither trained on nor tested. Rounds are compared by it: see
    `patience` in [evaluation]."""
    group: str | None = None
    """What keeps examples together, such as a patient: all of them are on one side of the split. For tables, a column,
    which is not learnt from. For images, a regular expression with one pair of brackets, which finds the patient in the
    name of a file: "^(P[0-9]+)_"."""
    balance: bool = False
    """Whether examples of rare classes are repeated in training, up to ten times, until a class has half as many as the
    site's most frequent one. Tests are not changed."""
    hold_out: Sequence[str] = ()
    """Sites that do not train. They are tested as new ones, with the model that the others have trained."""

    min_rows: Annotated[int, Ge(1)] = 1
    """For tables: what fewer training rows of a site have is not told to the other sites. Such words of a column count
    as others, and sums of a column with fewer values are left out."""

    def build(self) -> Task:
        own = self.read()
        if isinstance(own, OwnImages):
            own.refuse_many_damaged()
        task = self.made(own, agreed(own.shares, self))
        for name in untested_classes(own.examples, own.rows):
            log.warning("task custom: class %r is in no test set: it has too few examples at each site", name)
        return task

    def read(self, only: Collection[str] = ()) -> OwnImages | OwnTables:
        """The files of all sites, or of some, before it is agreed how they are prepared."""
        root, _ = self._root(), self._network_name()
        return (OwnImages if self.kind == "images" else OwnTables).read(self, root, only)

    def made(self, own: OwnImages | OwnTables, preparation: Agreed) -> Task:
        """The task of the sites whose files were read."""
        return own.task(preparation, self.network(preparation))

    def network(self, preparation: Agreed) -> Network:
        """The network of every site."""
        files = preparation.files
        inputs = files.channels if isinstance(files, ImageFiles) else len(files.encoder.features)
        return network(_function(self._network_name()), inputs, len(preparation.classes))

    def stamp(self) -> str:
        """A hash of names, sizes and modification times of the files: a run on changed files is another run. Nothing
        where there are no files."""
        if not self.path:
            return ""
        root = self._root()
        files = sorted(sites.data_files(root, self.kind))
        facts = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()

    def site_names(self) -> tuple[str, ...]:
        """The sites in the folder."""
        root = self._root()
        if self.kind == "images":
            return tuple(sorted(site for site, classes in sites.image_sites(root).files.items() if classes))
        return tuple(sorted(sites.table_sites(root)))

    def _root(self) -> Path:
        root = Path(self.path)
        if not self.path:
            raise BadInput(
                "task custom: path is not set; give the folder that contains the sites, or use `protofed data inspect`"
            )
        if not root.is_dir():
            raise BadInput(
                f"task custom: path {self.path!r} is not a folder, seen from {Path.cwd()}. Give the full path, or "
                "start the run in the folder where the relative path starts"
            )
        return root

    def _network_name(self) -> str:
        name = self.model or ("cnn3" if self.kind == "images" else "mlp")
        if ":" in name:
            return name
        choices = [*IMAGE_NETWORKS] if self.kind == "images" else [*TABLE_NETWORKS]
        if name not in choices:
            raise BadInput(f"task custom: model {name!r} is not for {self.kind}; choose {' or '.join(choices)}")
        side = ONLY_SIDE.get(name, self.pixels)
        if side != self.pixels:
            raise BadInput(f"task custom: model {name!r} needs images of {side} pixels, not {self.pixels}; choose cnn3")
        return name


def _function(name: str) -> Callable[[int, int], Parts]:
    return models.own_network(name) if ":" in name else models.MODELS[name]
