"""The engine in a process of its own, behind the same interface as on a thread.

`process_host` is the parent's side: it starts the child, follows it and says how it ended.
`program` is what the child runs: a `ThreadHost` at the other end of the connection. What crosses is
in `messages`; `codec` turns it into bytes. The parent imports no torch.
"""
