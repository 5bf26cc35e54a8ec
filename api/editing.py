"""What routes that edit have in common: `ETag`, `If-Match` and `If-None-Match` against lost edits (P6), and the log."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request

from api.answer import Answer
from api.decode import BadRequest
from api.json_text import shown
from limiter.store.policies import AuditEntry, Kind, RevisionConflict

_TAGS = re.compile(r'\s*(?:W/)?"[^"]*"\s*(?:,\s*(?:W/)?"[^"]*"\s*)*')
_STRONG_TAG = re.compile(r'(?<!W/)"(\d{1,15})"')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def expected_revision(request: Request, name: str, now_at: int, *, kind: Kind) -> int | None:
    """The revision that the caller means to replace: 0 for none, None for whatever is there."""
    if request.headers.get("if-none-match", "").strip() == "*":
        return 0
    condition = request.headers.get("if-match")
    if condition is None:
        return None
    if condition.strip() == "*":
        tags = {now_at} - {0}
    elif _TAGS.fullmatch(condition):
        tags = {int(tag) for tag in _STRONG_TAG.findall(condition)}
    else:
        raise BadRequest(f'If-Match: found {shown(condition)}; allowed: an ETag, such as "7", or *')
    if now_at not in tags:
        raise RevisionConflict(name, now_at, kind=kind)
    return now_at


def tagged(answer: Answer, revision: int) -> Answer:
    """An answer with its revision as the `ETag`."""
    return answer.with_header("etag", f'"{revision}"')


def shown_change(entry: AuditEntry) -> dict[str, Any]:
    """One change as plain data: who, when, before, after."""
    return {
        "revision": entry.revision,
        "when": (_EPOCH + timedelta(microseconds=entry.when_us)).isoformat(timespec="milliseconds"),
        "who": entry.who,
        "action": entry.action,
        "before": entry.before,
        "after": entry.after,
    }
