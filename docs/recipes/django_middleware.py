"""Django middleware: the work of an address is the milliseconds that its views take.

headgate up --policies docs/recipes/policies.yaml
python docs/recipes/django_middleware.py runserver --noreload 8000
"""

import math
import sys
import time
from collections.abc import Callable

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from headgate import Headgate, Throttled

gate = Headgate.sync()


def limited(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    def middleware(request: HttpRequest) -> HttpResponse:
        try:
            grant = gate.acquire({"service": "web", "ip": request.META["REMOTE_ADDR"]}, work=1).now()
        except Throttled as refusal:
            headers = {"Retry-After": math.ceil((refusal.retry_after_ms or 1000) / 1000)}
            return JsonResponse({"reason": refusal.reason}, status=refusal.status, headers=headers)
        with grant:
            began_s = time.perf_counter()
            response = get_response(request)
            grant.settle(work=(time.perf_counter() - began_s) * 1000)
            return response

    return middleware


def slow(request: HttpRequest) -> HttpResponse:
    time.sleep(int(request.GET.get("ms", 0)) / 1000)
    return HttpResponse("done\n")


urlpatterns = [path("slow", slow)]
if __name__ == "__main__":
    settings.configure(ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.limited"], ALLOWED_HOSTS=["127.0.0.1"])
    execute_from_command_line(sys.argv)
