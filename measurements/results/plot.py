"""The plots of docs/results.md: held-out reward over the CPU seconds of training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 460, 60, 200, 20, 50
COLOURS = ("#1b6ca8", "#d1495b", "#777777", "#2e933c", "#8e5aa8", "#e08e0b", "#00a0a0", "#5c4033")
TICKS = 5


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], out: Path) -> None:
    """Draw a line for each name through its (seconds, mean) points; the vertical axis goes from 0 to 1."""
    sheet = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    longest = max(1.0, *(seconds for points in curves.values() for seconds, _ in points))

    def place(seconds: float, mean: float) -> tuple[float, float]:
        return LEFT + seconds / longest * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - mean * (HEIGHT - TOP - BOTTOM)

    for tick in range(TICKS + 1):
        share = tick / TICKS
        pen.line([place(0, share), place(longest, share)], fill="#e5e5e5")
        pen.text((LEFT - 8, place(0, share)[1]), f"{share:.1f}", fill="#555", font=font, anchor="rm")
        pen.text((place(share * longest, 0)[0], HEIGHT - BOTTOM + 8), f"{share * longest:.0f}", fill="#555", font=font, anchor="mt")
    pen.text((place(longest / 2, 0)[0], HEIGHT - 18), "seconds of the processor", fill="#555", font=font, anchor="mt")
    for number, (name, points) in enumerate(curves.items()):
        colour, height = COLOURS[number % len(COLOURS)], TOP + 10 + 22 * number
        pen.line([place(*point) for point in points], fill=colour, width=2)
        for x, y in (place(*point) for point in points):
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        pen.line([(WIDTH - RIGHT + 15, height), (WIDTH - RIGHT + 40, height)], fill=colour, width=3)
        pen.text((WIDTH - RIGHT + 48, height), name, fill="#333", font=font, anchor="lm")
    sheet.save(out)
