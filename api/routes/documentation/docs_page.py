"""`/docs`: the OpenAPI document with Swagger UI.

Its files come with a package that is pinned and installed like any other: a page that fetched them from a CDN would not
work without internet access, and would trust a third party with the keys that people type into it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, HTTPException, Response
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

# Addresses are relative, so that the page works below a prefix, too.
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Headgate API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
START = """SwaggerUIBundle({
  dom_id: "#docs",
  url: "openapi.json",
  deepLinking: true,
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
"""
SECURITY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"

_STATIC = Path(str(files("fastapi_offline"))) / "static"
_ASSETS = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


@router.get("/docs")
async def docs() -> Response:
    """Return the page."""
    return Response(PAGE, media_type="text/html", headers={"content-security-policy": SECURITY})


@router.get("/docs/start.js")
async def start() -> Response:
    """Return the script that starts Swagger UI."""
    return Response(START, media_type="text/javascript")


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    """Return one of Swagger UI's files."""
    if name not in _ASSETS:
        raise HTTPException(404)
    return FileResponse(_STATIC / name, media_type=_ASSETS[name])
