"""Sweeps and campaigns run on a Dask cluster, go on where they stopped, and name a cluster that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.campaign.run import Book, Case, Method, run_campaign
from simulator.studies.tracing import Traced
from traces.errors import EnvironmentProblem, LowtideError
from traces.records.store import load

distributed = pytest.importorskip("distributed")
NET = Path(__file__).parents[1] / "torch" / "small_nets.py"


@pytest.mark.slow
def test_two_workers_trace_a_sweep_once(tmp_path: Path) -> None:
    said: list[str] = []
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        traced = Traced.of(f"{NET}:residual", tmp_path, "sweep", (), cluster.scheduler_address)
        found = traced.each([2, 4, 6, 8], said.append)
        assert [t.meta.batch_size for t in found] == [2, 4, 6, 8]
        assert said[-1] == "4 of 4: traced"
        again = traced.each([2, 4, 6, 8], said.append)
        assert again == found
        assert sum(line.endswith(": traced") for line in said) == 4
        with pytest.raises(LowtideError, match="could not be traced"):
            Traced.of("no_such_model", tmp_path, "sweep", (), cluster.scheduler_address).each(
                [2], said.append
            )
    assert load(traced.path(2)) == found[0]


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.studies.tracing.WAIT_S", 0.2)
    with pytest.raises(EnvironmentProblem, match="no scheduler answers there"):
        Traced.of("resnet18", tmp_path, "sweep", (), "tcp://127.0.0.1:9").each([2], print)
    book = Book(name="c", method=Method())
    with pytest.raises(EnvironmentProblem, match="no scheduler answers there"):
        run_campaign(book, [Case(model="resnet18")], tmp_path / "c", print, "tcp://127.0.0.1:9")
