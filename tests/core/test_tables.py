"""Tables: one definition of the columns for a terminal, a notebook and a page."""

from __future__ import annotations

from simulator.show.tables import CODE, NUMBER, WIDEST, Cell, table, yes

ROWS = [("a", 3 << 20, 1.5, "<b>"), ("bc", None, None, "x" * 200)]


def test_a_kind_says_how_a_value_is_shown_and_sorted() -> None:
    made = table(
        ROWS,
        (
            ("name", CODE, lambda r: r[0]),
            ("size", "bytes", lambda r: r[1]),
            ("added", "+percent", lambda r: r[2]),
            ("ready", NUMBER, lambda r: Cell("7", 7)),
            ("", "", lambda r: yes(r[3])),
        ),
        total=("sum", 3 << 20, 1.5, "", ""),
    )
    assert made.rows[0][1:4] == (Cell("3.00 MiB", 3 << 20), Cell("+1.50 %", 1.5), Cell("7", 7))
    assert made.texts()[1][:3] == ("bc", "–", "–")
    assert (made.numbers, made.code) == (frozenset({1, 2, 3}), frozenset({0}))
    assert made.total[:2] == ("sum", Cell("3.00 MiB", 3 << 20))
    less = made.without("size", "ready")
    assert (less.columns, less.numbers, less.total[0]) == (("name", "added", ""), frozenset({1}), "sum")


def test_terminals_get_aligned_lines_and_notebooks_escaped_cells() -> None:
    made = table(
        ROWS, (("name", "", lambda r: r[0]), ("size", "bytes", lambda r: r[1]), ("", "", lambda r: r[3]))
    )
    head, first, second = made.lines()
    assert head == "name      size"
    assert first == "a     3.00 MiB  <b>"
    assert second == f"bc           –  {'x' * (WIDEST - 1)}…"
    assert "<b>" not in made.html()
    assert "&lt;b&gt;" in made.html()
    assert "x" * 200 in made.html()
