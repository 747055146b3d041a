"""Keep addresses out of the committed `uv.lock`: a git clean filter.

    # once per clone, by whoever commits
    python tools/index_neutral_lock.py --install
    # what git runs when it stores the file
    python tools/index_neutral_lock.py < uv.lock
    # exit 1 when the file as it is contains an address
    python tools/index_neutral_lock.py --check uv.lock

uv writes into `uv.lock` the address of the index that this machine happened to use, and each file's
URL and hash. Committed, they would send everybody to that index. What the project wants to share is
only which versions were tested together, so the stored file keeps names, versions, markers and
dependencies, and loses three things:

- every registry address, replaced by a placeholder that uv knows to be no index;
- the `sdist` and `wheels` of each package, which are addresses and hashes from that index;
- the workspace's own members, and the list of their names. uv then sees that the lock does not
  cover its members, resolves again from the index that the user has configured, prefers the
  versions it finds here, and writes the full file into the work tree. There the filter hides the
  difference from git.

The price: the committed lock verifies no hash. Each clone's own lock does, from the first
resolution on.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PLACEHOLDER = "index"
ADDRESS = "://"
ATTRIBUTE = "index-neutral"
GIT_CONFIG = {
    # Through uv, which finds a Python on every system; on Windows `python3` is often missing or a
    # stub of the store.
    f"filter.{ATTRIBUTE}.clean": "uv run --quiet --no-project python tools/index_neutral_lock.py",
    f"filter.{ATTRIBUTE}.smudge": "cat",  # git asks for both directions of a required filter
    f"filter.{ATTRIBUTE}.required": "true",  # a filter that cannot run stops the commit
}


def without_addresses(lock: str) -> str:
    """The same lock without registry addresses, files, hashes and workspace members.

    Args:
        lock: Text of a `uv.lock`, full or already filtered.

    Raises:
        ValueError: If an address is left, as with a dependency from git or from a URL: such a pin
            cannot be neutral.
    """
    head, *packages = re.split(r"(?m)^(?=\[\[package\]\]\n)", lock)
    # Their names, too: a new package then changes no shared file.
    head = re.sub(r"(?ms)^members = \[\n.*?^\]\n", "", head)
    neutral = head + "".join(
        _package_without_addresses(package) for package in packages if not _is_member(package)
    )
    for line in neutral.splitlines():
        if ADDRESS in line:
            raise ValueError(
                f"uv.lock: cannot make this line neutral, depend on a release from an index "
                f"instead: {line.strip()}"
            )
    return neutral


def _is_member(package: str) -> bool:
    """Whether a `[[package]]` table is a workspace member, which uv locks as a folder."""
    source = re.search(r"(?m)^source = \{ (\w+) = ", package)
    return source is not None and source[1] in ("editable", "virtual", "directory")


def _package_without_addresses(package: str) -> str:
    package = re.sub(
        r'source = \{ registry = "[^"]*" \}', f'source = {{ registry = "{PLACEHOLDER}" }}', package
    )
    package = re.sub(r"(?m)^sdist = .*\n", "", package)
    return re.sub(r"(?ms)^wheels = \[\n.*?^\]\n", "", package)


def check(path: Path) -> None:
    """Raises ValueError with the first line of the file that contains an address."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if ADDRESS in line:
            raise ValueError(f"{path}:{number}: the lock carries an address: {line.strip()[:80]}")


def install() -> None:
    """Sets the filter in the configuration of the clone that contains this file; nothing outside it
    changes."""
    root = Path(__file__).parents[1]
    for key, value in GIT_CONFIG.items():
        subprocess.run(["git", "-C", str(root), "config", "--local", key, value], check=True)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the three forms above; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--install", action="store_true", help="set the filter in this clone")
    forms.add_argument(
        "--check", type=Path, metavar="FILE", help="exit 1 when FILE contains an address"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.install:
            install()
        elif arguments.check is not None:
            check(arguments.check)
        else:
            # Bytes: text mode would turn line ends into CRLF on Windows, and the stored file would
            # differ between systems.
            lock = sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
            sys.stdout.buffer.write(without_addresses(lock).encode("utf-8"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
