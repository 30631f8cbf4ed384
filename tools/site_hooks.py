"""What `mkdocs build` does to the pages of docs/ so that they work as a site as they do in the repository.

Links to files outside docs/ lead to the repository if `repo_url` is set, and become plain text if not. The figures of
methods, which the repository draws with mermaid, become HTML: mermaid would be fetched from a network.
"""

import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)")
MARK = re.compile(r"^<!-- generated: .* -->$", re.MULTILINE)
FIGURE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BOX = re.compile(r'(?P<name>\w+)(?:\["|\[\(")(?P<text>[^"]*)(?:"\]|"\)\])')


def on_config(config: Any) -> Any:
    """Every method's page is in the navigation, without a list to add it to."""
    [methods] = [section["Methods"] for section in config.nav if "Methods" in section]
    pages = sorted(path.name for path in Path(config.docs_dir, "methods").glob("*.md"))
    methods += [f"methods/{name}" for name in pages if name != "README.md"]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return rewritten(markdown, page.file.src_uri, config.repo_url)


def rewritten(markdown: str, page: str, repo_url: str | None = None) -> str:
    """A page's text as the site needs it. `page` is its path in docs/."""
    markdown = FIGURE.sub(lambda match: figure(match[1]), markdown)
    markdown = MARK.sub("", markdown)
    parts = FENCE.split(markdown)
    return "".join(part if k % 2 else _with_links(part, page, repo_url) for k, part in enumerate(parts))


def _with_links(text: str, page: str, repo_url: str | None) -> str:
    return LINK.sub(lambda match: _link(match, page, repo_url), text)


def _link(match: "re.Match[str]", page: str, repo_url: str | None) -> str:
    text, (path, _, anchor) = match["text"], match["target"].partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return match[0]
    outside = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if outside.startswith("docs/"):
        return match[0]
    if repo_url:
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{outside}{'#' + anchor if anchor else ''})"
    if outside.endswith(text.strip("`").rstrip("/")):
        return f"`{text.strip('`')}`"
    return f"{text} (`{outside}`)"


def figure(mermaid: str) -> str:
    """The round of a method: what the server does and sends, what a client does, keeps and sends."""
    boxes = {match["name"]: match["text"] for match in BOX.finditer(mermaid)}
    if not {"server", "message", "step", "upload", "memory"} <= boxes.keys():
        raise ValueError("a figure must be that of a method's page: server, message, step, upload and memory")
    cell = {name: escape(text.partition(": ")[2] or text) for name, text in boxes.items()}
    return (
        '<div class="round">\n'
        f'<div class="side"><b>Server</b><p>{cell["server"]}</p></div>\n'
        f'<div class="ways"><p><b>message →</b> {cell["message"]}</p><p><b>← upload</b> {cell["upload"]}</p></div>\n'
        f'<div class="side"><b>Client</b><p>{cell["step"]}</p><p><b>keeps</b> {cell["memory"]}</p></div>\n'
        "</div>\n"
    )
