"""Options of a run from three places, checked alike: fields of a dataclass, a YAML file, the command line.

`option(default, help, ...)` makes a field; its annotation says what a value must be (str, int, float, bool, Path,
tuple[str, ...], and "| None" where None may be given). `convert` turns what a file or a flag gives into such a value,
or raises ConfigError with the option's name, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean

from .other_words import ANSWERS, FILES, IDLE, NAMES, VALUES

KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "Path": "a path",
    "tuple[str, ...]": "a text, or a list of them",
}
WORDS = {"true": True, "false": False}
_HELP = "python examples/train_gpt.py --help"
_MOST_TOLD = 10  # unknown keys of a file that a message names
TEXT = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
GIVEN = re.compile(
    rf"(?<![\w./?&(-])([a-z]\w*)=(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|True\b|False\b|\((?:(?:{TEXT}),? ?)+\)|{TEXT})"
)


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] = (),
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    word: str = "",
    suffix: str = "",
    path: bool = False,
) -> Any:
    """A field of a configuration.

    least, above, most: bounds of numbers; `above` is none of them.
    word: a text that is allowed beside numbers, such as "auto".
    suffix: of paths that are allowed beside choices, such as ".json".
    path: may a text be a path? Then a ~ at its beginning is the home folder, as it is of options that are a Path:
        YAML has no shell that would put it in, and of --out=~/x a shell does not either.
    """
    bounds = {"least": least, "above": above, "most": most}
    facts = {"help": help, "choices": tuple(choices), "word": word, "suffix": suffix, "path": path}
    return field(default=default, metadata={**facts, **bounds})


def convert(rule: Field[Any], value: Any, given_as: str) -> Any:
    """Return `value` as the type of the option; `given_as` is its name where it was given."""
    kind, _, optional = str(rule.type).partition(" | ")
    facts = rule.metadata
    if isinstance(value, str):
        value = VALUES.get(rule.name, {}).get(value, value)
    if value is None and optional == "None":
        return None
    if value is None:  # in YAML, a name without anything after it
        raise ConfigError(
            f"{given_as}: got None: the value is missing, which must be {describe(rule, kind)}. Give one, or leave the "
            "option out."
        )
    if facts["word"] and (value is True or value in (facts["word"], "true")):
        return facts["word"]
    if facts["word"] and (value is False or value == "false"):  # it leaves open which number
        raise ConfigError(f"{given_as}: got {value}. Give the number: {rule.name}: N.")
    if value is False and "off" in facts["choices"]:
        value = "off"  # YAML reads the bare word off as false
    try:
        value = _CONVERTERS[kind](value)
        fits = kind not in ("int", "float") or _is_within(facts, value)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if fits and (facts["path"] or facts["suffix"]):
        value = os.path.expanduser(value)
    if facts["suffix"] and fits and value.endswith(facts["suffix"]):
        return value
    if not fits or (facts["choices"] and value not in facts["choices"]):
        close = did_you_mean(str(value)[:40], map(str, facts["choices"]))
        large = isinstance(value, int) and abs(value) >= 2**63
        got = f"{value!s:.20}..." if large else f"{value!r:.200}"
        below = " and below 2^63" * large
        raise ConfigError(f"{given_as}: got {got}, must be {describe(rule, kind)}{below}.{close}")
    return value


def describe(rule: Field[Any], kind: str) -> str:
    """What an option may be, in words."""
    facts = rule.metadata
    if facts["choices"]:
        path = f", or a path that ends in {facts['suffix']}" if facts["suffix"] else ""
        return f"one of {', '.join(map(str, facts['choices']))}{path}"
    text = KINDS[kind]
    if facts["least"] > -math.inf:
        text += f" of {facts['least']:g} or more"
    if facts["above"] > -math.inf:
        text += f" above {facts['above']:g}"
    if facts["most"] < math.inf:
        text += f" and {facts['most']} or less"
    return f'{text}, or "{facts["word"]}"' if facts["word"] else text


def _is_within(facts: Mapping[str, Any], value: float) -> bool:
    return facts["least"] <= value <= facts["most"] and value > facts["above"]


def _to_bool(value: Any) -> bool:
    if isinstance(value, str):
        value = WORDS.get(value.lower())
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, (bool, float)) or abs(int(value)) >= 2**63:
        raise TypeError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise TypeError
    return float(value)  # of a text as well: YAML takes 6e-4, without a point, for one


def _to_str(value: Any) -> str:
    if (
        isinstance(value, bool)
        or not isinstance(value, (str, int, float, os.PathLike))
        or not str(value)
    ):
        raise TypeError
    return str(value)


def _to_texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_to_str, value if isinstance(value, (list, tuple)) else [value]))


_CONVERTERS: dict[str, Any] = {
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "str": _to_str,
    "Path": lambda value: Path(os.path.expanduser(_to_str(value))),
    "tuple[str, ...]": _to_texts,
}


def warn(text: str, strict: bool) -> None:
    """Say what options that go together do not do, or do beside; `strict` raises ConfigError instead."""
    if strict:
        raise ConfigError(f"{text} (strict)")
    warnings.warn(text, Fp8StackWarning, stacklevel=3)


def in_flags(text: str, names: Container[str]) -> str:
    """Return a message of Python's options, such as "run_name='x'", in flags: "--run-name x"."""

    def flag(given: re.Match[str]) -> str:
        name = given[1]
        if name not in names:
            return given[0]
        try:
            value = ast.literal_eval(given[2])
        except (SyntaxError, ValueError):  # it only looked like one
            return given[0]
        if isinstance(value, bool):
            return switch(name)[not value]
        values = value if isinstance(value, tuple) else [value]
        return " ".join([as_flag(name), *(shlex.quote(str(part)) for part in values)])

    return GIVEN.sub(flag, text)


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def switch(name: str) -> tuple[str, str]:
    """Return the flags that turn an option on and off."""
    return as_flag(name), "--no-fp8" if name == "use_fp8" else as_flag(f"no_{name}")


