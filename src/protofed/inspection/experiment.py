"""The comparison proposed for a folder, with a comment on every setting."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low

from protofed.tasks.custom import Custom, SplitRows

BATCHES = (8, 16, 32, 64)
ROUNDS, PATIENCE = 30, 8
FEW_IMAGES = 1000
"""With fewer training images a pass over the data is short, and a round makes more of them."""

METHODS = {
    "local": "Each site trains alone. The others are worth their effort where they beat it.",
    "fedavg": "One model for all: the mean of the sites' weights.",
    "fedbn": "The same, but every site keeps its own layers of normalisation: for sites whose images or units differ.",
    "fpl": "One model for all, whose features are drawn to prototypes of all sites: for sites whose data differ.",
    "fedproto": "A model for each site; only prototypes, the mean features of the classes, are exchanged.",
}
"""What is compared, and what each is for."""


def experiment(settings: Custom, rows: Mapping[str, SplitRows]) -> str:
    sizes = [len(site_rows.train) for site_rows in rows.values()]
    batch = max([size for size in BATCHES if size <= median_low(sizes)], default=BATCHES[0])
    is_images, is_validated = settings.kind == "images", settings.validation_fraction > 0
    epochs = 2 if is_images and sum(sizes) >= FEW_IMAGES else 5
    label = Path(settings.path).resolve().name or "data"
    specific = _image_lines(settings) if is_images else _table_lines(settings)
    summary = "validation" if is_validated else "last_five"
    chosen = "the one that is best on the validation examples" if is_validated else "the mean of the last five"
    lines = [
        "# Written by `protofed data inspect`. Run it with `protofed compare` and the name of this file, one",
        "# method alone with --method LABEL. You may change every line. `protofed methods NAME` lists its settings.",
        f"title = {_quoted(label)}",
        "# Every method is run once for each seed. More seeds tell differences from luck, and take longer.",
        f"seeds = {[0] if is_images else [0, 1, 2]}",
        f"# The round whose numbers are reported: {chosen}.",
        f"summary = {_quoted(summary)}",
        "",
        "[common.task]",
        'name = "custom"',
        "# The folder that contains the sites. A relative path starts at the folder in which the run is started.",
        f"path = {_quoted(settings.path)}",
        f"kind = {_quoted(settings.kind)}",
        *specific,
        *_split_lines(settings),
        "",
        "[common.training]",
        "# How often the sites and the server exchange what they have learnt.",
        f"rounds = {ROUNDS}",
        "# Passes of each site over its data between two exchanges.",
        f"epochs = {epochs}",
        "# Examples in one step of training. Fewer examples mean more steps.",
        f"batch_size = {batch}",
        "# lr is the size of a step. Lower it if accuracies jump or fall.",
        'optimizer = { name = "sgd", lr = 0.01, momentum = 0.9, weight_decay = 1e-4 }',
        "",
        *(_patience_lines() if is_validated else []),
        f"[tasks.{_quoted(label)}.task]",
        'name = "custom"',
        "",
    ]
    for name, purpose in METHODS.items():
        lines += [f"[methods.{name}.method]", f"# {purpose}", f"name = {_quoted(name)}", ""]
    return "\n".join(lines)


def _split_lines(settings: Custom) -> list[str]:
    is_images = settings.kind == "images"
    how = "the part of a file's name in brackets" if is_images else "the value of a column"
    group = [
        f"# Examples with the same {how}, such as a patient, are on one side of the split.",
        f"group = {_quoted(settings.group or '')}",
    ]
    validation = [
        "# The share that is neither trained on nor tested: by it a round is chosen and training ends.",
        f"validation_fraction = {settings.validation_fraction}",
    ]
    return [
        *(group if settings.group is not None else []),
        "# Whether examples of rare classes are repeated in training, so that they are not overlooked.",
        f"balance = {_truth(settings.balance)}",
        "# The share of each class at each site that is used for testing, and the seed of that draw.",
        f"test_fraction = {settings.test_fraction}",
        f"seed = {settings.seed}",
        *(validation if settings.validation_fraction else []),
    ]


def _patience_lines() -> list[str]:
    return [
        "[common.evaluation]",
        "# Training ends when so many rounds in a row were not better on the validation examples. 0: it never does.",
        f"patience = {PATIENCE}",
        "",
    ]


def _image_lines(settings: Custom) -> list[str]:
    bits = [
        "# How many bits 16-bit grey uses: 0 to 2^bits - 1 become 0 to 255, in every image. Larger values are refused.",
        f"bits = {settings.bits}",
    ]
    return [
        "# Images are resized to this many pixels a side. More pixels show finer details and take longer.",
        f"pixels = {settings.pixels}",
        "# 3 for colour, 1 for grey.",
        f"channels = {settings.channels}",
        *(bits if settings.bits is not None else []),
        "# Whether files that cannot be decoded are left out. Otherwise they end the run.",
        f"skip_damaged = {_truth(settings.skip_damaged)}",
        "# The largest share of files that may be left out. If more are damaged, the run ends.",
        f"max_damaged = {settings.max_damaged}",
        "# The network. With normalisation: small_cnn for 28 pixels; cnn_norm, or the larger resnet10, for any size.",
        f"model = {_quoted(settings.model or '')}",
    ]


def _table_lines(settings: Custom) -> list[str]:
    return [
        "# The column to be predicted. Rows without a value there are left out.",
        f"label = {_quoted(settings.label or '')}",
        "# Columns that are not used, because they look like identifiers, are constant, or have too many words.",
        f"leave_out = [{', '.join(_quoted(name) for name in settings.leave_out)}]",
        "# Columns whose numbers are codes, not amounts, such as a ward or a device.",
        f"categorical = [{', '.join(_quoted(name) for name in settings.categorical)}]",
        "# The network: one hidden layer with normalisation.",
        f"model = {_quoted(settings.model or '')}",
    ]


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _quoted(text: str) -> str:
    """A TOML string. JSON does not escape U+007F, which TOML requires."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
