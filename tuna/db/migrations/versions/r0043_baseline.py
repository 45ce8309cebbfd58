"""The schema of version 0.1.0 at commit e630f606, the oldest that is upgraded.

Revision: 0043
"""

import secrets
import uuid

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import BigId, Double, LongBlob, LongText, UtcDateTime

revision = "0043"
down_revision = None
branch_labels = None
depends_on = None

BIG, BOOLEAN, INTEGER, JSON = sa.BigInteger(), sa.Boolean(), sa.Integer(), sa.JSON()
TIME, text = UtcDateTime(), sa.String
#: Types of the keys that other tables refer to, where they are not INTEGER
KEYS = {"golden_entry": BigId, "job": BigId, "search": BigId, "kernel": text(64), "token": text(16)}


def _column(name, type_, *items, nullable=False, **options):
    quote = name == "library" or None  # a reserved word of MySQL 9
    return sa.Column(name, type_, *items, nullable=nullable, quote=quote, **options)


def _columns(**types):
    return [_column(name, type_) for name, type_ in types.items()]


def _nullable(**types):
    return [_column(name, type_, nullable=True) for name, type_ in types.items()]


def _default(default, **types):
    return [_column(name, type_, server_default=default) for name, type_ in types.items()]


def _key(**types):
    return [_column(name, type_, primary_key=True) for name, type_ in types.items()]


def _reference(name, table, ondelete=None, **options):
    """A column that refers to the key of `table`."""
    key = f"{table}.digest" if table == "kernel" else f"{table}.id"
    foreign = sa.ForeignKey(key, ondelete=ondelete)
    return [_column(name, KEYS.get(table, INTEGER), foreign, **options)]


def _references(ondelete, **tables):
    return [_reference(name, table, ondelete)[0] for name, table in tables.items()]


def _unique(names):
    return [sa.UniqueConstraint(*names.split())]


def _indexes(*several, name=None, **options):
    return [sa.Index(name, *names.split(), **options) for names in several]


def _table(name, *items):
    return op.create_table(name, *(one for some in items for one in some), **TABLE_OPTIONS)


