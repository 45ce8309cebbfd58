"""The commands that `tuna --help` lists: module and line of help of each."""

COMMANDS = {
    "serve": (
        "tuna_serve.cli.service",
        "Serve requests and pages to people and programs over HTTP.",
    ),
    "cache": (
        "tuna_serve.cli.cache",
        "List, prune and verify what programs share in spaces of the cache.",
    ),
}
