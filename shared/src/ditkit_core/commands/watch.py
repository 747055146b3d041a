"""`watch`: serves the page of a run on this machine, while the run trains or later."""

import socket

from ditkit_core.commands.options import WatchOptions
from ditkit_core.diagnostics.report.server import ReportServer, is_loopback
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path
from ditkit_core.run.config import RunConfig


def watch(config: RunConfig, options: WatchOptions) -> None:
    """Serve the page of the run in `run.folder` until the command is interrupted; it reads the run's files, and changes none.

    Raises:
        UserError: If the address cannot be listened at.
    """
    folder, host, port = config.run_folder.path, options.bind, options.port
    log = local_path(options.log) if options.log else None
    try:
        server = ReportServer(folder, host=host, port=port, log=log)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}:{port} ({error.strerror or error}); choose another --port, or --port 0 for a free one"
        ) from error
    with server:
        port = server.server_address[1]
        say(f"watch:    {folder} at {server.address} (Ctrl-C ends it)")
        if is_loopback(host):
            say(
                f"          from another computer: ssh -N -L {port}:{host}:{port} {socket.gethostname()}, then open this address there"
            )
        else:
            warn(
                f"{host} is not only this machine: everybody who reaches port {port} can read the run, without a password"
            )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("watch:    ended; the run goes on")