def upgrade() -> None:
    _table("cache_hold", _key(space=text(63), key=text(255), pack=text(255)))
    _table(
        "environment",
        _key(id=INTEGER),
        _columns(key=text(16), library=text(64), library_version=text(128), arch=text(128)),
        _columns(num_cu=INTEGER, toolchain=text(128), device=text(255), target=LongText),
        _columns(flags=JSON),
        _nullable(conditions=JSON),
        _default("", machine_key=text(16)),
        _unique("key"),
        _indexes("machine_key"),
    )
    _table("former_key", _key(public=text(64)), _columns(superseded_at=TIME))
    _table(
        "framework",
        _key(id=INTEGER),
        _columns(name=text(128), version=text(64)),
        _unique("name version"),
    )
    _table(
        "golden",
        _key(id=INTEGER),
        _columns(library=text(64), version=INTEGER, state=text(16)),
        _nullable(base_version=INTEGER),
        _columns(created_at=TIME),
        _nullable(promoted_at=TIME),
        _default("", promoted_by=text(255)),
        _nullable(note=LongText),
        _unique("library version"),
    )
    installation = _table(
        "installation",
        _key(id=INTEGER),
        _columns(namespace=text(32)),
        _default("", secret=text(64), gateway_secret=text(64)),
    )
    _table("kernel", _key(digest=text(64)), _columns(blob=LongBlob, size_bytes=BIG))
    _table(
        "model",
        _key(id=INTEGER),
        _columns(name=text(128), version=text(64)),
        _unique("name version"),
    )
    _table(
        "reported",
        _key(id=BigId),
        _columns(digest=text(64), source=text(16), subject=LongText),
        _nullable(config_key=text(64)),
        _columns(implementation=LongText),
        _nullable(time_ms=Double),
        _columns(device=text(128), versions=JSON, who=text(255), origin=text(255)),
        _columns(reported_at=TIME),
        _unique("digest"),
        _indexes("config_key", "source id"),
    )
    _table(
        "solver",
        _key(id=INTEGER),
        _columns(library=text(64), name=text(128), kinds=text(255), algorithm=text(64)),
        _columns(tunable=BOOLEAN, dynamic=BOOLEAN, valid=BOOLEAN),
        _nullable(number=INTEGER),
        _unique("library name"),
    )
    _table(
        "token",
        _key(id=text(16)),
        _columns(digest=text(64), role=text(16), created_at=TIME, expires_at=TIME),
        _nullable(used_at=TIME, revoked_at=TIME),
        _default("", label=text(128), space=text(63)),
        _default("0", space_bytes=BIG),
    )
    _table(
        "action",
        _key(id=BigId),
        _columns(at=TIME),
        _reference("token_id", "token"),
        _columns(what=text(32), subject=text(255), details=LongText),
        _indexes("token_id"),
    )
    _table(
        "benchmark",
        _key(id=INTEGER),
        _columns(run=text(36), number=INTEGER),
        _reference("model_id", "model", "SET NULL", nullable=True),
        _columns(label=text(255), artifact=text(64), function=text(128), tracker=text(255)),
        _columns(device=text(255), extents=JSON, inputs=LongText, time_ms=Double, low_ms=Double),
        _columns(high_ms=Double, repeats=INTEGER, noisy=BOOLEAN),
        _nullable(error=Double),
        _columns(created_at=TIME),
        _unique("run number"),
        _indexes("model_id"),
    )
    _table(
        "cache_entry",
        _key(id=BigId),
        _columns(space=text(63), key=text(255), file=text(255), digest=text(64), size_bytes=BIG),
        _reference("token_id", "token"),
        _columns(refused=INTEGER, created_at=TIME, used_at=TIME),
        _unique("space key file"),
        _indexes("digest", "space used_at", "token_id"),
    )
    _table(
        "config",
        _key(id=INTEGER),
        _columns(key=text(64), kind=text(32), driver=text(2048), label=text(255), created_at=TIME),
        _nullable(problem_key=text(255)),
        _default("", json=text(4096)),
        _reference("body", "kernel", nullable=True),
        _unique("key"),
        _indexes("body", "problem_key"),
    )
    _table(
        "device",
        _key(id=INTEGER),
        _references("CASCADE", environment_id="environment"),
        _columns(name=text(255)),
        _nullable(peak_gflops=Double),
        _columns(updated_at=TIME),
        _default("", peak_source=text(8)),
        _unique("environment_id name"),
    )
    _table(
        "predictor",
        _key(name=text(128)),
        _columns(library=text(64), arch=text(64)),
        _nullable(since=TIME),
        _columns(seed=BIG, library_version=text(255), seen=text(64), trials=INTEGER),
        _columns(layers=INTEGER),
        _references(None, model="kernel", tables="kernel"),
        _columns(evaluation=LongText),
        _default(sa.false(), in_answers=BOOLEAN, in_searches=BOOLEAN),
        _columns(created_at=TIME),
        _indexes("model", "tables"),
    )
    _table(
        "session",
        _key(id=INTEGER),
        _references(None, environment_id="environment"),
        _columns(reason=text(255), created_at=TIME),
        _default("", uuid=text(36)),
        _nullable(fault=LongText, options=JSON),
        _unique("environment_id reason"),
        _indexes("uuid", unique=True),
    )
    _table(
        "worker",
        _key(id=INTEGER),
        _columns(name=text(128)),
        _reference("token_id", "token"),
        _columns(role=text(16), host=text(255), device=text(255), environment=LongText),
        _columns(toolchain=LongText, state=text(16), joined_at=TIME, seen_at=TIME),
        _nullable(revoked_at=TIME),
        _default("1", processes=INTEGER),
        _default("", digest=text(64)),
        _unique("name"),
        _indexes("token_id"),
    )
    _table(
        "batch_norm_config",
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _columns(spatial_dim=INTEGER, batchsize=INTEGER, in_channels=INTEGER, in_d=INTEGER),
        _columns(in_h=INTEGER, in_w=INTEGER, mode=INTEGER, run=INTEGER, save=INTEGER),
        _columns(alpha=Double, beta=Double, direction=text(1), layout=text(8), data_type=text(16)),
    )
    _table(
        "config_tag",
        _key(tag=text(128)),
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _default(sa.false(), recurrent=BOOLEAN),
        _indexes("config_id"),
    )
    _table(
        "conv_config",
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _columns(spatial_dim=INTEGER, batchsize=INTEGER, in_channels=INTEGER, in_d=INTEGER),
        _columns(in_h=INTEGER, in_w=INTEGER, out_channels=INTEGER, fil_d=INTEGER, fil_h=INTEGER),
        _columns(fil_w=INTEGER, pad_d=INTEGER, pad_h=INTEGER, pad_w=INTEGER),
        _columns(conv_stride_d=INTEGER, conv_stride_h=INTEGER, conv_stride_w=INTEGER),
        _columns(dilation_d=INTEGER, dilation_h=INTEGER, dilation_w=INTEGER, group_count=INTEGER),
        _columns(trans_output_pad_d=INTEGER, trans_output_pad_h=INTEGER),
        _columns(trans_output_pad_w=INTEGER, mode=text(16), pad_mode=text(16), direction=text(1)),
        _columns(in_layout=text(8), fil_layout=text(8), out_layout=text(8), data_type=text(16)),
    )
    _table(
        "dead_letter",
        _key(id=BigId),
        _columns(library=text(64)),
        _reference("session_id", "session", "CASCADE", nullable=True),
        _columns(fault=LongText, body=LongBlob, created_at=TIME),
        _indexes("library session_id", "session_id"),
    )
    _table(
        "gemm_config",
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _columns(m=INTEGER, n=INTEGER, k=INTEGER, batch_count=INTEGER, trans_a=BOOLEAN),
        _columns(trans_b=BOOLEAN, data_type=text(16)),
    )
    _table(
        "golden_entry",
        _key(id=BigId),
        _references("CASCADE", golden_id="golden"),
        _columns(arch=text(128), num_cu=INTEGER),
        _references(None, config_id="config", solver_id="solver", session_id="session"),
        _references(None, environment_id="environment"),
        _columns(time_ms=Double, workspace_bytes=BIG, params=LongText, algorithm=text(64)),
        _nullable(problem_key=text(255)),
        _reference("workload", "kernel", nullable=True),
        _columns(worker=text(255), device=text(255)),
        _nullable(source=text(255), measured_at=TIME),
        _default("", clock=text(8)),
        _default(sa.false(), noisy=BOOLEAN),
        _unique("golden_id arch num_cu config_id solver_id"),
        _indexes("config_id", "environment_id", "measured_at", "session_id config_id"),
        _indexes("solver_id session_id config_id", "workload"),
    )
    _table(
        "model_config",
        _reference("model_id", "model", "CASCADE", primary_key=True),
        _reference("framework_id", "framework", primary_key=True),
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _key(gpu_count=INTEGER),
        _columns(weight=INTEGER),
        _indexes("config_id", "framework_id"),
    )
    _table(
        "no_solver",
        _reference("session_id", "session", "CASCADE", primary_key=True),
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _columns(reason=text(255), loaded=BOOLEAN),
        _indexes("config_id"),
    )
    _table(
        "request",
        _key(id=INTEGER),
        _reference("token_id", "token"),
        _nullable(client_key=text(128)),
        _columns(digest=text(64), kind=text(16), name=text(128), wanted=LongText, upload=text(64)),
        _columns(upload_bytes=BIG, trials=INTEGER, priority=INTEGER, state=text(16)),
        _reference("session_id", "session", "SET NULL", nullable=True),
        _default("", tag=text(128)),
        _columns(message=LongText, progress=LongText, files=LongText, files_bytes=BIG),
        _columns(created_at=TIME, updated_at=TIME),
        _nullable(tuning_at=TIME, ended_at=TIME),
        _unique("token_id client_key"),
        _indexes("ended_at", "session_id", "token_id"),
    )
    _table(
        "search",
        _key(id=BigId),
        _references("CASCADE", session_id="session"),
        _references(None, config_id="config", solver_id="solver"),
        _columns(steps=text(255), reason=text(255), options=JSON),
        _nullable(begun=TIME, stopped=text(255)),
        _unique("session_id config_id solver_id steps"),
        _indexes("config_id", "solver_id"),
    )
    _table(
        "served_time",
        _reference("session_id", "session", "CASCADE", primary_key=True),
        _key(began_at=TIME),
        _columns(ended_at=TIME),
    )
    _table(
        "solver_applicability",
        _reference("session_id", "session", "CASCADE", primary_key=True),
        _reference("config_id", "config", "CASCADE", primary_key=True),
        _reference("solver_id", "solver", "CASCADE", primary_key=True),
        _indexes("config_id", "solver_id"),
    )
    _table(
        "golden_kernel",
        _reference("golden_entry_id", "golden_entry", "CASCADE", primary_key=True),
        _key(number=INTEGER),
        _references(None, kernel="kernel"),
        _columns(name=text(1024), args=LongText),
        _indexes("kernel"),
    )
    _table(
        "job",
        _key(id=BigId),
        _references("CASCADE", session_id="session"),
        _references(None, config_id="config", solver_id="solver"),
        _columns(steps=text(255), step=text(64), state=text(16), reason=text(255), options=JSON),
        _columns(attempt=INTEGER, failures=INTEGER, isolate=BOOLEAN),
        _nullable(chunk=text(32), leased_at=TIME, cause=text(32), workload=text(64)),
        _columns(updated_at=TIME),
        _nullable(ready_at=TIME, avoid=text(255)),
        _default("0", uncharged=INTEGER, round=INTEGER),
        _nullable(stopped=text(255)),
        _default("0", part=INTEGER),
        _reference("search_id", "search", "CASCADE", nullable=True),
        _unique("session_id config_id solver_id steps round part"),
        _indexes("session_id step state id", name="ix_job_claim"),
        _indexes("chunk", "config_id", "search_id round", "session_id steps stopped", "solver_id"),
    )
    _table(
        "warm_start",
        _reference("search_id", "search", "CASCADE", primary_key=True),
        _key(number=INTEGER),
        _references(None, digest="kernel"),
        _columns(origin=text(16), noisy=BOOLEAN, trials=INTEGER, label=text(255)),
        _default("0", round=INTEGER),
        _indexes("digest"),
    )
    _table(
        "find_db",
        _key(id=INTEGER),
        _references("CASCADE", session_id="session"),
        _references(None, config_id="config", solver_id="solver"),
        _reference("job_id", "job", nullable=True),
        _nullable(time_ms=Double),
        _columns(workspace_bytes=BIG, params=LongText),
        _nullable(trial_number=INTEGER),
        _reference("workload", "kernel", nullable=True),
        _columns(updated_at=TIME),
        _default("", algorithm=text(64)),
        _nullable(source=text(255)),
        _default(sa.false(), simulated=BOOLEAN),
        _default("", clock=text(8)),
        _default(sa.false(), noisy=BOOLEAN),
        _reference("final_job_id", "job", nullable=True),
        _unique("session_id config_id solver_id"),
        _indexes("config_id", "final_job_id", "job_id", "noisy session_id", "simulated session_id"),
        _indexes("solver_id session_id config_id", "updated_at", "workload"),
    )
    _table(
        "job_artifact",
        _key(digest=text(64)),
        _reference("job_id", "job", "CASCADE", primary_key=True),
        _indexes("job_id"),
    )
    _table(
        "step_result",
        _key(id=BigId),
        _references("CASCADE", job_id="job"),
        _columns(step=text(64), attempt=INTEGER, ok=BOOLEAN),
        _nullable(cause=text(32)),
        _columns(output_tail=LongText, worker=text(255), device=text(255)),
        _nullable(started_at=TIME, ended_at=TIME),
        _columns(busy_s=Double),
        _nullable(drift=Double),
        _unique("job_id step attempt"),
        _indexes("cause job_id"),
    )
    _table(
        "trial",
        _key(id=BigId),
        _references("CASCADE", job_id="job"),
        _columns(number=INTEGER),
        _nullable(params=LongText, artifact=text(64), cause=text(32)),
        _columns(output_tail=LongText, times_ms=LongText),
        _nullable(time_ms=Double, max_error=Double, build_s=Double, measured_at=TIME),
        _nullable(low_ms=Double, high_ms=Double),
        _default("", clock=text(8), step=text(64)),
        _default(sa.false(), ended_early=BOOLEAN),
        _nullable(parts=LongText),
        _unique("job_id number"),
    )
    _table(
        "find_db_kernel",
        _reference("find_db_id", "find_db", "CASCADE", primary_key=True),
        _key(number=INTEGER),
        _references(None, kernel="kernel"),
        _columns(name=text(1024), args=LongText),
        _indexes("kernel"),
    )
    identity = {"namespace": uuid.uuid4().hex[:12], "secret": secrets.token_hex(32)}
    op.bulk_insert(installation, [{"id": 1, **identity, "gateway_secret": secrets.token_hex(32)}])
