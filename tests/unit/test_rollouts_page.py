"""Laws of the page: every token of the archives is in it once, hostile text stays text, and a run that is too large is sampled and says so.

What the script makes of the data is looked at in a browser where there is one.
"""

import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.errors import DataError, MachineError
from megatron_gptoss.obs.rollouts_page import blocks_of, spread, write_page
from megatron_gptoss.obs.shelf import archives
from megatron_gptoss.obs.transcript import transcript
from megatron_gptoss.rl.samples import sample_name
from megatron_gptoss.rollout.archive import read_archive, write_archive
from megatron_gptoss.rollout.scores import write_scores
from tests.helpers.conversations import HOSTILE, TINY, a_step, scores_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        write_archive(folder / "rollouts" / f"step-{step}.jsonl", step, a_step(), TINY)
    scores = [scores_of(r, sample_name(r), advantage=-0.5) for r in a_step()[0].rollouts]
    write_scores(folder / "rollouts" / "step-2.scores.jsonl", 2, scores)
    write_archive(folder / "rollouts" / "eval-step-2.jsonl", 2, a_step()[1:], TINY)
    return folder


def page_of(run, **how) -> str:
    write_page("a run</title>", archives(run), TINY, run / "page.html", **how)
    return (run / "page.html").read_text()


def page_of_folder(folder, **how) -> str:
    write_page("a run", archives(folder), TINY, folder / "page.html", **how)
    return (folder / "page.html").read_text()


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.names: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def test_every_token_of_every_archive_is_in_the_page_once_and_in_order(run):
    data = dict(blocks_of(page_of(run)))
    assert sorted(data) == ["eval-2", "pieces", "run", "train-1", "train-2"]
    for archive in archives(run):
        written = [r for g in read_archive(archive.path) for r in g.rollouts]
        shown = [r for g in data[archive.key]["groups"] for r in g["rollouts"]]
        assert len(shown) == len(written)
        for ours, theirs in zip(shown, written, strict=True):
            pieces = [data["pieces"][number] for number in ours["t"]]
            assert tuple(piece[0] for piece in pieces) == theirs.token_ids
            assert "".join(piece[1] for piece in pieces) == TINY.decode(theirs.token_ids)
            read = transcript(theirs, 0, TINY)
            assert [m[4:] for m in ours["m"]] == [[len(m.header), len(m.body), len(m.end)] for m in read.messages]
            assert [m[:4] for m in ours["m"]] == [[m.role, m.name, m.channel, m.recipient] for m in read.messages]
            assert [len(piece) == 3 for piece in pieces] == [TINY.special_name(token) is not None for token in theirs.token_ids]
            edges = [0, *accumulate(ours["s"])]
            flags = [n % 2 == 1 for n, (a, b) in enumerate(pairwise(edges)) for _ in range(a, b)]
            assert tuple(flags) == theirs.sampled
            assert ours["lp"] == [pytest.approx(x, rel=1e-3) for x, flag in zip(theirs.logp, theirs.sampled, strict=True) if flag]
            assert (ours["reward"], ours["labels"], ours["i"]) == (theirs.reward, list(theirs.labels), theirs.index)


def test_scores_come_with_their_step_alone_and_what_is_the_same_is_said_once(run):
    data = dict(blocks_of(page_of(run)))
    (trained, _), (plain, _) = data["train-2"]["groups"], data["train-1"]["groups"]
    first = trained["rollouts"][0]
    assert first["adv"] == -0.5 and first["mm"] == 0.25 and first["v"][:1] == [3]
    assert plain["rollouts"][0]["adv"] is None and plain["rollouts"][0]["mm"] is None
    scored = {step["key"]: step["scored"] for step in data["run"]["steps"]}
    assert scored == {"train-1": False, "train-2": True, "eval-2": False}
    assert data["run"]["prompts"] == {"p/0": ["train-1", "train-2"], "p/1": ["train-1", "eval-2", "train-2"]}


def test_limits_are_of_all_rollouts_and_what_is_not_finite_is_said(tmp_path):
    groups = a_step()
    odd = [replace(r, reward=math.nan, logp=tuple(-math.inf if lp else lp for lp in r.logp)) for r in groups[1].rollouts]
    groups[1] = replace(groups[1], rollouts=tuple(odd))
    write_archive(tmp_path / "rollouts" / "step-1.jsonl", 1, groups, TINY)
    rollouts = [r for g in groups for r in g.rollouts]
    scores = [scores_of(r, sample_name(r), advantage=-n / 2) for n, r in enumerate(rollouts)]
    write_scores(tmp_path / "rollouts" / "step-1.scores.jsonl", 1, scores)
    for tokens, shown in ((1, 1), (10_000, 2)):
        data = dict(blocks_of(page_of_folder(tmp_path, tokens=tokens)))
        assert len(data["train-1"]["groups"]) == shown and data["run"]["prompts"] == {}
        assert (
            data["run"]["steps"][0]["limits"] == {"advantage": 1.5, "mismatch": 0.25, "logp": 3}
            and data["run"]["steps"][0]["mean"] == "nan"
        )
    last = data["train-1"]["groups"][1]["rollouts"][1]
    assert (last["reward"], last["adv"], last["mm"][0], last["lp"][1]) == ("nan", -1.5, 0.25, "-inf")


