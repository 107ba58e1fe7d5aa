"""Colours of the style sheet that can be read, in both themes (WCAG AA: 4.5, of marks 3)."""

from __future__ import annotations

import re

import pytest

from megascale.telemetry.dashboard.static import page_files

CSS = page_files()["/page/base.css"].raw.decode()
TEXTS = ("text", "muted", "accent", "bad", "warn")
GROUNDS = ("ground", "surface", "sunken")


def _theme(name: str) -> dict[str, tuple[float, float, float]]:
    light, dark = CSS.split(':root[data-theme="dark"]')[:2]
    found: dict[str, tuple[float, float, float]] = {}
    for part in (light, dark.split("}")[0]) if name == "dark" else (light,):
        for key, value in re.findall(r"--([\w-]+): #([0-9a-f]{6});", part):
            red, green, blue = (int(value[i : i + 2], 16) / 255 for i in (0, 2, 4))
            found[key] = red, green, blue
    return found


def _luminance(colour: tuple[float, float, float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read_on_every_ground(theme: str) -> None:
    colours = _theme(theme)
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
    pairs += [("bad", "bad-soft"), ("text", "bad-soft"), ("text", "warn-soft")]
    pairs += [("accent", "accent-soft"), ("text", "accent-soft"), ("muted", "accent-soft")]
    pairs += [("on-fill", "accent"), ("surface", "text")]
    poor = {
        pair: round(ratio, 2)
        for pair in pairs
        if (ratio := _contrast(colours[pair[0]], colours[pair[1]])) < 4.5
    }
    assert poor == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marks_stand_out_from_the_surface(theme: str) -> None:
    colours = _theme(theme)
    marks = ("bad", "accent")
    assert all(_contrast(colours[mark], colours["surface"]) >= 3.0 for mark in marks)
    assert _contrast(colours["warn-fill"], colours["surface"]) >= 2.2  # beside its word, and square


def test_a_theme_is_a_whole_one() -> None:
    assert _theme("light").keys() == _theme("dark").keys()
    assert _theme("light") != _theme("dark")


def test_the_ramp_is_of_one_direction_in_lightness() -> None:
    script = page_files()["/page/colour.js"].raw.decode()
    for name in ("LIGHT", "DARK"):
        points = re.search(rf"const {name} = (\[\[.*?\]\]);", script)
        assert points is not None
        values = [
            tuple(int(v) / 255 for v in re.findall(r"\d+", point))
            for point in points[1].split("],")
        ]
        lightness = [_luminance((r, g, b)) for r, g, b in values]
        assert lightness in (sorted(lightness), sorted(lightness, reverse=True))
        assert abs(lightness[0] - lightness[-1]) > 0.5, "the ends are far apart in grey"
