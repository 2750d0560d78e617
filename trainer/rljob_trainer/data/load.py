"""Loads prompts and demonstrations: every row is checked on the driver before a GPU works on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rljob_api.v1alpha1.data import Data, OverlongPrompts, SupervisedWarmStart, WarmStart
from rljob_trainer.data.cells import (
    Message,
    UnsupportedContentError,
    UnusableCellError,
    get_cell,
    has_column,
    name_kind,
    normalise_answer,
    normalise_prompt,
)
from rljob_trainer.data.files import DataFile, Row
from rljob_trainer.data.prompts import PromptRenderer, Rendered
from rljob_trainer.data.rows import DataReport, FileReport, PromptDataset, PromptRow, SupervisedRow
from rljob_trainer.errors import DataError

MAX_UNUSABLE_SHARE: Final = 0.01
"""More unusable rows than this mean that the columns, not single rows, are wrong."""
_TOKENIZE_BATCH_ROWS: Final = 1024
_PROMPT_NAMES: Final = ("prompt", "question", "problem", "messages", "conversation", "instruction", "input", "query")
_TARGET_NAMES: Final = ("answer", "solution", "ground_truth", "response", "completion", "output", "target")

AnswerCheck = Callable[[Any], str | None]
"""Why a gold answer cannot be compared with anything, or None."""


@dataclass(frozen=True)
class _Candidate:
    """A row whose cells are fine; its length is not known yet."""

    uid: str
    place: str
    text: str
    target: Any
    row: Row
    messages: tuple[Message, ...]


def load_prompts(
    files: list[str],
    data: Data,
    tokenizer: Any,
    *,
    field_path: str = "spec.data.train",
    check_answer: AnswerCheck | None = None,
    show: Callable[[str], None] = print,
) -> PromptDataset:
    """The usable prompts of `files`, in file order, rendered and tokenised; the account is handed to `show`.

    Args:
        files: JSONL or Parquet files, directories of these, or saved Hugging Face datasets.
        data: column names, length limit and its policy, template and system prompt.
        tokenizer: transformers tokenizer of the policy.
        field_path: list in the spec that `files` stands in; named in errors, and its last part in the row uids.
        check_answer: the reward's opinion on a gold answer (`rewards.make_answer_check`).
        show: prints the report.

    Raises:
        DataError: a missing or unreadable file, a missing column, files that disagree about a needed column, more than
            1 % unusable rows, an over-long prompt under `overlongPrompts: Fail`, or no row left.
    """
    report = DataReport(field_path=field_path, max_prompt_tokens=data.max_prompt_tokens)
    renderer = PromptRenderer(data, tokenizer)

    def read_answer(cell: Any) -> Any:
        answer = normalise_answer(cell)
        problem = check_answer(answer) if check_answer is not None else None
        if problem is not None:
            raise UnusableCellError(problem, f"answer {answer!r:.80}")
        return answer

    columns = _Columns(data.prompt_field, "spec.data.promptField", data.answer_field, "spec.data.answerField")
    candidates = _read_candidates(files, field_path, columns, renderer, read_answer, report)
    used = (data.prompt_field.split(".")[0], data.answer_field.split(".")[0])
    rows = [
        PromptRow(
            uid=candidate.uid,
            prompt_ids=rendered.ids,
            prompt_text=rendered.text,
            answer=candidate.target,
            fields={
                name: value
                for name, value in candidate.row.items()
                # A nested column (`reward_model.ground_truth`) stays visible as a whole.
                if name not in used or isinstance(value, dict)
            },
            messages=candidate.messages,
        )
        for candidate, rendered in _limit_lengths(candidates, data, renderer, report)
    ]
    _finish(report, len(rows), data, show)
    return PromptDataset(rows, report)


def load_supervised_rows(
    warm_start: WarmStart | SupervisedWarmStart,
    data: Data,
    tokenizer: Any,
    *,
    show: Callable[[str], None] = print,
) -> list[SupervisedRow]:
    """The demonstrations of `warmStart.supervised.data`: prompts rendered like RL prompts, and responses that end with
    the tokenizer's end-of-sequence token.

    Raises:
        DataError: as `load_prompts`, or the tokenizer has no end-of-sequence token.
    """
    supervised = warm_start.supervised if isinstance(warm_start, WarmStart) else warm_start
    field_path = "spec.warmStart.supervised.data"
    eos_id = tokenizer.eos_token_id
    if eos_id is None:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} has no end-of-sequence token, so demonstrations cannot end"
        )
    report = DataReport(field_path=field_path, max_prompt_tokens=data.max_prompt_tokens)
    renderer = PromptRenderer(data, tokenizer)
    columns = _Columns(
        data.prompt_field, "spec.data.promptField", supervised.response_field, f"{field_path[:-5]}.responseField"
    )

    def read_response(cell: Any) -> str:
        if not isinstance(cell, str):
            raise UnusableCellError("response is not text", f"it is of type {type(cell).__name__}")
        return cell

    candidates = _read_candidates(list(supervised.data), field_path, columns, renderer, read_response, report)
    kept = list(_limit_lengths(candidates, data, renderer, report))
    _finish(report, len(kept), data, show)
    texts = [str(candidate.target) for candidate, _ in kept]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        SupervisedRow(rendered.ids, list(ids) if ids and ids[-1] == eos_id else [*ids, eos_id])
        for (_, rendered), ids in zip(kept, encoded, strict=True)
    ]


@dataclass(frozen=True)
class _Columns:
    """The two needed columns and the fields of the spec that name them."""

    prompt: str
    prompt_field: str
    target: str
    target_field: str


def _read_candidates(
    files: list[str],
    field_path: str,
    columns: _Columns,
    renderer: PromptRenderer,
    read_target: Callable[[Any], Any],
    report: DataReport,
) -> Iterator[_Candidate]:
    # All files are recognised before the first is read: a missing last file shows at once.
    sources = [DataFile(path, f"{field_path}[{number}]") for number, path in enumerate(files)]
    kinds = _KindCheck()
    list_name = field_path.rsplit(".", 1)[-1]
    for file_number, source in enumerate(sources):
        found: dict[str, None] = {}
        has_prompt = has_target = False
        num_rows = 0
        for row_number, row in enumerate(source.rows()):
            num_rows += 1
            place = f"{source.path} row {row_number}"
            found.update(dict.fromkeys(row))
            has_prompt = has_prompt or has_column(row, columns.prompt)
            has_target = has_target or has_column(row, columns.target)
            try:
                prompt = normalise_prompt(get_cell(row, columns.prompt))
                target = read_target(get_cell(row, columns.target))
            except UnusableCellError as error:
                report.reject(error.reason, f"{place}: {error.detail}" if error.detail else place)
                continue
            except UnsupportedContentError as error:
                raise DataError(f"{source.place}: {place}: {error}") from error
            kinds.compare(columns.prompt, prompt, source, place)
            kinds.compare(columns.target, target, source, place)
            uid = f"{list_name}/{file_number}/{row_number}"
            text = _render(renderer, prompt, source, place)
            yield _Candidate(uid, place, text, target, row, renderer.list_messages(prompt))
        if num_rows == 0:
            raise DataError(f"{source.place}: {source.path} holds no rows")
        if not (has_prompt and has_target):
            raise DataError(_describe_missing_columns(source, columns, has_prompt, list(found)))
        report.files.append(FileReport(source.path, source.format, num_rows))


def _render(renderer: PromptRenderer, prompt: str | list[Message], source: DataFile, place: str) -> str:
    return renderer.render_text(prompt, f"{source.place}: {place}")


class _KindCheck:
    """Files must agree on the kind of a needed column; taking the first file's schema casts or nulls the others."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}

    def compare(self, column: str, cell: Any, source: DataFile, place: str) -> None:
        kind = name_kind(cell)
        first_kind, first_place = self._first.setdefault(column, (kind, place))
        if kind != first_kind:
            raise DataError(
                f"{source.place}: column {column!r} is a {first_kind} in {first_place} and a {kind} in {place}; "
                "give all files the same type"
            )


