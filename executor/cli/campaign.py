"""The command `execute campaign`: many cases predicted and measured, and the report of the errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from traces.commands import Output, output_options


@click.command()
@click.argument("cases")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Directory of the result (default: campaign-NAME).",
)
@click.option("--device", help="Run on cpu or cuda, instead of what the file says.")
@output_options
def campaign(cases: str, output: Path | None, device: str | None, out: Output) -> None:
    """Predict, run and measure every case of CASES, and report how wrong the predictions were.

    CASES is a TOML file of cases, or `cpu`, `gpu` or `gpu-quick` for one of those that come with Lowtide. A case that
    does not fit, or that no plan fits, is a result.

    Exit code 1: a planned step did not compute what the untouched model computes. 2: a case failed.
    """
    from executor.campaign import page
    from executor.campaign.cases import load_cases
    from executor.campaign.run import FAILED, NOT_EQUAL, Book, run_campaign
    from traces.errors import LowtideError, VerificationError
    from traces.provenance import refuse_page

    if out.report is not None:
        refuse_page()
    method, asked = load_cases(cases)
    book = Book(name=Path(cases).stem, method=replace(method, device=device or method.device))
    book = run_campaign(book, asked, output or Path(f"campaign-{book.name}"), out.say)
    if out.report is not None:
        page.write_campaign(out.report, book)
    out.show(lambda: page.answer(book), lambda: page.summary(book))
    for status, error in ((NOT_EQUAL, VerificationError), (FAILED, LowtideError)):
        if wrong := [r for r in book.records if r.status == status]:
            raise error(
                f"{len(wrong)} of {len(book.records)} cases: {status}; {wrong[0].case.label}: {wrong[0].message}"
            )
