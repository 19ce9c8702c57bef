"""Run traces/gallery/guide.ipynb again, in place: `python -m tests.bench.guide`.

Needs nbclient and ipykernel, of the extra `bench`. What a run leaves of its machine (when cells ran, the kernel's
version) is not kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

GUIDE: Final = Path(__file__).resolve().parents[2] / "traces" / "gallery" / "guide.ipynb"


def cells() -> list[dict[str, Any]]:
    """As they stand in the file."""
    found: list[dict[str, Any]] = json.loads(GUIDE.read_text(encoding="utf-8"))["cells"]
    return found


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(GUIDE, as_version=4)
    NotebookClient(book, timeout=600).execute()
    book.metadata = {"kernelspec": book.metadata["kernelspec"]}
    for cell in book.cells:
        cell.metadata = {}
    nbformat.write(book, GUIDE)


if __name__ == "__main__":
    main()
