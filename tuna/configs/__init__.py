"""Layers: what can be tuned, independent of the library that does it, and the texts that name
them."""

from tuna.configs.batch_norm import BatchNormConfig
from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.driver import UnsupportedCommand, UnsupportedLine, parse_line
from tuna.configs.files import parse_file, parse_lines
from tuna.configs.gemm import GemmConfig
from tuna.configs.kind import KINDS, ConfigKind, from_json, from_json_text, kind_of
from tuna.configs.lines import LINE_FORMS, LineForm, read_line, read_one
from tuna.configs.tally import LineCounts, ParsedFile, Rejection, Tally
from tuna.configs.task import TaskConfig
from tuna.configs.values import DataType, Direction

__all__ = [
    "KINDS",
    "LINE_FORMS",
    "BatchNormConfig",
    "Config",
    "ConfigKind",
    "ConvConfig",
    "DataType",
    "Direction",
    "GemmConfig",
    "LineCounts",
    "LineForm",
    "ParsedFile",
    "Rejection",
    "Tally",
    "TaskConfig",
    "UnsupportedCommand",
    "UnsupportedLine",
    "from_json",
    "from_json_text",
    "kind_of",
    "parse_file",
    "parse_line",
    "parse_lines",
    "read_line",
    "read_one",
]
