"""Attention of heads: softmax(Q K^T scale + mask) V as one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.kind import ConfigKind, similar_by
from tuna.configs.values import MAX_COUNT, DataType, check_sizes, member
from tuna.errors import BadInput

#: Axes of a tensor in the order of the default layout: batch, heads, sequence (queries or keys),
#: width
AXES = "BHSD"
#: Axis of a tensor that holds queries, keys and values in this order, and its extent
FUSED, PARTS = "N", 3
#: Axes of the scores, of which a mask has some
SCORES = "BHQK"
#: Axes of the masks that a kernel reads: of no key there is none
MASKS = ("", "K", "QK", "HK", "HQK", "BK", "BQK", "BHK", "BHQK")
#: Types of the tensors
TYPES = {kind.value: kind for kind in (DataType.FP32, DataType.BF16)}
_SIZES = ("batch_count", "heads", "kv_heads", "queries", "keys", "width", "value_width")


@dataclass(frozen=True)
class AttentionConfig(Config):
    """For each head, the mean of its values V with the weights softmax(Q K^T `scale` + mask), row
    by row.

    `kv_heads` divides `heads`: each head of keys and values is of so many adjacent ones of queries.
    `*_layout` is the order of a tensor's axes, a permutation of `AXES`; that of Q, V and Y has the
    width last. With `FUSED` among them, Q, K or V is one part of a tensor that holds all three.
    `mask` has the axes of a summand of the scores in fp32, as letters of `SCORES`; empty: none.
    With `zero_rows` the answer to a query whose weights are no numbers, as all scores are -inf, is
    zero.
    """

    kind: ClassVar[str] = "attention"
    later_fields: ClassVar[tuple[str, ...]] = ("causal",)

    batch_count: int
    heads: int
    queries: int
    keys: int
    width: int  #: columns of Q and K
    value_width: int  #: columns of V and the answer
    kv_heads: int
    scale: float
    mask: str = ""
    zero_rows: bool = False
    q_layout: str = AXES
    k_layout: str = AXES
    v_layout: str = AXES
    y_layout: str = AXES
    data_type: DataType = DataType.FP32
    causal: bool = False  #: whether a query sees no key behind its own place

    def __post_init__(self) -> None:
        if self.data_type not in TYPES.values() or type(self.data_type) is not DataType:
            object.__setattr__(self, "data_type", member(TYPES, "data_type", self.data_type))
        check_sizes(_SIZES, tuple(getattr(self, name) for name in _SIZES), 1)
        if self.heads % self.kv_heads:
            raise BadInput(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if type(self.scale) is not float or not abs(self.scale) < float("inf"):
            raise BadInput(f"scale must be a finite number, got {shown(self.scale)}")
        for name in ("zero_rows", "causal"):
            if type(getattr(self, name)) is not bool:
                raise BadInput(f"{name} must be true or false, got {shown(getattr(self, name))}")
        if self.mask not in MASKS:
            raise BadInput(f"mask must be one of {', '.join(MASKS)}, got {shown(self.mask)}")
        for letter in "qkvy":
            layout = getattr(self, f"{letter}_layout")
            axes = AXES if letter == "y" or FUSED not in str(layout) else AXES + FUSED
            whole = type(layout) is str and sorted(layout) == sorted(axes)
            if not whole or (letter != "k" and not layout.endswith("D")):
                last = "" if letter == "k" else ", D last"
                raise BadInput(f"{letter}_layout must have the axes {AXES}{last}: {shown(layout)}")
        if self.flops > MAX_COUNT:
            raise BadInput("the attention is too large: its FLOPs do not fit in 63 bits")

    @classmethod
    def checked(cls, values: dict[str, Any]) -> AttentionConfig:
        """The attention with these JSON values; raises BadInput."""
        scale = values.get("scale")
        return cls(**{**values, **({"scale": float(scale)} if type(scale) is int else {})})

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """Extents of the scores."""
        return self.batch_count, self.heads, self.queries, self.keys

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Extents of Q, K, V and Y as they are stored, and of the mask if there is one, by
        letter."""
        sizes = {
            "q": (self.heads, self.queries, self.width),
            "k": (self.kv_heads, self.keys, self.width),
            "v": (self.kv_heads, self.keys, self.value_width),
            "y": (self.heads, self.queries, self.value_width),
        }
        found = {}
        for letter, rest in sizes.items():
            extents = dict(zip(AXES + FUSED, (self.batch_count, *rest, PARTS), strict=True))
            found[letter] = tuple(extents[axis] for axis in getattr(self, f"{letter}_layout"))
        by_axis = dict(zip(SCORES, self.scores, strict=True))
        return found | ({"m": tuple(by_axis[axis] for axis in self.mask)} if self.mask else {})

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, two for each multiply-add."""
        return 2 * math.prod(self.scores) * (self.width + self.value_width)

    @property
    def label(self) -> str:
        """A short text such as `attention b8 12x128x128x64 +mask HQK BSHD fp32`."""
        sizes = [self.heads, self.queries, self.keys, self.width]
        sizes += [self.value_width] if self.value_width != self.width else []
        layouts = [self.q_layout, self.k_layout, self.v_layout, self.y_layout]
        words = [
            "attention",
            f"b{self.batch_count}" if self.batch_count > 1 else "",
            "x".join(map(str, sizes)),
            f"kv{self.kv_heads}" if self.kv_heads != self.heads else "",
            "causal" if self.causal else "",
            f"+mask {self.mask}" if self.mask else "",
            " ".join(dict.fromkeys(layouts)) if set(layouts) != {AXES} else "",
            self.data_type.value.lower(),
        ]
        return " ".join(filter(None, words))


KIND = ConfigKind(
    AttentionConfig,
    reference="tuna.libraries.reference:attention",
    similar=similar_by(
        (
            *(
                "causal",
                "mask",
                "zero_rows",
                "q_layout",
                "k_layout",
                "v_layout",
                "y_layout",
                "data_type",
            ),
            *("width", "value_width"),
        ),
        ("batch_count", "heads", "queries", "keys"),
    ),
)
