"""Tuna from Python: what the commands do, as functions that return data and print nothing.

    from tuna import api

    session = api.init_session("tvm", "from a notebook")
    api.import_configs(Path("layers.txt"), "mine")
    api.update_solvers("tvm")
    api.update_applicability(session.id, "mine")
    api.load_jobs(session.id, tag="mine", reason="tuning", options={"candidates": 16})
    api.run(session.id)
    api.report(session.id).layers[0].best

They use the settings of the process (`TUNA_*`), as the commands do, and raise
`tuna.errors.TunaError`. Importing this takes no time: each function imports what it needs.
"""

from tuna.api.archives import (
    archive_session,
    check_deletion,
    delete_session,
    list_sessions,
    restore_session,
    warm_starts,
)
from tuna.api.benchmarks import BenchmarkOptions, Board, benchmark_model, list_benchmarks
from tuna.api.capture import CapturedProgram, capture
from tuna.api.configs import (
    ImportedConfigs,
    Network,
    Networks,
    NothingImported,
    add_network,
    import_configs,
    list_configs,
    list_networks,
)
from tuna.api.databases import (
    MergedDatabase,
    check_databases,
    compare_databases,
    export,
    export_golden,
    forms_of,
    import_database,
    merge_databases,
)
from tuna.api.jobs import (
    CanceledJobs,
    LoadedJobs,
    cancel,
    enqueue,
    load_example_job,
    load_jobs,
    reproduce,
    reproduce_trial,
    retry,
    run,
)
from tuna.api.keys import RotatedKey, SigningKey, list_keys, rotate_key
from tuna.api.model_building import BuiltModel, Checks, build_model, check_model
from tuna.api.model_tuning import TunedModel, tune_model
from tuna.api.models import (
    MODEL_ENDINGS,
    ImportedModel,
    ModelTask,
    import_model,
    list_models,
    show_model,
)
from tuna.api.results import coverage, query, targets_met, winners, without_solver
from tuna.api.rpc import count_workers, listening
from tuna.api.rpc_client import rpc_client
from tuna.api.rpc_master import LayerCounts, Master, MasterPlan, start_master
from tuna.api.services import (
    Upgrade,
    doctor,
    list_tables,
    measure_noise,
    open_database,
    quiet_needed,
    serve_metrics,
    upgrade_database,
)
from tuna.api.serving import Boards, join, serve_workers
from tuna.api.sessions import (
    StartedSession,
    check_device,
    compare_sessions,
    init_session,
    list_conditions,
    list_job_options,
    list_solvers,
    outlook,
    report,
    session_library,
    set_deadline,
    set_priority,
    status,
    undrained_reports,
    update_applicability,
    update_solvers,
    watcher,
    workers_aside,
    write_report,
)
from tuna.api.simulation import read_scenario, recorded_scenario, simulate
from tuna.api.tuning import PreparedTuning, prepare_tuning
from tuna.api.workers import (
    Role,
    Token,
    Worker,
    create_client_token,
    create_token,
    list_tokens,
    list_workers,
    remote_exec,
    revoke_token,
    set_worker_state,
)
from tuna.models.refusals import TOLERANCE

__all__ = [
    "MODEL_ENDINGS",
    "TOLERANCE",
    "BenchmarkOptions",
    "Board",
    "Boards",
    "BuiltModel",
    "CanceledJobs",
    "CapturedProgram",
    "Checks",
    "ImportedConfigs",
    "ImportedModel",
    "LayerCounts",
    "LoadedJobs",
    "Master",
    "MasterPlan",
    "MergedDatabase",
    "ModelTask",
    "Network",
    "Networks",
    "NothingImported",
    "PreparedTuning",
    "Role",
    "RotatedKey",
    "SigningKey",
    "StartedSession",
    "Token",
    "TunedModel",
    "Upgrade",
    "Worker",
    "add_network",
    "archive_session",
    "benchmark_model",
    "build_model",
    "cancel",
    "capture",
    "check_databases",
    "check_deletion",
    "check_device",
    "check_model",
    "compare_databases",
    "compare_sessions",
    "count_workers",
    "coverage",
    "create_client_token",
    "create_token",
    "delete_session",
    "doctor",
    "enqueue",
    "export",
    "export_golden",
    "forms_of",
    "import_configs",
    "import_database",
    "import_model",
    "init_session",
    "join",
    "list_benchmarks",
    "list_conditions",
    "list_configs",
    "list_job_options",
    "list_keys",
    "list_models",
    "list_networks",
    "list_sessions",
    "list_solvers",
    "list_tables",
    "list_tokens",
    "list_workers",
    "listening",
    "load_example_job",
    "load_jobs",
    "measure_noise",
    "merge_databases",
    "open_database",
    "outlook",
    "prepare_tuning",
    "query",
    "quiet_needed",
    "read_scenario",
    "recorded_scenario",
    "remote_exec",
    "report",
    "reproduce",
    "reproduce_trial",
    "restore_session",
    "retry",
    "revoke_token",
    "rotate_key",
    "rpc_client",
    "run",
    "serve_metrics",
    "serve_workers",
    "session_library",
    "set_deadline",
    "set_priority",
    "set_worker_state",
    "show_model",
    "simulate",
    "start_master",
    "status",
    "targets_met",
    "tune_model",
    "undrained_reports",
    "update_applicability",
    "update_solvers",
    "upgrade_database",
    "warm_starts",
    "watcher",
    "winners",
    "without_solver",
    "workers_aside",
    "write_report",
]
