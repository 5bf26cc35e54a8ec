"""Request ids, which a caller reads in an answer and an operator finds in the log.

    sent and valid      returned with every answer as it came
    otherwise           made only for errors: nobody would look up a decision

In problem bodies as `request_id`, in headers as `x-request-id`. A refusal by a limit is a decision, not a problem.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from secrets import token_hex

from msgspec.structs import replace

from api.data.answer import PROBLEM, Answer

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
RANDOM_BYTES = 16
REFUSED = 429

SENT: ContextVar[bytes | None] = ContextVar("sent_request_id", default=None)
"""The id sent with the request that the framework is serving."""

_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")


def identified(answer: Answer, sent: bytes | None) -> Answer:
    """Add the request's id to an answer where it belongs; log an internal failure under it."""
    is_sane = sent is not None and _SANE.fullmatch(sent) is not None
    is_problem = answer.status >= 400 and answer.status != REFUSED
    if not is_sane and not is_problem and answer.error is None:
        return answer
    own = sent if sent is not None and is_sane else token_hex(RANDOM_BYTES).encode()
    if answer.error is not None:
        log.error("a request failed", exc_info=answer.error, extra={"request_id": own.decode()})
    body = answer.body
    if is_problem and answer.head.startswith(PROBLEM):
        body = b'%b,"request_id":"%b"}' % (body[:-1], own)
    return replace(answer, head=b"%b%b: %b\r\n" % (answer.head, HEADER, own), body=body, error=None)
