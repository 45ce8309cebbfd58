"""Kinds of config: classes of layers, registered under the entry point group `tuna.kinds`.

A kind is added by a module with a subclass of `Config` and a `ConfigKind`, named in a package's
pyproject.toml:

    [project.entry-points."tuna.kinds"]
    softmax = "my_package.softmax:KIND"
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import operator
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from reprlib import repr as shown
from typing import Any

from tuna.common.files import gunzip
from tuna.configs.config import Config
from tuna.errors import BadInput
from tuna.plugins import Plugins

#: Function that parses the words of a MIOpenDriver command, the command itself first; raises
#: BadInput
CommandReader = Callable[[list[str]], Sequence[Config]]


@dataclass(frozen=True)
class Similar:
    """Likeness of a config to others of its kind: params of similar ones are tried for it."""

    family: tuple[object, ...]  #: values that are equal for similar configs
    #: positive sizes in which similar configs differ, the same number of them in each family
    sizes: tuple[float, ...]
    batch_first: bool = True  #: true if the first size is that of a batch


def similar_by(equal: Sequence[str], sizes: Sequence[str]) -> Callable[[Config], Similar]:
    """Return the rule that configs are similar where the fields `equal` are, and differ in two
    sizes or more, the batch's first."""
    values, numbers = operator.attrgetter(*equal), operator.attrgetter(*sizes)
    return lambda config: Similar(values(config), numbers(config))


def _like_no_other(_: Config) -> None:
    return None


@dataclass(frozen=True)
class ConfigKind:
    """A class of layers."""

    config: type[Config]
    #: readers of driver lines by command (`conv` in `./bin/MIOpenDriver conv -n 1 ...`); a kind
    #: without any writes its layers as JSON lines
    commands: Mapping[str, CommandReader] = field(default_factory=dict)
    #: "module:function" that computes the layer by NumPy, for libraries that check their answers;
    #: empty: none. It takes a config and a seed, and returns a `reference.Problem` of
    #: `tuna.libraries`.
    reference: str = ""
    #: function that returns the likeness of a config to others of the kind; None for a config
    #: without similar ones
    similar: Callable[[Any], Similar | None] = _like_no_other

    def __post_init__(self) -> None:
        if not (
            isinstance(self.config, type)
            and issubclass(self.config, Config)
            and is_dataclass(self.config)
        ):
            raise TypeError(f"{self.config!r} is not a dataclass that inherits from Config")
        name = getattr(self.config, "kind", None)
        if not isinstance(name, str) or not 0 < len(name) <= 32:
            raise TypeError(
                f"{self.config.__name__}.kind must be a name of 1 to 32 characters, not {name!r}"
            )
        lacking = [
            member
            for member in ("label", "flops")
            if getattr(self.config, member) is getattr(Config, member)
        ]
        if lacking:
            raise TypeError(f"{self.config.__name__} lacks {' and '.join(lacking)}")

    @property
    def name(self) -> str:
        """The `kind` of its configs."""
        return self.config.kind

    def load_reference(self) -> Callable[[Config, int], Any]:
        """The function that `reference` names; raises BadInput where there is none."""
        if not self.reference:
            raise BadInput(f"a {self.name} config has no reference")
        function: Callable[[Config, int], Any] = pkgutil.resolve_name(self.reference)
        return function


KINDS: Plugins[ConfigKind] = Plugins("tuna.kinds", "kind of config", ConfigKind)


def kind_of(config: Config) -> ConfigKind:
    """The kind that `config` is of; raises NotFound and BadInput as `KINDS.get` does."""
    return KINDS.get(config.kind)


def command_reader(command: str) -> CommandReader | None:
    """The reader of a MIOpenDriver command; None if no kind has it."""
    return _readers(KINDS.generation).get(command)


@functools.lru_cache(maxsize=1)
def _readers(_generation: int) -> dict[str, CommandReader]:
    readers: dict[str, CommandReader] = {}
    for name, kind in KINDS.all().items():
        for command, reader in kind.commands.items():
            if readers.setdefault(command, reader) is not reader:
                import structlog

                structlog.get_logger(__name__).warning(
                    "driver command registered twice", command=command, kind=name
                )
    return readers


def from_json(mapping: Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote, or one written by hand; raises BadInput.

    A missing field takes the default of the config's class. Fields that a convolution does not use
    (depth in two dimensions, output padding unless transposed) are brought into normal form, and a
    batch normalisation gets its dimensions from depth and layout, as they do when a command is
    read.
    """
    values = dict(mapping)
    name = values.pop("kind", None)
    if name is None:
        raise BadInput(f"a config needs a 'kind': {' or '.join(KINDS.names())}")
    if not isinstance(name, str):
        raise BadInput(f"unknown kind of config {shown(name)}; Tuna has {', '.join(KINDS.names())}")
    return KINDS.get(name).config.from_fields(values)


def from_json_text(text: str) -> Config:
    """The config in a JSON object, as `json_text` writes it; raises BadInput."""
    return from_json(_object(text))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the line is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise BadInput("a config in JSON is an object with a 'kind'")
    return found


#: Name under which a line of a file holds the config's body, gzip in base64; it is not a field of a
#: config
_BODY = "body_gzip"


@dataclass(frozen=True)
class Workload:
    """A config with its body, for one that has a body."""

    config: Config
    body: bytes | None = None

    @classmethod
    def read(cls, mapping: Mapping[str, Any]) -> Workload:
        """Read a config as `from_json` does, with the body that may stand beside its fields; raises
        BadInput."""
        values = dict(mapping)
        packed = values.pop(_BODY, None)
        config = from_json(values)
        if packed is None:
            return cls(config)
        try:
            body = gunzip(base64.b64decode(str(packed), validate=True))
        except ValueError as error:
            raise BadInput(f"{_BODY} must be a body, gzip in base64: {error}") from None
        if hashlib.sha256(body).hexdigest() != config.body_digest:
            raise BadInput(f"{_BODY} is not the body that the {config.kind} config names")
        return cls(config, body)

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read the JSON of a line of a file; raises BadInput."""
        return cls.read(_object(text))

    def text(self) -> str:
        """The line of a file."""
        if self.body is None:
            return self.config.text()
        packed = base64.b64encode(gzip.compress(self.body, mtime=0)).decode()
        return json.dumps({**self.config.to_json(), _BODY: packed}, separators=(",", ":"))

    @property
    def bodies(self) -> dict[str, bytes]:
        """The body by its SHA-256, if there is one."""
        digest = self.config.body_digest
        return {} if self.body is None or digest is None else {digest: self.body}
