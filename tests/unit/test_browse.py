"""The terminal viewer: keys lead where they say, filters keep what they say, and what is drawn fits and steers no terminal."""

import math
import os
import pty
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_gptoss.data.harmony import generation_prefix
from megatron_gptoss.errors import ConfigError, DataError, MachineError
from megatron_gptoss.obs.browse import ESCAPES, ROLE_STYLES, Filter, Place, Reader, conversation, keys, legend, number, plain, shown
from megatron_gptoss.obs.console import visible
from megatron_gptoss.obs.shades import GROUND, HUES, LOGP_LIMIT, VERSIONS, limits, shade, strength
from megatron_gptoss.obs.shelf import archives, choose
from megatron_gptoss.obs.transcript import Token
from megatron_gptoss.rl.samples import sample_name
from megatron_gptoss.rollout.archive import write_archive
from megatron_gptoss.rollout.scores import write_scores
from megatron_gptoss.types import Prompt, RewardPart, Rollout, RolloutGroup, VersionRun
from tests.helpers.conversations import TINY, a_step, scores_of


@pytest.fixture
def run(tmp_path):
    """Steps 1, 2 and 10, of which 2 was not scored, and an evaluation after step 10."""
    for step in (1, 2, 10):
        write_archive(tmp_path / "rollouts" / f"step-{step}.jsonl", step, a_step(), TINY)
        rollouts = [r for g in a_step() for r in g.rollouts]
        if step != 2:
            scores = [scores_of(r, sample_name(r), advantage=step / 10) for r in rollouts]
            write_scores(tmp_path / "rollouts" / f"step-{step}.scores.jsonl", step, scores)
    write_archive(tmp_path / "rollouts" / "eval-step-10.jsonl", 10, a_step()[1:], TINY)
    return tmp_path


def reader(run, **place) -> Reader:
    found = archives(run)
    of_kind, last = choose(found, held_out=False, step=place.pop("step", None))
    return Reader(found, Place(tuple(of_kind), last, **place), TINY)


def at(r: Reader) -> tuple[int, str, int]:
    return r.archive.step, r.here.rollout.prompt.id, r.here.rollout.index


class TestShelf:
    def test_archives_come_by_step_as_numbers_and_scores_are_no_archive(self, run):
        assert [(a.step, a.held_out) for a in archives(run)] == [(1, False), (2, False), (10, True), (10, False)]
        assert [a.is_scored for a in archives(run)] == [True, False, False, True]

    def test_what_is_not_there_is_named(self, run, tmp_path_factory):
        with pytest.raises(ConfigError, match=r"--step 3 has no archive\. There are steps 1, 2, 10\."):
            choose(archives(run), held_out=False, step=3)
        with pytest.raises(ConfigError, match="no archived rollouts"):
            archives(tmp_path_factory.mktemp("empty"))
        with pytest.raises(ConfigError, match="use --held-out"):
            choose([a for a in archives(run) if a.held_out], held_out=False)

    def test_scores_of_another_archive_are_an_error_that_names_both(self, run):
        scores = run / "rollouts" / "step-1.scores.jsonl"
        write_scores(scores, 1, [scores_of(a_step()[1].rollouts[0], "p/0#0")])
        with pytest.raises(DataError, match=r"step-1\.scores\.jsonl does not belong to .*step-1\.jsonl: p/0#0"):
            archives(run)[0].read(TINY)


