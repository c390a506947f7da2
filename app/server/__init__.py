"""The server: models behind HTTP, for programs that speak OpenAI's protocol.

`link` reaches the engine, `desk` has what all requests share: models, places, the ledger, and the
answering itself, with its limits and its cancelling. `requests` checks what clients send, `openai`
translates, `web` is HTTP. Another protocol is a package of translations beside `openai`, whose
operations go into `web/site.py`. Imports no Qt, and of the engine its public names alone.
"""
