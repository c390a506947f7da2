"""The server: models behind HTTP, for programs that speak OpenAI's protocol.

`async_engine` reaches the engine; `context` has what all requests share: models, admission, the
request log and the answering itself, with its limits and cancelling. `request_body` and
`request_fields` check what clients send, `openai` translates it, `web` is HTTP. Another protocol is
a package of translations beside `openai`, whose operations go into `web/routes.py`. Imports no Qt,
and of the engine only its public names.
"""
