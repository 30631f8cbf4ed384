"""The page in a real Chromium. Skipped where there is none, or no chromedriver."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clocks import wait_for
from page_doubles import a_round, written
from protofed.reports.page.make import page_facts, write_page
from protofed.reports.page.server import Watched, server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver: apt-get install chromium chromium-driver"
)
SWITCHES = (
    *("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage"),
)
HOSTILE = '<img src=x onerror="document.title=1">'


class Browser:
    """A page in Chromium, and what is asked of it."""

    def __init__(self, profile: Path) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for switch in (*SWITCHES, f"user-data-dir={profile}"):
            options.add_argument(f"--{switch}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.resize(1440)
        self.prefer("light")

    def open(self, address: str) -> None:
        self.driver.get(address)

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, code: str, *words: object) -> Any:
        return self.driver.execute_script(code, *words)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )
        return found

    def click(self, selector: str, text: str = "") -> None:
        code = (
            "const all = [...document.querySelectorAll(arguments[0])];"
            "const found = all.find((e) => e.textContent.includes(arguments[1]));"
            "found.scrollIntoView({ block: 'center' }); return found"
        )
        self.run(code, selector, text).click()

    def press(self, selector: str, *keys: str) -> None:
        """Keys for what has the focus after it is given to this element; without one, for what has it now."""
        if selector:
            self.run("document.querySelector(arguments[0]).focus()", selector)
        self.driver.switch_to.active_element.send_keys(*keys)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    _, page = page_facts([runs], HOSTILE, "protofed report", True, lambda what: None)
    page["tasks"][0]["groups"][1]["runs"][0]["failures"] = [[1, "ink-0", HOSTILE]]
    write_page(page, path)
    return path


@pytest.fixture
def page(chromium: Browser, file: Path) -> Iterator[Browser]:
    """The page, opened anew; whatever a test does with it, it may complain of nothing and ask nobody."""
    chromium.resize(1440)
    chromium.prefer("light")
    chromium.complaints(), chromium.requests()  # of the test before
    chromium.open(file.as_uri())
    chromium.run("localStorage.clear()")
    yield chromium
    assert chromium.complaints() == []
    assert [url for url in chromium.requests() if not url.startswith((file.as_uri(), "data:"))] == []


ROWS = "#results tbody th"


def test_the_headline_comes_first_and_texts_are_texts(page: Browser) -> None:
    assert page.texts("h1") == [HOSTILE]
    (lead,) = page.texts(".lead")
    assert "is best on minidigits" in lead
    assert page.run("return [document.title, document.images.length]") == [HOSTILE, 0]
    assert page.run("return document.querySelectorAll('main svg').length") > 8


def test_tables_are_sorted_and_filtered(page: Browser) -> None:
    first = page.texts(ROWS)
    page.click("#results thead button", "own, %")
    assert page.texts(ROWS) == first[::-1]
    page.press("", "\ue007")  # Enter: the focus is still on the column
    assert page.texts(ROWS) == first
    page.click("#clients thead button", "examples")
    assert page.run("return document.querySelector('#clients th[aria-sort=descending]').textContent") == "examples"
    numbers = [int(text) for text in page.texts("#clients tbody td:nth-child(3)")]
    assert numbers == sorted(numbers, reverse=True)
    page.press("#clients input[type=search]", "street")
    assert sorted(page.texts("#clients tbody th")) == ["street-0", "street-1", "street-2"]
    assert page.texts("#clients [role=status]") == ["3 of 12 rows"]


def test_legends_toggle_methods_domains_and_clients(page: Browser) -> None:
    assert page.texts("#clients thead th")[-2:] == ["fedavg", "fedproto"]
    page.click("#methods .chip", "fedproto")
    assert page.texts("#clients thead th")[-1] == "fedavg"
    assert page.texts("#confusion h3") == ["fedavg"]
    page.click("#methods .chip", "fedproto")
    page.click("#curves .switch button", "By domain")
    assert page.texts("#curves .panel h3") == ["pen", "ink", "street", "print"]
    page.click("#curves .chip", "ink")
    assert page.texts("#curves .panel h3") == ["pen", "street", "print"]
    page.click("#curves .switch button", "By client")
    page.click("#curves .chip", "ink-1")
    assert len(page.texts("#curves .panel h3")) == 11
    page.click("#curves .switch button", "Each seed")
    lines = page.run(
        "return document.querySelector('#curves .panel svg').querySelectorAll('[aria-label=line] path').length"
    )
    assert lines == 3  # two seeds of fedavg, one of fedproto


def test_hovering_names_a_point(page: Browser) -> None:
    code = (
        "const svg = document.querySelector('#curves svg'), line = svg.querySelector('[aria-label=line] path');"
        "svg.scrollIntoView({ block: 'center' });"
        "const at = line.getPointAtLength(0).matrixTransform(line.getScreenCTM());"
        "return [at.x, at.y]"
    )
    x, y = page.run(code)
    for step in (3, 2, 1):
        place = {"type": "mouseMoved", "x": x + step, "y": y}
        page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", place)
    wait_for(lambda: "round 1: " in "".join(page.texts("#curves [aria-label=tip]")))


def test_the_slider_goes_over_the_kept_rounds_by_keyboard(page: Browser) -> None:
    assert page.texts("#features output") == ["round 2"]
    before = page.run("return document.querySelector('#features .panel svg').innerHTML")
    page.press("#features input[type=range]", "\ue012")  # left
    assert page.texts("#features output") == ["round 1"]
    assert page.run("return document.querySelector('#features .panel svg').innerHTML") != before


def test_a_client_and_a_run_open_and_close_by_keyboard(page: Browser) -> None:
    page.press("#clients tbody button", "\ue007")
    assert page.run("return document.querySelector('dialog').open")
    assert page.texts("#detail-title") == ["ink-0"]
    shown = "".join(page.texts("#detail-body"))
    assert "150 training examples" in shown
    assert HOSTILE in shown  # why a reply did not count
    assert len(page.texts("#detail-body .panel h3")) == 2  # a matrix of each method
    page.press("", "\ue00c")  # Escape
    assert not page.run("return document.querySelector('dialog').open")
    assert page.run("return document.activeElement.textContent") == "ink-0"
    page.click("#runs tbody button", "fedproto")
    assert "training.optimizer.lr" in page.texts("#detail-body th")
    page.click("#close")


def test_settings_that_differ(page: Browser) -> None:
    names = page.texts("#settings tbody th")
    assert "method.name" in names
    assert "training.rounds" not in names
    page.click("#settings .switch button", "All settings")
    assert "training.rounds" in page.texts("#settings tbody th")


def test_it_is_dark_where_the_system_is_and_can_be_turned(page: Browser) -> None:
    def ground() -> str:
        colour: str = page.run("return getComputedStyle(document.body).backgroundColor")
        return colour

    light = ground()
    page.prefer("dark")
    wait_for(lambda: page.run("return document.documentElement.dataset.theme") == "dark")
    assert ground() != light
    page.click("#theme")
    assert ground() == light
    page.driver.refresh()
    assert ground() == light, "what was chosen is forgotten"
    page.run("localStorage.clear()")


@pytest.mark.parametrize("kind", ["By domain", "By client", "Together"])
def test_a_phone_needs_no_scrolling_sideways(page: Browser, kind: str) -> None:
    page.resize(390)
    page.driver.refresh()
    page.click("#curves .switch button", kind)
    assert page.run("return document.documentElement.scrollWidth") == 390
    page.press("#clients tbody button", "\ue007")
    assert page.run("return document.querySelector('dialog').getBoundingClientRect().width") <= 390
    page.press("", "\ue00c")


def test_the_live_page_follows_a_run(chromium: Browser, tmp_path: Path) -> None:
    folder = written(tmp_path / "a", [a_round(1, 0.2)], {"training": {"rounds": 2}}, is_done=False)
    chromium.complaints(), chromium.requests()
    with server(Watched([tmp_path], "protofed watch", with_models=False)) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            address = f"http://127.0.0.1:{listening.server_port}/"
            chromium.open(address)
            assert "15.0 %" in chromium.texts(".lead")[0]
            (folder / "rounds.jsonl").write_text("".join(json.dumps(a_round(k, 0.6)) + "\n" for k in (1, 2)))
            (folder / "done").write_text("")
            wait_for(lambda: "45.0 %" in chromium.texts(".lead")[0])
            assert "all done" in chromium.texts("#made")[0]
            asked = {url.removeprefix(address) for url in chromium.requests() if not url.startswith("data:")}
            assert asked == {"", "facts.json"}
            assert chromium.complaints() == []
            chromium.open("about:blank")
        finally:
            listening.shutdown()
            thread.join()
