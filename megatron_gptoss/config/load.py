"""Which value does each key have, and who set it?

In: TOML files, left to right, then dotted flags (`--rl.clip_high=0.28`); later ones win. Out: `Loaded`, the frozen config with the origin
of every key. Raises ConfigError for files that are missing or broken, unknown keys and values of a wrong type. Does not look at rules
that join keys (plan.py) nor at the machine (preflight.py).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_gptoss.config.schema import Config, Section
from megatron_gptoss.errors import ConfigError

DEFAULT = "default"

SECTIONS: dict[str, type[Section]] = {name: type(section) for name, section in Config()}
FIELDS: dict[str, FieldInfo] = {f"{s}.{k}": info for s, model in SECTIONS.items() for k, info in model.model_fields.items()}


@dataclass(frozen=True)
class Flag:
    """One value from the command line."""

    key: str  # dotted: "rl.clip_high"
    text: str  # as typed; parsed by the type of the field
    name: str  # as typed: "--rl.clip_high", or a shorthand such as "--resume"


@dataclass(frozen=True)
class Loaded:
    config: Config
    origins: Mapping[str, str]  # every dotted key -> "20b.toml:31" | "flag --rl.clip_high" | "default"

    def value(self, key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(self.config, section), name)

    def show(self, key: str) -> str:
        """`rollout.group_size = 7 (20b.toml:31)`, as messages name a value."""
        return f"{key} = {to_toml(self.value(key))} ({self.origins[key]})"


@dataclass(frozen=True)
class _Setting:
    key: str
    value: Any  # a str when it comes from a flag
    origin: str
    is_flag: bool


# ---- public entry -------------------------------------------------------------------------------------------------------------------


def load(paths: Sequence[str | Path] = (), flags: Sequence[Flag] = ()) -> Loaded:
    """Merge files, left to right, then flags. All problems found are reported in one ConfigError."""
    settings: list[_Setting] = []
    for path in paths:
        settings += _read_file(Path(path))
    settings += [_Setting(flag.key, flag.text, f"flag {flag.name}", True) for flag in flags]

    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins = dict.fromkeys(FIELDS, DEFAULT)
    problems: list[str] = []
    for setting in settings:
        if setting.key not in FIELDS:
            problems.append(_unknown_key(setting.key, setting.origin))
            continue
        try:
            value = _checked(setting)
        except ConfigError as problem:
            problems.append(str(problem))
            continue
        section, name = setting.key.split(".")
        values[section][name] = value
        origins[setting.key] = setting.origin
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  - " + "\n  - ".join(problems))
    return Loaded(Config.model_validate(values), origins)


def parse_flags(arguments: Iterable[str]) -> tuple[list[str], list[Flag]]:
    """Split command-line words into paths and flags: `--section.key=value` or `--section.key value`, anywhere among the paths."""
    paths: list[str] = []
    flags: list[Flag] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if "=" in word and word.split("=")[0].strip() in FIELDS:
                raise ConfigError(f"{word} is neither a file nor a flag. A flag starts with two dashes: --{word}")
            paths.append(word)
            continue
        name, has_value, text = word.partition("=")
        key = name.removeprefix("--")
        if name.lstrip("-") in FIELDS and key not in FIELDS:
            raise ConfigError(f"{word} is not a flag. A flag starts with two dashes: --{word.lstrip('-')}")
        if key not in FIELDS:
            raise ConfigError(_unknown_key(name.lstrip("-"), f"flag {name}"))
        if not has_value:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"flag {name} has no value. Example: {_example(key, is_flag=True)}")
            text = words.pop(0)
        flags.append(Flag(key, text, name))
    return paths, flags


def to_toml(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def dump(config: Config) -> str:
    """Every key as TOML text that loads to the same config again."""
    blocks = []
    for section, model in SECTIONS.items():
        fields = getattr(config, section)
        blocks.append("\n".join([f"[{section}]", *(f"{name} = {to_toml(getattr(fields, name))}" for name in model.model_fields)]))
    return "\n\n".join(blocks) + "\n"


def explain(loaded: Loaded, key: str) -> list[str]:
    """Lines that say what `key`, or every key of a section, is and who set it."""
    keys = [k for k in FIELDS if k.startswith(key + ".")] if key in SECTIONS else [key]
    if keys == [key] and key not in FIELDS:
        raise ConfigError(_unknown_key(key, "flag --explain"))
    lines = []
    for k in keys:
        about = f"{FIELDS[k].description}. " if FIELDS[k].description else ""
        lines.append(f"{loaded.show(k)}\n    {about}Wanted: {wanted(k)}. Default: {to_toml(FIELDS[k].default)}.")
    return lines


LISTS = {  # keys whose text is a list: what stands in it, and one that works
    "parallel.pipeline_layers": ("whole numbers", "5,7,7,5"),
    "eval.k": ("whole numbers above 0", "1,4"),
    "parity.perturb": ("names", "no-sinks,yarn"),
}


def wanted(key: str) -> str:
    """What a value of `key` may be, in words: "a number, greater than 0 and less than 1"."""
    kind, limits = _kind(key)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    signs = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    ranges = [f"{words_} {getattr(limit, sign):g}" for limit in limits for sign, words_ in signs.items() if hasattr(limit, sign)]
    allowed = f'{LISTS[key][0]} with commas between, as "{LISTS[key][1]}"' if key in LISTS else 'letters, digits, ".", "_" and "-" only'
    patterns = [f"{allowed} (pattern {limit.pattern})" for limit in limits if getattr(limit, "pattern", None)]
    return ", ".join([words[kind], *([" and ".join(ranges)] if ranges else []), *patterns])


# ---- files --------------------------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> list[_Setting]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        known = sorted(str(p) for p in {*folder.glob("*.toml"), *Path("configs").glob("*.toml")})
        by_name = [p for p in known if Path(p).name == path.name]
        near = by_name or difflib.get_close_matches(str(path), known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else f" Looked from {Path.cwd()}."
        raise ConfigError(f"configuration file {path} does not exist.{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}), so it cannot be a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}.") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = found[1] if found else str(len(text.splitlines()) or 1)  # tomllib says "at end of document" otherwise
        reason = re.sub(r" \(at [^)]*\)$", "", str(error))
        form = 'Keys are written `key = value` under `[section]`; text wants "quotes".'
        raise ConfigError(f"{_short(path)}:{line} is not valid TOML: {reason}. {form}") from None
    lines = key_lines(text)
    return [_Setting(key, value, f"{_short(path)}:{lines[key]}", False) for key, value in _leaves(tree)]


def key_lines(text: str) -> dict[str, int]:
    """Line on which each dotted key is set, in a text that tomllib accepts.

    The text is parsed again up to every line: a key belongs to the statement that made it appear. That costs a square of the number of
    lines, which is nothing for a file people write, and is right for every spelling TOML has.
    """
    rows = text.splitlines()
    found: dict[str, int] = {}
    first = 1  # first line of the statement now being read
    for n in range(1, len(rows) + 1):
        try:
            tree = tomllib.loads("\n".join(rows[:n]))
        except tomllib.TOMLDecodeError:
            continue  # inside a text or list of several lines
        for key, _ in _leaves(tree):
            found.setdefault(key, first)
        first = n + 1
    return found


def _leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Dotted key and value of everything two levels deep; whatever is deeper, or not in a section, stays one odd leaf to be refused."""
    leaves: list[tuple[str, Any]] = []
    for section, fields in tree.items():
        if isinstance(fields, dict):
            leaves += [(f"{section}.{name}", value) for name, value in fields.items()]
            if not fields and section not in SECTIONS:  # an empty known section is harmless, an unknown one is a typing mistake
                leaves.append((section, fields))
        else:
            leaves.append((section, fields))
    return leaves


