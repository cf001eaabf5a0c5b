"""Tables in documents: written, compared, and refused where a document names one that does not exist."""

import pytest
import tables


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Let a temporary page be all documents, and a table of one number all tables."""
    path = tmp_path / "page.md"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", [path])
    monkeypatch.setattr(tables, "TABLES", {"one": lambda: ["| ms |", "|---|", "| 2.50 |"]})
    return path


def test_a_table_is_written_between_its_marks_and_nothing_else(page, capsys):
    page.write_text("before\n\n<!-- table: one -->\n| old |\n<!-- /table -->\n\nafter | 2.51 |\n")
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == "differ from their records: page.md\n"
    assert "old" in page.read_text()
    assert tables.main([]) == 0
    text = "| ms |\n|---|\n| 2.50 |\n"
    marks = "before\n\n<!-- table: one -->\n{}<!-- /table -->\n\nafter | 2.51 |\n"
    assert page.read_text() == marks.format(text)
    assert tables.main(["--check"]) == 0
    page.write_text(page.read_text().replace("2.50", "2.40"))
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: two -->\n<!-- /table -->\n", "there is no table 'two'; known: one"),
        ("<!-- table: one -->\n| ms |\n", "a place for a table is"),
    ],
)
def test_a_place_without_a_table_is_an_error(page, capsys, text, said):
    page.write_text(text)
    assert tables.main([]) == 2
    assert said in capsys.readouterr().err
    assert page.read_text() == text


def test_a_table_that_no_document_shows_is_named(page, capsys):
    page.write_text("nothing\n")
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().err == "in no document: one\n"
