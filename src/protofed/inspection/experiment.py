"""The experiment file proposed for a folder, with a comment on every setting."""

import json
from collections.abc import Mapping
from statistics import median_low

from protofed.tasks.custom import Custom, SplitRows

BATCHES = (8, 16, 32, 64)


def experiment(settings: Custom, rows: Mapping[str, SplitRows]) -> str:
    sizes = [len(site_rows.train) for site_rows in rows.values()]
    batch = max([size for size in BATCHES if size <= median_low(sizes)], default=BATCHES[0])
    specific = _image_lines(settings) if settings.kind == "images" else _table_lines(settings)
    lines = [
        "# Written by `protofed data inspect`. Run it with `protofed run` and the name of this file.",
        "# You may change every line. `protofed methods NAME` lists the settings of a method.",
        "",
        "[task]",
        'name = "custom"',
        "# The folder that contains the sites. A relative path starts at the folder in which the run is started.",
        f"path = {_quoted(settings.path)}",
        f"kind = {_quoted(settings.kind)}",
        *specific,
        "# The share of each class at each site that is used for testing, and the seed of that draw.",
        f"test_fraction = {settings.test_fraction}",
        f"seed = {settings.seed}",
        "",
        "[method]",
        "# FPL is made for sites whose data differ. For comparison: fedavg shares weights only, local shares nothing.",
        'name = "fpl"',
        "",
        "[training]",
        "# How often the sites and the server exchange what they have learnt.",
        "rounds = 20",
        "# Passes of each site over its data between two exchanges.",
        f"epochs = {2 if settings.kind == 'images' else 5}",
        "# Examples in one step of training. Fewer examples mean more steps.",
        f"batch_size = {batch}",
        "# Another seed gives another run. Compare methods over several seeds.",
        "seed = 0",
        "# lr is the size of a step. Lower it if accuracies jump or fall.",
        'optimizer = { name = "sgd", lr = 0.01, momentum = 0.9, weight_decay = 1e-5 }',
        "",
    ]
    return "\n".join(lines)


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
        f"skip_damaged = {'true' if settings.skip_damaged else 'false'}",
        "# The largest share of files that may be left out. If more are damaged, the run ends.",
        f"max_damaged = {settings.max_damaged}",
        "# The network: small_cnn for 28 pixels; cnn2, cnn3 or resnet10, from small to large, for any size.",
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
        "# The network: one hidden layer.",
        f"model = {_quoted(settings.model or '')}",
    ]


def _quoted(text: str) -> str:
    """A TOML string. JSON does not escape U+007F, which TOML requires."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