def test_hostile_text_adds_no_element(run, tmp_path):
    quiet = tmp_path / "quiet"
    write_archive(quiet / "rollouts" / "step-1.jsonl", 1, a_step()[1:], TINY)
    hostile, calm = Elements(page_of(run)).names, Elements(page_of(quiet)).names
    assert hostile.count("script") == calm.count("script") + 2, "two more archives, two more blocks of data"
    assert [name for name in hostile if name != "script"] == [name for name in calm if name != "script"]
    page = page_of(run)
    assert HOSTILE not in page and "<img" not in page and "<title>a run&lt;/title&gt;: rollouts</title>" in page
    assert "{{" not in page.split("<script>")[0].replace("{{script}}", ""), "no mark of the template is left"
    assert dict(blocks_of(page))["train-1"]["groups"][0]["prompt"] == HOSTILE


def test_it_needs_nothing_from_anywhere(run):
    page = page_of(run)
    assert not re.search(r"""(src|href)=["']?(https?:|//)|@import|url\(|fetch\(|XMLHttpRequest""", page)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 400))
def test_a_budget_is_kept_with_whole_groups_evenly_over_the_step(sizes, budget):
    groups = [[number] for number in range(len(sizes))]
    shown = [group[0] for group in spread(groups, sizes, budget)]
    assert shown[0] == 0 and shown == sorted(set(shown))
    assert len(shown) == 1 or sum(sizes[i] for i in shown) <= budget
    if sum(sizes) <= budget:
        assert shown == list(range(len(sizes)))
    gaps = [b - a for a, b in zip(shown, [*shown[1:], len(sizes)], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_step_that_is_sampled_says_of_how_many_and_means_are_of_all(run):
    data = dict(blocks_of(page_of(run, tokens=1)))
    by_key = {step["key"]: step for step in data["run"]["steps"]}
    assert (by_key["train-2"]["shown"], by_key["train-2"]["rollouts"]) == (2, 4)
    assert (by_key["train-2"]["shownGroups"], by_key["train-2"]["groups"]) == (1, 2)
    assert by_key["train-2"]["mean"] == 0.75 and len(data["train-2"]["groups"]) == 1
    assert (by_key["train-1"]["shown"], by_key["train-1"]["rollouts"], by_key["train-1"]["mean"]) == (0, 4, 0.75)
    assert data["train-1"] == {"groups": []}, "a budget that holds nothing holds one group of the last step"


def test_a_long_run_of_long_rollouts_stays_within_the_budget_and_shows_its_last_step(run, tmp_path):
    for step in range(1, 41):
        write_archive(tmp_path / "rollouts" / f"step-{step}.jsonl", step, a_step(), TINY)
    sizes = [sum(len(r.token_ids) for r in g.rollouts) for g in a_step()]
    budget = 10 * sizes[0]  # a group of every fourth step
    data = dict(blocks_of(page_of_folder(tmp_path, tokens=budget)))
    shown = [step["step"] for step in data["run"]["steps"] if step["shown"]]
    assert [step["step"] for step in data["run"]["steps"]] == list(range(1, 41)) and shown[-1] == 40
    assert 9 <= len(shown) <= 11 and max(b - a for a, b in pairwise([0, *shown])) <= 8, "no gap of more than two shares"
    assert sum(len(r["t"]) for step in shown for g in data[f"train-{step}"]["groups"] for r in g["rollouts"]) <= budget
    assert all(step["rollouts"] == 4 and step["mean"] == 0.75 for step in data["run"]["steps"])


def test_what_cannot_be_read_or_written_is_one_message(run, tmp_path):
    with pytest.raises(MachineError, match=r"nowhere/page\.html cannot be written"):
        write_page("x", archives(run), TINY, tmp_path / "nowhere" / "page.html")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-1.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"step-1\.jsonl:1: this line is not a rollout"):
        write_page("x", archives(tmp_path), TINY, tmp_path / "page.html")


@pytest.mark.skipif(BROWSER is None, reason="there is no browser here")
class TestInABrowser:
    def drawn(self, run, place: str) -> str:
        page_of(run)
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom",
            f"{(run / 'page.html').as_uri()}#{place}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert "Uncaught" not in done.stderr, done.stderr
        return done.stdout

    def tokens(self, dom: str) -> list[tuple[str, str]]:
        """(classes, text) of each token that is drawn."""
        found: list[tuple[str, str]] = []

        class Reader(HTMLParser):
            inside = False

            def handle_starttag(self, tag, attrs):
                named = dict(attrs)
                self.inside = "data-t" in named
                if self.inside:
                    found.append((named["class"], ""))

            def handle_endtag(self, tag):
                self.inside = False

            def handle_data(self, data):
                if self.inside:
                    found[-1] = (found[-1][0], found[-1][1] + data)

        Reader().feed(dom)
        return found

    def test_a_rollout_is_drawn_token_by_token_and_what_it_says_is_text(self, run):
        dom = self.drawn(run, "train-2/0/0/mismatch")
        rollout = a_step()[0].rollouts[0]
        drawn = self.tokens(dom)
        assert "".join(text for _, text in drawn) == TINY.decode(rollout.token_ids)
        assert tuple("on" in classes.split() for classes, _ in drawn) == rollout.sampled
        assert "<title>taken" not in dom and "<img" not in dom.split("<article")[1]
        assert "largest mismatch" in dom and "+0.25 nats" in dom

    def test_a_place_that_is_not_there_shows_the_last_step(self, run):
        assert ">Step 2<" in self.drawn(run, "train-99/7/7/colour")
