"Pictures are values: deterministic, closed, readable, and said in words too"
import re
import xml.etree.ElementTree as ET

import pytest

from cpkv import draw as d

NASTY = '<i id="x">&'


def album(label: str = "a") -> dict[str, d.Svg]:
    "Each picture once, with a label in all the places that take one"
    return {
        "strip": d.strip([0, 1, -1], [label, 1, 2], sinks=1, caption=label),
        "grid": d.grid([[0, -1], [1, 1]], [[label, 1], [2, 3]], rows=[label, "b"], columns=[label]),
        "triangle": d.triangle([(0, 3, 0), (3, 7, 1), (7, 8, 0)], caption=label),
        "history": d.triangle([(64, 65, 2)], history=64),
        "bars": d.bars([1, 2.5], [label, "b"], label, roof=3, caption=label),
        "table": d.table([(label, 1), ("b", 2.5)], (label, "n"), caption=label),
        "arrows": d.arrows([(0, label)], [(0, label)], [(0, 0)], names=(label, label)),
        "movement": d.movement(3, 7, caption=label),
        "tree": d.tree((label, -1, [(label, 0, []), ("b", 1, [("c", 2, [])])])),
        "lanes": d.lanes([(label, [(0, 1, label, 0)]), ("b", [])]),
        "stack": d.stack(d.strip([0]), d.strip([1])),
    }


@pytest.mark.parametrize("name", album())
def test_equal_input_gives_an_equal_string(name):
    pic, again = album()[name], album()[name]
    assert pic == again and hash(pic) == hash(again) and repr(pic) == repr(again)
    assert pic != album("other")[name] or name in ("history", "stack")
    assert pic._repr_html_() == pic.html and pic != pic.html


@pytest.mark.parametrize("name", album())
def test_a_picture_is_closed_and_takes_nothing_from_elsewhere(name):
    pic = album(NASTY)[name]
    tags = [*ET.fromstring(f"<all>{pic.html}</all>").iter()]  # every element closed, text escaped
    assert not {t.tag for t in tags} & {"i", "script", "style", "image", "use", "link"}
    assert not {k for t in tags for k in t.attrib} & {"id", "href", "src", "class"}
    assert not re.search(r"https?:|url\(", pic.html)
    assert "0x" not in repr(pic) and repr(pic).strip()


@pytest.mark.parametrize("name", [n for n in album() if n != "table"])
def test_a_picture_scales_and_takes_its_ink_from_the_page(name):
    for svg in ET.fromstring(f"<all>{album()[name].html}</all>").iter("svg"):
        assert "max-width:100%" in svg.get("style") and "height:auto" in svg.get("style")
        w, h = map(float, svg.get("viewBox").split()[2:])
        assert 0 < w <= 740 and 0 < h
        assert svg.find("title").text.strip() and svg.find("title") == svg[0]
        on_page = [t.get("fill") for t in svg.iter("text")]
        assert {*on_page} <= {"currentColor", "#111111", "#FFFFFF"}
        for box in svg.iter("rect"):  # what is drawn stays inside the frame
            x, y, bw, bh = (float(box.get(k)) for k in ("x", "y", "width", "height"))
            assert 0 <= x and 0 <= y and x + bw <= w + .5 and y + bh <= h + .5


def test_every_text_on_a_fill_is_readable_and_ranks_differ():
    fills = [d.color_of(r) for r in range(24)]
    assert len({*fills}) == 24 and min(d.contrast(f, d.ink_of(f)) for f in fills) >= 4.5
    assert d.color_of(-1) == "none" and d.ink_of("none") == "currentColor"
    assert d.color_of(24) == d.color_of(0)  # hues come again; the number in the box tells
    assert d.contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert d.contrast("#123456", "#123456") == 1


def test_a_strip_colours_each_page_by_its_owner():
    svg = ET.fromstring(d.strip([2, 0, -1], legend=False).html).find("svg")
    assert [b.get("fill") for b in svg.iter("rect")] == [d.color_of(2), d.color_of(0), "none"]
    assert [b.get("stroke-dasharray") is None for b in svg.iter("rect")] == [True, True, False]
    assert [t.text for t in svg.iter("text")] == ["0", "1", "2"]
    assert repr(d.strip([2, 0, -1], sinks=1)) == "pages by rank: 0*:r2 1:r0 2:-"
    named = ET.fromstring(d.strip([2, 0, -1]).html).iter("text")
    assert [t.text for t in named if t.get("font-size") == "13"] == ["rank 0", "rank 2"]


@pytest.mark.parametrize("pages,lines", [(1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_strip_breaks_into_lines(pages, lines):
    svg = ET.fromstring(d.strip([0] * pages, legend=False).html).find("svg")
    assert len({b.get("y") for b in svg.iter("rect")}) == lines


def test_a_triangle_counts_the_pairs_of_each_rank():
    pic = d.triangle([(0, 3, 0), (3, 5, 1), (5, 6, 0)])
    assert repr(pic) == "causal pairs by rank: r0 12, r1 9"  # 1+2+3+6 and 4+5
    assert "r2 65" in repr(d.triangle([(64, 65, 2)], history=64))


def test_movement_groups_shards_and_points_each_page_home():
    pic = d.movement(2, 5)
    assert repr(pic) == "rank 0 holds [0, 2, 4]; rank 1 holds [1, 3] -> [0, 1, 2, 3, 4]"
    svg = ET.fromstring(pic.html).find("svg")
    assert [t.text for t in svg.iter("text")][2:] == list("0241301234")
    owned = d.movement(2, 4, owners=[1, 1, 0, 1])
    assert repr(owned).startswith("rank 0 holds [2]; rank 1 holds [0, 1, 3]")


def test_a_table_sets_numbers_right_and_prints_as_columns():
    pic = d.table([("a", 12_345, 1.5), ("bb", 7, 20.25)], ("name", "n", "x"))
    assert repr(pic).splitlines() == ["name       n      x",
                                      "a     12,345    1.5",
                                      "bb         7  20.25"]
    for row in ET.fromstring(pic.html).iter("tr"):
        assert [c.get("style").split(":")[-1] for c in row] == ["left", "right", "right"]


def test_a_tree_keeps_the_order_of_a_list_of_files():
    t = d.tree(("root", -1, [("a", 0, [("a1", 1, []), ("a2", 2, [])]), ("b", 3, [])]))
    assert repr(t).splitlines() == ["root", "  a", "    a1", "    a2", "  b"]
    ys = {t.text: float(t.get("y")) for t in ET.fromstring(t.html).iter("text")}
    assert sorted(ys, key=ys.get) == ["root", "a", "a1", "a2", "b"]


def test_nothing_is_a_picture_too():
    for pic in (d.strip([]), d.grid([]), d.triangle([]), d.bars([], []), d.table([], ("a", "b")),
                d.arrows([], [], []), d.movement(2, 0), d.lanes([]), d.bars([0, 0], "ab", roof=0),
                d.stack()):
        ET.fromstring(f"<all>{pic.html}</all>")


def test_labels_that_do_not_fit_are_refused():
    for bad in (lambda: d.strip([0, 1], ["a"]), lambda: d.grid([[0]], [["a", "b"]]),
                lambda: d.bars([1], []), lambda: d.grid([[0]], rows=["a", "b"]),
                lambda: d.table([(1, 2)], ("a",))):
        with pytest.raises(ValueError): bad()
