"""Waiting for actors: always with a deadline, always with a name for who is late or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError
from ray.experimental import get_object_locations

from rljob_trainer.distributed.process_group import is_broken_collective
from rljob_trainer.errors import EngineDied, GPUMemoryError, TrainerError, TransientError

POLL_SECONDS: Final = 0.5
CAUSE_SECONDS: Final = 15.0
PROBE_SECONDS: Final = 5.0
PROBE_METHOD: Final = "count_progress"
PROBE_GROUP: Final = "control"
"""Of a rank: answered while it works, or waits for another one in a collective."""


@dataclass(frozen=True)
class Actor:
    """An actor handle with what people call it."""

    handle: Any
    label: str
    """For example `rank 3 (node fd00::17, GPU 3)`."""
    node_id: str
    is_engine: bool = False
    describe_log: Callable[[], str] = field(default=lambda: "", compare=False)


def translate_error(error: BaseException, actor: Actor) -> BaseException:
    """The typed failure behind a Ray exception."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, TrainerError):
            return cause
        if isinstance(cause, torch.OutOfMemoryError):
            return GPUMemoryError(f"{actor.label}: {cause}")
        return RuntimeError(f"{actor.label}: {error}")
    if isinstance(error, (RayActorError, ObjectLostError, OutOfMemoryError)):
        message = f"{actor.label} is gone: {error}"
        if actor.is_engine:
            return EngineDied(f"{message}\n{actor.describe_log()}".rstrip())
        return TransientError(message)
    return error


def wait_for_all(
    references: Mapping[Any, Actor],
    *,
    timeout_seconds: float,
    what: str,
    poll: Callable[[], None] = lambda: None,
    suspects: Mapping[Any, Actor] | None = None,
) -> list[Any]:
    """Values of all references, in order.

    The first failure is raised at once: the other ranks may sit in a collective that can never end.

    Args:
        references: reference -> actor it comes from.
        timeout_seconds: deadline for all of them.
        what: what is being waited for, for the message.
        poll: called about twice a second (stop requests, heartbeats); may raise.
        suspects: not waited for, but their actors may be the cause when one of `references` fails.

    Raises:
        TransientError: a rank is dead or late. EngineDied: an engine is.
    """
    deadline = time.monotonic() + timeout_seconds
    values: dict[Any, Any] = {}
    pending = list(references)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
        for reference in ready:
            try:
                values[reference] = ray.get(reference, timeout=timeout_seconds)
            except (RayTaskError, RayActorError, ObjectLostError, OutOfMemoryError, GetTimeoutError) as error:
                failure = translate_error(error, references[reference])
                left = {reference: references[reference] for reference in pending} | dict(suspects or {})
                raise _find_cause(error, failure, left, what) from error
        poll()
        if pending and time.monotonic() > deadline:
            raise _late([references[reference] for reference in pending], timeout_seconds, what)
    return [values[reference] for reference in references]


def _find_cause(
    error: BaseException, failure: BaseException, suspects: Mapping[Any, Actor], what: str
) -> BaseException:
    """The lost or silent actor behind what another one reports, if there is one.

    When a rank dies, its peers' collectives fail at once ("connection closed by peer"), seconds before Ray notices the
    death; when it hangs or never joins, they time out. The peer is not the culprit.
    """
    is_typed = isinstance(failure, TrainerError) and not isinstance(failure, TransientError)
    if is_typed or not isinstance(error, RayTaskError):
        return failure
    pending, deadline = list(suspects), time.monotonic() + CAUSE_SECONDS
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
        for reference in ready:
            try:
                ray.get(reference)
            except (RayActorError, OutOfMemoryError) as death:
                return translate_error(death, suspects[reference])
            except RayTaskError:
                continue  # another victim
    if not isinstance(failure, TransientError) and not is_broken_collective(failure):
        return failure
    left = [suspects[reference] for reference in pending]
    silent = ", ".join(actor.label for actor in find_silent(left) or left)
    return TransientError(f"{what}: no answer from {silent}; {failure}" if silent else f"{what}: {failure}")


def iterate_streams(
    streams: Mapping[Any, Actor],
    *,
    timeout_seconds: float,
    what: str,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Actor, Any]]:
    """(actor, reference) for each item of several streaming generators, as they come.

    Raises:
        TransientError, EngineDied: as `wait_for_all`.
    """
    deadline = time.monotonic() + timeout_seconds
    open_streams = list(streams)
    while open_streams:
        ready, _ = ray.wait(open_streams, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        for stream in ready:
            actor = streams[stream]
            try:
                reference = next(stream)
                _raise_if_failure(reference)
            except StopIteration:
                open_streams.remove(stream)
                continue
            except (RayTaskError, RayActorError, ObjectLostError, OutOfMemoryError) as error:
                suspects = {other.completed(): streams[other] for other in open_streams if other is not stream}
                raise _find_cause(error, translate_error(error, actor), suspects, what) from error
            yield actor, reference
        poll()
        if open_streams and time.monotonic() > deadline:
            raise _late([streams[stream] for stream in open_streams], timeout_seconds, what)


def _raise_if_failure(reference: Any) -> None:
    """A generator that fails ends with an item that is its failure; handed on, that would look like the failure of
    whoever got it. Small values and failures are in this process already; large ones, such as buckets of weights in
    host memory, stay where they are."""
    if not get_object_locations([reference]).get(reference, {}).get("node_ids"):
        ray.get(reference)


def get_value(reference: Any, actor: Actor, timeout_seconds: float) -> Any:
    """The value of one reference, with `actor` to blame."""
    try:
        return ray.get(reference, timeout=timeout_seconds)
    except GetTimeoutError as error:
        raise _late([actor], timeout_seconds, "an object") from error
    except (RayTaskError, RayActorError, ObjectLostError, OutOfMemoryError) as error:
        raise translate_error(error, actor) from error


def _late(actors: list[Actor], timeout_seconds: float, what: str) -> TrainerError:
    silent = find_silent(actors)
    names = ", ".join(actor.label for actor in silent or actors)
    message = f"{what}: no answer within {timeout_seconds:.0f} s from {names}"
    if silent and len(silent) < len(actors):
        message += f"; waiting as well: {', '.join(actor.label for actor in actors if actor not in silent)}"
    return EngineDied(message) if all(actor.is_engine for actor in actors) else TransientError(message)


def find_silent(actors: Sequence[Actor]) -> list[Actor]:
    """The ranks among `actors` whose process answers nothing any more: it is stopped, or its node is. One that only
    waits for others in a collective answers beside it."""
    probes = {
        getattr(actor.handle, PROBE_METHOD).options(concurrency_group=PROBE_GROUP).remote(): actor
        for actor in actors
        if not actor.is_engine and getattr(actor.handle, PROBE_METHOD, None) is not None
    }
    if not probes:
        return []
    answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=PROBE_SECONDS)
    return [actor for probe, actor in probes.items() if probe not in answered]
