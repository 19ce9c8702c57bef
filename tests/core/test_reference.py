"""What names a model, taken apart in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces.model_spec import short_name, source_digest, source_file, split_reference


@pytest.mark.parametrize(
    ("model", "parts", "name"),
    [
        ("resnet18", None, "resnet18"),
        ("a/net.py:make", ("a/net.py", "make"), "net"),
        ("a/net.py", ("a/net.py", "build"), "net"),
        ("C:/a/net.py:make", ("C:/a/net.py", "make"), "net"),
        ("net.py:", ("net.py", ""), "net"),  # refused where it is loaded
        ("pyproject.toml:build", None, "pyproject.toml:build"),
        ("", None, ""),
    ],
)
def test_references(model: str, parts: tuple[str, str] | None, name: str) -> None:
    assert split_reference(model) == parts
    assert source_file(model) == (None if parts is None else Path(parts[0]))
    assert short_name(model) == name


def test_an_edited_file_is_another_source_with_and_without_a_function_s_name(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    for model in (str(path), f"{path}:build"):
        path.write_text("one")
        before = source_digest(model)
        path.write_text("two")
        assert "" != source_digest(model) != before
    assert source_digest("resnet18") == ""
