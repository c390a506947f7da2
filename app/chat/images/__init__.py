"""Images that go with questions: kept beside their chat, shown, and named in its prompts.

`files` has what a message keeps of one, and the files; `program` is the child that reads them,
`child` asks it; `draft` has those of the message that is being written, `album` shows those of
messages. `files` and `program` know no Qt.
"""
