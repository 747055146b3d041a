"""Markup and pages: what is not markup is escaped, and a page loads nothing."""

import base64
import hashlib
import json
import re

from markupsafe import Markup

from ditkit_core.documents.document import Document, Text
from ditkit_core.documents.html import escape_html, json_script, macros, markup
from ditkit_core.documents.tables import Table


def test_text_is_escaped_and_markup_is_not() -> None:
    cell = markup('<p title="{}">{}{}</p>', '"quoted"', "<b>", Markup("<br>"))
    assert cell == '<p title="&#34;quoted&#34;">&lt;b&gt;<br></p>' and isinstance(cell, Markup)
    assert escape_html("a\x00b\ud800c\nd\te") == "a\ufffdb\ufffdc\nd\te"


def test_marks_that_turn_a_line_around_are_not_written() -> None:
    turned = "\u202egpj.\u2066x\u2069 אבג"
    assert escape_html(turned) == "\ufffdgpj.\ufffdx\ufffd אבג", (
        "letters that are written from the right stay"
    )
    table = Table(title=turned, head=[turned], rows=[[turned]])
    page = Document(title=turned, sections=[table, Text(lines=[turned])]).page()
    page += markup('<i id="{}">', turned) + json_script({turned: [turned]}, id="numbers")
    assert page.count("\ufffdgpj.\ufffdx\ufffd אבג") == 7
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page) and not re.search(
        r"\\u(202[a-e]|206[6-9])", page
    )
    (text,) = re.findall("<script[^>]*>(.*)</script>", json_script({"a": turned}, id="numbers"))
    assert json.loads(text) == {"a": "\ufffdgpj.\ufffdx\ufffd אבג"}


def test_a_table_escapes_its_cells_and_marks_rows_and_numbers() -> None:
    html_table = macros("documents/macros.html").html_table
    table = Table(
        head=["file", "frames"],
        rows=[["<b>", "9"], [Markup("<i>x</i>"), "4"]],
        row_classes=["warning", ""],
    )
    text = "".join(html_table(table).splitlines())
    assert (
        '<tr class="warning"><td dir="auto">&lt;b&gt;</td><td dir="auto" class="n">9</td></tr>'
        in text
    )
    assert '<tr><td dir="auto"><i>x</i></td>' in text
    assert '<th scope="col">file</th><th scope="col" class="n">frames</th>' in text
    assert '<th scope="row">&lt;b&gt;</th>' in html_table(table, row_titles=True)
    assert html_table(Table(head=["file"], rows=[])).strip() == "<p>none</p>"


def test_a_page_allows_its_own_style_and_nothing_else() -> None:
    page = Document(title="<title>", heading="heading", sections=[]).page()
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src '{digest}'; script-src 'none'; "
    assert (
        escape_html(policy) in page
        and "<title>&lt;title&gt;</title>" in page
        and "<script" not in page
    )


def test_values_for_a_script_cannot_end_its_element() -> None:
    made = json_script({"name": "</script><!-- & x"}, id="numbers")
    assert made.count("<") == 2 and "&" not in made
    (text,) = re.findall(">(.*)<", made)
    assert json.loads(text) == {"name": "</script><!-- & x"}
