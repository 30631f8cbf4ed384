"""The page as one HTML file: facts, scripts and style inside, and a policy that allows these and nothing else."""

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import Any

from protofed.printable import one_line

SCRIPTS = ("core.js", "tables.js", "charts.js", "models.js", "app.js")
PLOT_STYLE = (
    ":where(.plot) {\n  --plot-background: white;\n  display: block;\n  height: auto;\n  height: intrinsic;\n"
    "  max-width: 100%;\n}\n:where(.plot text),\n:where(.plot tspan) {\n  white-space: pre;\n}"
)
"""The one style that Observable Plot adds to its pictures, with the class name that the page gives them."""


def document(facts: dict[str, Any]) -> str:
    """The page with these facts. A page that is live may ask the server that it came from for new ones."""
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    d3, plot = _asset("vendor/d3.min.js"), _asset("vendor/plot.umd.min.js")
    parts = {
        "POLICY": policy([d3, plot, script], [style, PLOT_STYLE], bool(facts["live"])),
        "TITLE": html.escape(one_line(str(facts["title"]))),
        "STYLE": style,
        "FACTS": embedded(facts),
        "D3": d3,
        "PLOT": plot,
        "SCRIPT": script,
    }
    pieces = _asset("page.html").split("@@")  # text, name, text, name, …: what is put in is not searched again
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def embedded(facts: dict[str, Any]) -> str:
    """JSON that can stand in a script element: no text of a run can end it or begin a comment."""
    text = to_json(facts)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")  # guard: page-escapes-facts


def to_json(facts: dict[str, Any]) -> str:
    return json.dumps(printed(facts), ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def printed(value: Any) -> Any:
    """The same with what cannot be seen in texts and names shown as escapes."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {one_line(str(key)): printed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [printed(one) for one in value]
    return value


def policy(scripts: list[str], styles: list[str], is_live: bool) -> str:
    """Only these scripts and styles, no picture, no form, and no address but the page's own if it is live."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "connect-src 'self'" if is_live else "connect-src 'none'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return resources.files("protofed.reports.page").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
