"""Less noise from libraries, in the driver and in every actor."""

from __future__ import annotations

import os
import warnings


def quiet_libraries() -> None:
    """No progress bars and no advice from transformers; no warnings about what is meant to be so."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Weight buckets are mapped read-only from the object store and only ever copied from.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