def read_yaml(path: str, kind: type) -> dict[str, Any]:
    """Return the options that a YAML file gives for the dataclass `kind`, unchecked.

    Raises:
        ConfigError: for a file that cannot be read, that is no mapping, or with a key that is no option.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            '--config needs the package PyYAML, which is not installed: pip install -e ".[train]", or give flags.'
        ) from error
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        here = FILES.get(Path(path).name)
        meant = f" What that guide has in it is here {here}." if here else ""
        raise ConfigError(f"--config {path}: cannot be read ({error}).{meant}") from error
    try:
        # Not constructed before it is known to be flat: a few lines of aliases can stand for gigabytes.
        lines = _lines(path, yaml.compose(text, yaml.SafeLoader), {r.name: r for r in fields(kind)})
        given = yaml.safe_load(text) or {}
    except RecursionError as error:
        raise ConfigError(f"--config {path}: is nested too deeply; options are not.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two of a date or number
        if isinstance(error, ConfigError):
            raise
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: is not valid YAML: {where}.") from error
    values = zip(lines.items(), given.values(), strict=True)
    result = {name: value if written is None else written for (name, written), value in values}
    return _without_idle(result, f"--config {path}: ")


def _lines(path: str, node: Any, rules: Mapping[str, Field[Any]]) -> dict[str, str | None]:
    """Return what is written for each option whose value is a text, and None for the others.

    As it is written: YAML reads the name 010 as the number 8, and 12:30 as 750.
    """
    if node is None:
        return {}
    if node.id != "mapping":
        raise ConfigError(f'--config {path}: must be lines of "option: value", got a {node.id}.')
    found: dict[str, str | None] = {}
    names = [
        str(key.value).replace("-", "_").lower() if key.id == "scalar" else f"a {key.id}"
        for key, _ in node.value
    ]
    names = [NAMES.get(name, name) for name in names]
    if unknown := [name for name in names if name not in rules and name not in IDLE]:
        told = " ".join(_no_option(name, name, rules) for name in unknown[:_MOST_TOLD])
        raise ConfigError(f"--config {path}: {told} All options: {_HELP}")
    for name, (_, value) in zip(names, node.value, strict=True):
        if name in found:
            raise ConfigError(f"--config {path}: gives {name} twice. Leave one of them.")
        nested = value.id == "mapping" or (
            value.id == "sequence" and any(part.id != "scalar" for part in value.value)
        )
        if nested:
            raise ConfigError(
                f"--config {path}: {name}: must be a value or a list of them, got a {value.id} of more than those."
            )
        is_text = name in rules and str(rules[name].type).startswith(("str", "Path", "tuple"))
        number = value.tag.endswith((":int", ":float", ":timestamp"))
        found[name] = value.value if is_text and number else None
    return found


def _no_option(name: str, given: str, known: Iterable[str]) -> str:
    """Return a sentence about an option that there is not; `given`: as it was written."""
    if name in ANSWERS:
        return f"there is no option {given!r:.80}: {ANSWERS[name]}."
    return f"there is no option {given!r:.80}.{did_you_mean(given, known)}"


def _without_idle(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Leave out options of others that have no effect here, with a warning."""
    for name in given.keys() & IDLE.keys():
        told = f"{where}{name} has no effect: {IDLE[name]}."
        warnings.warn(told, Fp8StackWarning, stacklevel=3)
    return {name: value for name, value in given.items() if name not in IDLE}


