"""Writes what documents take from the code: `make docs`. With --check it only compares.

Generated text stands between `generated: begin NAME` and `generated: end NAME`. The rest of a page is written by hand.
A method without a page gets one.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import protofed
from protofed.api.describe import MethodText, settings_of, text_of
from protofed.api.method import Method
from protofed.methods import METHODS, bases_of

MethodClass = type[Method[Any, Any, Any, Any]]

ROOT = Path(__file__).parent.parent
COMMAND = "make docs"

PAGE = """# {title}

<!-- generated: begin about -->
<!-- generated: end about -->

## What it does

{summary}

```mermaid
flowchart LR
    server["Server: {server}"] --> message["message: what the server knows"]
    message --> step
    step --> upload["upload: {sends}"]
    upload --> server
    subgraph client["Client"]
        step["trains"]
        memory[("memory: {keeps}")]
    end
```

## Use

```toml
[task]
name = "minidigits"

[method]
name = "{name}"

[training]
rounds = 20
```

```python
import protofed

result = protofed.run(protofed.{class_name}(), "minidigits", rounds=20)
```

## Settings

<!-- generated: begin settings -->
<!-- generated: end settings -->

## What is sent and kept

<!-- generated: begin exchange -->
<!-- generated: end exchange -->

## Departures

<!-- generated: begin departures -->
<!-- generated: end departures -->

## When to use it

Not measured here yet.
"""


def blocks_by_file(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Every file with generated text, and its blocks."""
    index = "\n".join(group_table(heading) for heading in METHODS.groups())
    yield root / "docs/methods/README.md", {"methods": f"\n{index}"}
    yield root / "README.md", {"methods": readme_table()}
    yield root / "src/protofed/__init__.py", {"exports": exports()}
    for name, method in METHODS.items():
        text = text_of(method)
        yield (
            root / f"docs/methods/{name}.md",
            {
                "about": about_block(text),
                "settings": settings_table(method),
                "exchange": f"- **Sends:** {text.sends}\n- **Keeps:** {text.keeps}\n- **Server:** {text.server}",
                "departures": "\n".join(f"{k}. {item}" for k, item in enumerate(text.departures, 1)) or "None.",
            },
        )


def with_blocks(path: Path, blocks: dict[str, str]) -> str:
    """The text of a file with its generated blocks filled in. A page that does not exist starts from the template."""
    text = path.read_text(encoding="utf-8") if path.exists() else new_page(path.stem)
    for name, content in blocks.items():
        block = re.compile(rf"(generated: begin {name}\b.*\n)(?:.*\n)*?(.*generated: end {name}\b)")
        before, *middle = block.split(text)
        if len(middle) != 3:
            raise SystemExit(f"{path}: there must be one pair of marks 'generated: begin {name}' and 'end {name}'")
        begin, end, after = middle
        text = f"{before}{begin}{content}\n{end}{after}"
    return text


def about_block(text: MethodText) -> str:
    return "\n\n".join(part for part in (sentence(text.summary), text.reference) if part)


def settings_table(method: MethodClass) -> str:
    rows = [
        [f"`{setting.name}`", setting.kind, f"`{json.dumps(setting.default)}`", setting.meaning]
        for setting in settings_of(method)
    ]
    text = table(["setting", "values", "default", "meaning"], rows) if rows else "None."
    bases = ", ".join(f"[{name}]({name}.md)" for name in bases_of(method))
    return f"{text}\n\n`base` is one of: {bases}." if bases else text


def group_table(heading: str) -> str:
    rows = []
    for name in METHODS.groups()[heading]:
        text, has_public = text_of(METHODS[name]), METHODS[name].public is not Method.public
        judged_by = "public model" if has_public else "clients' own models"
        link = f"[{name}]({name}.md)"
        summary = sentence(text.summary) + (" A reconstruction." if is_reconstruction(METHODS[name]) else "")
        rows.append([link, summary, text.sends.rstrip("."), text.keeps.rstrip("."), judged_by])
    columns = ["method", "in one line", "sends", "keeps", "judged by"]
    return f"## {sentence(heading)}\n\n{table(columns, rows)}\n"


def readme_table() -> str:
    rows = []
    for heading, names in METHODS.groups().items():
        links = (f"[{label(METHODS[name])}](docs/methods/{name}.md)" for name in names)
        rows.append([heading, " · ".join(links)])
    return table([f"{len(METHODS)} methods", ""], rows)


def label(method: MethodClass) -> str:
    """The title without what stands behind it in brackets or after a comma."""
    name = re.split(r" \(|, ", text_of(method).title)[0]
    return f"{name} (reconstruction)" if is_reconstruction(method) else name


def is_reconstruction(method: MethodClass) -> bool:
    return "reconstruction" in method.tags


def exports() -> str:
    """What `protofed` offers: the imports for type checkers, the modules of methods, and all names, in ruff's order."""
    methods = {method.__name__: method.__module__ for method in METHODS.values()}
    modules = protofed._MODULES | methods
    imports = [
        f"    from {module} import {', '.join(sorted((n for n in modules if modules[n] == module), key=ruff_order))}"
        for module in sorted({*modules.values()})
    ]
    entries = [f'    "{name}": "{methods[name]}",' for name in sorted(methods, key=ruff_order)]
    names = [f'    "{name}",' for name in sorted([*modules, "__version__"], key=ruff_order)]
    lines = ["if TYPE_CHECKING:", *imports, "", "_METHODS = {", *entries, "}", "", "__all__ = [", *names, "]"]
    return "\n".join(lines)


def ruff_order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions."""
    return not name.isupper(), not name[0].isupper(), name


def new_page(name: str) -> str:
    text, class_name = text_of(METHODS[name]), METHODS[name].__name__
    parts = {part: getattr(text, part).rstrip(".").replace('"', "'") for part in ("sends", "keeps", "server")}
    return PAGE.format(title=text.title, name=name, class_name=class_name, summary=sentence(text.summary), **parts)


def table(columns: list[str], rows: list[list[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def stale(root: Path) -> dict[Path, str]:
    """The files that do not hold what they should, with what they should hold."""
    import reference_docs  # which uses this module

    wanted = {path: with_blocks(path, blocks) for path, blocks in blocks_by_file(root)} | reference_docs.pages(root)
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text}


def main() -> None:
    changed = stale(ROOT)
    names = "\n".join(f"  {path.relative_to(ROOT)}" for path in changed)
    if "--check" in sys.argv[1:]:
        raise SystemExit(f"stale, run `{COMMAND}`:\n{names}" if changed else 0)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    print(f"written:\n{names}" if changed else "all documents are up to date")


if __name__ == "__main__":
    main()
