"""Markup and pages: what is not markup is escaped, and a page loads nothing."""

import base64
import hashlib
import json
import re

from ditkit_core.diagnostics.rendering import Html, element, escape_html, html_page, html_table, join_html, json_script
from ditkit_core.io.tables import Table


def test_text_is_escaped_and_markup_is_not() -> None:
    made = element("p", "<b>", element("i", "x & y"), title='"quoted"', data_key="'k'", class_="c", id=None)
    assert made == '<p title="&quot;quoted&quot;" data-key="&#x27;k&#x27;" class="c">&lt;b&gt;<i>x &amp; y</i></p>'
    assert isinstance(join_html("<", Html("<br>")), Html) and join_html("<", Html("<br>")) == "&lt;<br>"
    assert escape_html("a\x00b\ud800c\nd\te") == "a\ufffdb\ufffdc\nd\te"
    assert element("img", src="a") == '<img src="a">' and element("td") == "<td></td>"


def test_marks_that_turn_a_line_around_are_not_written() -> None:
    turned = "\u202egpj.\u2066x\u2069 אבג"
    assert escape_html(turned) == "\ufffdgpj.\ufffdx\ufffd אבג", "letters that are written from the right stay"
    made = (
        element("p", turned, title=turned)
        + html_page(turned, element("p", turned))
        + json_script({turned: [turned]}, id="numbers")
    )
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", made) and not re.search(r"\\u(202[a-e]|206[6-9])", made)
    (text,) = re.findall("<script[^>]*>(.*)</script>", json_script({"a": turned}, id="numbers"))
    assert json.loads(text) == {"a": "\ufffdgpj.\ufffdx\ufffd אבג"}


def test_a_table_escapes_its_cells_and_marks_rows_and_numbers() -> None:
    table = Table(head=["file", "frames"], rows=[["<b>", "9"], [element("i", "x"), "4"]])
    made = html_table(table, classes=["warning", ""])
    assert '<tr class="warning"><td dir="auto">&lt;b&gt;</td><td dir="auto" class="n">9</td></tr>' in made
    assert '<tr><td dir="auto"><i>x</i></td>' in made
    assert '<th scope="col">file</th><th scope="col" class="n">frames</th>' in made
    assert '<th scope="row">&lt;b&gt;</th>' in html_table(table, row_titles=True)
    assert html_table(Table(head=["file"], rows=[])) == "<p>none</p>"


def test_a_page_allows_its_own_style_and_script_and_nothing_else() -> None:
    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    page = html_page("<title>", element("p", "x"), script="run()")
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src '{digest(style)}'; script-src '{digest('run()')}'; "
    assert escape_html(policy) in page and "<title>&lt;title&gt;</title>" in page and "<script>run()</script>" in page
    without = html_page("plain", element("p", "x"))
    assert "<script" not in without and escape_html("script-src 'none'; ") in without


def test_values_for_a_script_cannot_end_its_element() -> None:
    made = json_script({"name": "</script><!-- & x"}, id="numbers")
    assert made.count("<") == 2 and "&" not in made
    (text,) = re.findall(">(.*)<", made)
    assert json.loads(text) == {"name": "</script><!-- & x"}
