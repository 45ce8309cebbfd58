"""Configs and what names them: tags, models and frameworks."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from tuna.db.models.base import Base, owner, table, text
from tuna.db.types import utc_now

#: Lengths of the columns of `config` that a kind of a plug-in might exceed.
CONFIG_CHARS = {"json": 4096, "driver": 2048, "label": 255}


class ConfigRow(Base):
    """One layer, whatever its kind, found by the hash of its canonical text."""

    __tablename__ = "config"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = text(64, unique=True)
    kind: Mapped[str] = text(32)
    #: the config's fields as `Config.json_text` writes them, from which the config is read
    json: Mapped[str] = text(CONFIG_CHARS["json"], server_default="")
    #: digest of what is too large for a field; NULL: the kind has nothing that large
    body: Mapped[str | None] = mapped_column(ForeignKey("kernel.digest"), index=True)
    #: text for people: the driver command, or the JSON where the kind has no driver command
    driver: Mapped[str] = text(CONFIG_CHARS["driver"])
    label: Mapped[str] = text(CONFIG_CHARS["label"])
    #: MIOpen's key of the problem in a find db; NULL: it has none
    problem_key: Mapped[str | None] = text(255, index=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ConvConfigRow(Base):
    """The fields of a convolution, under MIOpen's names, for people's own queries; written from
    `config.json`."""

    __tablename__ = "conv_config"
    config_id: Mapped[int] = owner("config.id", primary_key=True)
    spatial_dim: Mapped[int]
    batchsize: Mapped[int]
    in_channels: Mapped[int]
    in_d: Mapped[int]
    in_h: Mapped[int]
    in_w: Mapped[int]
    out_channels: Mapped[int]
    fil_d: Mapped[int]
    fil_h: Mapped[int]
    fil_w: Mapped[int]
    pad_d: Mapped[int]
    pad_h: Mapped[int]
    pad_w: Mapped[int]
    conv_stride_d: Mapped[int]
    conv_stride_h: Mapped[int]
    conv_stride_w: Mapped[int]
    dilation_d: Mapped[int]
    dilation_h: Mapped[int]
    dilation_w: Mapped[int]
    group_count: Mapped[int]
    trans_output_pad_d: Mapped[int]
    trans_output_pad_h: Mapped[int]
    trans_output_pad_w: Mapped[int]
    mode: Mapped[str] = text(16)
    pad_mode: Mapped[str] = text(16)
    direction: Mapped[str] = text(1)
    in_layout: Mapped[str] = text(8)
    fil_layout: Mapped[str] = text(8)
    out_layout: Mapped[str] = text(8)
    data_type: Mapped[str] = text(16)


class GemmConfigRow(Base):
    """The fields of a matrix product, for people's own queries; written from `config.json`."""

    __tablename__ = "gemm_config"
    config_id: Mapped[int] = owner("config.id", primary_key=True)
    m: Mapped[int]
    n: Mapped[int]
    k: Mapped[int]
    batch_count: Mapped[int]
    trans_a: Mapped[bool]
    trans_b: Mapped[bool]
    data_type: Mapped[str] = text(16)


class BatchNormConfigRow(Base):
    """The fields of a batch normalisation, under MIOpen's names, for people's own queries; written
    from `config.json`."""

    __tablename__ = "batch_norm_config"
    config_id: Mapped[int] = owner("config.id", primary_key=True)
    spatial_dim: Mapped[int]
    batchsize: Mapped[int]
    in_channels: Mapped[int]
    in_d: Mapped[int]
    in_h: Mapped[int]
    in_w: Mapped[int]
    mode: Mapped[int]
    run: Mapped[int]
    save: Mapped[int]
    alpha: Mapped[float]
    beta: Mapped[float]
    direction: Mapped[str] = text(1)
    layout: Mapped[str] = text(8)
    data_type: Mapped[str] = text(16)


class ConfigTag(Base):
    """A name for a set of configs."""

    __tablename__ = "config_tag"
    tag: Mapped[str] = text(128, primary_key=True)
    config_id: Mapped[int] = owner("config.id", primary_key=True, index=True)
    #: true if the config is tuned again whenever the library changes
    recurrent: Mapped[bool] = mapped_column(default=False, server_default=sa.false())


class Model(Base):
    """A neural network, in one version."""

    __tablename__ = "model"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = text(128)
    version: Mapped[str] = text(64)
    __table_args__ = table(UniqueConstraint("name", "version"))


class Framework(Base):
    """A deep-learning framework, in one version."""

    __tablename__ = "framework"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = text(128)
    version: Mapped[str] = text(64)
    __table_args__ = table(UniqueConstraint("name", "version"))


class ModelConfig(Base):
    """A config of a network, for a framework and a number of GPUs, with its number of
    occurrences."""

    __tablename__ = "model_config"
    model_id: Mapped[int] = owner("model.id", primary_key=True)
    framework_id: Mapped[int] = mapped_column(
        ForeignKey("framework.id"), primary_key=True, index=True
    )
    config_id: Mapped[int] = owner("config.id", primary_key=True, index=True)
    gpu_count: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    weight: Mapped[int]  #: number of lines of the imported file with this config
