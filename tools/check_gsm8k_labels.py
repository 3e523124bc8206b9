"""Does our answer checker agree with published labels? In: GSM8K's example_model_solutions.jsonl. Out: a table, and every disagreement.

Each of the 1,319 problems has four model solutions labelled `is_correct`. It judges them with the code that rewards rollouts.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.data.prompts import read_json_lines
from megatron_gptoss.errors import DataError
from megatron_gptoss.tasks.math_check import MathChecker, Outcome, final_answer

NUM_WORKERS = 2


@dataclass(frozen=True)
class Judged:
    line: int
    model: str
    gold: str
    solution: str
    label: bool
    outcome: Outcome

    @property
    def agrees(self) -> bool:
        return self.label == (self.outcome == "equal")


def judge(path: Path, timeout_s: float = 5.0) -> list[Judged]:
    """Every labelled solution of the file, judged. The reference is the final answer of `ground_truth`, found like any other."""
    work: list[tuple[int, str, str, str, bool]] = []
    for line, value in read_json_lines(path):
        gold = final_answer(value.get("ground_truth", ""))
        if gold is None:
            raise DataError(f"{path}:{line}: ground_truth marks no final answer.")
        models = [(model, v) for model, v in value.items() if isinstance(v, dict) and "is_correct" in v]
        work += [(line, model, gold, v["solution"], v["is_correct"]) for model, v in models]
    checker = MathChecker(timeout_s, NUM_WORKERS)
    try:
        with ThreadPoolExecutor(NUM_WORKERS) as threads:
            outcomes: list[Outcome] = list(threads.map(lambda w: checker.check(w[2], w[3]), work))
    finally:
        checker.close()
    return [Judged(*labelled, outcome) for labelled, outcome in zip(work, outcomes, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    judged = judge(parser.parse_args().path)
    print(f"{'model':<20} {'solutions':>9} {'right':>6} {'wrong':>6} {'no answer':>9} {'other':>6} {'disagree':>9}")
    for model in [*sorted({j.model for j in judged}), "all"]:
        mine = [j for j in judged if model in (j.model, "all")]
        counts = [sum(j.outcome == o for j in mine) for o in ("equal", "different", "no-answer")]
        disagree = sum(not j.agrees for j in mine)
        print(f"{model:<20} {len(mine):>9} {counts[0]:>6} {counts[1]:>6} {counts[2]:>9} {len(mine) - sum(counts):>6} {disagree:>9}")
    for j in judged:
        if not j.agrees:
            print(f"line {j.line} {j.model}: label {j.label}, {j.outcome}; reference {j.gold!r}, answer {final_answer(j.solution)!r}")
    return 0 if all(j.agrees for j in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
