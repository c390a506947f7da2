"""The engine in a child process, with the same interface as on a thread.

`process_host` is the parent's side: it starts the child, follows it and reports how it ended.
`program` runs in the child, with a `ThreadHost` at the other end of the connection. Messages are
defined in `channel`; `codec` serializes them. The parent imports no torch.
"""