def _describe_missing_columns(source: DataFile, columns: _Columns, has_prompt: bool, found: list[str]) -> str:
    names: tuple[str, ...]
    if not has_prompt:
        missing, field, names = columns.prompt, columns.prompt_field, _PROMPT_NAMES
    else:
        missing, field, names = columns.target, columns.target_field, _TARGET_NAMES
    guesses = [name for name in names if name in found and name != columns.prompt] or found
    return f"{source.place}: column {missing!r} not found in {source.path}; found {found}; set {field}: {guesses[0]}"


def _limit_lengths(
    candidates: Iterator[_Candidate], data: Data, renderer: PromptRenderer, report: DataReport
) -> Iterator[tuple[_Candidate, Rendered]]:
    """Measures the final ids, the very ones that are sent (measuring another string lets 1081 > 1024 through to die
    in the middle of an epoch), and applies the policy."""
    limit = data.max_prompt_tokens
    for batch in _batches(candidates, _TOKENIZE_BATCH_ROWS):
        rendered_batch = renderer.tokenize([candidate.text for candidate in batch])
        for candidate, rendered in zip(batch, rendered_batch, strict=True):
            length = len(rendered.ids)
            report.longest_prompt_tokens = max(report.longest_prompt_tokens, length)
            if length <= limit:
                yield candidate, rendered
                continue
            note = f"{candidate.place} has {length} tokens"
            if data.overlong_prompts is OverlongPrompts.FAIL:
                raise DataError(
                    f"{report.field_path}: {note}, spec.data.maxPromptTokens is {limit}; raise it to {length} or more, "
                    "or set spec.data.overlongPrompts: Drop"
                )
            if data.overlong_prompts is OverlongPrompts.DROP:
                report.num_rows_overlong += 1
                report.note("overlong", note)
                continue
            report.num_rows_truncated += 1
            report.note("truncated", note)
            yield candidate, renderer.cut_left(rendered, limit)


def _batches(candidates: Iterator[_Candidate], size: int) -> Iterator[list[_Candidate]]:
    batch: list[_Candidate] = []
    for candidate in candidates:
        batch.append(candidate)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _finish(report: DataReport, num_rows_used: int, data: Data, show: Callable[[str], None]) -> None:
    report.num_rows_used = num_rows_used
    show(report.format())
    if report.num_rows_unusable > MAX_UNUSABLE_SHARE * report.num_rows_read:
        reasons = "; ".join(
            f"{count} rows: {reason} ({'; '.join(report.examples[reason])})"
            for reason, count in report.unusable.items()
        )
        raise DataError(
            f"{report.field_path}: {report.num_rows_unusable} of {report.num_rows_read} rows are unusable, more than "
            f"{MAX_UNUSABLE_SHARE:.0%}: {reasons}; repair or remove them"
        )
    if num_rows_used == 0:
        raise DataError(
            f"{report.field_path}: 0 rows left of {report.num_rows_read}: {report.num_rows_overlong} are longer than "
            f"spec.data.maxPromptTokens = {data.max_prompt_tokens} (longest: {report.longest_prompt_tokens}), "
            f"{report.num_rows_unusable} are unusable; "
            f"maxPromptTokens: {report.longest_prompt_tokens} keeps the over-long ones"
        )