class TestKeys:
    def test_each_leads_where_it_says_and_no_further_than_the_ends(self, run):
        r = reader(run)
        assert at(r) == (10, "p/0", 0)
        walk = [
            ("p", (10, "p/0", 0)), ("n", (10, "p/0", 1)), ("right", (10, "p/1", 0)), ("left", (10, "p/0", 1)), ("g", (10, "p/1", 0)),
            ("g", (10, "p/1", 0)), ("n", (10, "p/1", 1)), ("n", (10, "p/1", 1)), ("G", (10, "p/0", 0)), ("s", (10, "p/0", 0)),
            ("n", (10, "p/0", 1)), ("S", (2, "p/0", 0)), ("S", (1, "p/0", 0)), ("S", (1, "p/0", 0)), ("e", (10, "p/1", 0)),
            ("e", (10, "p/0", 0)), ("x", (10, "p/0", 0)),
        ]  # fmt: skip
        for key, place in walk:
            assert r.press(key) and at(r) == place, key
        assert not r.press("q")

    def test_filters_keep_the_rollout_that_is_read_where_they_can(self, run):
        r = reader(run)
        r.press("n")
        r.press("r")
        assert r.place.filter.words == "reward above 0" and at(r) == (10, "p/0", 1) and len(r.kept) == 3
        r.press("r")
        assert r.place.filter.words == "reward 0 or less" and at(r) == (10, "p/0", 0) and len(r.kept) == 1
        r.press("r")
        assert r.place.filter.words == "groups that differ" and [t.rollout.index for t in r.kept] == [0, 1]
        r.press("r")
        assert len(r.kept) == 4
        for label in ("</script>", "right", ""):
            r.press("l")
            assert r.place.filter.label == label
            assert all(label in t.rollout.labels for t in r.kept) or not label

    @pytest.mark.parametrize(("reward", "asked"), [(2 / 3, "0.666667"), (2 / 3, "0.6666666666666666"), (-0.0, "0"), (math.nan, "nan")])
    def test_a_reward_is_found_as_it_is_shown(self, run, reward, asked):
        groups = [RolloutGroup(g.prompt, tuple(replace(r, reward=reward if r.index else 0.25) for r in g.rollouts)) for g in a_step()]
        write_archive(run / "rollouts" / "step-11.jsonl", 11, groups, TINY)
        r = reader(run, filter=Filter(reward=shown(float(asked))))
        assert [t.rollout.index for t in r.kept] == [1, 1] and f"reward {shown(reward)}" in drawn(r)

    def test_colours_go_round_both_ways(self, run):
        r, seen = reader(run), []
        for _ in range(5):
            r.press("c")
            seen.append(r.place.measure)
        assert sorted(seen) == sorted(["none", "advantage", "mismatch", "logp", "version"]) and r.place.measure == "advantage"
        r.press("C")
        assert r.place.measure == "none"

    def test_a_filter_keeps_the_place_of_what_it_keeps(self, run):
        r = reader(run)
        r.press("g")
        r.press("n")
        r.press("r")
        assert at(r) == (10, "p/1", 1) and r.place.rollout == 2 and r.place.filter.reward == "above 0"

    @pytest.mark.parametrize(
        ("words", "ids"), [("p/1", ["p/1"] * 2), ("(37+58)", ["p/1"] * 2), ("onerror", ["p/0"] * 2), ("/", ["p/0", "p/0", "p/1", "p/1"])]
    )
    def test_a_prompt_is_found_by_its_id_and_by_its_text(self, run, words, ids):
        assert [t.rollout.prompt.id for t in reader(run, filter=Filter(prompt=words)).kept] == ids

    def test_a_filter_that_keeps_nothing_says_so_and_keys_go_on_working(self, run):
        r = reader(run, filter=Filter(prompt="nowhere"))
        assert "Nothing matches the filter." in drawn(r)
        for key in "npgGsSecClrjk 0?":
            assert r.press(key)


def drawn(r: Reader, width=100, height=30, colour=None) -> str:
    # With a height of its own it does not ask the terminal that the tests run in, which may be a dumb one.
    console = Console(
        width=width,
        height=height,
        color_system=colour,
        force_terminal=bool(colour),
        record=True,
        file=open("/dev/null", "w"),  # noqa: SIM115, PTH123
    )
    for line in r.screen(width, height):
        console.print(line, no_wrap=True)
    return console.export_text(styles=bool(colour))


