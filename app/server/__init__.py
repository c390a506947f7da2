"""The HTTP server: models for clients of OpenAI's, Anthropic's and Ollama's protocols; no Qt.

`async_engine` connects to the engine. `context` contains what all requests share: models,
admission, the request log, limits and cancellation. `request_body` and `request_fields` validate
requests. Each protocol is a package such as `openai`; `web/routes.py` lists their operations.
"""
