"""Laws of the timeline. In: nothing but the package."""

import json
import time

import pytest

from megatron_gptoss.errors import MachineError
from megatron_gptoss.obs.spans import (
    FOLDER,
    TRACE,
    Recorder,
    Span,
    chrome_trace,
    chrome_trace_spans,
    crowds,
    of_last_steps,
    read_spans,
    shares,
    table_rows,
    write_trace,
)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_without_a_file_a_span_leaves_nothing_and_lets_errors_through():
    record = Recorder()
    with record("work"):
        pass
    with pytest.raises(KeyError), record("work"):
        raise KeyError


def test_spans_nest_and_are_on_disk_as_they_end(tmp_path):
    record, file = Recorder(), tmp_path / "new" / "driver.jsonl"
    record.open(file)
    with record("outer"):
        with record("inner"):
            assert not file.read_text()
        assert [name for name, *_ in lines(file)] == ["inner"]  # a killed process loses only what it was at
    with pytest.raises(KeyError), record("failed"):
        raise KeyError
    record.close()
    outer, inner, failed = read_spans(tmp_path / "new")
    assert [s.name for s in (outer, inner, failed)] == ["outer", "inner", "failed"]
    assert outer.start_us <= inner.start_us
    assert inner.end_us <= outer.end_us + 1000  # two clocks: one says when, the other how long
    with record("after the end"):
        pass
    assert len(lines(file)) == 3


def test_a_barrier_stands_at_both_ends_of_what_nests(tmp_path):
    record, calls = Recorder(), []
    record.open(tmp_path / "a.jsonl", barrier=lambda: calls.append("wait"))
    with record("work"):
        calls.append("work")
    with record("turn", beside=True):
        calls.append("turn")
    assert calls == ["wait", "work", "wait", "turn"]


def test_a_decorated_function_is_a_span_at_every_call(tmp_path):
    record = Recorder()

    @record("verb")
    def verb(x):
        return x + 1

    assert verb(1) == 2
    record.open(tmp_path / "a.jsonl")
    assert [verb(2), verb(3)] == [3, 4]
    record.close()
    assert [name for name, *_ in lines(tmp_path / "a.jsonl")] == ["verb", "verb"]


def test_what_somebody_else_measured_ends_now(tmp_path):
    record = Recorder()
    record.note("nowhere", 1.0)
    record.open(tmp_path / "a.jsonl")
    with record("outer"):
        pass
    record.note("part", 0.25)
    record.close()
    part, outer = read_spans(tmp_path)
    assert (part.name, part.duration_us) == ("part", 250_000)
    assert outer.end_us <= part.end_us + 1000


def test_a_torn_line_is_passed_over(tmp_path):
    (tmp_path / "engine-0.jsonl").write_text('["turn", 5, 2, true]\n["turn", 9, 2')
    assert read_spans(tmp_path) == [Span("engine-0", "turn", 5, 2, True)]


# Two steps of 100 and 140 us; the update takes 40 of each, of which the trainer's forward takes 10.
STEPS = [
    Span("driver", "before", 0, 50),
    Span("driver", "step 7", 100, 100),
    Span("driver", "rollout", 100, 50),
    Span("driver", "update", 150, 40),
    Span("trainer-0", "update", 155, 30),
    Span("trainer-0", "forward", 160, 10),
    Span("engine-0", "turn", 101, 40, True),
    Span("engine-0", "turn", 105, 40, True),
    Span("driver", "evaluation", 210, 10),
    Span("driver", "step 8", 230, 140),
    Span("driver", "update", 320, 40),
    Span("trainer-0", "update", 325, 30),
    Span("trainer-0", "forward", 330, 10),
]


def test_the_last_steps_are_a_window_in_time_over_all_processes():
    assert {s.name for s in of_last_steps(STEPS, 1)} == {"step 8", "update", "forward"}
    assert {s.name for s in STEPS} - {s.name for s in of_last_steps(STEPS, 5)} == {"before", "evaluation"}
    assert len(of_last_steps(STEPS, 2)) == len(STEPS) - 2
    assert of_last_steps(STEPS[:1], 2) == []


def test_shares_are_means_over_steps_and_parts_leave_a_rest():
    found = {(s.process, s.path): s for s in shares(sorted(of_last_steps(STEPS, 2), key=lambda s: (s.start_us, -s.duration_us)))}
    assert set(found) == {
        ("driver", ("rollout",)),
        ("driver", ("update",)),
        ("trainer-0", ("update",)),
        ("trainer-0", ("update", "forward")),
    }
    rollout, update, forward = found["driver", ("rollout",)], found["trainer-0", ("update",)], found["trainer-0", ("update", "forward")]
    assert (rollout.count, rollout.seconds, rollout.of_step) == pytest.approx((0.5, 25e-6, 50 / 240))
    assert (update.count, update.seconds, update.rest_s, update.of_step) == pytest.approx((1, 30e-6, 20e-6, 60 / 240))
    assert (forward.seconds, forward.rest_s) == pytest.approx((10e-6, 10e-6))
    rows = table_rows(list(found.values()))
    assert [name.strip() for name, _ in rows] == ["driver", "rollout", "update", "trainer-0", "update", "forward"]
    assert shares([]) == []


def test_a_crowd_is_counted_while_there_is_one():
    (turns,) = crowds(STEPS)
    assert (turns.process, turns.name, turns.count) == ("engine-0", "turn", 1.0)
    assert (turns.mean_s, turns.at_once) == pytest.approx((40e-6, 80 / 44))  # 101 to 145, two of 40
    apart = [Span("driver", "step 1", 0, 100), Span("e", "turn", 0, 10, True), Span("e", "turn", 50, 10, True)]
    assert crowds(apart)[0].at_once == 1.0
    assert table_rows([], [turns]) == [("engine-0, side by side", ""), ("  turn", "1 a step, 0.0 ms each, 1.8 at once")]


def test_the_trace_is_chromes_format():
    events = chrome_trace(STEPS)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    whole = [e for e in events if e["ph"] == "X"]
    assert {(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in whole} == {
        (s.process, s.name, s.start_us, s.duration_us) for s in STEPS if not s.beside
    }
    begins, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "be")
    assert [(ends[i]["ts"] - e["ts"], names[e["pid"]], ends[i]["cat"] == e["cat"]) for i, e in begins.items()] == [
        (40, "engine-0", True)
    ] * 2


def test_the_spans_come_back_out_of_the_trace_from_0_on():
    late = [Span(s.process, s.name, s.start_us + 1_000, s.duration_us, s.beside) for s in STEPS]
    in_order = sorted(STEPS, key=lambda s: (s.start_us, -s.duration_us))
    assert chrome_trace_spans(json.loads(json.dumps(chrome_trace(late)))) == in_order
    assert chrome_trace_spans(chrome_trace([])) == []


def test_a_trace_that_cannot_be_written_is_one_message(tmp_path):
    record = Recorder()
    record.open(tmp_path / FOLDER / "driver.jsonl")
    with record("step 1"), record("rollout"):
        time.sleep(0.001)
    record.close()
    (tmp_path / TRACE).mkdir()
    with pytest.raises(MachineError, match=r"trace\.json cannot be written"):
        write_trace(tmp_path, 1)


def test_a_run_without_a_traced_step_gets_no_trace(tmp_path):
    assert write_trace(tmp_path, 3) == []
    record = Recorder()
    record.open(tmp_path / FOLDER / "driver.jsonl")
    with record("step 1"), record("rollout"):
        pass
    assert [name for name, _ in write_trace(tmp_path, 3)] in (["driver", "  rollout"], [])  # [] where the clock saw no time pass
    record.close()