class TestScreen:
    @pytest.mark.parametrize(("width", "height"), [(100, 40), (40, 12), (200, 80)])
    def test_it_fits_and_scrolling_shows_every_line_once(self, run, width, height):
        r = reader(run)
        lines = r.screen(width, height)
        assert len(lines) <= height and all(line.cell_len <= width for line in lines)
        seen = []
        for _ in range(200):
            body = [line.plain for line in r.screen(width, height)[4:-4]]
            seen += body if not seen else body[-1:]
            before = r.place.top
            r.press("j")
            r.screen(width, height)
            if r.place.top == before:
                break
        text = "".join(line.rstrip() for line in seen)
        for message in r.here.messages:
            words = "".join(t.text for t in message.body)
            if words.isascii() and words.isprintable():
                assert words.replace(" ", "") in text.replace(" ", "")

    def test_it_fits_wherever_a_character_of_two_cells_does(self, run):
        r = reader(run)
        for width, height in [(w, h) for w in (2, 3, 5, 11, 24) for h in (1, 3, 8, 9, 20)]:
            lines = r.screen(width, height)
            assert len(lines) <= height and all(line.cell_len <= width for line in lines), (width, height)

    def test_the_end_is_the_end_and_what_is_below_is_counted(self, run):
        r = reader(run)
        below = lambda: next(iter(map(int, re.findall(r"(\d+) more lines? below", drawn(r, width=50, height=14)))), 0)  # noqa: E731
        first = below()
        r.press("j")
        assert below() == first - 1 > 0
        for _ in range(50):
            r.press(" ", page=6)
        assert below() == 0
        r.press("k")
        assert below() == 1, "a line up is a line up, however often one has asked for more"
        r.press("0")
        assert below() == first

    def test_what_is_drawn_follows_every_change(self, run):
        r = reader(run)
        seen = [drawn(r, width=60, height=40, colour="truecolor")]
        for key in "cnnS":
            r.press(key)
            seen.append(drawn(r, width=60, height=40, colour="truecolor"))
        assert len(set(seen)) == len(seen)
        assert drawn(r, width=60) == drawn(r, width=60) != drawn(r, width=90)
        assert drawn(r, width=50, height=40) == drawn(Reader(r.every, r.place, TINY), width=50, height=40), "as if nothing was kept"

    def test_no_control_character_of_a_model_reaches_the_terminal(self, run):
        r = reader(run)
        for text in (drawn(r), plain(r.here), plain(r.here, tokens=True)):
            assert "\x1b" not in text and "\u2028" not in text and "\\x1b[31m" in text

    def test_nor_one_that_stands_in_a_header_or_that_a_task_wrote(self, run):
        prompt = Prompt("p/\x1b[2J", "mine", "q", "a\x1b[1m")
        prefix = generation_prefix(TINY)
        said = [*TINY.encode("<|x|> to=functions.\x1b[31mcalc\x07 \x1b]0;taken\x07"), TINY.special("<|message|>"), *TINY.encode("5")]
        flags = (*[False] * len(prefix), *[True] * len(said))
        rollout = Rollout(
            prompt, 0, (*prefix, *said), flags, (0.0,) * len(flags), (VersionRun(0, len(said)),), 0, "odd\x1b", "\x1b", 0.5,
            (RewardPart("part\x1b", 1.0),), ("label\x1b\nsecond",),
        )  # fmt: skip
        write_archive(run / "rollouts" / "step-11.jsonl", 11, [RolloutGroup(prompt, (rollout,))], TINY)
        r = reader(run)
        assert "to functions." in r.here.messages[0].title
        r.press("l")
        assert r.place.filter.label and "label label" in drawn(r)
        for text in (drawn(r), plain(r.here), plain(r.here, tokens=True)):
            assert not re.search(r"[^\n\S ]|[^\n\x20-\uffff]", text) and "\\x1b" in text
        assert "   label\\x1b\\nsecond" in plain(r.here).splitlines()[1], "a verdict is one line"

    def test_sampled_tokens_stand_on_their_colour_and_others_on_none(self, run):
        r = reader(run)
        coloured = drawn(r, width=160, height=60, colour="truecolor")
        red, green, blue = HUES["advantage"][1]  # all advantages of the step are the same, so each is the strongest
        ground = f"48;2;{red};{green};{blue}m"
        sampled = "".join(re.findall(rf"{ground}([^\x1b]*)\x1b", coloured)).removesuffix(" +1 ")  # that one is the legend's
        assert sampled == "".join(visible(t.text) for t in r.here.tokens if t.sampled)
        assert "# Tools" in coloured

    def test_what_was_given_is_dim_and_who_speaks_has_a_colour(self, run):
        r = reader(run)
        lines = list(conversation(r.here, "advantage", r.limit))
        for message, title, text in zip(r.here.messages, lines[::3], lines[1::3], strict=True):
            assert title.spans[0].style == f"bold {ROLE_STYLES[message.role]}" and title.plain.startswith(message.title)
            said = [token for token in message.tokens if visible(token.text)]
            assert [span.style == "dim" for span in text.spans] == [not token.sampled for token in said]
        assert len({ROLE_STYLES[m.role] for m in r.here.messages}) == 4

    def test_the_head_has_the_groups_rewards_with_the_one_that_is_read(self, run):
        r = reader(run)
        for index, styles in ((0, ["red reverse", "green"]), (1, ["red", "green reverse"])):
            line = r.screen(100, 30)[1]
            assert line.plain == "group 1 of 2   0  1 " and [span.style for span in line.spans[1:]] == styles
            assert r.screen(100, 30)[2].spans[0].style == ("bold red", "bold green")[index]
            r.press("n")

    def test_the_strongest_colour_is_the_steps_not_the_rollouts(self, run):
        path = run / "rollouts" / "step-10.scores.jsonl"
        rollouts = [r for g in a_step() for r in g.rollouts]
        write_scores(path, 10, [scores_of(r, sample_name(r), advantage=-n / 4, gap=n / 8) for n, r in enumerate(rollouts)])
        r = reader(run)
        assert r.limit == 0.75 and " -0.75  0  +0.75 " in drawn(r, width=160)
        r.press("c")
        assert r.limit == 0.375 and "-0.375  0  +0.375   nats" in drawn(r, width=160)

    def test_a_legend_of_log_probs_ends_at_0_and_the_least_likely_are_named(self, run):
        r = reader(run, measure="logp")
        text = drawn(r, width=200)
        assert re.search(r"engine's log-prob +-3 +0 +nats", text) and "+3" not in text
        least = min((t for t in r.here.tokens if t.sampled), key=lambda t: t.logp)
        assert f"least likely, nats: {visible(least.text)!r} {least.logp:+.3g}" in text
        r.press("C")
        assert "largest mismatch, nats: " in drawn(r, width=200)

    def test_what_is_not_known_is_said(self, run):
        r = reader(run, step=2)
        assert "not known of this rollout: it was not trained, or without run.archive_scores" in drawn(r, width=160)
        r.press("c")
        assert "not known" in drawn(r, width=160)
        for _ in range(2):
            r.press("c")
        assert re.search(r"policy version +3 +4\b", drawn(r, width=160))
        grounds = {str(span.style).partition(" on ")[2] for span in legend("version", 0.0, r.here).spans} - {""}
        assert grounds == {"#{:02x}{:02x}{:02x}".format(*VERSIONS[version]) for version in (3, 4)}


