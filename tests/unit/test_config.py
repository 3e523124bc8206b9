"""Laws of loading: later settings win, every value knows its origin, what is written loads again, and a mistake is named with its cure."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config.load import DEFAULT, FIELDS, Flag, dump, explain, key_lines, load, parse_flags, to_toml, wanted
from megatron_gptoss.config.schema import Config
from megatron_gptoss.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def message(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*parse_flags(arguments))
    return str(caught.value)


# ---- merging ------------------------------------------------------------------------------------------------------------------------


def test_later_files_win_and_flags_win_over_files(tmp_path):
    a = write(tmp_path / "a.toml", "[rl]\nlr = 1.0\nclip_low = 0.1\nclip_high = 0.1\n")
    b = write(tmp_path / "b.toml", "# a comment\n[rl]\n\nclip_low = 0.2\nclip_high = 0.2\n")
    loaded = load([a, b], [Flag("rl.clip_high", "0.3", "--rl.clip_high")])
    rl = loaded.config.rl
    assert (rl.lr, rl.clip_low, rl.clip_high) == (1.0, 0.2, 0.3)
    assert loaded.origins["rl.lr"] == f"{a}:2"
    assert loaded.origins["rl.clip_low"] == f"{b}:4"
    assert loaded.origins["rl.clip_high"] == "flag --rl.clip_high"
    assert loaded.origins["rl.epochs"] == DEFAULT
    assert load([b, a]).config.rl.clip_low == 0.1


def test_nothing_given_is_the_schema():
    loaded = load()
    assert loaded.config == Config()
    assert set(loaded.origins) == set(FIELDS) and set(loaded.origins.values()) == {DEFAULT}


def test_flags_are_taken_out_of_any_place_in_either_spelling():
    paths, flags = parse_flags(["a.toml", "--rl.lr", "1e-3", "b.toml", "--rollout.deterministic=true", "--rl.entropy_coef", "-0.5"])
    assert paths == ["a.toml", "b.toml"]
    config = load([], flags).config
    assert (config.rl.lr, config.rollout.deterministic, config.rl.entropy_coef) == (1e-3, True, -0.5)


@pytest.mark.parametrize("key", FIELDS)
def test_every_default_is_a_flag_that_gives_itself(key):
    default = FIELDS[key].default
    text = default if isinstance(default, str) else to_toml(default)
    loaded = load([], [Flag(key, text, f"--{key}")])
    assert loaded.config == Config()
    assert loaded.origins[key] == f"flag --{key}"
    assert wanted(key)


# ---- lines --------------------------------------------------------------------------------------------------------------------------


def test_a_key_is_found_on_the_line_that_sets_it_in_every_spelling():
    text = 'top.a = 1\n\n["s"]\n# b = 0\n"b" = """\nb = 2\n"""\nc = [\n 1,\n]\nd = "#"\n\n[t]\ne = 1\ninline = { x = 1 }\n'
    found = key_lines(text)
    assert {"top.a": 1, "s.b": 5, "s.c": 8, "s.d": 11, "t.e": 14, "t.inline": 15}.items() <= found.items()
    assert key_lines("\n[modle]\n") == {"modle": 2}


# ---- writing ------------------------------------------------------------------------------------------------------------------------


@given(st.text(), st.floats(min_value=1e-30, max_value=1e30), st.booleans(), st.integers(min_value=0, max_value=2**62))
def test_what_is_written_loads_to_the_same_config(text, number, truth, whole):
    config = Config.model_validate(
        {"run": {"dir": text, "seed": whole}, "rl": {"lr": number, "drop_uniform_groups": truth}, "task": {"name": text}}
    )
    tree = tomllib.loads(dump(config))
    assert Config.model_validate(tree) == config
    assert {f"{s}.{k}" for s in tree for k in tree[s]} == set(FIELDS)


# ---- mistakes -----------------------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_names(tmp_path):
    file = write(tmp_path / "a.toml", "[rl]\nlr = 1.0\nclip_hihg = 0.3\n")
    assert message(str(file)) == f"unknown key 'rl.clip_hihg' ({file}:3). Nearest: rl.clip_high, rl.clip_grad."


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[rl]\nclip_high = "0.28"', ['rl.clip_high = "0.28"', "a.toml:2", "it is text", "a number, greater than 0", "clip_high = 0.28"]),
        ("[run]\nsteps = 4.5", ["run.steps = 4.5", "a.toml:2", "a whole number, greater than 0", "steps = 40"]),
        ("[run]\nsteps = true", ["run.steps = true", "it is true/false"]),
        ("[rollout]\ndeterministic = 1", ["rollout.deterministic = 1", "true or false", "deterministic = false"]),
        ("[rl]\nclip_low = 1.5", ["rl.clip_low = 1.5", "greater than 0 and at most 1"]),
        ("[rl]\nlr = inf", ["rl.lr = inf", "a number, greater than 0"]),
        ('[rollout]\ndtype = "bfloat"', ['one of "float32", "bfloat16"', 'Did you mean "bfloat16"?']),
        ('[run]\nid = "a/b"', ['run.id = "a/b"', "letters, digits"]),
        ('[eval]\nk = "9,x"', ['eval.k = "9,x"', 'whole numbers above 0 with commas between, as "1,4"', 'Example: k = "1,4"']),
        ("[modle]\nhead_dim = 64", ["unknown section 'modle'", "a.toml:2", "model.head_dim"]),
        ("[model.rope]\nfactor = 3", ["model.rope", "a.toml:1", "model.rope_factor"]),
        ("steps = 3", ["unknown key 'steps'", "run.steps", "sft.steps"]),
        ("rl = 3", ["rl (", "is a section"]),
        ("[rl]\nlr = \n", ["a.toml:2 is not valid TOML", "Invalid value"]),
        ('[rl]\nadvantage = "group', ["a.toml:2 is not valid TOML"]),
        ("[rl]\nlr = 1.0\nlr = 2.0\n", ["a.toml:3 is not valid TOML", "overwrite"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_place_rule_and_cure(tmp_path, text, parts):
    found = message(str(write(tmp_path / "a.toml", text)))
    assert all(part in found for part in parts), found


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--rl.lr=abc"], ["rl.lr = abc (flag --rl.lr)", "a number, greater than 0", "--rl.lr=0.0004"]),
        (["--run.steps=4.0"], ["a whole number"]),
        (["--rollout.deterministic=yes"], ["true or false", "--rollout.deterministic=false"]),
        (["--rollout.deterministic"], ["has no value", "--rollout.deterministic=false"]),
        (["--rl.lr", "--rl.clip_low=0.1"], ["flag --rl.lr has no value"]),
        (["--lr=3"], ["unknown key 'lr'", "sft.lr", "rl.lr"]),
        (["--trainer.atention=reference"], ["Nearest: trainer.attention, trainer.attention_windowed."]),
        (["-rl.lr=3"], ["A flag starts with two dashes: --rl.lr=3"]),
        (["-x"], ["unknown key 'x' (flag -x)"]),
        (["rl.lr=3"], ["--rl.lr=3"]),
        (["none.toml"], ["none.toml does not exist"]),
        (["."], ["cannot be read", "directory"]),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_its_cure(arguments, parts):
    found = message(*arguments)
    assert all(part in found for part in parts), found


def test_a_file_that_lies_in_configs_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs" / "tiny.toml", "")
    monkeypatch.chdir(tmp_path)
    assert message("tiny.toml").endswith("Did you mean configs/tiny.toml?")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"[rl]\n\xff")
    assert "not UTF-8" in message(str(file))


def test_all_mistakes_are_reported_at_once_also_one_that_a_later_setting_replaces(tmp_path):
    file = write(tmp_path / "a.toml", '[rl]\nlr = "x"\nfoo = 1\n')
    found = message(str(file), "--rl.lr=1.0")
    assert found.startswith("2 problems:") and "rl.lr" in found and "rl.foo" in found


# ---- explain and the shipped files --------------------------------------------------------------------------------------------------


def test_explain_says_value_and_who_set_it():
    loaded = load([], [Flag("rl.clip_high", "0.3", "--rl.clip_high")])
    assert explain(loaded, "rl.clip_high")[0].startswith("rl.clip_high = 0.3 (flag --rl.clip_high)")
    assert len(explain(loaded, "rl")) == sum(key.startswith("rl.") for key in FIELDS)
    with pytest.raises(ConfigError, match=r"Nearest: rl\.clip_high"):
        explain(loaded, "rl.clip_hig")


@pytest.mark.parametrize("name", ["tiny", "demo", "20b", "120b", "scaled"])
def test_a_shipped_file_holds_only_what_differs_from_the_defaults(name):
    loaded = load([CONFIGS / f"{name}.toml"])
    same = [k for k, origin in loaded.origins.items() if origin != DEFAULT and loaded.value(k) == FIELDS[k].default]
    assert same == []


def test_origins_of_files_below_here_are_relative(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert re.fullmatch(r"configs/tiny\.toml:\d+", load([CONFIGS / "tiny.toml"]).origins["model.hidden_size"])
