"""Inspects a folder of images: folder/site/class/image."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import median_low
from typing import Literal

import torch

from protofed.datasets import sites
from protofed.datasets.images import SUFFIXES
from protofed.datasets.sites import ImageInfo, ImageSites
from protofed.errors import BadInput
from protofed.inspection.findings import Finding, class_findings
from protofed.inspection.page import Inspection
from protofed.inspection.proposal import proposed
from protofed.inspection.text import listed, number_of, some
from protofed.tasks.custom import Custom, SiteExamples

SIDES = (28, 32, 64, 96, 128)
MANY = 10_000
"""With so many images, and a GPU, a larger network is proposed."""
GREY = frozenset({"1", "L", "I", "I;16", "I;16L", "I;16B", "I;16N", "F"})


def inspected_images(path: Path, requested: Custom) -> Inspection:
    listing = sites.image_sites(path)
    infos, damaged = _image_infos(listing)
    group, group_findings = _groups(requested.group, [*infos])
    examples = {
        site: site_examples for site, site_examples in _examples(listing, infos, group).items() if site_examples.labels
    }
    settings = _image_settings(requested, [*infos.values()])
    if requested.skip_damaged and damaged:  # the user has seen this many damaged files, so allow no more
        share = ceil(1000 * len(damaged) / listing.count) / 1000
        settings = replace(settings, max_damaged=min(0.999, max(settings.max_damaged, share)))
    settings, rows = proposed(settings, examples)
    findings = [
        *_damage(damaged, requested.skip_damaged),
        *_windows(path, infos),
        *_depths(path, listing, infos),
        *_empty(listing, examples),
        *_copies(path, listing, infos),
        *_misplaced(path, listing.ignored),
        *group_findings,
        *class_findings(examples, rows),
    ]
    if requested.label is not None:
        findings.append(
            Finding("warning", "a label column is only for tables", "the class of an image is the name of its folder")
        )
    return Inspection(
        path, "images", (*listing.files,), examples, rows, _image_facts(infos, listing), tuple(findings), settings
    )


def _image_infos(listing: ImageSites) -> tuple[dict[Path, ImageInfo], dict[Path, str]]:
    """Facts about each image, and what is wrong with those that cannot be decoded."""
    infos, damaged = {}, {}
    for path in listing.paths:
        try:
            infos[path] = sites.image_info(path)
        except BadInput as error:
            damaged[path] = str(error)
    return infos, damaged


def _groups(pattern: str | None, paths: Sequence[Path]) -> tuple[str | None, list[Finding]]:
    """The pattern, if it finds a group in every name; otherwise what is wrong with it."""
    try:
        group_of = sites.group_finder(pattern)
        for path in paths:
            group_of(path)
    except BadInput as error:
        return None, [Finding("error", str(error), 'a pattern such as "^(P[0-9]+)_" finds P17 in P17_2.png')]
    return pattern, []


def _examples(
    listing: ImageSites, infos: Mapping[Path, ImageInfo], group: str | None = None
) -> dict[str, SiteExamples]:
    examples, group_of = {}, sites.group_finder(group)
    for site, classes in listing.files.items():
        rows = [(name, path) for name, paths in classes.items() for path in paths if path in infos]
        examples[site] = SiteExamples(
            tuple(name for name, _ in rows),
            tuple(infos[path].digest for _, path in rows),
            tuple(found for _, path in rows for found in group_of(path)),
        )
    return examples


def _image_settings(requested: Custom, images: Sequence[ImageInfo]) -> Custom:
    side = median_low([min(image.size) for image in images]) if images else SIDES[0]
    pixels = max([candidate for candidate in SIDES if candidate <= side], default=SIDES[0])
    channels: Literal[1, 3] = 1 if all(image.mode in GREY for image in images) else 3
    model: Literal["small_cnn", "cnn_norm", "resnet10"] = "small_cnn" if pixels == 28 else "cnn_norm"
    if len(images) >= MANY and torch.cuda.is_available():
        model = "resnet10"
    return replace(requested, label=None, pixels=pixels, channels=channels, model=model, bits=_most_bits(images))


def _most_bits(images: Iterable[ImageInfo]) -> int | None:
    return max((image.bits for image in images if image.bits is not None), default=None)


def _image_facts(infos: Mapping[Path, ImageInfo], listing: ImageSites) -> tuple[str, ...]:
    facts = []
    if infos:
        by_size = sorted((image.size for image in infos.values()), key=lambda size: (min(size), max(size)))
        named = (("smallest", by_size[0]), ("median", by_size[(len(by_size) - 1) // 2]), ("largest", by_size[-1]))
        modes = Counter(image.mode for image in infos.values())
        facts += ["sizes    " + ", ".join(f"{name} {width} × {height}" for name, (width, height) in named)]
        facts += ["modes    " + ", ".join(f"{mode} {count}" for mode, count in sorted(modes.items()))]
        bits = _most_bits(infos.values())
        if bits is not None:
            facts += [f"grey     16-bit files use {bits} bits: 0 to {2**bits - 1} become 0 to 255, in every image"]
    facts += (
        [f"ignored  {number_of(len(listing.ignored), 'name')}, not counting hidden files"] if listing.ignored else []
    )
    return tuple(facts)


def _damage(damaged: Mapping[Path, str], skip_damaged: bool) -> Iterator[Finding]:
    if not damaged:
        return
    what = f"{number_of(len(damaged), 'image')} cannot be decoded:{listed([*damaged.values()])}"
    if skip_damaged:
        yield Finding("warning", what, "they are left out, since skip_damaged is set")
    else:
        yield Finding("error", what, "get them again, remove them, or leave them out with --skip-damaged")


def _windows(root: Path, infos: Mapping[Path, ImageInfo]) -> Iterator[Finding]:
    without = [str(path.relative_to(root)) for path, image in infos.items() if image.has_window is False]
    if without:
        yield Finding(
            "warning",
            f"DICOM files that do not say how their values are to be shown:{listed(without)}",
            "the whole range of their stored bits is used, so they may look flat; export them with a window",
        )


def _depths(root: Path, listing: ImageSites, infos: Mapping[Path, ImageInfo]) -> Iterator[Finding]:
    """Sites whose 16-bit grey uses different numbers of bits, and colours of 16 bits."""
    by_site = {
        site: _most_bits(infos[path] for paths in classes.values() for path in paths if path in infos)
        for site, classes in listing.files.items()
    }
    lines = [f"{site}: {bits}" for site, bits in by_site.items() if bits is not None]
    if len({bits for bits in by_site.values() if bits is not None}) > 1:
        yield Finding(
            "warning",
            f"16-bit grey uses different numbers of bits:{listed(lines)}",
            "all are divided by the same number, so that sites with fewer bits are darker; export all in the same way",
        )
    cut = [str(path.relative_to(root)) for path, image in infos.items() if image.is_cut]
    if cut:
        what = f"{number_of(len(cut), 'image')} with 16 bits for each colour:{listed(cut)}"
        yield Finding(
            "warning", what, "only the upper 8 bits are read; export them with 8 bits, or as grey if they are grey"
        )


def _empty(listing: ImageSites, examples: Mapping[str, SiteExamples]) -> Iterator[Finding]:
    for site, classes in listing.files.items():
        if site not in examples:
            yield Finding(
                "warning", f"{site} has no images", "the site is left out; add its images, or remove the folder"
            )
            continue
        empty = [name for name, paths in classes.items() if not paths]
        if empty:
            yield Finding("warning", f"{site} has empty class folders: {some(empty)}", "empty folders are ignored")


def _copies(root: Path, listing: ImageSites, infos: Mapping[Path, ImageInfo]) -> Iterator[Finding]:
    """Files with the same content: in several classes, at several sites, or within a class of a site."""
    places: dict[str, list[tuple[str, str, Path]]] = defaultdict(list)
    for site, classes in listing.files.items():
        for name, paths in classes.items():
            for path in (path for path in paths if path in infos):
                places[infos[path].digest].append((site, name, path))
    groups: dict[str, list[str]] = defaultdict(list)
    for copies in (copies for copies in places.values() if len(copies) > 1):
        named = " = ".join(str(path.relative_to(root)) for _, _, path in copies)
        kind = "class" if len({name for _, name, _ in copies}) > 1 else "site"
        groups[kind if len({(site, name) for site, name, _ in copies}) > 1 else "place"].append(named)
    advice = "they are used for training, never for testing"
    if groups["class"]:
        what = f"{number_of(len(groups['class']), 'image')} in more than one class:{listed(groups['class'])}"
        yield Finding("warning", what, f"keep the right one of each; until then, {advice}")
    if groups["site"]:
        what = f"{number_of(len(groups['site']), 'image')} at more than one site:{listed(groups['site'])}"
        yield Finding("warning", what, f"find out whose they are and remove the others; until then, {advice}")
    if groups["place"]:
        what = f"{number_of(len(groups['place']), 'image')} more than once in a class:{listed(groups['place'])}"
        yield Finding(
            "warning", what, "remove the copies; until then, all copies are used for training, or all for testing"
        )


def _misplaced(root: Path, ignored: Sequence[Path]) -> Iterator[Finding]:
    folders = [path for path in ignored if path.is_dir()]
    tables = [path for path in ignored if path.suffix.lower() in sites.TABLE_SUFFIXES and path not in folders]
    images = [path for path in ignored if path.suffix.lower() in SUFFIXES and path not in folders]
    others = [path for path in ignored if path not in {*folders, *tables, *images}]
    for paths, what, advice in (
        (images, "images outside class folders", "put them into folder/site/class/ if they are examples"),
        (folders, "folders inside class folders", "put their images into the class folder itself"),
        (tables, "tables among the images", "they are not read; to use them, put them into a separate folder"),
        (others, "files of other kinds", f"only {', '.join(sorted(SUFFIXES))} are read; export others as PNG or TIFF"),
    ):
        if paths:
            yield Finding("warning", f"{what}:{listed([str(path.relative_to(root)) for path in paths])}", advice)