class TestShades:
    def token(self, **known) -> Token:
        return Token(5, 7, "a", False, True, **known)

    def test_the_scale(self):
        assert [strength(x, 4.0) for x in (-4.0, -1.0, 0.0, 1.0, 4.0, 9.0, None)] == [-1.0, -0.5, 0.0, 0.5, 1.0, 1.0, 0.0]
        assert strength(1.0, 0.0) == 0.0
        assert [strength(x, limit) for x in (math.nan, math.inf, -math.inf) for limit in (4.0, 0.0)] == [1, 1, 1, 1, -1, -1]

    def test_the_largest_of_a_step_has_the_full_colour_and_zero_has_the_ground(self):
        tokens = [self.token(logp=-1.0, trainer_logp=-1.5, advantage=0.0), self.token(logp=-1.0, trainer_logp=-1.0, advantage=-2.0)]
        most = limits(tokens)
        assert most == {"advantage": 2.0, "mismatch": 0.5, "logp": LOGP_LIMIT}
        assert shade(tokens[0], "mismatch", most["mismatch"]) == HUES["mismatch"][0]
        assert shade(tokens[1], "mismatch", most["mismatch"]) == GROUND == shade(tokens[0], "advantage", most["advantage"])
        assert shade(Token(0, 7, "a", False, False), "advantage", 1.0) is None and shade(tokens[0], "none", 1.0) is None

    def test_each_of_six_policies_has_its_colour_and_an_unknown_one_the_ground(self):
        grounds = [shade(self.token(version=version), "version", 0.0) for version in range(7)]
        assert len(set(grounds)) == 6 and grounds[6] == grounds[0]
        assert shade(self.token(), "version", 0.0) == GROUND not in grounds

    def test_small_numbers_keep_their_digits(self):
        assert [number(x) for x in (0.0, 0.42, -3.0, 1.234e-4, -9e-9, 1e-3)] == ["0", "+0.42", "-3", "+1.23e-04", "-9.00e-09", "+0.001"]