def _in_our_words(flag: str) -> str:
    """Return a flag of others, or one with underscores, as it is called here: --max_lr=1 as --max-lr=1."""
    name, equals, value = flag.partition("=")
    if not name.startswith("--"):
        return flag
    plain = name[2:].replace("-", "_").lower()
    if plain == "auto_batch_size" and not equals:  # the word alone, which says so
        equals, value = "=", "true"
    return f"{as_flag(NAMES.get(plain, plain))}{equals}{value}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigError, with a did-you-mean for unknown flags."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}. All options: {_HELP}")

    def read(self, argv: list[str] | None) -> dict[str, Any]:
        """Return what was given, by name, as texts."""
        for name in IDLE:
            self.add_argument(as_flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        given = sys.argv[1:] if argv is None else argv
        found, unknown = self.parse_known_args([*map(_in_our_words, given)])
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            flag = unknown[0].partition("=")[0]
            told = _no_option(flag.lstrip("-").replace("-", "_"), flag, known)
            raise ConfigError(f"{told} All options: {_HELP}")
        return _without_idle(vars(found), "--")


class Switch(argparse.Action):
    """Two flags, of which the second, --no-something, sets False."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, nargs=0, **kwargs)

    def __call__(self, parser: Any, found: Any, values: Any, flag: str | None = None) -> None:
        value = flag == self.option_strings[0]
        if getattr(found, self.dest, value) != value:
            parser.error(f"{' and '.join(self.option_strings)} contradict each other")
        setattr(found, self.dest, value)


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Give `parser` a flag for each option of the dataclass `kind`; what is not given stays out of the result."""
    for rule in fields(kind):
        flag = as_flag(rule.name)
        name = str(rule.type).partition(" | ")[0]
        facts = rule.metadata
        default = "" if rule.default in (None, MISSING, ()) else f" ({rule.default})"
        help = f"{facts['help']}{default}".replace("%", "%%")
        if name == "bool":
            both = switch(rule.name)
            parser.add_argument(
                *both, dest=rule.name, action=Switch, default=argparse.SUPPRESS, help=help
            )
        elif name == "tuple[str, ...]":
            parser.add_argument(
                flag,
                nargs="+",
                action="extend",
                default=argparse.SUPPRESS,
                metavar="TEXT",
                help=help,
            )
        else:
            choices = "|".join(map(str, facts["choices"])) or name.upper()
            file = facts["suffix"] and f"FILE{facts['suffix']}"
            words = "|".join(word for word in (choices, facts["word"], file) if word)
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=words, help=help)