def _short(path: Path) -> str:
    """The file as the user may call it: relative to here when it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# ---- values -------------------------------------------------------------------------------------------------------------------------


def _kind(key: str) -> tuple[Any, list[Any]]:
    """Type of a field, and what limits it (annotated-types and pydantic constraints)."""
    info = FIELDS[key]
    return info.annotation, list(info.metadata)


def _checked(setting: _Setting) -> Any:
    key = setting.key
    value = _from_text(key, setting.value) if setting.is_flag else setting.value
    section, name = key.split(".")
    # One field at a time, through its section, so that the message can name this setting even when a later one replaces it.
    try:
        return getattr(SECTIONS[section](**{name: value}), name)
    except ValidationError:
        pass
    shown = str(setting.value) if setting.is_flag else _plain(value)
    kind, _ = _kind(key)
    near = difflib.get_close_matches(str(value), get_args(kind), n=1) if get_origin(kind) is Literal else []
    guess = f' Did you mean "{near[0]}"?' if near else ""
    clash = "" if setting.is_flag else _clash(key, value)
    raise ConfigError(
        f"{key} = {shown} ({setting.origin}) cannot be used: {clash}wanted is {wanted(key)}.{guess} "
        f"Example: {_example(key, setting.is_flag, near[0] if near else None)}"
    )


def _clash(key: str, value: Any) -> str:
    """Says what a value of a wrong type is; empty when the type is right and the range or choice is not."""
    kind, _ = _kind(key)
    right = str if get_origin(kind) is Literal else kind
    names = {str: "text", bool: "true/false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}
    if type(value) is right or (right is float and type(value) is int):
        return ""
    return f"it is {names.get(type(value), type(value).__name__)}, "


def _from_text(key: str, text: str) -> Any:
    """A flag's text as the type its field has; what does not parse stays text, and is then refused like any wrong type."""
    kind, _ = _kind(key)
    if kind is bool and text in ("true", "false"):
        return text == "true"
    if kind is int and re.fullmatch(r"[+-]?\d+(_\d+)*", text):
        return int(text)
    if kind is float:
        try:
            return TypeAdapter(float).validate_python(text)
        except ValidationError:
            return text
    return text


