"""Checks that chunks have different shades of their action's hue, and that texts are readable."""

import colorsys

import pytest

from megatron.adaptive.trace.views.palette import IDLE, chunk_color, text_color


def channels(color: str) -> tuple[float, float, float]:
    return (int(color[:2], 16) / 255, int(color[2:4], 16) / 255, int(color[4:], 16) / 255)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 8, 64])
def test_shades_are_distinct_get_lighter_and_keep_their_hue(num_chunks: int) -> None:
    for action in "FBW":
        shades = [chunk_color(action, chunk, num_chunks) for chunk in range(num_chunks)]
        assert len({*shades, IDLE}) == num_chunks + 1
        lightness = [colorsys.rgb_to_hls(*channels(shade))[1] for shade in shades]
        assert lightness == sorted(lightness)
    for chunk in range(num_chunks):
        red, green, blue = channels(chunk_color("F", chunk, num_chunks))
        assert blue > green > red
        red, green, blue = channels(chunk_color("B", chunk, num_chunks))
        assert green > max(red, blue)


def test_text_contrast_is_readable() -> None:
    def luminance(color: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for action in "FBW":
        for chunk in range(16):
            fill = chunk_color(action, chunk, 16)
            light, dark = sorted((luminance(fill), luminance(text_color(fill))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3.5
