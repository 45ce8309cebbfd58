"""The commands that `tuna --help` lists: module and line of help of each."""

COMMANDS = {
    "rpc-client": (
        "tuna_remote.cli.joining",
        "Join a master over the network, and compile and measure for it.",
    ),
    "gateway": ("tuna_remote.cli.joining", "Let workers on other machines join, over HTTPS."),
    "tune-rpc": ("tuna_remote.cli.rpc_master", "Tune on workers that join over the network."),
}
