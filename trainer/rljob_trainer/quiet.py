"""Less noise from libraries, in the driver and in every actor."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """No progress bars and no advice from transformers; fast tokenizers must not fork threads in actors."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
