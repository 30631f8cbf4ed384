"""Pictures of a federation: what they show, counted by hand, and files of the size that was planned."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from protofed.api.task import Task
from protofed.data.batches import Data
from protofed.errors import BadInput
from protofed.reports.federation import (
    Holdings,
    clients_by_domain,
    colours,
    contact_sheet,
    holdings,
    layout,
    picture_of_holdings,
    picture_of_images,
    pictures,
    sizes,
    who_holds_what,
)
from protofed.reports.figures import COLOURS, DPI


def images(labels: Sequence[int], start: int = 0) -> Data:
    """Grey images of 2 × 2, each of a brightness of its own: start, start + 1, …"""
    x = torch.arange(start, start + len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Data.of(x, torch.tensor(labels))


def task_of(clients: Mapping[str, Data], domain_of: Mapping[str, str], num_classes: int = 3) -> Task:
    example = next(iter(clients.values())).rows(torch.tensor([0]))
    tests = dict.fromkeys(("town", "sea"), example)
    return Task(clients, tests, num_classes, lambda client: {}, domain_of, name="made-up")


@pytest.fixture
def task() -> Task:
    # The clients' names, the alphabet of the domains and the order of the mapping all disagree with the right order.
    clients = {
        "d": images([1, 1, 0], 0),
        "c": images([2, 2, 2, 2], 10),
        "b": images([0, 0, 1], 20),
        "a": images([1], 30),
    }
    return task_of(clients, {"d": "town", "b": "town", "c": "sea"})


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def test_clients_stand_by_domain_in_the_order_of_the_tests_then_by_name_and_those_of_no_domain_last(task: Task) -> None:
    groups = clients_by_domain(task)
    assert list(groups.items()) == [("town", ["b", "d"]), ("sea", ["c"]), ("no domain", ["a"])]


def test_where_nobody_has_a_domain_all_clients_are_one_group(task: Task) -> None:
    assert clients_by_domain(task_of(task.clients, {})) == {"all clients": ["a", "b", "c", "d"]}


def test_holdings_count_each_clients_rows_of_each_class(task: Task) -> None:
    held = holdings(task)
    assert held.clients == ("b", "d", "c", "a")
    assert held.domains == ("town", "town", "sea", "no domain")
    assert held.counts.tolist() == [[2, 1, 0], [1, 2, 0], [0, 0, 4], [0, 1, 0]]


def test_only_a_clients_own_rows_of_a_shared_store_count() -> None:
    store = images([0, 1, 2, 2, 2])
    task = task_of({"a": store.rows(torch.tensor([0, 2])), "b": store.rows(torch.tensor([1, 3, 4]))}, {})
    assert holdings(task).counts.tolist() == [[1, 0, 1], [0, 1, 2]]


def test_up_to_eight_domains_have_the_colours_of_the_other_pictures() -> None:
    assert colours(["x", "y"]) == {"x": COLOURS[0], "y": COLOURS[1]}
    assert tuple(colours([str(k) for k in range(8)]).values()) == COLOURS


@pytest.mark.parametrize("number", [9, 20])
def test_more_domains_have_distinct_colours_from_dark_to_light_none_of_them_near_white(number: int) -> None:
    found = list(colours([str(k) for k in range(number)]).values())
    light = [float(np.dot(to_rgb(colour), (0.299, 0.587, 0.114))) for colour in found]
    assert len(set(found)) == number
    assert light == sorted(light)
    assert light[-1] < 0.8


@pytest.mark.parametrize(
    ("largest", "shown"),
    # 144 / 16 = 9, 144 / 4 = 36 and 144, each rounded down to 1, 2 or 5 with zeros behind
    [(144, (5, 20, 100)), (1, (1,)), (3, (1, 2)), (29, (1, 5, 20)), (5000, (200, 1000, 5000))],
)
def test_the_legend_of_areas_shows_round_numbers_that_occur(largest: int, shown: tuple[int, ...]) -> None:
    assert sizes(largest) == shown


def test_bubbles_stand_at_client_and_class_with_areas_proportional_to_counts_in_the_domains_colour(task: Task) -> None:
    (bubbles,) = axes_of(picture_of_holdings(task)).collections
    found = {
        tuple(place): area for place, area in zip(bubbles.get_offsets().tolist(), bubbles.get_sizes(), strict=True)
    }
    # (class, row of the client): the six numbers of the holdings that are not zero
    numbers = {(0, 0): 2, (1, 0): 1, (0, 1): 1, (1, 1): 2, (2, 2): 4, (1, 3): 1}
    assert found == pytest.approx({place: found[2, 2] * number / 4 for place, number in numbers.items()})
    paint = {tuple(p): to_hex(c) for p, c in zip(bubbles.get_offsets().tolist(), bubbles.get_facecolor(), strict=True)}
    assert [paint[place] for place in numbers] == [*[COLOURS[0]] * 4, COLOURS[1], COLOURS[2]]


def test_the_largest_bubble_fits_its_cell(task: Task) -> None:
    (bubbles,) = axes_of(picture_of_holdings(task)).collections
    # Four clients and three classes have cells of half an inch, which are 36 points.
    assert 30 < bubbles.get_sizes().max() ** 0.5 <= 36


def test_totals_stand_at_the_right_of_clients_and_above_classes(task: Task) -> None:
    texts = {text.get_position(): text.get_text() for text in axes_of(picture_of_holdings(task)).texts}
    at_right = {y: text for (x, y), text in texts.items() if x > 2.5}
    at_top = {x: text for (x, y), text in texts.items() if y < -0.5}
    assert at_right == {0: "3", 1: "3", 2: "4", 3: "1"}
    assert at_top == {0: "3", 1: "4", 2: "4"}


def test_names_run_downwards_and_the_legends_name_domains_and_numbers(task: Task) -> None:
    figure = picture_of_holdings(task)
    axes = axes_of(figure)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "d", "c", "a"]
    assert axes.yaxis_inverted()
    legends = [
        [text.get_text() for text in child.get_texts()] for child in axes.get_children() if isinstance(child, Legend)
    ]
    assert sorted(legends) == [["1", "2"], ["town", "sea", "no domain"]]
    assert figure.texts[0].get_text() == "made-up: 4 clients, 3 classes, 11 examples"


def held(rows: int, columns: int) -> Holdings:
    return Holdings(("client",) * rows, ("town",) * rows, np.ones((rows, columns), np.int64))


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (4, 200), (100, 2), (100, 100), (100, 200)])
def test_every_label_has_room_and_the_picture_stays_below_four_thousand_pixels(rows: int, columns: int) -> None:
    plan = layout(held(rows, columns), "title")
    assert 72 * plan.cell > 1.2 * plan.points
    assert DPI * max(plan.width, plan.height) < 4_000
    left, bottom, width, height = plan.box
    assert min(left, bottom) > 0
    assert left + width < 1
    assert bottom + height < 1
    # Cells are square in inches.
    assert width * plan.width / columns == pytest.approx(plan.cell)
    assert height * plan.height / rows == pytest.approx(plan.cell)


def test_where_classes_are_many_only_some_are_named() -> None:
    few = task_of({"a": images([0, 2])}, {})
    many = task_of({"a": images([0, 2])}, {}, num_classes=200)
    assert list(axes_of(picture_of_holdings(few)).get_xticks()) == [0, 1, 2]
    assert list(axes_of(picture_of_holdings(many)).get_xticks()) == list(range(0, 200, 2))


def test_a_long_title_is_not_cut_off() -> None:
    title = "x" * 100
    figure = Figure()
    text = figure.text(0, 0, title, fontsize=11, fontweight="bold")
    assert layout(held(2, 2), title).width * figure.dpi > text.get_window_extent().width


def test_the_bubbles_are_saved_as_a_png_of_the_planned_size(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "new" / "holdings.png"
    who_holds_what(task, path)
    plan = layout(holdings(task), "made-up: 4 clients, 3 classes, 11 examples")
    assert png_size(path) == pytest.approx((DPI * plan.width, DPI * plan.height), abs=1)
    assert [file.name for file in path.parent.iterdir()] == ["holdings.png"]


def shown(task: Task, number: int) -> dict[str, list[tuple[int, int]]]:
    """Brightness and label of the chosen images."""
    return {d: [(int(p.image[0, 0, 0]), p.label) for p in row] for d, row in pictures(task, number).items()}


def test_a_row_has_the_first_image_of_each_class_then_second_ones_in_the_order_of_classes(task: Task) -> None:
    # Town is client b, brightness 20, 21, 22 of classes 0, 0, 1, and then d, 0, 1, 2 of classes 1, 1, 0.
    found = shown(task, 3)
    assert found["town"] == [(20, 0), (21, 0), (22, 1)]
    assert shown(task, 4)["town"] == [(20, 0), (21, 0), (22, 1), (0, 1)]
    assert shown(task, 2)["town"] == [(20, 0), (22, 1)]
    assert found["sea"] == [(10, 2), (11, 2), (12, 2)]
    assert found["no domain"] == [(30, 1)]


def test_images_are_a_clients_own_rows_of_a_shared_store() -> None:
    store = images([0, 1, 2, 0])
    assert shown(task_of({"a": store.rows(torch.tensor([3, 1]))}, {}), 5) == {"all clients": [(3, 0), (1, 1)]}


def test_each_domain_has_a_row_with_its_name_and_each_image_its_class(task: Task) -> None:
    figure = picture_of_images(task, 3)
    names = [text.get_text() for text in figure.texts]
    assert names == ["made-up: training images", "town", "sea", "no domain"]
    assert [axes.get_title() for axes in figure.axes] == ["0", "0", "1", "2", "2", "2", "1"]
    heights = [round(axes.get_position().y0, 3) for axes in figure.axes]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_bytes_are_shown_from_black_to_white_and_colours_in_their_places() -> None:
    x = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    x[0, 0], x[1, 2] = 255, 51  # red; a dark blue of 51 / 255 = 0.2
    colour = task_of({"a": Data.of(x, torch.tensor([0, 1]))}, {})
    first, second = (axes.images[0].get_array() for axes in picture_of_images(colour, 2).axes)
    assert first is not None
    assert second is not None
    assert first.shape == (2, 2, 3)
    assert first[0, 0].tolist() == pytest.approx([1, 0, 0])
    assert second[0, 0].tolist() == pytest.approx([0, 0, 0.2])


def test_a_grey_image_is_not_stretched_to_its_own_range() -> None:
    (axes,) = picture_of_images(task_of({"a": images([0], start=51)}, {}), 1).axes
    assert axes.images[0].get_clim() == (0, 1)
    assert np.asarray(axes.images[0].get_array()).tolist() == [[pytest.approx(0.2)] * 2] * 2


def test_the_contact_sheet_is_a_png_with_room_for_ten_images_and_every_domain(task: Task, tmp_path: Path) -> None:
    sizes_found = []
    for number in (2, 3):
        contact_sheet(task, tmp_path / "sheet.png", per_domain=number)
        sizes_found.append(png_size(tmp_path / "sheet.png"))
    (narrow, low), (wide, high) = sizes_found
    assert wide - narrow == pytest.approx(0.75 * DPI, abs=1)
    assert low == high == pytest.approx(DPI * (0.45 + 3 * 0.97), abs=1)


def test_examples_that_are_not_images_are_refused_in_words(tmp_path: Path) -> None:
    vectors = task_of({"a": Data.of(torch.zeros(2, 12), torch.tensor([0, 1]))}, {})
    with pytest.raises(BadInput, match=r"made-up: client 'a' holds examples of shape \(12,\).*is for images"):
        contact_sheet(vectors, tmp_path / "sheet.png")
    planes = task_of({"a": Data.of(torch.zeros(2, 5, 4, 4), torch.tensor([0, 1]))}, {})
    with pytest.raises(BadInput, match="one or three channels"):
        contact_sheet(planes, tmp_path / "sheet.png")
    assert not list(tmp_path.iterdir())


def test_a_sheet_of_no_images_is_refused(task: Task, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least one image"):
        contact_sheet(task, tmp_path / "sheet.png", per_domain=0)


def test_a_name_with_dollars_is_a_name_and_no_formula(tmp_path: Path) -> None:
    client = r"$\nonsense$"
    task = task_of({client: images([0, 1])}, {})
    who_holds_what(task, tmp_path / "holdings.png")
    assert png_size(tmp_path / "holdings.png")


def test_the_same_task_gives_the_same_bytes(task: Task, tmp_path: Path) -> None:
    for name in ("first", "second"):
        who_holds_what(task, tmp_path / name)
        contact_sheet(task, tmp_path / f"{name} sheet")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert (tmp_path / "first sheet").read_bytes() == (tmp_path / "second sheet").read_bytes()
