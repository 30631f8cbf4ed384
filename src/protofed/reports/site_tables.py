"""Tables of comparisons on a user's own data: what each site gets comes first, beside local training alone."""

from collections.abc import Sequence
from statistics import fmean

from protofed.printable import one_line
from protofed.reports.tables import (
    ALL_MODELS_NOTE,
    NOTES,
    Column,
    Numbers,
    Row,
    Sheet,
    domain_sheet,
    gain,
    headline_of,
    paired_differences,
    sheets,
)

SITES_NOTE = (
    "mean: over the sites that train. Δ: points of the mean above local training alone. majority: the accuracy of "
    "always naming the most frequent class.\n"
    "*: every site has a model of its own."
)
BALANCED_NOTE = (
    "Balanced accuracy is the mean of the classes' sensitivities: always naming one class gives 1 divided by the "
    "number of classes that a site tests."
)


def sheets_of(rows: Sequence[Row], domains: Sequence[str], is_own_data: bool) -> list[tuple[str, Sheet, str]]:
    """The tables of accuracies, the one that decides first: title, table and note."""
    if not is_own_data:
        return sheets(rows, domains)
    return [
        ("What each site gets, accuracy in %", site_sheet(rows, "accuracy"), SITES_NOTE),
        ("What each site gets, balanced accuracy in %", site_sheet(rows, "balanced_accuracy"), BALANCED_NOTE),
        ("What each site gets, macro-F1 in %", site_sheet(rows, "macro_f1"), ""),
        ("Accuracy on all sites, foreign ones too, %", domain_sheet(rows, domains), ALL_MODELS_NOTE),
    ]


def note_of(rows: Sequence[Row], is_own_data: bool) -> str:
    """What must be known to read the first table."""
    return SITES_NOTE if is_own_data else NOTES[headline_of(rows)]


def at_site(site: str, name: str) -> Column:
    """What a site sees at home; one that was held out, as a new one."""
    return Column(site, lambda numbers: {**numbers.sites, **numbers.new_sites}.get(site, {}).get(name))


def over_sites(name: str) -> Column:
    """The mean over the sites that train."""

    def read(numbers: Numbers) -> float | None:
        values = [scores[name] for scores in numbers.sites.values() if name in scores]
        return fmean(values) if values else None

    return Column("mean", read)


def site_sheet(rows: Sequence[Row], measure: str) -> Sheet:
    """What each site sees at home, the mean, and the gain over local training alone. Below the methods: what naming the
    most frequent class would give, and how many examples were tested."""
    numbers = [seed for row in rows for seed in row.seeds]
    home = list(dict.fromkeys(site for one in numbers for site in one.sites))
    held_out = list(dict.fromkeys(site for one in numbers for site in one.new_sites))
    columns, total = [at_site(site, measure) for site in (*home, *held_out)], over_sites(measure)
    lines = [[row.name, *map(row.cell, [*columns, total]), gain(row, rows, [total])] for row in rows]
    rates = Row("majority", numbers)
    if measure == "accuracy":
        guesses = [at_site(site, "majority_rate") for site in (*home, *held_out)]
        lines.append(["majority", *(f"{100 * rates.mean(one):.1f}" for one in guesses), "", ""])
    tested = {site: count for one in numbers for site, count in one.tested.items()}
    if tested:
        lines.append(["test examples", *(str(tested.get(site, "–")) for site in (*home, *held_out)), "", ""])
    return Sheet(["method", *home, *(f"{site} (held out)" for site in held_out), "mean", "Δ"], lines)


def worse_than_local(rows: Sequence[Row]) -> list[str]:
    """Where methods do worse than local training alone, in words; and that it is missing, if it is."""
    local = next((row for row in rows if row.is_reference and row.seeds), None)
    if local is None:
        return ['Local training alone is not among the methods: add name = "local" to see what the others bring.']
    found = []
    for row in rows:
        if row is local or not row.seeds:
            continue
        sites = dict.fromkeys(site for one in (*row.seeds, *local.seeds) for site in one.sites)
        pairs = {site: paired_differences(row, local, at_site(site, "balanced_accuracy")) for site in sites}
        worse = [f"{one_line(site)} ({fmean(d):+.1f})" for site, d in pairs.items() if d and round(fmean(d), 1) < 0]
        if worse:
            found.append(f"{row.label} is worse than local training alone at {', '.join(worse)}")
    if not found:
        return []
    return [f"{'; '.join(found)}. In points of balanced accuracy, mean over seeds."]
