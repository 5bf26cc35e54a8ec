"""A LiteLLM hook: asks before each call of a model, and settles the tokens that it used, streamed or not.

headgate up --policies docs/recipes/policies.yaml
python docs/recipes/litellm_hook.py c1 'Tell me a story'
"""

import asyncio
import sys
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger

from headgate import Headgate, Throttled


class HeadgateHook(CustomLogger):
    def __init__(self, gate: Headgate) -> None:
        super().__init__()
        self.gate = gate
        self.calls = 0  # that are not settled yet

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any]:
        grant = await self.gate.acquire({"service": "llm", "customer": kwargs.get("user") or "unknown"})
        kwargs["litellm_logging_obj"].model_call_details["headgate"] = grant  # LiteLLM passes them to the hooks below
        self.calls += 1
        return kwargs

    async def async_log_success_event(self, kwargs: dict[str, Any], response_obj: Any, **_: Any) -> None:
        self.settle(kwargs, response_obj.usage.total_tokens, "ok")

    async def async_log_failure_event(self, kwargs: dict[str, Any], **_: Any) -> None:
        self.settle(kwargs, 0, "error")

    def settle(self, kwargs: dict[str, Any], work: float, outcome: str) -> None:
        grant = kwargs.get("headgate")  # there is none after a refusal
        if grant is not None and not grant.settled:
            grant.settle(work=work, outcome=outcome)
            self.calls -= 1


async def main(customer: str, prompt: str) -> None:
    async with Headgate() as gate:
        litellm.callbacks = [hook := HeadgateHook(gate)]
        messages = [{"role": "user", "content": prompt}]
        try:
            answer = await litellm.acompletion("gpt-4o", messages, user=customer, mock_response="Once upon a time.")
            print(answer.choices[0].message.content, answer.usage.total_tokens)
        except Throttled as refusal:
            print("refused:", refusal.reason)
        while hook.calls:  # LiteLLM calls its hooks a little later; a program that goes on need not wait
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
