from hf_moa.markdown import escaped, read_table, table, union_table


def test_values_do_not_break_a_table():
    assert table(["a"], [["x | y\nz"], [1 / 3], [None], [float("nan")]]).splitlines() == [
        "| a |",
        "|---|",
        "| x \\| y z |",
        "| 0.3333 |",
        "|  |",
        "| nan |",
    ]


def test_cells_can_have_another_form():
    written = table(["a", "b"], [[0.5, "x|y"]], cell=lambda value: escaped(f"<{value}>"))
    assert written.splitlines()[2] == "| <0.5> | <x\\|y> |"


def test_columns_are_all_that_come_up():
    rows = [{"a": 1, "b": (1.0, 0.5)}, {"c": 2.0, "a": 3}]
    assert union_table(rows).splitlines() == [
        "| a | b | c |",
        "|---|---|---|",
        "| 1 | (1.0, 0.5) |  |",
        "| 3 |  | 2 |",
    ]


def test_table_is_read_as_it_was_written():
    rows = [["a | b", 0.5, None], ["c", 1, "two  words"]]
    text = f"Before.\n\n{table(['name', 'value', 'x'], rows)}\n\nAfter."
    assert read_table(text) == [
        {"name": "a | b", "value": "0.5", "x": ""},
        {"name": "c", "value": "1", "x": "two words"},
    ]
    assert read_table("no table") == []
    assert read_table(f"{table(['a'], [[1]])}\n\n{table(['b'], [[2]])}") == [{"a": "1"}]
