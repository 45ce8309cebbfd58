"""Layers, which any library may tune, and the texts that name them."""

from tuna.configs.batch_norm import BatchNormConfig
from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.files import (
    LineCounts,
    LineReader,
    ParsedFile,
    Rejection,
    parse_file,
    parse_lines,
)
from tuna.configs.gemm import GemmConfig
from tuna.configs.kind import KINDS, ConfigKind, Workload, from_json, from_json_text, kind_of
from tuna.configs.lines import (
    LINE_FORMS,
    LineForm,
    UnsupportedLine,
    parse_line,
    read_line,
    read_one,
)
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
    "LineReader",
    "ParsedFile",
    "Rejection",
    "TaskConfig",
    "UnsupportedLine",
    "Workload",
    "from_json",
    "from_json_text",
    "kind_of",
    "parse_file",
    "parse_line",
    "parse_lines",
    "read_line",
    "read_one",
]