def _example(key: str, is_flag: bool, value: Any = None) -> str:
    """A spelling that works; the default is one by construction, except where it is empty."""
    value = FIELDS[key].default if value is None else value
    value = (LISTS[key][1] if key in LISTS else "something") if value == "" else value
    if is_flag:
        return f"--{key}={value if isinstance(value, str) else to_toml(value)}"
    return f"{key.split('.')[1]} = {to_toml(value)}"


def _plain(value: Any) -> str:
    return to_toml(value) if isinstance(value, str | int | float | bool) else str(value)


def _unknown_key(key: str, origin: str) -> str:
    """Message for a key that does not exist: the nearest names, by spelling and by the part after the dot."""
    section, dot, name = key.partition(".")
    if section in SECTIONS and not dot:
        return f"{key} ({origin}) is a section and takes no value of its own. Its keys: {', '.join(SECTIONS[section].model_fields)}."
    near = [k for k in FIELDS if k.split(".")[1] == (name or section)]  # right key, wrong or missing section
    if section in SECTIONS:
        near += [f"{section}.{k}" for k in difflib.get_close_matches(name, SECTIONS[section].model_fields, n=3)]
    near += difflib.get_close_matches(key, FIELDS, n=3, cutoff=0.7)
    near = list(dict.fromkeys(near))[:3]
    if near:
        hint = f"Nearest: {', '.join(near)}."
    elif section in SECTIONS:
        hint = f"Keys of {section}: {', '.join(SECTIONS[section].model_fields)}."
    elif sections := difflib.get_close_matches(section, SECTIONS, n=1):
        hint = f"Nearest section: {sections[0]}."
    else:
        hint = f"Sections: {', '.join(SECTIONS)}."
    what = f"unknown section {section!r} in {key!r}" if dot and section not in SECTIONS else f"unknown key {key!r}"
    return f"{what} ({origin}). {hint}"