class TestPlain:
    def test_a_token_line_has_all_that_is_known(self, run):
        r = reader(run)
        (line,) = [line for line in plain(r.here, tokens=True).splitlines() if line.endswith("  'final'")]
        position, token_id, version, logp, gap, advantage, text = line.split()
        assert (version, gap, advantage, text) == ("4", "+0.25", "+1", "'final'")
        token = next(t for t in r.here.tokens if t.text == "final")
        assert (int(position), int(token_id)) == (token.position, token.token_id) and float(logp) == pytest.approx(token.logp, rel=1e-2)

    def test_every_sampled_token_has_a_line(self, run):
        r = reader(run)
        text = plain(r.here, tokens=True)
        assert len(re.findall(r"^ *\d+ +\d+ +[34] ", text, re.MULTILINE)) == sum(r.here.rollout.sampled)
        assert "-- assistant, final: 6 of 8 sampled" in text and "-- user:" in text


def test_keys_without_a_terminal_are_an_error_that_says_what_to_use(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(ours))
    with pytest.raises(MachineError, match="Use --plain"), keys():
        pass
    os.close(theirs)


def test_keys_of_a_terminal_become_names_and_the_terminal_is_as_before(monkeypatch):
    import termios

    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs, "r"))
    before = termios.tcgetattr(theirs)
    with keys() as key:
        for sent, name in [(b"n", "n"), (b"\x1b[C", "right"), (b"\x1b[5~", "b"), (b"\x1bOB", "down"), (b"\x1b", "q"), (b"G", "G")]:
            os.write(ours, sent)
            assert key() == name
        os.write(ours, b"\x1b[C" * 3 + b"n\x1b[1;5C\x1b[6~q")  # a key that is held down, and one without a meaning among others
        read = [key() for _ in range(7)]
        assert [name for name in read if len(name) < 6] == ["right", "right", "right", "n", " ", "q"] and read[4] not in ESCAPES.values()
    assert termios.tcgetattr(theirs) == before
    assert set(ESCAPES.values()) <= {"right", "left", "up", "down", "b", " ", "0", "q"}
