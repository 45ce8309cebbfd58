# The names of `tuna_models.api`: each is imported from here when it is used first.

from tuna.db.benchmarks import ModelTime as ModelTime
from tuna_models.api.benchmarks import BenchmarkBoard as BenchmarkBoard
from tuna_models.api.benchmarks import BenchmarkOptions as BenchmarkOptions
from tuna_models.api.benchmarks import benchmark_model as benchmark_model
from tuna_models.api.benchmarks import list_benchmarks as list_benchmarks
from tuna_models.api.building import BuiltModel as BuiltModel
from tuna_models.api.building import build_model as build_model
from tuna_models.api.building import check_model as check_model
from tuna_models.api.importing import ImportedModel as ImportedModel
from tuna_models.api.importing import ModelTask as ModelTask
from tuna_models.api.importing import import_model as import_model
from tuna_models.api.importing import list_models as list_models
from tuna_models.api.importing import model_workloads as model_workloads
from tuna_models.api.importing import show_model as show_model
from tuna_models.api.tuning import Ending as Ending
from tuna_models.api.tuning import Latency as Latency
from tuna_models.api.tuning import Reached as Reached
from tuna_models.api.tuning import TunedModel as TunedModel
from tuna_models.api.tuning import tune_model as tune_model
from tuna_models.checks import Checks as Checks
from tuna_models.documents import model_document as model_document
from tuna_models.documents import tasks_document as tasks_document
from tuna_models.onnx_files import check_upload as check_upload
from tuna_models.store import StoredModel as StoredModel
from tuna_models.work import ModelWork as ModelWork
from tuna_models.work import open_work as open_work
