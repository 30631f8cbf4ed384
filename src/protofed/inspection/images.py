"""What a folder of images holds: sites, in them classes, in them files."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import median_low
from typing import Literal

from protofed.datasets import sites
from protofed.datasets.images import SUFFIXES
from protofed.datasets.sites import ImageInfo, ImageSites
from protofed.errors import BadInput
from protofed.inspection.findings import Finding, class_findings
from protofed.inspection.page import Inspection
from protofed.inspection.text import listed, number_of, some
from protofed.tasks.custom import Custom, SiteExamples, split_sites

SIDES = (28, 32, 64, 96, 128)
GREY = frozenset({"1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"})


def inspected_images(path: Path, wishes: Custom) -> Inspection:
    listing = sites.image_sites(path)
    known, damaged = _described(listing)
    samples = {site: sample for site, sample in _samples(listing, known).items() if sample.labels}
    settings = _image_settings(wishes, [*known.values()])
    if wishes.skip_damaged and damaged:  # whoever says so has seen them, and no more than these
        share = ceil(1000 * len(damaged) / listing.count) / 1000
        settings = replace(settings, max_damaged=min(0.999, max(settings.max_damaged, share)))
    sides = split_sites(samples, settings.test_fraction, settings.seed)
    findings = [
        *_damage(damaged, wishes.skip_damaged),
        *_empty(listing, samples),
        *_copies(path, listing, known),
        *_misplaced(path, listing.ignored),
        *class_findings(samples, sides),
    ]
    if wishes.label is not None:
        findings.append(Finding("warning", "a label column is for tables", "the class of an image is its folder"))
    return Inspection(
        path, "images", (*listing.files,), samples, sides, _image_facts(known, listing), tuple(findings), settings
    )


def _described(listing: ImageSites) -> tuple[dict[Path, ImageInfo], dict[Path, str]]:
    """What each image is, and what is wrong with those that cannot be decoded."""
    known, damaged = {}, {}
    for path in (path for classes in listing.files.values() for paths in classes.values() for path in paths):
        try:
            known[path] = sites.image_info(path)
        except BadInput as error:
            damaged[path] = str(error)
    return known, damaged


def _samples(listing: ImageSites, known: Mapping[Path, ImageInfo]) -> dict[str, SiteExamples]:
    samples = {}
    for site, classes in listing.files.items():
        rows = [(name, known[path].digest) for name, paths in classes.items() for path in paths if path in known]
        samples[site] = SiteExamples(tuple(name for name, _ in rows), tuple(digest for _, digest in rows))
    return samples


def _image_settings(wishes: Custom, images: Sequence[ImageInfo]) -> Custom:
    side = median_low([min(image.size) for image in images]) if images else SIDES[0]
    pixels = max([known for known in SIDES if known <= side], default=SIDES[0])
    channels: Literal[1, 3] = 1 if all(image.mode in GREY for image in images) else 3
    model: Literal["small_cnn", "cnn3"] = "small_cnn" if pixels == 28 else "cnn3"
    return replace(wishes, label=None, pixels=pixels, channels=channels, model=model)


def _image_facts(known: Mapping[Path, ImageInfo], listing: ImageSites) -> tuple[str, ...]:
    facts = []
    if known:
        by_size = sorted((image.size for image in known.values()), key=lambda size: (min(size), max(size)))
        named = (("smallest", by_size[0]), ("median", by_size[(len(by_size) - 1) // 2]), ("largest", by_size[-1]))
        modes = Counter(image.mode for image in known.values())
        facts += ["sizes    " + ", ".join(f"{name} {width} × {height}" for name, (width, height) in named)]
        facts += ["modes    " + ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items()))]
    facts += [f"ignored  {number_of(len(listing.ignored), 'name')}, hidden ones aside"] if listing.ignored else []
    return tuple(facts)


def _damage(damaged: Mapping[Path, str], skip_damaged: bool) -> Iterator[Finding]:
    if not damaged:
        return
    what = f"{number_of(len(damaged), 'image')} cannot be decoded:{listed([*damaged.values()])}"
    if skip_damaged:
        yield Finding("warning", what, "they are left out, since skip_damaged is set")
    else:
        yield Finding("error", what, "get them again, remove them, or leave them out with --skip-damaged")


def _empty(listing: ImageSites, samples: Mapping[str, SiteExamples]) -> Iterator[Finding]:
    for site, classes in listing.files.items():
        if site not in samples:
            yield Finding("warning", f"{site} has no images", "it is left out; add its images, or remove the folder")
            continue
        empty = [name for name, paths in classes.items() if not paths]
        if empty:
            yield Finding("warning", f"{site} has empty class folders: {some(empty)}", "a class needs no empty folder")


def _copies(root: Path, listing: ImageSites, known: Mapping[Path, ImageInfo]) -> Iterator[Finding]:
    """Files with the same content, by what they would spoil."""
    places: dict[str, list[tuple[str, str, Path]]] = defaultdict(list)
    for site, classes in listing.files.items():
        for name, paths in classes.items():
            for path in (path for path in paths if path in known):
                places[known[path].digest].append((site, name, path))
    groups: dict[str, list[str]] = defaultdict(list)
    for copies in (copies for copies in places.values() if len(copies) > 1):
        named = " = ".join(str(path.relative_to(root)) for _, _, path in copies)
        kind = "class" if len({name for _, name, _ in copies}) > 1 else "site"
        groups[kind if len({(site, name) for site, name, _ in copies}) > 1 else "place"].append(named)
    advice = "they are trained on, never tested"
    if groups["class"]:
        what = f"{number_of(len(groups['class']), 'image')} in more than one class:{listed(groups['class'])}"
        yield Finding("warning", what, f"keep the right one of each; as they are, {advice}")
    if groups["site"]:
        what = f"{number_of(len(groups['site']), 'image')} at more than one site:{listed(groups['site'])}"
        yield Finding("warning", what, f"find out whose they are and remove the others; as they are, {advice}")
    if groups["place"]:
        what = f"{number_of(len(groups['place']), 'image')} more than once in a class:{listed(groups['place'])}"
        yield Finding("warning", what, "remove the copies; as they are, all copies are trained on, or all tested")


def _misplaced(root: Path, ignored: Sequence[Path]) -> Iterator[Finding]:
    folders = [path for path in ignored if path.is_dir()]
    tables = [path for path in ignored if path.suffix.lower() in sites.TABLE_SUFFIXES and path not in folders]
    images = [path for path in ignored if path.suffix.lower() in SUFFIXES and path not in folders]
    others = [path for path in ignored if path not in {*folders, *tables, *images}]
    for paths, what, advice in (
        (images, "images outside of class folders", "put them into folder/site/class/ if they are examples"),
        (folders, "folders inside class folders", "put their images into the class folder itself"),
        (tables, "tables among the images", "they are not read; put them into a folder of their own to use them"),
        (others, "files of other kinds", f"only {', '.join(sorted(SUFFIXES))} are read; export others as PNG or TIFF"),
    ):
        if paths:
            yield Finding("warning", f"{what}:{listed([str(path.relative_to(root)) for path in paths])}", advice)
