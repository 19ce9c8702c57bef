"""The rates of this processor, by a clock that says what it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402

import tracer.costs.machine as machine  # noqa: E402
from tests.torch import small_nets  # noqa: E402
from tracer.build.step import load_spec  # noqa: E402
from tracer.cli.main import trace  # noqa: E402
from tracer.costs.machine import ELEMENTS, SIDE, SLOW_SIDE, probed_cpu, rates_of, rates_text  # noqa: E402
from tracer.costs.roofline import op_time_ns  # noqa: E402
from tracer.measure.step import measure  # noqa: E402
from tracer.record.step import trace_step  # noqa: E402
from traces.devices import Device, device  # noqa: E402
from traces.records import store  # noqa: E402
from traces.records.trace import TraceMeta  # noqa: E402

MLP = small_nets.spec("mlp")


class Ticking:
    """A clock that goes on by a microsecond whenever it is asked: everything takes that long."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


@pytest.fixture(scope="module")
def probed() -> Device:
    return probed_cpu(Ticking())


def test_rates_by_what_was_done_in_a_microsecond(probed: Device) -> None:
    rates = rates_of(probed)
    assert rates["float32_flops_per_s"] == pytest.approx(2 * SIDE**3 / 1e-6, rel=1e-9)
    assert rates["float16_flops_per_s"] == pytest.approx(2 * SLOW_SIDE**3 / 1e-6, rel=1e-9)
    # Two sums, each of two tensors read and one written, in a microsecond each.
    assert rates["bytes_per_s"] == pytest.approx(2 * 3 * 4 * ELEMENTS / 2e-6, rel=1e-9)
    assert rates["op_ns"] == 2  # 500 small ops in a microsecond
    assert set(probed.flops_per_s) == set(device("cpu").flops_per_s)


def test_the_roofline_gives_back_what_was_measured(probed: Device) -> None:
    """The efficiencies of the cost model are of a datasheet's peaks; what is measured is not reduced twice."""
    assert op_time_ns(2 * SIDE**3, 0, "float32", probed) == 1_000 + 2
    assert op_time_ns(0, 3 * 4 * ELEMENTS, "float32", probed) == 1_000 + 2


def test_rates_for_people(probed: Device) -> None:
    threads = torch.get_num_threads()
    text = rates_text(probed)
    assert text.startswith(f"Rates measured on this machine with {threads} thread")
    assert text.endswith("us an op.")


def test_a_trace_by_measured_rates_says_so(probed: Device) -> None:
    build = load_spec(MLP)
    fake = trace_step(build, probed)
    meta = fake.trace.meta
    assert (meta.rates, meta.threads) == (rates_of(probed), torch.get_num_threads())
    assert meta.target == "cpu"
    assert meta.mode == "fake"
    nominal = trace_step(build, device("cpu")).trace
    assert (nominal.meta.rates, nominal.meta.threads) == ({}, 0)
    assert nominal.meta.fingerprint == meta.fingerprint
    # The ops' own times take their place.
    real = measure(fake, build, "cpu", rounds=1, warmup=1).finish().meta
    assert (real.rates, real.threads) == ({}, torch.get_num_threads())


def test_rates_of_another_kind_are_no_header() -> None:
    good = TraceMeta(model="m", rates={"op_ns": 3}).to_json()
    assert TraceMeta.from_json(good).rates == {"op_ns": 3}
    with pytest.raises(ValueError, match="rates"):
        TraceMeta.from_json({**good, "rates": {"op_ns": "3"}})


def call(*args: Any) -> Any:
    return CliRunner().invoke(trace, [str(a) for a in args])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed: Device) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "probed_cpu", lambda: probed)
    result = call(MLP, "--probe", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["trace"] == str(tmp_path / "out")
    assert "Rates measured on this machine" in result.stderr
    assert store.load(tmp_path / "out").meta.rates == rates_of(probed)


@pytest.mark.parametrize("other", [("--device", "cpu"), ("--target", "h200")])
def test_only_for_a_processor_whose_times_are_not_measured(tmp_path: Path, other: tuple[str, str]) -> None:
    result = call(MLP, "--probe", *other, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert f"leave it out with {other[0]}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_record_names_torch_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was installed as 2.11.0 may hold the build 2.11.0+cu130."""
    from importlib import metadata

    from tracer.record.step import versions

    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    assert versions()["torch"] == str(torch.__version__)
    assert versions()["transformers"] == "1.0"
