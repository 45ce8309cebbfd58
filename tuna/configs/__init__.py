"""Layers: what can be tuned, independent of the library that does it, and the texts that name them."""

from tuna.configs.batch_norm import BatchNormConfig
from tuna.configs.config import Config, from_json
from tuna.configs.conv import ConvConfig
from tuna.configs.driver import UnsupportedCommand, parse_line
from tuna.configs.files import LineCounts, ParsedFile, Rejection, parse_file, parse_lines
from tuna.configs.gemm import GemmConfig
from tuna.configs.values import DataType, Direction

__all__ = [
    "BatchNormConfig",
    "Config",
    "ConvConfig",
    "DataType",
    "Direction",
    "GemmConfig",
    "LineCounts",
    "ParsedFile",
    "Rejection",
    "UnsupportedCommand",
    "from_json",
    "parse_file",
    "parse_line",
    "parse_lines",
]
