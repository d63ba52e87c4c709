"""A picture: as SVG, as PNG, as JSON, at a step."""

import io
import json
from xml.etree import ElementTree

import pytest
from PIL import Image

from pdlab.trace.journey import Journey
from pdlab.views.picture import THEME, Picture

SVG = "{http://www.w3.org/2000/svg}"


def place(journey: Journey, number: int) -> int:
    """Index of the step of that number."""
    return next(i for i, step in enumerate(journey.steps) if step.number == number)


def check_drawable(picture: Picture) -> None:
    """It is JSON, no text is too small to read from the back of a room, and nothing is outside."""
    json.dumps(picture.as_dict())
    assert picture.line and picture.width <= 1030
    for shape in picture.shapes:
        x, y, *rest = shape.at
        if shape.kind == "text":
            assert shape.size >= 11, shape
        corners = [(x, y)]
        if rest:
            corners.append((x + rest[0], y + rest[1]) if shape.kind == "rect" else (rest[0], rest[1]))
        assert all(0 <= a <= picture.width and 0 <= b <= picture.height for a, b in corners), shape
        assert shape.since <= shape.until, shape


@pytest.fixture
def picture() -> Picture:
    picture = Picture(200, 100, "one < two")
    picture.text(10, 20, "A & B", role="P", bold=True)
    picture.add("rect", 10, 30, 40, 20, role="D", fill="hatch", label='"waits"', name="it", since=2)
    picture.add("rect", 60, 30, 40, 20, role="P", fill="soft", until=3)
    picture.add("arrow", 10, 70, 90, 70, role="equal", step=4)
    return picture


@pytest.mark.parametrize("dark", [False, True])
def test_svg_is_well_formed_in_the_colours_of_the_theme(picture: Picture, dark: bool) -> None:
    root = ElementTree.fromstring(picture.svg(step=2, dark=dark))
    assert root.tag == f"{SVG}svg" and root.get("viewBox") == "0 0 200 100"
    assert root.findtext(f"{SVG}title") == "one < two"
    [text] = root.findall(f"{SVG}text")
    assert text.text == "A & B" and text.get("fill") == THEME["P"][dark] and text.get("font-weight") == "600"
    ground, hatched, soft = root.findall(f"{SVG}rect")
    assert ground.get("fill") == THEME["ground"][dark] and soft.get("fill") == THEME["P"][dark]
    assert hatched.get("fill") == "url(#hatch-D)" and hatched.findtext(f"{SVG}title") == '"waits"'
    [arrow] = root.findall(f"{SVG}line")
    assert arrow.get("stroke") == THEME["equal"][dark] and arrow.get("marker-end") == "url(#head)"


@pytest.mark.parametrize("dark", [False, True])
def test_png_opens_on_the_ground_of_the_theme(picture: Picture, dark: bool) -> None:
    image = Image.open(io.BytesIO(picture.png(dark=dark, scale=3)))
    assert image.format == "PNG" and image.size == (600, 300)
    assert "#{:02x}{:02x}{:02x}".format(*image.convert("RGB").getpixel((599, 299))) == THEME["ground"][dark]
    assert len(image.convert("RGB").getcolors()) > 2


def test_at_step(picture: Picture) -> None:
    assert [len(picture.at_step(step)) for step in (0, 2, 3, 4)] == [3, 4, 4, 3]
    assert picture.svg(step=0).count('url(#hatch-D)"') == 0


def test_as_dict_leaves_out_what_is_as_usual(picture: Picture) -> None:
    fields = json.loads(json.dumps(picture.as_dict()))
    assert {key: fields[key] for key in ("width", "height", "line")} == {
        "width": 200,
        "height": 100,
        "line": "one < two",
    }
    assert fields["shapes"][0] == {"kind": "text", "at": [10, 20], "role": "P", "label": "A & B", "bold": True}
    assert fields["shapes"][3] == {"kind": "arrow", "at": [10, 70, 90, 70], "role": "equal", "step": 4}


def test_every_role_has_two_colours() -> None:
    assert all(light != dark for light, dark in THEME.values())
    check_drawable(Picture(10, 10, "nothing"))
