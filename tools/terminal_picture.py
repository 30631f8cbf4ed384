"""Makes a picture of what a program printed, as a terminal shows it.

    python tools/terminal_picture.py OUT.png "server" "protofed serve first.toml …" < captured.txt

The captured text is drawn as it is. The pictures of docs/tutorials/federation.md are made from what the processes of
tests/federation/test_tutorial.py print: `pytest -m slow --basetemp DIR tests/federation/test_tutorial.py` leaves it in
DIR, in files ending in .out.
"""

import sys
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

SIZE = 16
MARGIN, BAR = 18, 34
BACK, BAR_BACK, TEXT, DIM, PROMPT = "#11161d", "#222a35", "#d8dee6", "#8b97a6", "#7fd18b"


def picture(title: str, command: str, text: str) -> Image.Image:
    lines = text.rstrip("\n").split("\n")
    fonts = [
        font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans Mono", weight=w)) for w in (400, 700)
    ]
    plain, bold = (ImageFont.truetype(path, SIZE) for path in fonts)
    step = SIZE + 4
    width = 2 * MARGIN + int(max(plain.getlength(line) for line in [f"$ {command}", *lines]))
    image = Image.new("RGB", (width, BAR + 2 * MARGIN + step * (len(lines) + 1)), BACK)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, BAR), fill=BAR_BACK)
    draw.text((MARGIN, (BAR - SIZE) / 2 - 1), title, font=bold, fill=DIM)
    draw.text((MARGIN, BAR + MARGIN), "$", font=bold, fill=PROMPT)
    draw.text((MARGIN + plain.getlength("$ "), BAR + MARGIN), command, font=bold, fill=TEXT)
    for number, line in enumerate(lines, 1):
        draw.text((MARGIN, BAR + MARGIN + step * number), line, font=plain, fill=TEXT)
    return image.quantize(32)


def main() -> None:
    out, title, command = sys.argv[1:]
    picture(title, command, sys.stdin.read()).save(Path(out), optimize=True)


if __name__ == "__main__":
    main()
