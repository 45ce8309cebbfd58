"""Layers, which any library may tune, and the texts that name them."""

from tuna.configs.attention import AttentionConfig as AttentionConfig
from tuna.configs.batch_norm import BatchNormConfig as BatchNormConfig
from tuna.configs.config import Config as Config
from tuna.configs.conv import ConvConfig as ConvConfig
from tuna.configs.files import LineCounts as LineCounts
from tuna.configs.files import LineReader as LineReader
from tuna.configs.files import ParsedFile as ParsedFile
from tuna.configs.files import Rejection as Rejection
from tuna.configs.files import parse_file as parse_file
from tuna.configs.files import parse_lines as parse_lines
from tuna.configs.gemm import GemmConfig as GemmConfig
from tuna.configs.kind import KINDS as KINDS
from tuna.configs.kind import ConfigKind as ConfigKind
from tuna.configs.kind import Workload as Workload
from tuna.configs.kind import from_json as from_json
from tuna.configs.kind import from_json_text as from_json_text
from tuna.configs.kind import kind_of as kind_of
from tuna.configs.lines import LINE_FORMS as LINE_FORMS
from tuna.configs.lines import LineForm as LineForm
from tuna.configs.lines import UnsupportedLine as UnsupportedLine
from tuna.configs.lines import parse_line as parse_line
from tuna.configs.lines import read_line as read_line
from tuna.configs.lines import read_one as read_one
from tuna.configs.task import TaskConfig as TaskConfig
from tuna.configs.values import DataType as DataType
from tuna.configs.values import Direction as Direction
