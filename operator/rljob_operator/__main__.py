"""`python -m rljob_operator`: exits with 0 after SIGTERM or SIGINT, 1 when the Lease was lost or something broke."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import kopf
from kubernetes.aio.config import ConfigException

from rljob_operator.adapters.lease import LeadershipLostError
from rljob_operator.app import Operator
from rljob_operator.settings import LogFormat, Settings, parse_settings

logger = logging.getLogger("rljob_operator")


async def run_until_signal(settings: Settings) -> None:
    """Run the operator; a signal cancels it and waits for the Lease to be released."""
    running = asyncio.ensure_future(Operator(settings).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        logger.info("Stopped")


def configure_logging(log_format: LogFormat) -> None:
    """kopf's formatters, without a line per watch event: what was done about it is logged by ourselves."""
    is_json = log_format is LogFormat.JSON
    kopf.configure(log_format=kopf.LogFormat.JSON if is_json else kopf.LogFormat.FULL, log_prefix=not is_json)
    for name in ("kopf.objects", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main() -> int:
    """Entry point."""
    settings = parse_settings(sys.argv[1:])
    configure_logging(settings.log_format)
    try:
        asyncio.run(run_until_signal(settings))
    except LeadershipLostError as error:
        logger.error("%s: exiting", error)
        return 1
    except (ConfigException, OSError) as error:
        logger.error("Could not start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
