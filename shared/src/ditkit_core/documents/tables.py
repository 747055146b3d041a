"""Tables of text: with lines on a terminal, and as aligned text elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from rich import table as rich_table
from rich.markup import escape
from rich.measure import Measurement

from ditkit_core.errors import printable
from ditkit_core.io import console


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose cells are texts; the caller formats numbers."""

    kind: ClassVar = "table"
    title: str = ""
    """A line above it; in a document a heading of the page."""
    head: Sequence[str] = ()
    """Column titles; empty for a table without titles."""
    rows: Sequence[Sequence[str]]
    num_left: int | None = None
    """Number of columns at the left that are aligned left; the others are aligned right. None
    aligns columns of numbers right."""
    only: Literal["", "terminal", "page"] = ""
    """The only form of a document that shows it; empty for all."""
    row_classes: Sequence[str] = ()
    """On a page, the CSS class of each row; empty if no row has one."""
    names: Sequence[Sequence[str]] = ()
    """On a page, the names of each row: cells of a column `linked` of any table lead to it."""
    linked: int | None = None
    """On a page, the column whose cells are names of rows, or several with commas."""

    @cached_property  # templates ask for it in each cell
    def is_right(self) -> list[bool]:
        """Whether each column is aligned right."""
        columns = list(zip(*self.rows, strict=True))
        if self.num_left is None:
            return [all(map(is_number, column)) for column in columns]
        return [index >= self.num_left for index in range(len(columns))]

    def show(self) -> None:
        """Print the table, without its title; nothing if it has no rows."""
        if not self.rows:
            return
        if not console.CONSOLE.is_terminal:
            for line in self.lines():
                console.say(line)
            return
        table, room = self._on_terminal(self.head), console.CONSOLE.width
        # rich would cut words to keep the other titles on one line
        if _width(table).maximum > room:
            table = self._on_terminal([title.replace(" ", "\n") for title in self.head])
            if _width(table).minimum > room:
                table.box, table.padding = None, (0, 1, 0, 0)
        console.CONSOLE.print(table)

    def _on_terminal(self, head: Sequence[str]) -> rich_table.Table:
        table = rich_table.Table(show_header=bool(head))
        for title, is_right in zip(head or [""] * len(self.is_right), self.is_right, strict=True):
            table.add_column(
                escape(title), justify="right" if is_right else "left", overflow="fold"
            )
        for row in self.rows:
            # a file name may look like rich's markup
            table.add_row(*(escape(printable(cell)) for cell in row))
        return table

    def lines(self) -> list[str]:
        """The table as aligned text."""
        rows = [
            list(map(printable, row)) for row in (*([self.head] if self.head else []), *self.rows)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = []
        for row in rows:
            cells = zip(row, widths, self.is_right, strict=True)
            aligned.append(
                "  ".join(
                    c.rjust(width) if right else c.ljust(width) for c, width, right in cells
                ).rstrip()
            )
        return aligned


def _width(table: rich_table.Table) -> Measurement:
    """The width that a table needs if its texts are wrapped (minimum) or not (maximum), however
    narrow the terminal is."""
    return Measurement.get(
        console.CONSOLE, console.CONSOLE.options.update(max_width=100_000), table
    )


def is_number(cell: str) -> bool:
    """Whether a cell is a plain number, `?` or empty."""
    return cell.replace(".", "", 1).isdigit() or cell in ("", "?")
