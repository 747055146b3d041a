"""The commands wan-train, wan-encode, wan-sample and wan-export."""

from ditkit_core import cli


def train() -> int:
    """wan-train"""
    return _run("train")


def encode() -> int:
    """wan-encode"""
    return _run("encode")


def sample() -> int:
    """wan-sample"""
    return _run("sample")


def export() -> int:
    """wan-export"""
    return _run("export")


def _run(command: str) -> int:
    from ditkit_wan.spec import WAN

    return cli.run(WAN, command)
