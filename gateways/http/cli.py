"""The command `mdp-gateway http`."""

from typing import Final

import click

from ...mdp.cli.console import CONTEXT_SETTINGS, SectionedCommand, log_level_option, log_to_stderr
from ...mdp.program.extras import needs_extra
from ...mdp.security.keys import ClientKeys
from ..serving import SECTIONS, Serving, bind_option, serving_options
from ..upstream import Upstream, raise_descriptor_limit

DEFAULT_BIND: Final = "127.0.0.1:8080"


@click.command(cls=SectionedCommand, sections=SECTIONS, context_settings=CONTEXT_SETTINGS)
@serving_options(bind=bind_option(DEFAULT_BIND, "Where to listen; port 0 for a free one."))
@log_level_option
def cli(*, broker: tuple[str, ...], keys: ClientKeys | None, serving: Serving, log_level: str) -> int:
    """Let programs call services with HTTP: POST /services/NAME.

    The URL is printed to stdout; logs go to stderr.  Without --access, whoever can connect may call every service: the
    gateway listens only on loopback addresses, which other machines cannot reach.

    With --key, requests are made on behalf of the callers' roles, so the broker decides what each role may call.

    SIGTERM or Ctrl-C finishes the requests in progress, and exits at the latest after --drain-timeout; a second signal
    exits immediately.  SIGHUP makes the gateway read the access file again.

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  cannot listen; or stopped before that, by --drain-timeout or a second signal
      2  invalid usage, or a package is missing
    """
    with needs_extra("web"):
        from ...mdp.http.server import run  # noqa: PLC0415 - the help does not need what these import
        from .. import program  # noqa: PLC0415
        from ..gateway import Gateway  # noqa: PLC0415
        from .app import gateway_server  # noqa: PLC0415
    serving.check()
    rules, settings, tls = serving.rules(), serving.settings(), serving.tls()
    log_to_stderr(log_level)
    raise_descriptor_limit(settings.max_connections)
    listener = serving.listener()

    async def main() -> int:
        upstream = Upstream(broker, keys=keys, timeout=settings.timeout)
        gateway = Gateway(upstream, settings, rules, on_behalf=keys is not None)
        return await program.serve(gateway, gateway_server(gateway, listener, tls), serving.warning())

    return run(main)
