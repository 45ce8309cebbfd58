"""The commands that `tuna --help` lists: module and line of help of each."""

COMMANDS = {
    "model": (
        "tuna_models.cli.model",
        "Import models, see their tasks, build them with the kernels that won.",
    ),
    "benchmark-model": (
        "tuna_models.cli.benchmark",
        "Time a built model on a board behind TVM RPC, or here.",
    ),
}
