"""Own files of several sites, each in a folder of its own, and all of them in one folder."""

import csv
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from protofed.federation.messages import Limits
from protofed.federation.own_data import TELLS_ALL, OwnData, Telling
from protofed.federation.site import Site
from protofed.tasks.custom import Custom

CLIENTS = {"A": ("north",), "B": ("east", "south-2"), "C": ("west",)}
"""Of each site."""
NO_LIMITS = Limits()
COLUMNS = ("patient", "age", "sex", "ward", "marker", "note", "outcome")
RARE_WORD = "Lake Hallow"
RARE_NUMBER = "123456789.125"


def write_images(folder: Path) -> Custom:
    """Noise, brighter for a later class, of which one site has no images. Some are of 12 bits, at one site alone."""
    noise = np.random.default_rng(5)
    for client in (client for own in CLIENTS.values() for client in own):
        for brightness, name in enumerate(("benign", "malignant", "unclear")):
            for k in range(0 if (client, name) == ("west", "unclear") else 8 + 2 * brightness):
                path = folder / client / name / f"P{k // 2}_{client}_{k}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                if client == "north" and k < 3:
                    image = Image.fromarray(noise.integers(brightness * 900, 4000, (20, 16), dtype=np.uint16))
                else:
                    image = Image.fromarray(noise.integers(brightness * 60, 255, (16, 18), dtype=np.uint8))
                image.save(path)
    return Custom(str(folder), pixels=16, channels=1, model="cnn_norm", group="^(P[0-9]+_.*)_", validation_fraction=0.1)


def write_tables(folder: Path) -> Custom:
    """Numbers with gaps, words, codes, a column that is empty at one site, and one word and one number of one row."""
    draw = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    for client in (client for own in CLIENTS.values() for client in own):
        rows = []
        for k in range(40):
            ill = draw.random() < 0.5
            row = [f"{client}-{k // 2}", f"{draw.gauss(60 + 5 * ill, 11):.3f}", draw.choice("fm"), draw.choice("123")]
            marker = "" if client == "west" or draw.random() < 0.2 else f"{draw.gauss(3 + ill, 1):.2f}"
            rows.append(
                [*row, marker, draw.choice(["", "calm", "restless"]), ["well", "ill", "dead"][ill + (k % 13 == 0)]]
            )
        if client == "east":
            rows[7][5], rows[9][1] = RARE_WORD, RARE_NUMBER
            rows = [row[::-1] for row in rows]  # the order of columns is the file's own business
        with open(folder / f"{client}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS[::-1] if client == "east" else COLUMNS)
            writer.writerows(rows)
    settings = Custom(str(folder), "tables", label="outcome", group="patient", categorical=["ward"], model="mlp_norm")
    return replace(settings, balance=True, min_rows=3, validation_fraction=0.15)


def given_to_sites(folder: Path, settings: Custom, clients: Mapping[str, Sequence[str]] = CLIENTS) -> dict[str, Path]:
    """Copies each site's files into a folder that only it has."""
    for site, own in clients.items():
        for client in own:
            for path in Path(settings.path).glob(f"{client}*"):
                if path.stem == client:
                    target = folder / site / "data" / path.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    return {site: folder / site / "data" for site in clients}


def sites_with(
    folder: Path,
    settings: Custom,
    telling: Telling = TELLS_ALL,
    limits: Limits = NO_LIMITS,
    clients: Mapping[str, Sequence[str]] = CLIENTS,
) -> dict[str, Site]:
    """Sites, each with its own files alone."""
    folders = given_to_sites(folder, settings, clients)
    return {
        site: Site(folder / site / "state", OwnData(replace(settings, path=str(path)), (), telling), limits)
        for site, path in folders.items()
    }
