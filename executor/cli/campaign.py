"""The command `execute campaign`: many cases predicted and measured, and the report of the errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from traces.commands import Output, analysis_option, output_options


@click.command()
@click.argument("cases")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory; default: campaign-NAME.")
@click.option("--device", help="cpu or cuda, instead of what the file says.")
@click.option("--only", default="", help="Run only cases whose label has this in it (* and ? allowed).")
@analysis_option
@output_options
def campaign(
    cases: str, output: Path | None, device: str | None, only: str, analysis: str | None, out: Output
) -> None:
    """Predict, run and measure every case of CASES, and report how wrong the predictions were.

    CASES is a TOML file of cases, `cpu` or `gpu` for one of those that come with Lowtide, or a finished campaign (its
    directory or campaign.json), which is only reported. Finished cases are kept: the same command again goes on where
    it stopped, and tries again what failed. A case that does not fit, or that no plan fits, is a result.

    Exit code 1: a planned step did not compute what the untouched model computes. 2: a case failed.
    """
    from executor.campaign import tables
    from executor.campaign.cases import find_cases, load_cases
    from executor.campaign.record import FAILED, NOT_EQUAL, Book
    from traces.errors import LowtideError, SpecError, VerificationError
    from traces.provenance import refuse_page

    if out.report is not None:
        refuse_page()
    path = Path(cases)
    if path.is_dir() or path.suffix == ".json":
        given = {"--output": output, "--device": device, "--only": only}
        ignored = [name for name, value in given.items() if value]
        if ignored:
            raise SpecError(
                f"{ignored[0]}: {cases} is a finished campaign, which is only reported; to run more of it, name its "
                "file of cases (cpu.toml or gpu.toml for those that come with Lowtide) and its directory with -o."
            )
        book = Book.load(path / "campaign.json" if path.is_dir() else path)
    else:
        from executor.campaign.bench import run_campaign
        from executor.measuring import sharing_imports

        asked = load_cases(find_cases(cases))
        if device is not None:
            asked = replace(asked, method=replace(asked.method, device=device))
        with sharing_imports(asked.method.device):
            book = run_campaign(asked, output or Path(f"campaign-{asked.name}"), out.say, only=only)
    if out.report is not None:
        from executor.campaign.page import write_campaign

        write_campaign(out.report, book, analysis=analysis or "")
    out.show(lambda: tables.answer(book), lambda: tables.summary(book))
    wrong = [r.case.label for r in book.records if r.status == NOT_EQUAL]
    if wrong:
        raise VerificationError(
            f"{len(wrong)} planned steps differ from the untouched model: {'; '.join(wrong)}."
        )
    failed = [r for r in book.records if r.status == FAILED]
    if failed:
        raise LowtideError(
            f"{len(failed)} of {len(book.records)} cases failed, the first ({failed[0].case.label}) with: "
            f"{failed[0].message} The same command tries them again."
        )
